"""The breaker opens, lets one call try, and ignores late results of earlier calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.settlement.upstream.limits import Breaker, BreakerState, CallPermit
from rpcsvc.settlement.upstream.transport import BreakerOpen

T0 = 1_000_000


def breaker() -> Breaker:
    return Breaker(failures=3, open_ms=1_000, longest_ms=3_000)


def fail(b: Breaker, now: int, times: int = 1) -> None:
    for _ in range(times):
        b.admit(now).failed("no answer", now)


def opened() -> Breaker:
    b = breaker()
    fail(b, T0, 3)
    return b


def refusal(b: Breaker, now: int, *, may_probe: bool = True) -> BreakerOpen:
    with pytest.raises(BreakerOpen) as caught:
        b.admit(now, may_probe=may_probe)
    return caught.value


def test_breaker_opens_after_failures_in_a_row() -> None:
    b = breaker()
    fail(b, T0, 2)
    assert b.state(T0) is BreakerState.CLOSED

    fail(b, T0)

    assert b.state(T0) is BreakerState.OPEN
    assert refusal(b, T0 + 400).retry_after_ms == 600


def test_breaker_success_resets_the_count() -> None:
    b = breaker()
    for _ in range(5):
        fail(b, T0, 2)
        b.admit(T0).succeeded()

    assert b.state(T0) is BreakerState.CLOSED


def test_half_open_breaker_admits_one_call() -> None:
    b = opened()
    assert b.state(T0 + 999) is BreakerState.OPEN
    assert b.state(T0 + 1_000) is BreakerState.HALF_OPEN

    b.admit(T0 + 1_000)

    assert b.state(T0 + 1_000) is BreakerState.HALF_OPEN
    refusal(b, T0 + 1_001)


def test_the_probe_that_succeeds_closes_it() -> None:
    b = opened()
    b.admit(T0 + 1_000).succeeded()

    assert b.state(T0 + 1_000) is BreakerState.CLOSED
    fail(b, T0 + 1_000, 2)
    assert b.state(T0 + 1_000) is BreakerState.CLOSED


def test_failed_probe_doubles_the_open_time_up_to_a_limit() -> None:
    b, now, waits = opened(), T0, []
    for _ in range(4):
        waits.append(refusal(b, now).retry_after_ms or 0)
        now += waits[-1]
        b.admit(now).failed("still none", now)

    assert waits == [1_000, 2_000, 3_000, 3_000]


def test_breaker_opens_for_the_first_time_span_after_recovery() -> None:
    b = opened()
    b.admit(T0 + 1_000).failed("still none", T0 + 1_000)
    b.admit(T0 + 3_000).succeeded()

    fail(b, T0 + 3_000, 3)

    assert refusal(b, T0 + 3_000).retry_after_ms == 1_000


def test_cancelled_probe_leaves_its_place_to_another() -> None:
    b = opened()
    b.admit(T0 + 1_000).abandoned()

    b.admit(T0 + 1_001).succeeded()

    assert b.state(T0 + 1_001) is BreakerState.CLOSED


def test_a_late_success_from_before_it_opened_does_not_close_it() -> None:
    b = breaker()
    slow = b.admit(T0)
    fail(b, T0, 3)

    slow.succeeded()

    assert b.state(T0) is BreakerState.OPEN


def test_breaker_ignores_failures_from_before_it_opened() -> None:
    b = breaker()
    slow = b.admit(T0)
    fail(b, T0, 3)
    probe = b.admit(T0 + 1_000)

    slow.failed("too late", T0 + 1_000)
    slow.abandoned()

    refusal(b, T0 + 1_000)
    probe.succeeded()
    assert b.state(T0 + 1_000) is BreakerState.CLOSED


def test_a_call_that_may_not_probe_waits_until_it_is_closed() -> None:
    b = opened()

    assert refusal(b, T0 + 1_000, may_probe=False).retry_after_ms == 1_000
    b.admit(T0 + 1_000).succeeded()

    b.admit(T0 + 1_000, may_probe=False).succeeded()
    assert b.state(T0 + 1_000) is BreakerState.CLOSED


def test_check_takes_nothing() -> None:
    b = opened()
    b.check(T0 + 1_000)
    b.check(T0 + 1_000)

    b.admit(T0 + 1_000).succeeded()
    assert b.state(T0 + 1_000) is BreakerState.CLOSED


def test_health_gives_the_reason_while_it_is_not_closed() -> None:
    b = breaker()
    assert b.health(T0).ok
    fail(b, T0, 3)

    assert (b.health(T0).ok, b.health(T0).detail) == (False, "The upstream is down: no answer")
    assert "being tried again: no answer" in (b.health(T0 + 1_000).detail or "")


@pytest.mark.parametrize(
    "limits", [{"failures": 0}, {"open_ms": 0}, {"open_ms": 5, "longest_ms": 4}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="breaker"):
        Breaker(**limits)


REPORTS: dict[str, Callable[[CallPermit, int], None]] = {
    "ok": lambda permit, _now: permit.succeeded(),
    "fail": lambda permit, now: permit.failed("x", now),
    "abandon": lambda permit, _now: permit.abandoned(),
    "never": lambda _permit, _now: None,
}


def step(b: Breaker, now: int, report: str) -> CallPermit | None:
    was_open = b.state(now) is not BreakerState.CLOSED
    try:
        permit = b.admit(now)
    except BreakerOpen as error:
        assert (error.retry_after_ms or 0) > 0
        return None
    if was_open:
        refusal(b, now)
    REPORTS[report](permit, now)
    return permit


@given(st.lists(st.tuples(st.sampled_from(sorted(REPORTS)), st.integers(0, 2_000)), max_size=60))
def test_breaker_has_at_most_one_probe_and_can_always_recover(
    steps: list[tuple[str, int]],
) -> None:
    b, now = breaker(), T0
    permits = []
    for report, wait in steps:
        now += wait
        permits.append(step(b, now, report))
    for permit in filter(None, permits):
        permit.abandoned()

    now += 3_000
    if b.state(now) is not BreakerState.CLOSED:
        b.admit(now).succeeded()
    assert b.state(now) is BreakerState.CLOSED
