"""Money: integers only, exact to the unit, and unambiguous strings."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain.money import (
    MAX_UNITS,
    USDC,
    XMR,
    Asset,
    Money,
    as_decimal,
    as_units,
    decimal_pattern,
    format_units,
    mul_div_ceil,
    mul_div_floor,
    parse_amount,
    parse_any_amount,
    reported_limits,
    require_storable,
)
from rpcsvc.errors import AmountAboveMaximum, InputError, InvalidInput

assets = st.sampled_from([XMR, USDC])
amounts = st.integers(min_value=1, max_value=MAX_UNITS)


@given(amounts, assets)
def test_every_amount_survives_the_way_to_text_and_back(units: int, asset: Asset) -> None:
    assert parse_amount(format_units(units, asset), asset) == Money(units, asset)


@given(amounts, assets)
def test_units_and_decimals_are_two_spellings(units: int, asset: Asset) -> None:
    text = format_units(units, asset)
    assert as_units(text, asset) == str(units)
    assert as_decimal(str(units), asset) == text
    assert as_decimal(text + "x", asset) == text + "x"


@given(amounts, amounts, assets)
def test_sums_and_differences_keep_the_asset(a: int, b: int, asset: Asset) -> None:
    assert Money(a, asset) + Money(b, asset) == Money(a + b, asset)
    assert Money(a, asset) - Money(b, asset) == Money(a - b, asset)
    assert (Money(a, asset) < Money(b, asset)) is (a < b)
    assert (Money(a, asset) <= Money(b, asset)) is (a <= b)


def test_limits_of_a_refusal_are_rewritten_by_their_asset() -> None:
    details = {
        "asset": "XMR", "minimum": "1", "maxNow": None, "receiveAsset": "USDC",
        "receiveMaximum": "2", "reason": "3",
    }  # fmt: skip
    written = reported_limits(details, lambda text, asset: f"{text} {asset.symbol}")
    assert written == {**details, "minimum": "1 XMR", "receiveMaximum": "2 USDC"}


def test_pattern_bounds_digits_and_decimals() -> None:
    pattern = re.compile(decimal_pattern(3, 2))
    assert all(map(pattern.fullmatch, ("0", "0.1", "999.99", "1.0")))
    assert not any(map(pattern.fullmatch, ("1000", "0.999", "01", "1.", ".5", "-1")))
    unbounded = re.compile(decimal_pattern())
    assert unbounded.fullmatch(f"{10**50}.{10**50}")
    assert not unbounded.fullmatch("1.")


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
    with pytest.raises(AmountAboveMaximum) as caught:
        parse_amount("9223372.036854775808", XMR)
    assert (caught.value.field, caught.value.received) == ("amount", "9223372.036854775808")
    assert caught.value.details == {"maximum": "9223372.036854775807", "asset": "XMR"}
    with pytest.raises(AmountAboveMaximum) as caught:
        require_storable(Money(MAX_UNITS + 1, USDC))
    assert caught.value.field == "amount"


def test_refusal_names_the_field_that_the_caller_sent() -> None:
    for text in ("x", 1, "9223372.036854775808"):
        with pytest.raises(InputError) as caught:
            parse_amount(text, XMR, field="receiveAmount")
        assert caught.value.field == "receiveAmount"
        assert caught.value.received == text
    with pytest.raises(InputError) as caught:
        parse_any_amount("x", XMR)
    assert caught.value.field == "amount"


def test_longest_amount_is_read_and_shown_whole() -> None:
    longest = "0" * 40
    with pytest.raises(InvalidInput, match=f'"{longest}" has a leading zero'):
        parse_amount(longest, XMR)
    assert parse_amount("1." + "0" * 12, XMR) == Money(10**12, XMR)
    with pytest.raises(InvalidInput, match=r'"9{48}" is too long'):
        parse_amount("9" * 48, XMR)
    with pytest.raises(InvalidInput, match=r'"9{45}\.\.\." is too long'):
        parse_amount("9" * 49, XMR)


def test_largest_number_gets_the_string_to_send() -> None:
    with pytest.raises(InvalidInput, match=f'"{MAX_UNITS}"'):
        parse_amount(MAX_UNITS, XMR)
    with pytest.raises(InvalidInput, match="must be a string: a JSON number"):
        parse_amount(MAX_UNITS + 1, XMR)


@pytest.mark.parametrize("value", [0.8, 1, True, None, [], {}])
def test_only_a_string_is_an_amount(value: object) -> None:
    with pytest.raises(InvalidInput, match="must be a string"):
        parse_amount(value, XMR)


@pytest.mark.parametrize("units", [1.0, True, "1"])
def test_money_is_made_of_integers(units: object) -> None:
    with pytest.raises(TypeError):
        Money(units, XMR)  # type: ignore[arg-type] # the point of the test


def test_changed_copy_of_money_is_checked() -> None:
    with pytest.raises(TypeError):
        replace(Money(1, XMR), units=1.5)


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "above 0"),
        ("0.000", "above 0"),
        ("-1", "sign"),
        ("+1", "sign"),
        ("1e3", "exponent"),
        ("1e400", "exponent"),
        ("0.0000000000001", "13 decimals; XMR has 12"),
        (" 1", "spaces around"),
        ("1\n", "spaces around"),
        ("1 000", "spaces in it"),
        ("1,5", "comma"),
        ("1_000", "underscore"),
        ("\u0661", "ASCII digits"),
        ("\uff11", "ASCII digits"),
        ("9" * 200, "too long"),
        ("01", "leading zero"),
        (".5", 'write "0"'),
        ("5.", "ends with a point"),
        ("", "empty"),
        ("NaN", "not a decimal number"),
        ("0x10", "not a decimal number"),
    ],
    ids=repr,
)
def test_each_bad_amount_has_its_own_message(text: str, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected) as caught:
        parse_amount(text, XMR)
    assert (caught.value.field, caught.value.received) == ("amount", text)


def test_usdc_takes_no_more_decimals_than_it_has() -> None:
    assert parse_amount("0.000001", USDC) == Money(1, USDC)
    with pytest.raises(InvalidInput, match="7 decimals; USDC has 6"):
        parse_amount("0.0000001", USDC)


@pytest.mark.parametrize(("number", "text"), [(0.8, '"0.8"'), (1, '"1"'), (150.25, '"150.25"')])
def test_number_gets_the_string_to_send(number: float, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"such as {text}: a JSON number loses digits"):
        parse_amount(number, XMR)


@pytest.mark.parametrize("number", [1e-7, 1e22, -1, 10**5000, float("nan")], ids=type)
def test_number_gets_no_string_that_would_be_refused_too(number: float) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_amount(number, XMR)
    assert "such as" not in caught.value.message


@pytest.mark.parametrize("value", [True, False, None, [], {}])
def test_what_is_no_number_either_is_not_called_one(value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_amount(value, XMR)
    assert "JSON number" not in caught.value.message
    assert str(value) not in caught.value.message


def test_an_asset_without_decimals_is_written_without_a_point() -> None:
    assert format_units(5, Asset("PTS", 0)) == "5"
    assert format_units(0, Asset("PTS", 0)) == "0"


def test_money_is_shown_with_its_asset() -> None:
    assert Money(8 * 10**11, XMR).display() == "0.8 XMR"


def test_money_is_compared_with_money_only() -> None:
    assert Money(1, XMR) < Money(2, XMR) <= Money(2, XMR)
    assert Money(2, XMR) > Money(1, XMR)
    assert Money(1, XMR) != Money(1, USDC)
    with pytest.raises(TypeError):
        _ = Money(1, XMR) < 2  # type: ignore[operator] # the point of the test
    with pytest.raises(TypeError):
        _ = Money(1, XMR) + 2  # type: ignore[operator] # the point of the test
