"""Runs universes: ``python -m tests.simulation [--engine E] [--seed N] [--seconds S]``.

With ``--seed`` one universe runs; without, new seeds run until the time is up, or the seeds from
``--first`` on, ``--jobs`` at once: those that are not over then are ended a little later, and say
nothing. It ends with status 1 at the first violation, and prints the seed that replays it, then the
least of that universe that still shows one, with what happened last; with status 75 when none was
over. ``--left-out`` names faults, and strikes by their numbers, that do not happen.

With ``--cut`` a scenario (or ``all``) is struck at each of its effects, or with ``--size 2`` at
each pair of them, or once at those that ``--at`` names.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tests.simulation.cuts import SCENARIOS, cut, cut_everywhere
from tests.simulation.runs import ENGINES, CutShort, Outcome, run
from tests.simulation.shrink import shrink

ORDERS = 100
# How long a universe may go on when the time is up.
_MORE_SECONDS = 10


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this universe alone")
    parser.add_argument("--seconds", type=float, default=60, help="how long to run new seeds")
    parser.add_argument("--first", type=int, help="run this seed and those that follow it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="universes at once")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="onchain")
    parser.add_argument("--orders", type=int, default=ORDERS, help="orders in each universe")
    parser.add_argument("--left-out", nargs="+", default=[], help="without these faults, strikes")
    parser.add_argument("--shrink", type=float, default=300, help="seconds to look for the least")
    parser.add_argument("--cut", choices=["all", *SCENARIOS], help="strike at each effect of it")
    parser.add_argument("--size", type=int, default=1, help="most strikes of a run")
    parser.add_argument("--at", type=int, nargs="+", help="strike at these effects alone")
    given = parser.parse_args()
    if given.cut is not None and given.at is not None:
        return _report([cut(given.cut, given.at)])
    if given.cut is not None:
        names = [given.cut] if given.cut != "all" else list(SCENARIOS)
        return _cut(names, given.size, given.jobs)
    if given.seed is not None:
        outcomes = [run(given.seed, given.orders, engine=given.engine, left_out=given.left_out)]
        cut_short = 0
    else:
        seeds = _new_seeds() if given.first is None else itertools.count(given.first)
        outcomes, cut_short = _search(seeds, given.seconds, given.orders, given.engine, given.jobs)
    status = _report(outcomes, cut_short)
    if (found := next((each for each in outcomes if each.violations), None)) is not None:
        _print_least(found, given.left_out, given.shrink)
    return status


def _new_seeds() -> Iterator[int]:
    while True:
        yield secrets.randbits(32)


def _search(
    seeds: Iterator[int], seconds: float, orders: int, engine: str, jobs: int
) -> tuple[list[Outcome], int]:
    """Run seeds until the time is up or one has a violation; also how many were cut short."""
    ends = time.monotonic() + seconds
    found: list[Outcome] = []

    def has_found() -> bool:
        return any(each.violations for each in found)

    def is_over() -> bool:
        return has_found() or time.monotonic() > ends + _MORE_SECONDS

    cut_short = 0
    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future[Outcome]] = set()
        while True:
            is_enough = time.monotonic() > ends or has_found()
            while not is_enough and len(running) < jobs:
                running.add(pool.submit(run, next(seeds), orders, None, engine, is_over))
            if not running:
                return found, cut_short
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                try:
                    found.append(each.result())
                except CutShort:
                    cut_short += 1


def _cut(names: list[str], size: int, jobs: int) -> int:
    """Strike scenarios at each set of their effects, each until one does not end well."""
    wrong = 0
    for name in names:
        runs = 0
        for outcome in cut_everywhere(name, size, jobs):
            runs += 1
            for violation in outcome.violations:
                at = " ".join(map(str, outcome.struck))
                print(f"{name} --at {at}: {violation}", file=sys.stderr, flush=True)
            if outcome.violations:
                wrong += 1
                break
        print(f"{name}: {runs} runs", flush=True)
    print(f"{wrong} scenarios with violations")
    return 1 if wrong else 0


def _print_least(found: Outcome, left_out: list[str], seconds: float) -> None:
    """Look for the least universe that shows a violation, and print what happened in it last."""
    ends = time.monotonic() + seconds

    def again(people: int, without: Collection[str]) -> Outcome:
        without = [*left_out, *without]
        return run(found.seed, people, engine=found.engine, left_out=without)

    least = shrink(found, again, lambda: time.monotonic() < ends)
    print("\n".join(least.outcome.last_notes))
    for violation in least.outcome.violations:
        print(f"with less: {violation}")
    without = " ".join([*left_out, *least.left_out])
    print(
        f"the least found: make simulate ENGINE={found.engine} SEED={found.seed}"
        f" ORDERS={least.outcome.asked} LEFT_OUT='{without}'"
    )


def _report(outcomes: list[Outcome], cut_short: int = 0) -> int:
    struck: dict[str, int] = {}
    for outcome in outcomes:
        for name, count in outcome.counts.items():
            struck[name] = struck.get(name, 0) + count
        for violation in outcome.violations:
            print(f"seed {outcome.seed}: {violation}", file=sys.stderr)
    wrong = [outcome for outcome in outcomes if outcome.violations]
    print(
        f"{len(outcomes)} universes, {sum(each.orders for each in outcomes)} orders,"
        f" {sum(each.steps for each in outcomes)} steps,"
        f" {', '.join(f'{count} {name}' for name, count in struck.items())}:"
        f" {sum(len(each.violations) for each in wrong)} violations"
    )
    for outcome in wrong:
        print(
            f"replay: make simulate ENGINE={outcome.engine} SEED={outcome.seed}"
            f" ORDERS={outcome.asked}"
        )
    if cut_short:
        print(f"{cut_short} universes were not over in time, and were not counted")
    if len(outcomes) == 1:
        print(f"trace {outcomes[0].trace}")
    if not outcomes:
        return os.EX_TEMPFAIL
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
