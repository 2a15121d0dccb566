"""Exact output: the price inverted, and what an order for an exact payout pays."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import PriceLateDeposit
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.money import MAX_UNITS
from rpcsvc.domain.order import Order, OrderStatus, Terms
from rpcsvc.domain.pricing import Direction, Price, exact_output
from rpcsvc.domain.reservations import funded_reservations_of, unfunded_units
from tests.unit.orders import HOUR, NOW, key, terms

X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR
LOCK_END, EXPIRES = NOW + HOUR // 4, NOW + HOUR
RATE = 165_000_000
WANTED = {X2U: 100_000_000, U2X: 500_000_000_000}
BETTER, WORSE = 1_001, 999
# From 0.01 to 1,000,000 USDC for one XMR, fees up to what settings can hold, and beyond.
PRICES = st.builds(
    Price,
    st.integers(10_000, 10**12),
    st.integers(0, 9_000),
    st.integers(0, 10**9),
    st.just(9_900),
    st.integers(0, 999),
    st.integers(0, 10**9),
)


@given(PRICES, st.sampled_from(Direction), st.integers(1, 10**15))
@example(Price(RATE, 50, 0, 9_900, 50), X2U, 9_900)
def test_deposit_for_an_output_is_the_least_that_brings_it(
    price: Price, direction: Direction, output: int
) -> None:
    units = price.deposit_for(direction, output)
    assert price.output(direction, units) >= output
    assert price.output(direction, units - 1) < output


@given(PRICES, st.sampled_from(Direction), st.integers(1, 10**9), st.data())
def test_no_smaller_deposit_brings_the_output(
    price: Price, direction: Direction, output: int, data: st.DataObject
) -> None:
    """Outputs are not monotonic: two fees may be rounded up at once."""
    units = price.deposit_for(direction, output)
    smaller = data.draw(st.integers(max(0, units - 100_000), units - 1))
    assert price.output(direction, smaller) < output


@given(PRICES, st.sampled_from(Direction), st.integers(1, MAX_UNITS))
def test_the_output_of_a_deposit_asks_for_no_more_than_it(
    price: Price, direction: Direction, units: int
) -> None:
    output = price.output(direction, units)
    if output > 0:
        asked = price.deposit_for(direction, output)
        assert asked <= units
        assert price.deposit_for(direction, price.output(direction, asked)) <= asked


def test_fees_that_take_all_leave_no_deposit_that_is_enough() -> None:
    for price in (Price(RATE, 10_000, 0, 9_900), Price(RATE, 9_500, 0, 9_900, 600)):
        assert price.deposit_for(X2U, 1) > MAX_UNITS


@given(
    output=st.integers(0, 10**12),
    wanted=st.integers(1, 10**12),
    excess=st.integers(-(10**12), 10**12) | st.just(0),
    is_priced=st.booleans(),
)
def test_exact_output_is_never_below_for_a_priced_deposit(
    output: int, wanted: int, excess: int, *, is_priced: bool
) -> None:
    found = exact_output(output, wanted, excess, is_priced=is_priced)
    if excess < 0:
        assert found == min(output, wanted)
    elif is_priced:
        assert found == (wanted if excess == 0 else max(output, wanted))
    else:
        assert found == (min(output, wanted) if excess == 0 else output)


# --- orders ---


def exact(direction: Direction, integrator_bps: int = 0, funding_fee: int = 0) -> Terms:
    agreed, wanted = terms(direction), WANTED[direction]
    price = replace(agreed.price, integrator_bps=integrator_bps, funding_fee=funding_fee)
    return replace(
        agreed,
        price=price,
        deposit_amount=price.deposit_for(direction, wanted),
        expected_output=wanted,
        min_received=wanted,
        receive_amount=wanted,
        price_locked_until=LOCK_END,
    )


def seen(order: Order, number: int, units: int, at: int, rate: int | None = RATE) -> Order:
    return transition(order, ev.DepositSeen(key(number), units, "sender", at, rate), at).order


def settled(order: Order, at: int, fresh: int = RATE) -> Order:
    """The order with its deposits confirmed, and priced at ``fresh`` where they have no rate."""
    for deposit in order.deposits:
        result = transition(order, ev.DepositConfirmed(deposit.key), at)
        order = result.order
        if result.effects == (PriceLateDeposit(),):
            order = transition(order, ev.Repriced(fresh), at).order
    return order


def paid(order: Order) -> int | None:
    return None if order.payout is None else order.payout.units


def moved(direction: Direction, permille: int) -> int:
    """A rate that is better for the payer above 1,000, in either direction."""
    return RATE * permille // 1_000 if direction is X2U else RATE * 1_000 // permille


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("fees", [(0, 0), (75, 0), (75, 12_345)])
def test_exact_deposit_pays_the_amount_to_the_unit(
    direction: Direction, fees: tuple[int, int]
) -> None:
    agreed = exact(direction, *fees)
    order = settled(seen(open_order(agreed), 1, agreed.deposit_amount, NOW), NOW)
    assert paid(order) == WANTED[direction]


@given(st.sampled_from(Direction), st.data())
def test_deposits_that_sum_up_pay_the_amount_to_the_unit(
    direction: Direction, data: st.DataObject
) -> None:
    """However they are split, and at whichever rates in time."""
    agreed = exact(direction, 75)
    left, order, number = agreed.deposit_amount, open_order(agreed), 0
    while left:
        units = data.draw(st.integers(1, left)) if number < 4 else left
        at = data.draw(st.sampled_from([NOW, LOCK_END + 1]))
        rate = moved(direction, data.draw(st.integers(1_000, 1_050)))
        order, left, number = seen(order, number, units, at, rate), left - units, number + 1
    assert paid(settled(order, LOCK_END + 2)) == WANTED[direction]


@pytest.mark.parametrize("direction", Direction)
def test_exact_deposit_after_the_lock_is_paid_in_full(direction: Direction) -> None:
    for rate in (RATE, moved(direction, BETTER)):
        agreed = exact(direction)
        order = seen(open_order(agreed), 1, agreed.deposit_amount, LOCK_END + 1, rate)
        assert paid(settled(order, LOCK_END + 2)) == WANTED[direction]


@pytest.mark.parametrize("direction", Direction)
def test_exact_deposit_after_the_lock_is_late_at_a_worse_rate(direction: Direction) -> None:
    agreed, worse = exact(direction), moved(direction, WORSE)
    order = seen(open_order(agreed), 1, agreed.deposit_amount, LOCK_END + 1, worse)
    assert order.deposits[0].rate is None
    refunded = settled(order, LOCK_END + 2, worse)
    assert (refunded.status, refunded.payout) == (OrderStatus.REFUNDING, None)
    assert paid(settled(order, LOCK_END + 2, RATE)) == WANTED[direction]


@pytest.mark.parametrize("direction", Direction)
def test_late_exact_deposit_pays_the_amount_or_is_refunded(direction: Direction) -> None:
    agreed = exact(direction)
    order = seen(open_order(agreed), 1, agreed.deposit_amount, EXPIRES + 1, None)
    assert paid(settled(order, EXPIRES + 2, moved(direction, BETTER))) == WANTED[direction]
    assert settled(order, EXPIRES + 2, moved(direction, WORSE)).status is OrderStatus.REFUNDING


@pytest.mark.parametrize("direction", Direction)
def test_more_than_due_is_all_swapped_at_the_locked_rate(direction: Direction) -> None:
    agreed = exact(direction)
    units = agreed.deposit_amount * 3 // 2
    order = settled(seen(open_order(agreed), 1, units, NOW), NOW)
    assert paid(order) == agreed.price.output(direction, units) > WANTED[direction]


def test_a_unit_more_than_due_never_pays_less() -> None:
    """Two fees that are rounded up at once take a unit of the price of a larger deposit."""
    agreed = exact(X2U, 50)
    for wanted in range(9_900, 10_100):
        price = replace(agreed.price, payout_fee=0)
        units = price.deposit_for(X2U, wanted)
        small = replace(
            agreed,
            price=price,
            deposit_amount=units,
            min_deposit=1,
            min_received=wanted,
            receive_amount=wanted,
        )
        more = units + agreed.price.deposit_for(X2U, 1)
        order = settled(seen(open_order(small), 1, more, NOW), NOW)
        assert (paid(order) or 0) >= wanted


@pytest.mark.parametrize("direction", Direction)
def test_less_than_due_is_swapped_at_the_locked_rate(direction: Direction) -> None:
    agreed = exact(direction)
    units = agreed.deposit_amount // 2
    order = settled(seen(open_order(agreed), 1, units, NOW), NOW)
    assert order.status is OrderStatus.DEPOSIT_DETECTED
    over = transition(order, ev.DeadlinePassed(), (order.deadline_at or 0) + 1).order
    assert paid(over) == agreed.price.output(direction, units)


@pytest.mark.parametrize("direction", Direction)
def test_exact_order_reserves_the_amount_and_its_fee(direction: Direction) -> None:
    agreed = exact(direction)
    order = open_order(agreed)
    assert unfunded_units(order) == WANTED[direction] + agreed.price.payout_fee
    funded = funded_reservations_of(seen(order, 1, agreed.deposit_amount, NOW))
    assert funded[agreed.payout_network] == WANTED[direction] + agreed.price.payout_fee


@pytest.mark.parametrize("direction", Direction)
def test_less_than_due_pays_no_more_than_is_reserved(direction: Direction) -> None:
    """At a better rate a unit less would else bring more than the whole deposit."""
    agreed, better = exact(direction), moved(direction, 1_050)
    order = open_order(agreed)
    order = seen(order, 1, agreed.deposit_amount - 1, LOCK_END + 1, better)
    reserved = funded_reservations_of(order)[agreed.payout_network]
    order = settled(order, LOCK_END + 2)
    over = transition(order, ev.DeadlinePassed(), (order.deadline_at or 0) + 1).order
    assert paid(over) == WANTED[direction]
    assert reserved == WANTED[direction] + agreed.price.payout_fee
