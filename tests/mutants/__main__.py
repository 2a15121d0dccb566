"""Plants each mutant and says what finds it: ``python -m tests.mutants [NAME ...]``.

``--suite simulation`` runs the scenario that a mutant names, then new seeds of both engines for
``--seconds``; ``--suite test`` the quick tests until the first that fails. The tree without a
mutant comes first and must pass. Ends with status 1 when a mutant was not found, and nothing holds
its money.
"""

from __future__ import annotations

import argparse
import os
import re
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
# How long (s) the runs of a scenario may take.
_MOST_OF_CUTS: Final = 1_200
# What says what is wrong: of a seed, of a scenario, of a test.
_WRONG: Final = re.compile(r"seed \d|[a-z-]+ --at |FAILED |E ")
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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="universes at once")
    given = parser.parse_args()
    chosen = [each for each in MUTANTS if not given.names or each.name in given.names]
    if unknown := set(given.names) - {each.name for each in chosen}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    if (how := _found_by(None, given)) is not None:
        print(f"the tree without a mutant does not pass:\n{how}", file=sys.stderr)
        return 1
    missed, held = list[str](), 0
    for mutant in chosen:
        began = time.monotonic()
        how = _found_by(mutant, given)
        if how is None and mutant.behind:
            held += 1
            print(f"{mutant.name}: not found: {mutant.behind}", flush=True)
        elif how is None:
            missed.append(mutant.name)
            print(f"{mutant.name}: NOT FOUND: {mutant.why}", flush=True)
        else:
            print(f"{mutant.name}: {time.monotonic() - began:.0f} s: {how}", flush=True)
    found = len(chosen) - len(missed) - held
    print(f"{found} of {len(chosen)} found, {held} held or seldom shown, {len(missed)} missed")
    return 1 if missed else 0


def _found_by(mutant: Mutant | None, given: argparse.Namespace) -> str | None:
    """The first thing that the suite says is wrong; None when it passes."""
    with planted(mutant) as root:
        if given.suite == "test":
            return _run(root, _TEST, 3_600)
        simulation = ("-m", "tests.simulation", "--jobs", str(given.jobs))
        if mutant is not None and mutant.cut:
            how = _run(root, (*simulation, "--cut", mutant.cut), _MOST_OF_CUTS)
            if how is not None:
                return how
        for engine, share in _ENGINES.items():
            time_up = given.seconds * share
            options = ("--engine", engine, "--orders", "15", "--seconds", str(time_up))
            if (how := _run(root, (*simulation, *options), time_up + 120)) is not None:
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
            # It may be slow here, and shows nothing.
            print(f"{' '.join(arguments)}: not over within {most:.0f} s", flush=True)
            return None
    if process.returncode in (0, _NONE_OVER):
        return None
    lines = [line for line in output.splitlines() if _WRONG.match(line)]
    return (lines or output.splitlines() or ["no output"])[0][:300]


if __name__ == "__main__":
    sys.exit(main())
