"""What an amount is worth now, within which limits, and on which terms it is locked.

What does not live here: the arithmetic (domain/pricing.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import orjson

from rpcsvc.clock import iso8601
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.money import (
    MAX_UNITS,
    USDC,
    XMR,
    Asset,
    Money,
    format_units,
    require_storable,
)
from rpcsvc.domain.order import PERPS
from rpcsvc.domain.pricing import (
    BPS,
    Direction,
    Price,
    convert_floor,
    deposit_asset,
    payout_asset,
    usd_to_deposit_ceil,
    usd_to_deposit_floor,
)
from rpcsvc.errors import AmountAboveMaximum, AmountBelowMinimum, Unavailable
from rpcsvc.operations.inputs import require_offered
from rpcsvc.operations.policy_text import DEPOSIT_POLICY
from rpcsvc.operations.reserving import require_reservable
from rpcsvc.operations.service import SOCKET, Service
from rpcsvc.orders.ports.rates import Rate
from rpcsvc.orders.ports.upstream import Created, Offer, UpstreamRequest
from rpcsvc.orders.ports.wallets import Fees
from rpcsvc.orders.reservations import UPSTREAM
from rpcsvc.orders.unfunded import Client

# The same in every quote: written once.
_DEPOSIT_POLICY = orjson.Fragment(orjson.dumps(DEPOSIT_POLICY))


MONERO_NETWORK = "monero"


def network_of(asset: Asset, chain: Chain) -> str:
    """The network that an asset moves on, in a swap with USDC on ``chain``."""
    return MONERO_NETWORK if asset is XMR else chain.name


@dataclass(frozen=True, slots=True)
class Quote:
    """A price for one amount; units are atomic, of the deposit's and the payout's asset.

    ``seconds``: how long the swap takes, where the one who settles it has told.
    ``price_locked_until`` (ms): how long an order at this quote keeps its rate; None if unknown.
    """

    direction: Direction
    chain: Chain
    deposit: Money
    price: Price
    rate: Rate
    fees: Fees
    minimum: int
    maximum: int
    expected_output: int
    min_received: int
    seconds: int | None = None
    price_locked_until: int | None = None

    @property
    def deposit_asset(self) -> Asset:
        """The asset that the user sends."""
        return self.deposit.asset

    @property
    def payout_asset(self) -> Asset:
        """The asset that is paid out."""
        return payout_asset(self.direction)


def limits(service: Service, direction: Direction, chain: Chain, rate: Rate) -> tuple[int, int]:
    """The least and the most that can be swapped, in deposit units.

    The most is no more than can be stored, as a deposit and as what it brings.
    """
    usdc_per_xmr = rate.usdc_per_xmr
    return (
        usd_to_deposit_ceil(direction, chain.min_swap_usd, usdc_per_xmr),
        min(
            usd_to_deposit_floor(direction, service.policy.max_swap_usd, usdc_per_xmr),
            convert_floor(direction.reverse, MAX_UNITS, usdc_per_xmr),
            MAX_UNITS,
        ),
    )


def require_within_limits(
    service: Service, direction: Direction, chain: Chain, amount: Money, rate: Rate
) -> tuple[int, int]:
    """The limits. Raises AmountBelowMinimum or AmountAboveMaximum when the amount is outside."""
    minimum, maximum = limits(service, direction, chain, rate)
    if minimum <= amount.units <= maximum:
        return minimum, maximum
    asset = amount.asset
    shown = {
        "minimum": format_units(minimum, asset),
        "maximum": format_units(maximum, asset),
        "asset": asset.symbol,
    }
    if amount.units < minimum:
        raise AmountBelowMinimum(
            f"{amount.display()} is below the minimum of {shown['minimum']} {asset.symbol}"
            f" ({chain.min_swap_usd} USD) on {chain.name}.",
            field="amount",
            received=format_units(amount.units, asset),
            details=shown,
        )
    raise AmountAboveMaximum(
        f"{amount.display()} is above the maximum of {shown['maximum']} {asset.symbol}"
        f" ({service.policy.max_swap_usd} USD). Split it into several orders.",
        field="amount",
        received=format_units(amount.units, asset),
        details=shown,
    )


def payable_deposit(direction: Direction, free: int, rate: Rate) -> int:
    """A deposit, in its own units, whose output is surely no more than ``free`` payout units."""
    return convert_floor(direction.reverse, free, rate.usdc_per_xmr)


def _require_payable(
    service: Service, direction: Direction, chain: Chain, amount: Money, needed: int
) -> None:
    """Refuse what the operator's wallet can't pay. Raises Unavailable when it will be able to
    before long, AmountAboveMaximum when it holds less.
    """
    payout = payout_asset(direction)
    held = service.payable(network_of(payout, chain))
    if held is None or needed <= held.free:
        return
    maximum = payable_deposit(direction, held.free, service.rates.rate())
    shown = {
        "maxNow": format_units(maximum, amount.asset),
        "asset": amount.asset.symbol,
        "secondsToUnlock": held.seconds_to_unlock if held.locked else None,
    }
    if needed <= held.free + held.locked:
        raise Unavailable(
            f"The service can pay out {format_units(held.free, payout)} {payout.symbol} on"
            f" {network_of(payout, chain)} now, and more within {held.seconds_to_unlock} s. Send at"
            f" most {shown['maxNow']} {amount.asset.symbol}, or try again then.",
            details=shown,
            retry_after=max(1, held.seconds_to_unlock),
        )
    raise AmountAboveMaximum(
        f"{amount.display()} is more than the service can pay for on {network_of(payout, chain)}"
        f" now: at most {shown['maxNow']} {amount.asset.symbol}.",
        field="amount",
        received=format_units(amount.units, amount.asset),
        details=shown,
    )


async def make_quote(
    service: Service,
    direction: Direction,
    chain: Chain,
    amount: Money,
    integrator: Integrator | None = None,
    *,
    to: str = "",
    client: Client = SOCKET,
) -> Quote:
    """A quote at the current rate; ``to`` is where the payout of an order goes that waits for it.

    Raises Unavailable, UnsupportedChain, RateLimited for what ``client`` can't reserve, and the
    limits' errors.
    """
    service.engine.require_ready()
    require_offered(chain, service)
    if service.relay is not None:
        request = UpstreamRequest(direction, chain, amount, to)
        require_reservable(service, client, amount, UPSTREAM, 0)
        offer = await service.relay.quote(request)  # refuses by the upstream's own limits
        require_storable(amount)
        found = _relayed(request, offer, service.clock.now_ms())
        if chain.name != PERPS:
            worth = found.expected_output if amount.asset is XMR else amount.units
            require_reservable(service, client, amount, UPSTREAM, worth)
        return found
    rate = service.rates.rate()
    minimum, maximum = require_within_limits(service, direction, chain, amount, rate)
    policy = service.policy
    fees = service.engine.fees(deposit_asset(direction), payout_asset(direction), chain.name)
    price = Price(
        rate.usdc_per_xmr,
        policy.spread_bps,
        fees.payout,
        policy.min_received_bps,
        integrator.fee_bps if integrator else 0,
    )
    output = price.output(direction, amount.units)
    if output == 0:
        raise _eaten_by_fees(price, direction, amount, chain)
    needed = output + fees.payout
    _require_payable(service, direction, chain, amount, needed)
    require_reservable(service, client, amount, network_of(payout_asset(direction), chain), needed)
    return Quote(
        direction=direction,
        chain=chain,
        deposit=amount,
        price=price,
        rate=rate,
        fees=fees,
        minimum=minimum,
        maximum=maximum,
        expected_output=output,
        min_received=price.min_received(direction, amount.units),
        price_locked_until=service.clock.now_ms() + policy.price_lock,
    )


def _eaten_by_fees(
    price: Price, direction: Direction, amount: Money, chain: Chain
) -> AmountBelowMinimum:
    """Of such an amount nothing would be paid out. ``minimum`` is the least that brings a unit."""
    minimum = format_units(price.least(direction), amount.asset)
    return AmountBelowMinimum(
        f"The fees on {chain.name} are more than {amount.display()} is worth: at least {minimum}"
        f" {amount.asset.symbol} has to be sent for anything to arrive.",
        field="amount",
        received=format_units(amount.units, amount.asset),
        details={"minimum": minimum, "asset": amount.asset.symbol},
    )


def quote_to_come(service: Service, direction: Direction, chain: Chain, amount: Money) -> Quote:
    """In place of an upstream's price that can't be had, until it tells what it has agreed to."""
    request, now = UpstreamRequest(direction, chain, amount), service.clock.now_ms()
    return replace(_relayed(request, Offer(1, 0, 1, 0), now), seconds=None)


def agreed(found: Quote, created: Created) -> Quote:
    """The quote with what the upstream has agreed to; the price may have moved since the quote."""
    return replace(
        found,
        price=replace(found.price, rate=created.usdc_per_xmr),
        rate=replace(found.rate, usdc_per_xmr=created.usdc_per_xmr),
        expected_output=created.expected_output,
        min_received=min(found.min_received, created.expected_output),
    )


def _relayed(request: UpstreamRequest, offer: Offer, now: int) -> Quote:
    """An upstream's price: its fees are within it, its limits are its own to check."""
    rate = Rate(offer.usdc_per_xmr, now, "upstream")
    return Quote(
        direction=request.direction,
        chain=request.chain,
        deposit=request.amount,
        price=Price(rate.usdc_per_xmr, 0, 0, BPS),
        rate=rate,
        fees=Fees(0, 0),
        minimum=1,
        maximum=MAX_UNITS,
        expected_output=offer.expected_output,
        min_received=offer.min_received,
        seconds=offer.seconds,
    )


