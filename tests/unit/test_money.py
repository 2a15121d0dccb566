"""Money: integers only, exact to the unit, and strings that mean one thing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.domain.money import (
    MAX_UNITS,
    USDC,
    XMR,
    Asset,
    Money,
    format_units,
    mul_div_ceil,
    mul_div_floor,
    parse_amount,
)
from rpcsvc.errors import AmountAboveMaximum, InputError, InvalidInput

assets = st.sampled_from([XMR, USDC])
amounts = st.integers(min_value=1, max_value=MAX_UNITS)


@given(amounts, assets)
def test_every_amount_survives_the_way_to_text_and_back(units: int, asset: Asset) -> None:
    assert parse_amount(format_units(units, asset), asset) == Money(units, asset)


@given(st.text(max_size=60), assets)
def test_any_text_is_an_amount_or_an_input_error(text: str, asset: Asset) -> None:
    try:
        money = parse_amount(text, asset)
    except InputError:
        return
    assert text.isascii()
    assert money.units > 0


@pytest.mark.parametrize(
    ("units", "text"),
    [(0, "0"), (1, "0.000000000001"), (8 * 10**11, "0.8"), (10**12, "1"), (-5 * 10**11, "-0.5")],
)
def test_text_is_canonical(units: int, text: str) -> None:
    assert format_units(units, XMR) == text


def test_amounts_beyond_2_to_the_53_are_exact() -> None:
    assert parse_amount("9007.199254740993", XMR).units == 2**53 + 1


def test_an_amount_beyond_what_the_store_holds_is_refused() -> None:
    assert parse_amount("9223372.036854775807", XMR).units == MAX_UNITS
    with pytest.raises(AmountAboveMaximum):
        parse_amount("9223372.036854775808", XMR)


@pytest.mark.parametrize("value", [0.8, 1, True, None, [], {}])
def test_only_a_string_is_an_amount(value: object) -> None:
    with pytest.raises(InvalidInput, match="must be a string"):
        parse_amount(value, XMR)


@pytest.mark.parametrize("units", [1.0, True, "1"])
def test_money_is_made_of_integers(units: object) -> None:
    with pytest.raises(TypeError):
        Money(units, XMR)  # type: ignore[arg-type] # the point of the test


def test_money_of_different_assets_does_not_mix() -> None:
    with pytest.raises(ValueError, match="can't be combined"):
        Money(1, XMR) + Money(1, USDC)
    with pytest.raises(ValueError, match="can't be combined"):
        _ = Money(1, XMR) < Money(1, USDC)
    assert Money(3, XMR) - Money(1, XMR) == Money(2, XMR)


@given(amounts, amounts, amounts)
def test_rounding_is_to_the_named_side_by_less_than_one(a: int, b: int, c: int) -> None:
    low, high = mul_div_floor(a, b, c), mul_div_ceil(a, b, c)
    assert low * c <= a * b <= high * c
    assert high - low in (0, 1)
