"""Deposit rules: the bounds of each decision, to the unit and to the millisecond."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.deposit_rules import (
    breaking_rate,
    brings_min_received,
    confirmation_deadline,
    rate_of_deposit,
    spread_earned,
    units_by_rate,
)
from rpcsvc.domain.events import AdvanceTransfer, ImpossibleTransition, PriceLateDeposit
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import (
    Deposit,
    DepositState,
    Fill,
    Order,
    OrderReason,
    OrderStatus,
    Terms,
    Transfer,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.pricing import BPS, Direction, Price
from tests.unit.orders import HOUR, NOW, TIMEOUTS, XMR_UNIT, key, terms

X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR
RATE = 165_000_000
LATE = NOW + HOUR + 1
CONFIRM = ev.DepositConfirmed(key(1))


def seen(units: int, *, at: int = NOW, agreed: Terms | None = None, n: int = 1) -> Order:
    """An order whose only deposit was seen."""
    order = open_order(agreed or terms())
    return transition(order, ev.DepositSeen(key(n), units, "sender", at), at).order


def confirmed(units: int, *, at: int = NOW, now: int = NOW, agreed: Terms | None = None) -> Order:
    return transition(seen(units, at=at, agreed=agreed), CONFIRM, now).order


def expired(order: Order, units: int) -> Order:
    """The same once its deadline has passed."""
    after = max(order.deadline_at or 0, LATE)
    assert order.status is OrderStatus.DEPOSIT_DETECTED
    assert order.deposits[0].units == units
    return transition(order, ev.DeadlinePassed(), after).order


def test_rate_is_the_locked_one_until_the_lock_ends() -> None:
    order = open_order(replace(terms(), price_locked_until=NOW + 5))
    assert rate_of_deposit(order, NOW + 5, 7 * RATE) == RATE
    assert rate_of_deposit(order, NOW + 6, 7 * RATE) == 7 * RATE
    assert rate_of_deposit(order, NOW + 6, RATE // 2) is None
    assert rate_of_deposit(order, NOW + HOUR, 7 * RATE) == 7 * RATE
    assert rate_of_deposit(order, LATE, 7 * RATE) is None
    assert rate_of_deposit(order, NOW + 6, None) is None


def test_rate_is_taken_that_brings_just_the_minimum() -> None:
    agreed = terms()
    output = agreed.price.output(X2U, agreed.deposit_amount)
    assert brings_min_received(replace(agreed, min_received=output), RATE)
    assert not brings_min_received(replace(agreed, min_received=output + 1), RATE)
    free = Price(RATE, 0, 0, 0)
    tiny = replace(agreed, price=free, deposit_amount=XMR_UNIT, min_received=0)
    assert brings_min_received(tiny, 1)
    assert not brings_min_received(replace(tiny, deposit_amount=1), 1)


@given(st.sampled_from(list(Direction)), st.integers(1, 10**18), st.integers(0, 9_999))
def test_breaking_rate_is_exact(direction: Direction, current: int, bps: int) -> None:
    share = Fraction(bps, BPS)
    if direction is X2U:
        assert breaking_rate(direction, current, bps) == math.floor(current / (1 - share))
    else:
        assert breaking_rate(direction, current, bps) == math.ceil(current / (1 + share))


def test_lock_breaks_until_it_ends_and_not_after() -> None:
    order = seen(1)
    broken = transition(order, ev.LockBroken(RATE), NOW + HOUR - 1).order
    assert (broken.lock_broken_at, broken.price_locked_until) == (NOW + HOUR - 1, NOW + HOUR - 1)
    for late in (NOW + HOUR, LATE):
        with pytest.raises(ImpossibleTransition, match="lock of ord_1 is over"):
            transition(order, ev.LockBroken(RATE), late)


def test_spread_is_that_of_the_swapped_deposits() -> None:
    payout = Transfer("p", TransferKind.PAYOUT, "base", terms().payout_asset, "to", 1, 1)
    spent = Deposit(key(1), 2 * XMR_UNIT, None, NOW, DepositState.CONFIRMED, "p", rate=2 * RATE)
    other = replace(spent, key=key(2), transfer_id="q")
    unpriced = replace(spent, key=key(3), units=XMR_UNIT, rate=None)
    order = replace(open_order(terms()), deposits=(spent, other, unpriced))
    assert spread_earned(order, payout) == (4 * RATE + RATE) * 50 // BPS
    fill = Fill(XMR_UNIT, 1, 0, 3 * RATE, NOW)
    in_chunks = replace(order, fills=(fill, replace(fill, rate=RATE)))
    assert spread_earned(in_chunks, payout) == 4 * RATE * 50 // BPS
    assert units_by_rate(order.deposits, 7) == {2 * RATE: 4 * XMR_UNIT, 7: XMR_UNIT}


@pytest.mark.parametrize(
    ("direction", "asset", "network"), [(X2U, "USDC", "arbitrum"), (U2X, "XMR", "monero")]
)
def test_payout_is_planned_with_all_that_it_needs(
    direction: Direction, asset: str, network: str
) -> None:
    agreed = terms(direction)
    price = replace(agreed.price, integrator_bps=100)
    agreed = replace(agreed, price=price)
    moved = transition(seen(agreed.deposit_amount, agreed=agreed), CONFIRM, NOW)
    (payout,) = moved.order.transfers
    assert payout.integrator_fee == price.integrator_fee(direction, agreed.deposit_amount) > 0
    assert payout.units == price.output(direction, agreed.deposit_amount)
    assert (payout.asset.symbol, payout.network, payout.address) == (asset, network, "pay here")
    assert (payout.fee, payout.kind) == (1_000, TransferKind.PAYOUT)
    assert payout.state is TransferState.PLANNED
    assert moved.effects == (AdvanceTransfer("ord_1/payout/1"),)
    assert moved.order.deposits[0].transfer_id == payout.transfer_id == "ord_1/payout/1"
    assert moved.order.status is OrderStatus.DEPOSIT_CONFIRMED


def test_sum_at_the_maximum_is_swapped_and_above_refunded() -> None:
    most = terms().max_deposit
    assert confirmed(most).status is OrderStatus.DEPOSIT_CONFIRMED
    above = confirmed(most + 1)
    assert above.error_message == OrderReason.ABOVE_MAXIMUM.text
    assert above.payout is None


def test_sum_at_the_minimum_is_swapped_and_below_refunded() -> None:
    least = terms().min_deposit
    assert expired(confirmed(least), least).status is OrderStatus.DEPOSIT_CONFIRMED
    below = expired(confirmed(least - 1), least - 1)
    assert below.error_message == OrderReason.BELOW_MINIMUM.text
    assert below.payout is None


def test_sum_is_decided_at_the_expiry_and_not_before() -> None:
    least = terms().min_deposit
    assert confirmed(least, now=NOW + HOUR - 1).status is OrderStatus.DEPOSIT_DETECTED
    assert confirmed(least, now=NOW + HOUR).status is OrderStatus.DEPOSIT_CONFIRMED
    reached = confirmed(terms().deposit_amount, now=NOW + 1)
    assert reached.status is OrderStatus.DEPOSIT_CONFIRMED


def test_order_waits_for_what_is_still_confirming() -> None:
    order = seen(terms().min_deposit)
    order = transition(order, ev.DepositSeen(key(2), 1, None, NOW), NOW).order
    order = transition(order, CONFIRM, LATE).order
    assert order.status is OrderStatus.DEPOSIT_DETECTED
    assert order.deadline_at == confirmation_deadline(order) == NOW + TIMEOUTS.confirm
    early = transition(order, ev.DepositConfirmed(key(2)), LATE).order
    assert early.status is OrderStatus.DEPOSIT_CONFIRMED


def test_order_is_decided_once_the_last_unconfirmed_is_gone() -> None:
    order = confirmed(terms().min_deposit)
    order = transition(order, ev.DepositSeen(key(2), 1, None, NOW), NOW).order
    for now, status in ((NOW, OrderStatus.DEPOSIT_DETECTED), (LATE, OrderStatus.DEPOSIT_CONFIRMED)):
        assert transition(order, ev.DepositRemoved(key(2)), now).order.status is status


def test_deposit_that_never_confirms_ends_the_order() -> None:
    order = seen(terms().deposit_amount)
    waits = transition(order, ev.DeadlinePassed(), order.deadline_at or 0).order
    over = NOW + TIMEOUTS.confirm
    assert confirmation_deadline(order) == over
    assert waits.status is OrderStatus.EXPIRED
    assert waits.error_message == OrderReason.UNCONFIRMED.text
    assert order.deadline_at == over


def test_deposit_below_the_fees_is_refunded() -> None:
    price = replace(terms().price, payout_fee=2 * RATE)
    agreed = replace(terms(), price=price, min_deposit=1)
    assert confirmed(XMR_UNIT, agreed=agreed).error_message == OrderReason.BELOW_FEES.text


def late(units: int) -> Order:
    """An order whose deposit came late and waits for its price."""
    moved = transition(seen(units, at=LATE), CONFIRM, LATE)
    assert moved.effects == (PriceLateDeposit(),)
    assert moved.order.payout is None
    return moved.order


def test_late_deposit_is_swapped_at_the_fresh_rate() -> None:
    order = transition(late(XMR_UNIT), ev.Repriced(2 * RATE), LATE).order
    assert order.payout is not None
    assert order.payout.units == terms().price.at(2 * RATE).output(X2U, XMR_UNIT)


def test_late_deposit_at_the_maximum_is_swapped() -> None:
    most = terms().max_deposit
    assert transition(late(most), ev.Repriced(RATE), LATE).order.payout is not None


def test_late_deposit_is_swapped_if_the_wallet_can_pay_it() -> None:
    order = late(XMR_UNIT)
    needed = terms().price.output(X2U, XMR_UNIT) + terms().price.payout_fee
    assert transition(order, ev.Repriced(RATE, needed), LATE).order.payout is not None
    refused = transition(order, ev.Repriced(RATE, needed - 1), LATE).order
    assert refused.error_message == OrderReason.LATE_NOT_PAYABLE.text
    assert refused.payout is None
    assert refused.action_required == "refund_address"


def test_late_deposit_is_refunded_once_the_rate_moved_too_far() -> None:
    order = late(XMR_UNIT)
    least = terms().min_received
    rates = range(RATE * 99 // 100 - 3, RATE * 99 // 100 + 3_000)
    fair = next(rate for rate in rates if terms().price.at(rate).output(X2U, XMR_UNIT) >= least)
    assert transition(order, ev.Repriced(fair), LATE).order.payout is not None
    moved = transition(order, ev.Repriced(fair - 1), LATE).order
    assert moved.error_message == OrderReason.LATE_RATE_MOVED.text


def test_second_price_for_a_planned_payout_is_refused() -> None:
    order = transition(late(XMR_UNIT), ev.Repriced(RATE), LATE).order
    with pytest.raises(ImpossibleTransition, match="planned already"):
        transition(order, ev.Repriced(RATE), LATE)


def test_deposit_is_recorded_as_it_was_seen() -> None:
    (deposit,) = seen(5).deposits
    assert deposit == Deposit(key(1), 5, "sender", NOW, rate=RATE)
    second = ev.DepositSeen(key(2), 7, None, LATE, RATE)
    order = transition(seen(5), second, LATE).order
    assert order.deposits[1] == Deposit(key(2), 7, None, LATE, rate=None)


def test_deposit_comes_back_with_its_amount_only() -> None:
    order = transition(seen(5), ev.DepositRemoved(key(1)), NOW).order
    assert order.status is OrderStatus.AWAITING_DEPOSIT
    with pytest.raises(ImpossibleTransition, match="another amount"):
        transition(order, ev.DepositSeen(key(1), 6, "sender", NOW), NOW)


@pytest.mark.parametrize("event", [CONFIRM, ev.DepositConfirmed(key(9))])
def test_only_a_seen_deposit_is_confirmed(event: ev.Event) -> None:
    with pytest.raises(ImpossibleTransition, match="is not waiting"):
        transition(confirmed(5), event, NOW)


def test_deposit_counts_before_it_is_final_within_the_lock_only() -> None:
    early = ev.DepositConfirmed(key(1), is_final=False)
    assert transition(seen(XMR_UNIT), early, NOW).order.payout is not None
    with pytest.raises(ImpossibleTransition, match="has to be final"):
        transition(seen(XMR_UNIT, at=LATE), early, LATE)


def test_order_without_deposit_ends_by_time_or_by_its_owner() -> None:
    order = open_order(terms())
    by_time = transition(order, ev.DeadlinePassed(), order.deadline_at or 0).order
    assert by_time.error_message == OrderReason.NO_DEPOSIT.text
    cancelled = transition(order, ev.Cancelled(), NOW).order
    assert cancelled.error_message == OrderReason.CANCELLED.text
    assert by_time.status is cancelled.status is OrderStatus.EXPIRED
    returned = transition(seen(5), ev.DepositRemoved(key(1)), NOW).order
    with pytest.raises(ImpossibleTransition, match="was seen"):
        transition(returned, ev.Cancelled(), NOW)