def estimated_seconds(service: Service, quote: Quote) -> int:
    """How long the swap takes, typically, in seconds."""
    if quote.seconds is not None:
        return quote.seconds
    return service.engine.estimated_seconds(quote.deposit_asset, quote.chain.name)


def quote_view(service: Service, quote: Quote) -> dict[str, Any]:
    """``data.quote``: amounts as decimal strings, fees in the payout's asset."""
    payout = quote.payout_asset
    spread = quote.price.spread(quote.direction, quote.deposit.units)
    return {
        "direction": quote.direction.value,
        "chain": quote.chain.name,
        "chainId": quote.chain.chain_id,
        "depositAsset": quote.deposit_asset.symbol,
        "depositAmount": format_units(quote.deposit.units, quote.deposit_asset),
        "payoutAsset": payout.symbol,
        "expectedOutput": format_units(quote.expected_output, payout),
        "minReceived": format_units(quote.min_received, payout),
        "rate": format_units(quote.rate.usdc_per_xmr, USDC),
        "rateAsOf": iso8601(quote.rate.as_of),
        "fees": {
            "asset": payout.symbol,
            "spread": format_units(spread, payout),
            "network": format_units(quote.price.payout_fee, payout),
            "refundNetwork": format_units(quote.fees.refund, quote.deposit_asset),
            "refundAsset": quote.deposit_asset.symbol,
        },
        "estimatedTimeSeconds": estimated_seconds(service, quote),
        "depositWindowSeconds": service.policy.deposit_window // 1000,
        "priceLockedUntil": None
        if quote.price_locked_until is None
        else iso8601(quote.price_locked_until),
        "depositPolicy": _DEPOSIT_POLICY,
    }
