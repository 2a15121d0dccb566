"""Prices: direction, rates, fees, limits. Integers only, rounded in the service's favour.

A rate is USDC units (10^-6 USDC) per whole XMR. Outputs are rounded down and fees up, so that no
more is ever paid out than was quoted. One USDC is taken as one USD.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.domain.money import MAX_UNITS, USDC, XMR, Asset, mul_div_ceil, mul_div_floor

ONE_XMR: int = 10**XMR.decimals
ONE_USDC: int = 10**USDC.decimals
BPS = 10_000


def deposit_asset(direction: Direction) -> Asset:
    """The asset that the user sends."""
    return XMR if direction is Direction.XMR_TO_USDC else USDC


def payout_asset(direction: Direction) -> Asset:
    """The asset that the service sends to the destination."""
    return USDC if direction is Direction.XMR_TO_USDC else XMR


def convert_floor(direction: Direction, units: int, rate: int) -> int:
    """Payout units for ``units`` of deposit at ``rate``, before fees, rounded down."""
    if direction is Direction.XMR_TO_USDC:
        return mul_div_floor(units, rate, ONE_XMR)
    return mul_div_floor(units, ONE_XMR, rate)


def convert_ceil(direction: Direction, units: int, rate: int) -> int:
    """The least deposit that ``convert_floor`` turns into ``units`` of payout or more."""
    if direction is Direction.XMR_TO_USDC:
        return mul_div_ceil(units, ONE_XMR, rate)
    return mul_div_ceil(units, rate, ONE_XMR)


def implied_rate(direction: Direction, sent: int, received: int) -> int:
    """USDC units per XMR of a swap of ``sent`` for ``received``, all fees included; at least 1."""
    usdc, xmr = (received, sent) if direction is Direction.XMR_TO_USDC else (sent, received)
    return max(1, usdc * ONE_XMR // xmr)


def usd_to_deposit_ceil(direction: Direction, usd: int, rate: int) -> int:
    """The least deposit, in deposit units, that is worth ``usd`` whole dollars or more."""
    if direction is Direction.XMR_TO_USDC:
        return mul_div_ceil(usd * ONE_USDC, ONE_XMR, rate)
    return usd * ONE_USDC


def usd_to_deposit_floor(direction: Direction, usd: int, rate: int) -> int:
    """The largest deposit, in deposit units, that is worth no more than ``usd`` whole dollars."""
    return usdc_to_deposit_floor(direction, usd * ONE_USDC, rate)


def usdc_to_deposit_floor(direction: Direction, units: int, rate: int) -> int:
    """The largest deposit, in deposit units, worth no more than ``units`` USDC units."""
    if direction is Direction.XMR_TO_USDC:
        return mul_div_floor(units, ONE_XMR, rate)
    return units


class Price(Struct, frozen=True):
    """The terms of exchange of one quote.

    ``rate`` in USDC units per XMR; ``spread_bps`` in 1/10,000 of the output; ``payout_fee`` in
    payout units, the network fee of sending the payout; ``min_received_bps`` in 1/10,000;
    ``integrator_bps`` in 1/10,000 of the output, the fee of whoever brought the order.
    ``funding_fee`` in payout units: gas that the service pays to fetch the deposit (x402).
    """

    rate: int
    spread_bps: int
    payout_fee: int
    min_received_bps: int
    integrator_bps: int = 0
    funding_fee: int = 0

    @property
    def fixed_fee(self) -> int:
        """The fee of an order that does not depend on its amount, in payout units."""
        return self.payout_fee + self.funding_fee

    def spread(self, direction: Direction, units: int) -> int:
        """The service's own fee for a deposit of ``units``, in payout units, rounded up."""
        return mul_div_ceil(convert_floor(direction, units, self.rate), self.spread_bps, BPS)

    def integrator_fee(self, direction: Direction, units: int) -> int:
        """The integrator's fee for a deposit of ``units``, in payout units, rounded up."""
        gross = convert_floor(direction, units, self.rate)
        return mul_div_ceil(gross, self.integrator_bps, BPS)

    def output(self, direction: Direction, units: int) -> int:
        """The payout for a deposit of ``units``, in payout units; 0 if the fees exceed it."""
        return max(0, self.exchanged(direction, units) - self.fixed_fee)

    def deposit_for(self, direction: Direction, output: int) -> int:
        """The least deposit, in deposit units, with an ``output`` of that many payout units or
        more; more than MAX_UNITS where the fees take all of every deposit.
        """
        kept = BPS - self.spread_bps - self.integrator_bps
        if kept <= 0:
            return MAX_UNITS + 1
        # No smaller one is enough. Fees are rounded up one by one, so that it may take a few more.
        gross = mul_div_ceil(output + self.fixed_fee, BPS, kept)
        while True:
            units = convert_ceil(direction, gross, self.rate)
            if self.output(direction, units) >= output:
                return units
            gross = convert_floor(direction, units, self.rate) + 1

    def exchanged(self, direction: Direction, units: int) -> int:
        """The output of a deposit of ``units`` before the fixed fee, in payout units."""
        gross = convert_floor(direction, units, self.rate)
        fees = self.spread(direction, units) + self.integrator_fee(direction, units)
        return max(0, gross - fees)

    def payout(self, direction: Direction, units_by_rate: Mapping[int, int]) -> tuple[int, int]:
        """The payout for deposits at different rates, and the integrator's fee within it.

        ``units_by_rate`` holds deposit units by rate; the fixed fee is borne once.
        """
        parts = [(self.at(rate), units) for rate, units in units_by_rate.items()]
        exchanged = sum(price.exchanged(direction, units) for price, units in parts)
        integrator_fee = sum(price.integrator_fee(direction, units) for price, units in parts)
        return max(0, exchanged - self.fixed_fee), integrator_fee

    def min_received(self, direction: Direction, units: int) -> int:
        """The least that a re-priced deposit of ``units`` may bring, in payout units."""
        return mul_div_floor(self.output(direction, units), self.min_received_bps, BPS)

    def at(self, rate: int) -> Price:
        """The same fees at another rate."""
        return replace(self, rate=rate)


def exact_output(output: int, receive_amount: int, excess: int, *, is_priced: bool) -> int:
    """The payout of an order for exactly ``receive_amount``, of which ``output`` is the price.

    Deposits of ``excess`` 0 are just what was asked for: what rounding left over stays with the
    service. Less than that never brings more, whatever its rates. Deposits that are ``is_priced``
    by their rates bring the amount each, in proportion: rounding at several rates takes nothing of
    it.
    """
    if is_priced and excess >= 0:
        output = max(output, receive_amount)
    return output if excess > 0 else min(output, receive_amount)


def keeps_proportion(
    *, output: int, deposited: int, min_received: int, deposit_amount: int
) -> bool:
    """True when ``output`` for ``deposited`` is no worse than the order's ``min_received``.

    Compared as output / deposited >= min_received / deposit_amount, without division.
    """
    return output > 0 and output * deposit_amount >= min_received * deposited


class Direction(StrEnum):
    """The direction of a swap."""

    XMR_TO_USDC = "x2u"
    USDC_TO_XMR = "u2x"

    @property
    def reverse(self) -> Direction:
        """The other way."""
        return Direction.USDC_TO_XMR if self is Direction.XMR_TO_USDC else Direction.XMR_TO_USDC
