"""Pauses between the tries of work that was refused."""

from __future__ import annotations

import pytest

from rpcsvc.settlement.onchain.backoff import Backoff
from tests.sandbox import ManualClock


def tries(backoff: Backoff, clock: ManualClock, seconds: int) -> list[int]:
    """The seconds at which refused work is tried, if it is asked for each second."""
    found = []
    for second in range(seconds):
        if backoff.is_due("work"):
            found.append(second)
            backoff.note("work")
        clock.now += 1000
    return found


def test_a_pause_doubles_up_to_the_longest() -> None:
    clock = ManualClock()
    backoff = Backoff(clock.now_ms, 4_000, 20_000)
    assert tries(backoff, clock, 90) == [0, 4, 12, 28, 48, 68, 88]
    backoff.forget("work")
    assert tries(backoff, clock, 12) == [0, 4]


def test_changed_grounds_end_a_pause_and_begin_a_short_one() -> None:
    clock = ManualClock()
    backoff = Backoff(clock.now_ms, 4_000, 20_000)
    assert [backoff.note("work", "fee 1") for _ in range(3)] == [4_000, 8_000, 16_000]
    assert not backoff.is_due("work", "fee 1")
    assert backoff.is_due("work", "fee 2")
    assert backoff.note("work", "fee 2") == 4_000


@pytest.mark.parametrize("by_ms", [-1, -3_600_000])
def test_a_clock_that_was_set_back_holds_nothing_up(by_ms: int) -> None:
    clock = ManualClock()
    backoff = Backoff(clock.now_ms, 4_000, 20_000)
    backoff.note("work")
    clock.now += by_ms
    assert backoff.is_due("work")


def test_refusals_of_other_work_are_forgotten() -> None:
    backoff = Backoff(ManualClock().now_ms, 4_000, 20_000)
    backoff.note("work")
    backoff.note("other")
    backoff.forget_all_but({"work"})
    assert (backoff.is_due("work"), backoff.is_due("other")) == (False, True)
