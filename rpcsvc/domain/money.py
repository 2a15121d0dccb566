"""Money: integers of atomic units with their asset, never floats.

Decimal strings exist at the edges only: ``parse_amount`` reads them, ``format_units`` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from rpcsvc.errors import AmountAboveMaximum, InputError, InvalidInput

# What an INTEGER of SQLite and a BIGINT of PostgreSQL hold.
LARGEST_INTEGER: Final = 2**63 - 1
# 9.2 million XMR: more than any order, less than all XMR there is.
MAX_UNITS: Final = LARGEST_INTEGER
LONGEST_AMOUNT = 40

# Which details of a refusal are amounts.
LIMITS: Final = ("minimum", "maximum", "maxNow")
# The same limits in the asset of the payout, where that is what was named.
RECEIVE_LIMITS: Final = {name: f"receive{name[0].upper()}{name[1:]}" for name in LIMITS}
_UNITS = re.compile(r"[0-9]{1,30}", re.ASCII)


def decimal_pattern(digits: int | None = None, places: int | None = None) -> str:
    """Return a pattern of decimals without a sign or leading zeros.

    Its groups are the whole part, of at most ``digits``, and the fraction with its point, of at
    most ``places`` decimals; None for any number.
    """
    whole = "*" if digits is None else f"{{0,{digits - 1}}}"
    fraction = "+" if places is None else f"{{1,{places}}}"
    return rf"(0|[1-9][0-9]{whole})(\.[0-9]{fraction})?"


_AMOUNT = re.compile(decimal_pattern(), re.ASCII)

_COMPLAINTS: Final = tuple(
    (re.compile(pattern), complaint)
    for pattern, complaint in (
        (r"\A\Z", "is empty: send a decimal string"),
        (r"[^\x00-\x7f]", "has characters other than the ASCII digits 0 to 9"),
        (r"\A\s|\s\Z", "has spaces around it: leave them out"),
        (r"\s", "has spaces in it: leave them out"),
        (r"\A[+-]", "has a sign: send a positive amount without one"),
        (r",", 'has a comma: use a point for decimals, as in "1.5", and no thousands separators'),
        (r"\A[0-9.]+[eE]", "has an exponent: write the number out"),
        (r"_", "has an underscore: send digits only"),
        (r"\A0[0-9]", "has a leading zero: leave it out"),
        (r"\A\.[0-9]+\Z", 'starts with a point: write "0" before it'),
        (r"\A[0-9]+\.\Z", "ends with a point: leave it out"),
    )
)


class Asset(Struct, frozen=True):
    """A currency; one coin is ``10**decimals`` atomic units."""

    symbol: str
    decimals: int


XMR = Asset("XMR", 12)
USDC = Asset("USDC", 6)
ASSETS: Final = {asset.symbol: asset for asset in (XMR, USDC)}


class Money(Struct, frozen=True):
    """``units`` atomic units of ``asset``. Raises TypeError for anything but an integer."""

    units: int
    asset: Asset

    def __post_init__(self) -> None:
        if type(self.units) is not int:
            raise TypeError(f"money is an integer of atomic units, not {type(self.units).__name__}")

    def __add__(self, other: Money) -> Money:
        self._require_same(other)
        return Money(self.units + other.units, self.asset)

    def __sub__(self, other: Money) -> Money:
        self._require_same(other)
        return Money(self.units - other.units, self.asset)

    def __lt__(self, other: Money) -> bool:
        self._require_same(other)
        return self.units < other.units

    def __le__(self, other: Money) -> bool:
        self._require_same(other)
        return self.units <= other.units

    def text(self) -> str:
        """The amount as a decimal string, such as ``0.8``."""
        return format_units(self.units, self.asset)

    def display(self) -> str:
        """The amount with its asset, such as ``0.8 XMR``."""
        return f"{self.text()} {self.asset.symbol}"

    def _require_same(self, other: Money) -> None:
        if not isinstance(other, Money):
            raise TypeError(f"money can't be combined with {type(other).__name__}")
        if other.asset != self.asset:
            raise ValueError(f"{self.asset.symbol} can't be combined with {other.asset.symbol}")


def reported_limits(
    details: Mapping[str, Any], write: Callable[[str, Asset], str]
) -> dict[str, Any]:
    """Details of a refusal with its limits in another unit: ``as_units`` or ``as_decimal``."""
    named = {"asset": LIMITS, "receiveAsset": RECEIVE_LIMITS.values()}
    assets = {
        limit: asset
        for name, limits in named.items()
        for asset in (XMR, USDC)
        if asset.symbol == details.get(name)
        for limit in limits
    }
    return {
        name: write(value, assets[name]) if name in assets and isinstance(value, str) else value
        for name, value in details.items()
    }


def as_units(text: str, asset: Asset) -> str:
    """A decimal string such as ``0.8`` as a number of atomic units."""
    whole, _, fraction = text.partition(".")
    return str(int(whole + fraction.ljust(asset.decimals, "0")))


def as_decimal(text: str, asset: Asset) -> str:
    """A number of atomic units as a decimal string; any other text as it is."""
    return format_units(int(text), asset) if _UNITS.fullmatch(text) else text


def parse_amount(text: object, asset: Asset, *, field: str = "amount") -> Money:
    """A positive amount from a decimal string (design part 3 "Inputs").

    Raises InvalidInput, and AmountAboveMaximum beyond what can be stored.
    """
    amount = parse_any_amount(text, asset, field=field)
    require_storable(amount, field=field)
    return amount


def require_storable(amount: Money, *, field: str = "amount") -> None:
    """Raise AmountAboveMaximum for an amount beyond what can be stored."""
    if amount.units > MAX_UNITS:
        maximum = format_units(MAX_UNITS, amount.asset)
        raise AmountAboveMaximum(
            f"{field} {amount.text()} is more than any order can be: send at most {maximum}.",
            field=field,
            received=amount.text(),
            details={"maximum": maximum, "asset": amount.asset.symbol},
        )


def parse_any_amount(text: object, asset: Asset, *, field: str = "amount") -> Money:
    """Parse an amount as ``parse_amount`` does, without a maximum: for callers with their own
    limit.
    """
    if not isinstance(text, str):
        raise _not_a_string(text, field)
    if len(text) > LONGEST_AMOUNT:
        raise _refuse(field, text, f"is too long: send at most {LONGEST_AMOUNT} characters")
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise _refuse(field, text, _what_is_wrong(text))
    return Money(_units(match[1], (match[2] or "")[1:], asset, field, text), asset)


def _units(whole: str, fraction: str, asset: Asset, field: str, text: str) -> int:
    if len(fraction) > asset.decimals:
        raise _refuse(
            field, text, f"has {len(fraction)} decimals; {asset.symbol} has {asset.decimals}"
        )
    units = int(whole + fraction.ljust(asset.decimals, "0"))
    if units == 0:
        raise _refuse(field, text, "is zero: send an amount above 0")
    return units


def _not_a_string(value: object, field: str) -> InputError:
    if isinstance(value, int | float) and not isinstance(value, bool):
        reason = f"{_as_text(value)}: a JSON number loses digits on its way"
    else:
        reason = ' with a decimal number, such as "0.8"'
    return InvalidInput(f"{field} must be a string{reason}.", field=field, received=value)


def _as_text(number: float) -> str:
    """How to send the number instead; nothing where its own text would be refused as well."""
    # Beyond 64 bits no amount is good, and from 4300 digits on Python won't write an integer.
    text = str(number) if abs(number) <= MAX_UNITS else ""
    return f', such as "{text}"' if _AMOUNT.fullmatch(text) else ""


def _what_is_wrong(text: str) -> str:
    for pattern, complaint in _COMPLAINTS:
        if pattern.search(text):
            return complaint
    return "is not a decimal number"


def _refuse(field: str, text: str, complaint: str) -> InvalidInput:
    shown = text if len(text) <= 48 else text[:45] + "..."
    return InvalidInput(
        f'{field} "{shown}" {complaint}. Send a decimal string such as "0.8".',
        field=field,
        received=text,
    )


def format_units(units: int, asset: Asset) -> str:
    """Atomic units as a canonical decimal string: no exponent, no trailing zeros."""
    decimals = asset.decimals
    digits = str(abs(units)).rjust(decimals + 1, "0")
    point = len(digits) - decimals
    whole, fraction = digits[:point], digits[point:].rstrip("0")
    sign = "-" if units < 0 else ""
    return f"{sign}{whole}.{fraction}" if fraction else sign + whole


def mul_div_floor(a: int, b: int, c: int) -> int:
    """``a * b / c`` rounded down, for non-negative ``a`` and ``b`` and positive ``c``."""
    return a * b // c


def mul_div_ceil(a: int, b: int, c: int) -> int:
    """``a * b / c`` rounded up, for non-negative ``a`` and ``b`` and positive ``c``."""
    return -(-a * b // c)
