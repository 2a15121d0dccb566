"""The price lock: the rate of each deposit, payouts of several deposits, and when a lock breaks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.deposit_rules import breaking_rate
from rpcsvc.domain.events import ImpossibleTransition, PriceLateDeposit, Transition
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import Order, OrderStatus, Terms
from rpcsvc.domain.pricing import Direction
from tests.unit.orders import HOUR, NOW, XMR_UNIT, key, terms

LOCK_END = NOW + HOUR // 4
EXPIRES = NOW + HOUR
RATE = 165_000_000
X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR
FAIR, UNFAIR = 164_000_000, 160_000_000


def locked(direction: Direction = X2U) -> Terms:
    return replace(terms(direction), price_locked_until=LOCK_END)


def seen(order: Order, number: int, units: int, at: int, rate: int | None = RATE) -> Order:
    return transition(order, ev.DepositSeen(key(number), units, None, at, rate), at).order


def confirmed(order: Order, number: int, at: int) -> Transition:
    return transition(order, ev.DepositConfirmed(key(number)), at)


def paid(order: Order) -> int:
    assert order.payout is not None
    return order.payout.units


@pytest.mark.parametrize(
    ("at", "current", "found"),
    [
        (LOCK_END, FAIR, RATE),
        (LOCK_END, None, RATE),
        (LOCK_END + 1, FAIR, FAIR),
        (LOCK_END + 1, RATE + 1_000_000, RATE + 1_000_000),
        (EXPIRES, FAIR, FAIR),
        (LOCK_END + 1, UNFAIR, None),
        (LOCK_END + 1, None, None),
        (EXPIRES + 1, FAIR, None),
    ],
)
def test_a_deposit_gets_the_rate_of_its_time(at: int, current: int | None, found: int) -> None:
    order = seen(open_order(locked()), 1, XMR_UNIT, at, current)
    assert order.deposits[0].rate == found


def test_rate_at_first_sighting_is_paid_after_the_lock() -> None:
    order = seen(open_order(locked()), 1, XMR_UNIT, LOCK_END + 1, FAIR)
    result = confirmed(order, 1, LOCK_END + 9)
    assert paid(result.order) == locked().price.at(FAIR).output(X2U, XMR_UNIT)


def test_after_the_lock_an_unfair_rate_is_treated_as_late() -> None:
    order = seen(open_order(locked()), 1, XMR_UNIT, LOCK_END + 1, UNFAIR)
    result = confirmed(order, 1, LOCK_END + 9)
    assert result.effects == (PriceLateDeposit(),)
    refunded = transition(result.order, ev.Repriced(UNFAIR), LOCK_END + 10).order
    assert (refunded.status, refunded.payout) == (OrderStatus.REFUNDING, None)
    recovered = transition(result.order, ev.Repriced(FAIR), LOCK_END + 10).order
    assert paid(recovered) == locked().price.at(FAIR).output(X2U, XMR_UNIT)


def test_dust_does_not_hold_the_lock_for_later_deposits() -> None:
    dust, rest = XMR_UNIT // 100, XMR_UNIT
    order = seen(open_order(locked()), 1, dust, NOW)
    order = seen(order, 2, rest, LOCK_END + 1, FAIR)
    order = confirmed(order, 1, LOCK_END + 2).order
    order = confirmed(order, 2, LOCK_END + 3).order
    price = locked().price
    due = price.exchanged(X2U, dust) + price.at(FAIR).exchanged(X2U, rest) - price.payout_fee
    assert paid(order) == due


def test_overpayment_after_the_lock_does_not_get_the_locked_rate() -> None:
    """The full amount arrives within the lock, and is unconfirmed when much more arrives."""
    order = seen(open_order(locked()), 1, XMR_UNIT, NOW)
    order = seen(order, 2, 8 * XMR_UNIT, LOCK_END + 1, FAIR)
    order = confirmed(order, 2, LOCK_END + 2).order
    assert paid(order) == locked().price.at(FAIR).output(X2U, 8 * XMR_UNIT)
    assert order.unspent == (), "the first is confirmed later and refunded"


def test_late_dust_does_not_reprice_deposits_in_the_lock() -> None:
    order = seen(open_order(locked()), 1, XMR_UNIT - 10, NOW)
    order = seen(order, 2, 10, EXPIRES + 1)
    order = confirmed(order, 1, EXPIRES + 2).order
    result = confirmed(order, 2, EXPIRES + 3)
    order = transition(result.order, ev.Repriced(UNFAIR), EXPIRES + 4).order
    assert paid(order) >= locked().min_received
    assert paid(order) == pytest.approx(locked().expected_output, rel=1e-6)


@given(
    direction=st.sampled_from(Direction),
    parts=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.integers(NOW, EXPIRES),
            st.integers(RATE * 98 // 100, RATE * 102 // 100),
        ),
        min_size=1,
        max_size=5,
    ),
    fresh=st.integers(RATE * 98 // 100, RATE * 102 // 100),
)
def test_nobody_is_paid_more_than_his_parts_at_their_rates(
    direction: Direction, parts: list[tuple[int, int, int]], fresh: int
) -> None:
    """For any split: each part is paid at the locked rate or at the rate of its time."""
    agreed = locked(direction)
    order, worth = open_order(agreed), Fraction(0)
    for number, (share, at, rate) in enumerate(sorted(parts, key=lambda part: part[1])):
        units = agreed.deposit_amount * share // 3
        order = seen(order, number, units, at, rate)
        own = RATE if at <= LOCK_END else rate
        dearest = (max if direction is X2U else min)(own, fresh if at > LOCK_END else own)
        gross = Fraction(units * dearest, XMR_UNIT)
        worth += gross if direction is X2U else Fraction(units * XMR_UNIT, dearest)
    for number in range(len(parts)):
        if order.status is OrderStatus.DEPOSIT_DETECTED:
            result = confirmed(order, number, EXPIRES + 1)
            order = result.order
            if result.effects == (PriceLateDeposit(),):
                order = transition(order, ev.Repriced(fresh), EXPIRES + 1).order
    if order.payout is not None:
        after_spread = worth * (10_000 - agreed.price.spread_bps) / 10_000
        assert order.payout.units <= after_spread - agreed.price.payout_fee
        paid_for = sum(d.units for d in order.deposits if d.transfer_id == order.payout.transfer_id)
        if paid_for >= agreed.deposit_amount:
            least = agreed.min_received * paid_for
            assert order.payout.units * agreed.deposit_amount >= least


# --- the lock breaks --------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
@given(locked_rate=st.integers(1, 10**12), move=st.integers(-(10**6), 10**6))
def test_price_lock_breaks_when_the_rate_moves_beyond_the_limit(
    direction: Direction, locked_rate: int, move: int
) -> None:
    current = max(1, locked_rate + locked_rate * move // 10**7)
    loss = locked_rate - current if direction is X2U else current - locked_rate
    limit = breaking_rate(direction, current, 100)
    breaks = locked_rate > limit if direction is X2U else locked_rate < limit
    assert breaks is (loss * 10_000 > locked_rate * 100)


def test_broken_lock_ends_at_once_and_keeps_earlier_rates() -> None:
    order = seen(open_order(locked()), 1, XMR_UNIT // 2, NOW)
    order = transition(order, ev.LockBroken(UNFAIR), NOW + 10).order
    assert order.price_locked_until == NOW + 10
    order = seen(order, 2, XMR_UNIT // 4, NOW + 10, UNFAIR)
    order = seen(order, 3, XMR_UNIT // 4, NOW + 11, FAIR)
    assert [d.rate for d in order.deposits] == [RATE, RATE, FAIR]


def test_deposit_in_the_pool_before_the_break_is_in_time() -> None:
    """The scan may lag: the time when it was first seen counts."""
    order = transition(open_order(locked()), ev.LockBroken(UNFAIR), NOW + 10).order
    seen_late = ev.DepositSeen(key(1), XMR_UNIT, None, NOW + 9, UNFAIR)
    assert transition(order, seen_late, NOW + 60).order.deposits[0].rate == RATE


@pytest.mark.parametrize("now", [LOCK_END, LOCK_END + 1])
def test_ended_lock_does_not_break(now: int) -> None:
    with pytest.raises(ImpossibleTransition, match="is over"):
        transition(open_order(locked()), ev.LockBroken(UNFAIR), now)


def test_order_without_a_price_lock_is_locked_until_it_expires() -> None:
    order = seen(open_order(terms()), 1, XMR_UNIT, EXPIRES, UNFAIR)
    assert order.deposits[0].rate == RATE
