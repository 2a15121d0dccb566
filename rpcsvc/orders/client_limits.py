"""Refuses an order whose client, or all clients together, reserve too much without a deposit."""

from __future__ import annotations

from collections.abc import Callable

from rpcsvc.clock import Clock, ms_to_next_day
from rpcsvc.domain.money import USDC, XMR, Asset, Money, format_units
from rpcsvc.errors import AmountAboveMaximum, RateLimited
from rpcsvc.orders.reservations import UPSTREAM, Reservations
from rpcsvc.orders.unfunded import (
    ALL,
    BY_ADDRESS,
    UNFUNDED_REASON,
    Client,
    Refusal,
    UnfundedLimits,
    is_known,
)


class ClientLimits:
    """The operator's bounds on unfunded orders.

    ``wallet`` gives what a network's wallet holds beside funded orders, in payout units; None while
    only the number of orders is bounded. ``secret`` keys the hashes of clients' names.
    """

    def __init__(
        self,
        reservations: Reservations,
        bounds: UnfundedLimits,
        wallet: Callable[[str], int],
        clock: Clock,
        secret: bytes,
    ) -> None:
        self._reservations = reservations
        self._bounds = bounds
        self._wallet = wallet
        self._clock = clock
        self._secret = secret

    def stored(self, client: Client) -> str:
        """What is kept of a client with its unfunded orders."""
        return client.stored(self._secret)

    def require(self, client: Client, amount: Money, network: str, needed: int) -> None:
        """Raise RateLimited when an order would reserve more than its client may before a deposit.

        ``needed``: payout units with their fee; on UPSTREAM the order's worth in USDC units. Raises
        AmountAboveMaximum for one that is more than the bound by itself, and Unavailable.
        """
        stored = self.stored(client)
        if not is_known(stored):
            self._require_day(stored)
        self._reservations.on(network)  # ends what has expired
        refusal = self._reservations.unfunded.refusal(
            self._bounds, stored, network, needed, self._wallet(network)
        )
        if refusal is None:
            return
        asset = USDC if network == UPSTREAM or amount.asset is XMR else XMR
        if refusal.frees_at is None:
            raise _too_large(refusal, amount, asset, needed)
        raise _too_much(refusal, asset, refusal.frees_at - self._clock.now_ms())

    def room(self, client: Client, network: str) -> int:
        """The most payout units that a client's next order may reserve. Raises Unavailable."""
        wallet, stored = self._wallet(network), self.stored(client)
        return self._reservations.unfunded.room(self._bounds, stored, network, wallet)

    def _require_day(self, stored: str) -> None:
        """Raise RateLimited when an address has made as many orders as it may in a day."""
        now, most = self._clock.now_ms(), self._bounds.address_orders_a_day
        if self._reservations.today.count(stored, now) < most:
            return
        seconds = -(-ms_to_next_day(now) // 1000)
        raise RateLimited(
            f"You have made {most} orders today (UTC), the most for a caller without a token or"
            f" key. Send one, or come back in {seconds} s.",
            details={
                "reason": UNFUNDED_REASON,
                "scope": "client",
                "limit": f"{most} orders a day",
                "held": f"{most} orders",
                "retryAfterSeconds": seconds,
            },
            retry_after=seconds,
        )


def _too_large(refusal: Refusal, amount: Money, asset: Asset, needed: int) -> AmountAboveMaximum:
    room = max(0, refusal.limit - refusal.held)
    # In proportion; 2 units make up for what rounding took from ``needed``.
    most = format_units(amount.units * room // (needed + 2), amount.asset)
    return AmountAboveMaximum(
        f"{amount.display()} would reserve more than {_shown(refusal.limit, asset)}, the most that"
        f" {_whose(refusal)} may reserve before a deposit is seen. Send at most {most}"
        f" {amount.asset.symbol} now.",
        field="amount",
        received=format_units(amount.units, amount.asset),
        details={"reason": UNFUNDED_REASON, "maxNow": most, "asset": amount.asset.symbol},
    )


def _too_much(refusal: Refusal, asset: Asset, wait_ms: int) -> RateLimited:
    def shown(value: int) -> str:
        return f"{value} orders" if refusal.is_count else _shown(value, asset)

    seconds = max(1, -(-wait_ms // 1000))
    return RateLimited(
        f"{shown(refusal.held)} without a deposit are reserved for {_whose(refusal)}, of at most"
        f" {shown(refusal.limit)}. Fund or cancel an order, or come back in {seconds} s.",
        details={
            "reason": UNFUNDED_REASON,
            "scope": _SCOPES.get(refusal.scope, "client"),
            "limit": shown(refusal.limit),
            "held": shown(refusal.held),
            "retryAfterSeconds": seconds,
        },
        retry_after=seconds,
    )


_WHOSE = {ALL: "all callers together", BY_ADDRESS: "all callers without a token or key"}
_SCOPES = {ALL: "all", BY_ADDRESS: "addresses"}


def _whose(refusal: Refusal) -> str:
    return _WHOSE.get(refusal.scope, "you")


def _shown(units: int, asset: Asset) -> str:
    return f"{format_units(units, asset)} {asset.symbol}"
