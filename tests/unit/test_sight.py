"""Until when deposits are known, and which orders that is enough for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rpcsvc.domain.order import Order
from rpcsvc.domain.states import OnDeadline
from rpcsvc.domain.transition import open_order
from rpcsvc.orders.sight import Sight
from tests.sandbox import ManualClock
from tests.unit.test_transition import terms

MINUTE = 60_000


def order(on_deadline: OnDeadline = OnDeadline.EXPIRE, network: str = "monero") -> Order:
    made = open_order(replace(terms(), deposit_network=network))
    return replace(made, deadline_at=100, on_deadline=on_deadline)


@pytest.mark.parametrize("on_deadline", [OnDeadline.EXPIRE, OnDeadline.SWAP_OR_REFUND])
def test_an_order_waits_until_its_network_was_seen_whole_at_its_deadline(
    on_deadline: OnDeadline,
) -> None:
    sight, waiting = Sight(["monero", "base"], ManualClock()), order(on_deadline)
    assert not sight.covers(waiting), "nobody has looked yet"
    for at, is_covered in ((99, False), (100, True), (101, True)):
        sight.looked({"monero": at}, {})
        assert sight.covers(waiting) is is_covered
        assert not sight.covers(order(on_deadline, "base"))


@pytest.mark.parametrize("on_deadline", sorted(set(OnDeadline) - {"expire", "swap_or_refund"}))
def test_what_no_deposit_decides_waits_for_none(on_deadline: OnDeadline) -> None:
    assert Sight(["monero"], ManualClock()).covers(order(on_deadline))


def test_where_nobody_looks_nothing_is_waited_for() -> None:
    assert Sight(["base"], ManualClock()).covers(order())


def test_an_order_with_deposits_left_to_record_waits_until_a_whole_look_left_none() -> None:
    sight, waiting = Sight(["monero"], ManualClock()), order()
    sight.looked({"monero": 100}, {waiting.order_id: "monero"})
    assert sight.behind == {waiting.order_id}
    assert not sight.covers(waiting)
    sight.looked({}, {})
    assert not sight.covers(waiting), "its deposits may not have been shown this time"
    sight.looked({"monero": 101}, {})
    assert sight.covers(waiting)
    assert not sight.behind


def test_a_network_that_is_not_seen_for_long_is_told_until_it_is() -> None:
    clock = ManualClock()
    sight = Sight(["monero", "base"], clock)
    clock.now += 10 * MINUTE - 1
    assert sight.health().ok, "it has just begun"
    sight.looked({"monero": clock.now}, {})
    clock.now += 1
    told = sight.health()
    assert not told.ok
    assert (told.detail or "").startswith(
        "Deposits on base have not been seen whole for 10 minutes"
    )
    sight.looked({"base": clock.now}, {})
    assert sight.health().ok


def test_where_no_deposits_are_watched_all_is_well() -> None:
    assert Sight([], ManualClock()).health().ok
