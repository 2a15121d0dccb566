"""Scan progress, and which orders may be decided at it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import OnDeadline, Order
from rpcsvc.orders.deposits import ScanProgress
from tests.sandbox import ManualClock
from tests.unit.orders import terms

MINUTE = 60_000


def order(on_deadline: OnDeadline = OnDeadline.EXPIRE, network: str = "monero") -> Order:
    made = open_order(replace(terms(), deposit_network=network))
    return replace(made, deadline_at=100, on_deadline=on_deadline)


DECIDED = ("expire", "swap_or_refund", "refund")


@pytest.mark.parametrize("on_deadline", [OnDeadline(name) for name in DECIDED])
def test_order_waits_until_the_scan_passed_its_deadline(
    on_deadline: OnDeadline,
) -> None:
    progress, waiting = ScanProgress(["monero", "base"], ManualClock()), order(on_deadline)
    assert not progress.covers(waiting), "nobody has looked yet"
    for at, is_covered in ((99, False), (100, True), (101, True)):
        progress.advance({"monero": at}, {})
        assert progress.covers(waiting) is is_covered
        assert not progress.covers(order(on_deadline, "base"))


@pytest.mark.parametrize("on_deadline", sorted(set(OnDeadline) - set(DECIDED)))
def test_what_no_deposit_decides_waits_for_none(on_deadline: OnDeadline) -> None:
    assert ScanProgress(["monero"], ManualClock()).covers(order(on_deadline))


def test_where_nobody_looks_nothing_is_waited_for() -> None:
    assert ScanProgress(["base"], ManualClock()).covers(order())


def test_order_with_unrecorded_deposits_waits_for_a_full_scan() -> None:
    progress, waiting = ScanProgress(["monero"], ManualClock()), order()
    progress.advance({"monero": 100}, {waiting.order_id: "monero"})
    assert progress.lagging == {waiting.order_id}
    assert not progress.covers(waiting)
    progress.advance({}, {})
    assert not progress.covers(waiting), "its deposits may not have been shown this time"
    progress.advance({"monero": 101}, {})
    assert progress.covers(waiting)
    assert not progress.lagging


def test_deadline_waits_for_a_scan_since_the_pause_of_payouts() -> None:
    clock, pauses, late = ManualClock(), list[str](), order(OnDeadline.REFUND)
    progress = ScanProgress(["monero", "base"], clock, lambda: bool(pauses))
    progress.advance({"monero": clock.now, "base": clock.now}, {})
    for _ in range(2):
        pauses.append("a deep branch")
        clock.now += MINUTE
        assert progress.covers(late), "the pause itself holds refunds"
        scanned = clock.now
        progress.advance({"monero": scanned}, {})
        clock.now += 1
        pauses.clear()
        assert not progress.covers(late)
        progress.advance({"monero": scanned, "base": clock.now}, {})
        assert not progress.covers(late), "that scan began in the pause"
        assert progress.complete_until == {"monero": 0, "base": clock.now}
        assert progress.lags()["monero"] == 1
        progress.advance({"monero": clock.now}, {})
        assert progress.covers(late)
        clock.now += MINUTE
        assert progress.covers(late), "until the next pause"


def test_clock_set_back_after_a_pause_delays_no_payment() -> None:
    clock, pauses = ManualClock(), ["a deep branch"]
    progress = ScanProgress(["monero"], clock, lambda: bool(pauses))
    progress.advance({"monero": clock.now}, {})
    assert progress.is_current("monero")
    pauses.clear()
    assert not progress.is_current("monero")
    clock.now -= MINUTE
    assert not progress.is_current("monero"), "no scan has begun since"
    progress.advance({"monero": clock.now}, {})
    assert progress.is_current("monero")


def test_network_without_scans_is_reported_until_one() -> None:
    clock = ManualClock()
    progress = ScanProgress(["monero", "base"], clock)
    clock.now += 10 * MINUTE - 1
    assert progress.health().ok, "it has just begun"
    progress.advance({"monero": clock.now}, {})
    clock.now += 1
    assert progress.behind() == {"base": 10 * MINUTE}
    reported = progress.health()
    assert not reported.ok
    assert (reported.detail or "").startswith("Deposit scan of base is 10 min behind")
    progress.advance({"base": clock.now}, {})
    assert progress.health().ok


def test_where_no_deposits_are_watched_all_is_well() -> None:
    assert ScanProgress([], ManualClock()).health().ok
