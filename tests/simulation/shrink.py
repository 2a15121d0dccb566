"""Finds the least of a universe that still shows a violation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from tests.simulation.onchain import ChainFaults
from tests.simulation.runs import Outcome
from tests.simulation.universe import Faults

# A delay is no fault.
KINDS: Final = tuple(sorted({*Faults._fields, *ChainFaults._fields} - {"delay_ms"}))


class Least(NamedTuple):
    """The fewest people found, the faults and strikes that are not needed, and how that run
    ended.
    """

    left_out: tuple[str, ...]
    outcome: Outcome


def shrink(
    found: Outcome,
    run: Callable[[int, Collection[str]], Outcome],
    has_time: Callable[[], bool] = lambda: True,
) -> Least:
    """Leave out people, kinds of faults and single strikes while something still does not hold.

    Without a strike all that follows is another run, so that a smaller one may show another
    violation, and the least one may be missed. ``run``: with so many people, without these.
    """
    least = Least((), found)

    def tries(people: int, left_out: Collection[str]) -> bool:
        nonlocal least
        if not has_time():
            return False
        outcome = run(people, left_out)
        if outcome.violations:
            least = Least(tuple(left_out), outcome)
        return bool(outcome.violations)

    for kind in KINDS:
        tries(least.outcome.asked, (*least.left_out, kind))
    while least.outcome.asked > 1 and tries(least.outcome.asked // 2, least.left_out):
        pass
    while least.outcome.asked > 1 and tries(least.outcome.asked - 1, least.left_out):
        pass
    size = least.outcome.strikes
    while size:
        for first in range(1, least.outcome.strikes + 1, size):
            last = min(first + size - 1, least.outcome.strikes)
            more = {str(number) for number in range(first, last + 1)} - {*least.left_out}
            if more:
                tries(least.outcome.asked, (*least.left_out, *sorted(more, key=int)))
        size //= 2
    return least
