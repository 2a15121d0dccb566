"""Plants each mutant and says what finds it: ``python -m tests.mutants [NAME ...]``.

``--suite simulation`` runs new seeds of both engines for ``--seconds`` each; ``--suite test`` the
quick tests until the first that fails. The tree without a mutant comes first and must pass. Ends
with status 1 when a mutant was not found.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.planting import planted

# Of the simulation's time; the engine onchain has the payments.
_ENGINES: Final = {"onchain": 0.85, "sandbox": 0.15}
# The simulation's status when it ended before the first universe was over.
_NONE_OVER: Final = os.EX_TEMPFAIL
_TEST: Final = (
    "-m", "pytest", "-x", "-q", "-m", "not slow", "-n", "2", "--ignore", "tests/browser",
    "--ignore", "tests/container", "--ignore", "tests/simulation", "--ignore", "tests/mutants",
)  # fmt: skip


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="these mutants alone")
    parser.add_argument("--suite", choices=["simulation", "test"], default="simulation")
    parser.add_argument("--seconds", type=float, default=60, help="of simulation for each mutant")
    given = parser.parse_args()
    chosen = [each for each in MUTANTS if not given.names or each.name in given.names]
    if unknown := set(given.names) - {each.name for each in chosen}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    if (how := _found_by(None, given.suite, given.seconds)) is not None:
        print(f"the tree without a mutant does not pass:\n{how}", file=sys.stderr)
        return 1
    missed = []
    for mutant in chosen:
        began = time.monotonic()
        how = _found_by(mutant, given.suite, given.seconds)
        if how is None:
            missed.append(mutant.name)
            print(f"{mutant.name}: NOT FOUND: {mutant.why}", flush=True)
        else:
            print(f"{mutant.name}: {time.monotonic() - began:.0f} s: {how}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found")
    return 1 if missed else 0


def _found_by(mutant: Mutant | None, suite: str, seconds: float) -> str | None:
    """The first thing that the suite says is wrong; None when it passes."""
    with planted(mutant) as root:
        if suite == "test":
            return _run(root, _TEST, 3_600)
        for engine, share in _ENGINES.items():
            arguments = ("-m", "tests.simulation", "--engine", engine, "--orders", "15")
            time_up = str(seconds * share)
            if (how := _run(root, (*arguments, "--seconds", time_up), seconds + 120)) is not None:
                return how
    return None


def _run(root: Path, arguments: tuple[str, ...], most: float) -> str | None:
    """Run Python in the tree; the line that says what is wrong, or None."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=root, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=most)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"it does not end within {most:.0f} s"
    if process.returncode in (0, _NONE_OVER):
        return None
    lines = [line for line in output.splitlines() if line.startswith(("seed ", "FAILED ", "E "))]
    return (lines or output.splitlines() or ["no output"])[0][:300]


if __name__ == "__main__":
    sys.exit(main())
