"""Fuzzes readers with coverage: ``python -m tests.fuzz [TARGET ...] --seconds S``.

Each target runs in a process of its own, begins at its corpus and adds what reaches new code. Ends
with status 1 at the first input that raises what its reader does not document, or that costs more
than its length allows; ``tests/fuzz/corpus`` keeps such an input once the fault is mended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
NAMES: Final = sorted(folder.name for folder in CORPUS.iterdir())
LONGEST: Final = 8_192
# Of CPU under coverage, which costs some ten times the usual: for any input, and for each byte.
_SECONDS: Final = 0.25
_SECONDS_PER_BYTE: Final = 50e-6


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.targets) - set(NAMES):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    if given.inside:
        _fuzz(given.targets[0], given.seconds)  # does not return
    failed = [name for name in given.targets or NAMES if not _run(name, given.seconds)]
    print(f"failed: {', '.join(failed)}" if failed else "no fault found")
    return 1 if failed else 0


def _run(name: str, seconds: int) -> bool:
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "tests.fuzz", name, "--inside", "--seconds", str(seconds)]
    return subprocess.run(command, check=False).returncode == 0


def _fuzz(name: str, seconds: int) -> None:
    import atheris  # noqa: PLC0415 - only this command needs it

    # Coverage is of the modules that are imported here for the first time.
    with atheris.instrument_imports(include=["rpcsvc"]):
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415

    found = Path(".fuzz") / name
    found.mkdir(parents=True, exist_ok=True)
    target = TARGETS[name]

    def bounded(data: bytes) -> None:
        began = time.process_time()
        target(data)
        spent = time.process_time() - began
        if spent > _SECONDS + len(data) * _SECONDS_PER_BYTE:
            raise TimeoutError(f"{len(data)} bytes cost {spent:.3f} s of CPU")

    atheris.Setup(
        ["fuzz", f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-print_final_stats=1",
         "-verbosity=0", f"-artifact_prefix={found}/", str(found), str(CORPUS / name)],
        bounded,
    )  # fmt: skip
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
