"""Prices: every result against exact fractions, rounded in the service's favour."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain.money import MAX_UNITS, USDC, XMR
from rpcsvc.domain.pricing import (
    BPS,
    ONE_USDC,
    ONE_XMR,
    Direction,
    Price,
    convert_ceil,
    convert_floor,
    deposit_asset,
    exact_output,
    implied_rate,
    keeps_proportion,
    payout_asset,
    usd_to_deposit_ceil,
    usd_to_deposit_floor,
    usdc_to_deposit_floor,
)

X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR
directions = st.sampled_from(list(Direction))
rates = st.integers(1, 10**10)
amounts = st.integers(0, 10**16)
fees = st.integers(0, 10**6)
bps = st.integers(0, 500)
prices = st.builds(Price, rates, bps, fees, st.integers(9_000, 10_000), bps, fees)


def exact(direction: Direction, units: int, rate: int) -> Fraction:
    """Payout units for a deposit, before fees."""
    return Fraction(units * rate, ONE_XMR) if direction is X2U else Fraction(units * ONE_XMR, rate)


def test_each_direction_has_its_assets() -> None:
    assert (deposit_asset(X2U), payout_asset(X2U)) == (XMR, USDC)
    assert (deposit_asset(U2X), payout_asset(U2X)) == (USDC, XMR)
    assert (X2U.reverse, U2X.reverse) == (U2X, X2U)


@given(directions, amounts, rates)
def test_conversions_are_exact_to_less_than_a_unit(
    direction: Direction, units: int, rate: int
) -> None:
    assert convert_floor(direction, units, rate) == math.floor(exact(direction, units, rate))
    back = convert_ceil(direction, units, rate)
    assert exact(direction, back, rate) >= units
    assert back == 0 or exact(direction, back - 1, rate) < units


@given(directions, st.integers(0, 10**6), rates)
def test_dollars_become_the_nearest_deposits(direction: Direction, usd: int, rate: int) -> None:
    wanted = Fraction(usd * ONE_USDC)
    if direction is X2U:
        wanted = wanted * ONE_XMR / rate
    assert usd_to_deposit_ceil(direction, usd, rate) == math.ceil(wanted)
    assert usd_to_deposit_floor(direction, usd, rate) == math.floor(wanted)
    assert usdc_to_deposit_floor(direction, usd * ONE_USDC, rate) == math.floor(wanted)


@given(directions, st.integers(1, 10**16), rates)
def test_implied_rate_is_that_of_the_swap(direction: Direction, units: int, rate: int) -> None:
    received = max(1, convert_floor(direction, units, rate))
    usdc, xmr = (received, units) if direction is X2U else (units, received)
    assert implied_rate(direction, units, received) == max(1, usdc * ONE_XMR // xmr)


def test_implied_rate_is_at_least_one() -> None:
    assert implied_rate(X2U, 10**18, 1) == 1
    assert implied_rate(X2U, ONE_XMR, 165 * ONE_USDC) == 165 * ONE_USDC
    assert implied_rate(U2X, 165 * ONE_USDC, ONE_XMR) == 165 * ONE_USDC


@given(prices, directions, amounts)
def test_fees_are_taken_off_and_rounded_up_one_by_one(
    price: Price, direction: Direction, units: int
) -> None:
    gross = convert_floor(direction, units, price.rate)
    spread = math.ceil(Fraction(gross * price.spread_bps, BPS))
    integrators = math.ceil(Fraction(gross * price.integrator_bps, BPS))
    assert price.spread(direction, units) == spread
    assert price.integrator_fee(direction, units) == integrators
    assert price.exchanged(direction, units) == max(0, gross - spread - integrators)
    assert price.fixed_fee == price.payout_fee + price.funding_fee
    output = max(0, gross - spread - integrators - price.payout_fee - price.funding_fee)
    assert price.output(direction, units) == output
    assert price.min_received(direction, units) == output * price.min_received_bps // BPS


@given(prices, directions, st.integers(1, 10**15))
def test_deposit_for_an_output_is_the_least_one(
    price: Price, direction: Direction, output: int
) -> None:
    units = price.deposit_for(direction, output)
    assert price.output(direction, units) >= output
    assert price.output(direction, units - 1) < output


@pytest.mark.parametrize(("spread", "integrators"), [(BPS, 0), (0, BPS), (6_000, 4_000)])
def test_fees_of_all_need_more_than_any_deposit(spread: int, integrators: int) -> None:
    price = Price(165_000_000, spread, 0, 0, integrators)
    assert price.deposit_for(X2U, 1) > MAX_UNITS
    least = (
        replace(price, spread_bps=spread - 1) if spread else replace(price, integrator_bps=9_999)
    )
    units = least.deposit_for(X2U, 1)
    assert units <= MAX_UNITS
    assert least.output(X2U, units) >= 1


@given(prices, directions, st.dictionaries(rates, amounts, max_size=4))
def test_payout_at_several_rates_bears_the_fixed_fee_once(
    price: Price, direction: Direction, by_rate: dict[int, int]
) -> None:
    parts = [(price.at(rate), units) for rate, units in by_rate.items()]
    assert [part.rate for part, _ in parts] == list(by_rate)
    assert all(replace(part, rate=price.rate) == price for part, _ in parts)
    exchanged = sum(part.exchanged(direction, units) for part, units in parts)
    integrators = sum(part.integrator_fee(direction, units) for part, units in parts)
    expected = max(0, exchanged - price.payout_fee - price.funding_fee), integrators
    assert price.payout(direction, by_rate) == expected


@pytest.mark.parametrize(
    ("output", "excess", "is_priced", "paid"),
    [
        (99, 0, True, 100), (101, 0, True, 100), (99, 1, True, 100), (101, 1, True, 101),
        (99, -1, True, 99), (101, -1, True, 100), (99, 0, False, 99), (101, 0, False, 100),
        (99, 1, False, 99), (101, 1, False, 101), (101, -1, False, 100),
    ],
)  # fmt: skip
def test_exact_order_pays_its_amount_for_its_deposit(
    output: int, excess: int, is_priced: bool, paid: int
) -> None:
    assert exact_output(output, 100, excess, is_priced=is_priced) == paid


@given(amounts, st.integers(1, 10**16), amounts, st.integers(1, 10**16))
def test_proportion_is_that_of_the_fractions(
    output: int, deposited: int, least: int, agreed: int
) -> None:
    kept = keeps_proportion(
        output=output, deposited=deposited, min_received=least, deposit_amount=agreed
    )
    assert kept is (output > 0 and Fraction(output, deposited) >= Fraction(least, agreed))


def test_output_in_just_the_proportion_is_fair_if_not_zero() -> None:
    assert keeps_proportion(output=1, deposited=2, min_received=2, deposit_amount=4)
    assert not keeps_proportion(output=0, deposited=2, min_received=0, deposit_amount=4)
    assert not keeps_proportion(output=1, deposited=3, min_received=2, deposit_amount=4)
