"""The sum at risk: what a deposit is worth, and what each event does to the sum."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.finality import (
    EVERYWHERE,
    Exposure,
    FinalityChange,
    FinalityLimits,
    counts_early,
    finality_change,
    is_lost,
    worth,
)
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Deposit, DepositState, Order
from rpcsvc.domain.pricing import Direction
from tests.unit.orders import IN_CHUNKS, NOW, XMR_UNIT, key, terms

X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR
LIMITS = FinalityLimits(total=900, each=500, networks={"monero": 300}, hold_ms=60)
SEEN = Deposit(key(1), XMR_UNIT, None, NOW, rate=165_000_000)
CONFIRMED = replace(SEEN, state=DepositState.CONFIRMED)
SPENT = replace(CONFIRMED, transfer_id="ord_1/payout/1")
LOST = replace(SPENT, state=DepositState.REMOVED)
GONE = replace(SEEN, state=DepositState.REMOVED)


def order_with(*deposits: Deposit, direction: Direction = X2U) -> Order:
    return replace(open_order(terms(direction)), deposits=deposits)


def test_network_has_its_own_bound_or_the_common_one() -> None:
    assert LIMITS.on("monero") == (("monero", 300), (EVERYWHERE, 900))
    assert LIMITS.on("base") == (("base", 500), (EVERYWHERE, 900))
    assert FinalityLimits().on("base") == (("base", 0), (EVERYWHERE, 0))


def test_deposit_counts_early_where_its_worth_is_known() -> None:
    order, fee = order_with(), terms().refund_fee
    assert counts_early(order, SEEN)
    assert counts_early(order, replace(SEEN, units=fee + 1))
    assert not counts_early(order, replace(SEEN, units=fee))
    assert not counts_early(order, replace(SEEN, rate=None))
    in_chunks = open_order(terms(X2U, IN_CHUNKS))
    assert not counts_early(in_chunks, SEEN)
    assert counts_early(open_order(terms(U2X, IN_CHUNKS)), replace(SEEN, rate=None))


@pytest.mark.parametrize(
    ("direction", "units", "rate", "expected"),
    [
        (U2X, 7, None, 7), (U2X, 7, 9, 7), (X2U, XMR_UNIT, 200_000_000, 200_000_000),
        (X2U, XMR_UNIT, None, 165_000_000), (X2U, XMR_UNIT + 1, None, 165_000_001),
        (X2U, 1, 200_000_000, 1), (X2U, 0, 200_000_000, 1),
    ],
)  # fmt: skip
def test_worth_is_that_of_the_swap_rounded_up(
    direction: Direction, units: int, rate: int | None, expected: int
) -> None:
    deposit = replace(SEEN, units=units, rate=rate)
    assert worth(order_with(direction=direction), deposit) == expected


def test_only_a_spent_deposit_can_be_lost() -> None:
    assert is_lost(LOST)
    assert not any(map(is_lost, (None, SEEN, CONFIRMED, SPENT, GONE)))


EARLY, FINAL = (ev.DepositConfirmed(key(1), is_final=final) for final in (False, True))
REMOVED, SHOWN = ev.DepositRemoved(key(1)), ev.DepositSeen(key(1), XMR_UNIT, None, NOW)
CHANGE = FinalityChange("ord_1", NOW, held_until=NOW + 60)
TAKEN = Exposure(key(1), 165_000_000, (("network", 500), (EVERYWHERE, 900)))


@pytest.mark.parametrize(
    ("before", "after", "event", "expected"),
    [
        (SEEN, CONFIRMED, EARLY, replace(CHANGE, taken=TAKEN)),
        (SEEN, CONFIRMED, FINAL, replace(CHANGE, freed=(key(1),))),
        (CONFIRMED, SPENT, ev.DeadlinePassed(), None),
        (SPENT, LOST, REMOVED, replace(CHANGE, lost=(key(1),))),
        (LOST, LOST, ev.DeadlinePassed(), None),
        (CONFIRMED, GONE, REMOVED, replace(CHANGE, freed=(key(1),))),
        (LOST, replace(SPENT, state=DepositState.SEEN), SHOWN, replace(CHANGE, returned=(key(1),))),
        (LOST, replace(LOST, transfer_id="ord_1/refund/1"), REMOVED, None),
        (SEEN, SEEN, SHOWN, None),
    ],
)
def test_event_changes_the_sum_at_risk(
    before: Deposit, after: Deposit, event: ev.Event, expected: FinalityChange | None
) -> None:
    change = finality_change(order_with(before), order_with(after), event, LIMITS, NOW)
    assert change == expected


def test_other_deposits_of_the_order_are_looked_at_too() -> None:
    others = [replace(CONFIRMED, key=key(n)) for n in (2, 3)]
    gone = [replace(each, state=DepositState.REMOVED) for each in others]
    before, after = order_with(CONFIRMED, *others), order_with(CONFIRMED, *gone)
    change = finality_change(before, after, REMOVED, LIMITS, NOW)
    assert change == replace(CHANGE, freed=(key(2), key(3)))


def test_final_deposit_that_the_order_lacks_is_freed() -> None:
    for event in (EARLY, FINAL):
        change = finality_change(order_with(), order_with(), event, LIMITS, NOW)
        assert change == replace(CHANGE, freed=(key(1),))
