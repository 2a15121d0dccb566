"""A universe with a violation is made smaller until all that is left is needed."""

from __future__ import annotations

from collections.abc import Collection

from tests.simulation.runs import Outcome
from tests.simulation.shrink import KINDS, shrink


def ended(people: int, left_out: Collection[str]) -> Outcome:
    """Go wrong when three people come, a replica is killed, and the strikes 3 and 5 happen."""
    is_wrong = people >= 3 and not {"kill", "3", "5"} & {*left_out}
    return Outcome("onchain", 1, people, "", 0, people, {}, ["wrong"] if is_wrong else [], 9, [])


def test_least_universe_has_only_what_is_needed() -> None:
    least = shrink(ended(10, ()), ended)
    assert least.outcome.violations == ["wrong"]
    assert least.outcome.asked == 3
    needed = {*KINDS, *map(str, range(1, 10))} - {*least.left_out}
    assert needed == {"kill", "3", "5"}


def test_without_time_the_universe_stays_as_it_was() -> None:
    found = ended(10, ())
    assert shrink(found, ended, lambda: False) == ((), found)
