"""Decides which orders can be accepted, by the wallets' holdings and the clients' reservations.

``ClientLimits`` bounds unfunded orders; ``Inventory`` decides for the wallets as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import Clock, day_of, ms_to_next_day
from rpcsvc.domain.chains import Chain, network_of
from rpcsvc.domain.clients import Client, is_known
from rpcsvc.domain.money import USDC, XMR, Asset, Money, format_units
from rpcsvc.domain.order import Order, Transfer
from rpcsvc.domain.pricing import Direction, convert_floor, payout_asset
from rpcsvc.domain.reservations import (
    ALL,
    BY_ADDRESS,
    TOTAL,
    UNFUNDED_REASON,
    UPSTREAM,
    Admission,
    ExceededBound,
    Holdings,
    Reserved,
    bounds_of,
    excesses,
    room,
    units_to_leave,
    worst,
)
from rpcsvc.errors import AmountAboveMaximum, RateLimited, Unavailable
from rpcsvc.orders.policy import Policy
from rpcsvc.orders.ports.venue import Rate
from rpcsvc.store.orders import OrderStore

# Most reservations read to say when there is room. Where it takes more, a caller who comes back is
# told so again: one refusal costs no more, however many orders there are.
SOONEST: Final = 500

_WHOSE = {ALL: "all callers together", BY_ADDRESS: "all callers without a token or key"}
_SCOPES = {ALL: "all", BY_ADDRESS: "addresses"}


class ClientLimits:
    """The operator's bounds on unfunded orders.

    ``wallet`` gives a network's holdings beyond funded orders, in payout units. ``secret`` keys the
    hashes of clients' names.
    """

    def __init__(
        self,
        store: OrderStore,
        policy: Policy,
        wallet: Callable[[str, Reserved], int],
        clock: Clock,
        secret: bytes,
    ) -> None:
        self._store = store
        self._policy = policy
        self._wallet = wallet
        self._clock = clock
        self._secret = secret

    def stored(self, client: Client) -> str:
        """Return what is kept of a client with its unfunded orders."""
        return client.stored(self._secret)

    async def reserved(self, client: Client, network: str) -> Reserved:
        """Return the reservations on a network, of all and of the client. Raises Unavailable."""
        return await self._store.reserved(network, self.stored(client))

    async def require(
        self, client: Client, amount: Money, network: str, needed: int, reserved: Reserved
    ) -> Admission:
        """Return the bounds to make an order within, none of which it breaks now.

        ``needed``: payout units with their fee; on UPSTREAM the order's worth in USDC units. Raises
        RateLimited when the order would reserve more than its client may before a deposit,
        AmountAboveMaximum when it alone exceeds the bound, and Unavailable.
        """
        stored, wallet = self.stored(client), self._wallet(network, reserved)
        limits = self._policy.unfunded
        today = None if is_known(stored) else limits.address_orders_a_day
        if today is not None:
            await self._require_day(stored, today)
        broken = excesses(limits, stored, needed, wallet, reserved)
        if not broken:
            units = tuple(bounds_of(limits, stored, wallet))
            return Admission(stored, units, limits.orders_of(stored), today)
        only = stored if all(each.scope == stored for each in broken) else None
        unfunded = await self._store.unfunded(SOONEST, only)
        refusal = worst([each.refusal(network, unfunded) for each in broken])
        asset = USDC if network == UPSTREAM or amount.asset is XMR else XMR
        if refusal.frees_at is None:
            raise _too_large(refusal, amount, asset, needed)
        raise _too_much(refusal, asset, refusal.frees_at - self._clock.now_ms())

    def room(self, client: Client, network: str, reserved: Reserved) -> int:
        """The most payout units that a client's next order may reserve. Raises Unavailable."""
        wallet, stored = self._wallet(network, reserved), self.stored(client)
        return room(self._policy.unfunded, stored, wallet, reserved)

    async def _require_day(self, stored: str, most: int) -> None:
        """Raise RateLimited when an address has made as many orders as it may in a day."""
        now = self._clock.now_ms()
        if await self._store.orders_made(stored, day_of(now)) < most:
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


def _too_large(
    refusal: ExceededBound, amount: Money, asset: Asset, needed: int
) -> AmountAboveMaximum:
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


def _too_much(refusal: ExceededBound, asset: Asset, wait_ms: int) -> RateLimited:
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


def _whose(refusal: ExceededBound) -> str:
    return _WHOSE.get(refusal.scope, "you")


def _shown(units: int, asset: Asset) -> str:
    return f"{format_units(units, asset)} {asset.symbol}"


class Inventory(Protocol):
    """Decides which orders the wallets can take on."""

    async def require(
        self,
        client: Client,
        direction: Direction,
        chain: Chain,
        amount: Money,
        needed: int,
        rate: Rate,
    ) -> Admission | None:
        """Refuse an order that can't be paid, or that reserves too much before a deposit; else the
        bounds to make it within, None where nothing is counted.

        ``needed``: payout units with their fee. Raises Unavailable when the wallet will be able to
        pay before long, AmountAboveMaximum when it holds less, and RateLimited.
        """
        ...

    async def room(self, client: Client, network: str) -> int | None:
        """The most payout units that a client's next order may take; None: no limit.

        Raises errors.Unavailable while it is not known.
        """
        ...

    async def payable_for(self, order: Order) -> int | None:
        """Payout units, fee included, that can be paid for an order now or when outputs unlock.

        None: no limit. Raises errors.Unavailable while it is not known.
        """
        ...

    async def leaves(self, due: Sequence[tuple[Order, Transfer]]) -> Mapping[str, int]:
        """Return what must be left after each of one network's unsigned transfers, by its id, in
        units. Raises errors.Unavailable.
        """
        ...


class SimulatedInventory(Inventory):
    """No limit: a simulated wallet that runs dry is one of the faults to try out."""

    @override
    async def require(
        self,
        client: Client,
        direction: Direction,
        chain: Chain,
        amount: Money,
        needed: int,
        rate: Rate,
    ) -> None:
        pass

    @override
    async def room(self, client: Client, network: str) -> int | None:
        return None

    @override
    async def payable_for(self, order: Order) -> int | None:
        return None

    @override
    async def leaves(self, due: Sequence[tuple[Order, Transfer]]) -> Mapping[str, int]:
        return {}


class WalletInventory(Inventory):
    """The wallets' holdings less what open orders may still take out of them.

    ``holdings`` gives those of a network; it raises errors.Unavailable while they are not known.
    """

    def __init__(
        self,
        holdings: Callable[[str], Holdings],
        store: OrderStore,
        policy: Policy,
        clock: Clock,
        secret: bytes,
    ) -> None:
        self._holdings = holdings
        self._store = store
        self._clients = ClientLimits(store, policy, self._wallet, clock, secret)

    @override
    async def require(
        self,
        client: Client,
        direction: Direction,
        chain: Chain,
        amount: Money,
        needed: int,
        rate: Rate,
    ) -> Admission | None:
        network = network_of(payout_asset(direction), chain)
        reserved = await self._clients.reserved(client, network)
        free = self._holdings(network).free
        held = self._payable(network, reserved)
        if needed > held.free:
            raise _not_payable(held, direction, chain, amount, needed, rate)
        admission = await self._clients.require(client, amount, network, needed, reserved)
        return replace(admission, units=((TOTAL, free), *admission.units))

    @override
    async def room(self, client: Client, network: str) -> int | None:
        reserved = await self._clients.reserved(client, network)
        free = self._payable(network, reserved).free
        return min(free, self._clients.room(client, network, reserved))

    @override
    async def payable_for(self, order: Order) -> int | None:
        network = order.terms.payout_network
        reserved = (await self._store.reserved(network)).total
        beside = reserved - await self._store.reserved_by(order.order_id, network)
        held = self._holdings(network)
        return max(0, held.free + held.locked - beside)

    @override
    async def leaves(self, due: Sequence[tuple[Order, Transfer]]) -> Mapping[str, int]:
        claims = await self._store.claims(due[0][1].network)
        return {item.transfer_id: units_to_leave(order, item, claims) for order, item in due}

    def _payable(self, network: str, reserved: Reserved) -> Holdings:
        """Return what can be paid out on a network after open orders have taken their share."""
        held = self._holdings(network)
        return replace(held, free=max(0, held.free - reserved.total))

    def _wallet(self, network: str, reserved: Reserved) -> int:
        """Return what the wallet holds, less what funded orders may still take, in units."""
        held = self._holdings(network)
        return max(0, held.free + held.locked - reserved.funded)


def payable_deposit(direction: Direction, free: int, rate: Rate) -> int:
    """A deposit, in its own units, whose output is surely no more than ``free`` payout units."""
    return convert_floor(direction.reverse, free, rate.usdc_per_xmr)


def _not_payable(
    held: Holdings, direction: Direction, chain: Chain, amount: Money, needed: int, rate: Rate
) -> Unavailable | AmountAboveMaximum:
    payout = payout_asset(direction)
    maximum = payable_deposit(direction, held.free, rate)
    shown = {
        "maxNow": format_units(maximum, amount.asset),
        "asset": amount.asset.symbol,
        "secondsToUnlock": held.seconds_to_unlock if held.locked else None,
    }
    if needed <= held.free + held.locked:
        return Unavailable(
            f"The service can pay out {format_units(held.free, payout)} {payout.symbol} on"
            f" {network_of(payout, chain)} now, and more within {held.seconds_to_unlock} s. Send at"
            f" most {shown['maxNow']} {amount.asset.symbol}, or try again then.",
            details=shown,
            retry_after=max(1, held.seconds_to_unlock),
        )
    return AmountAboveMaximum(
        f"{amount.display()} is more than the service can pay for on {network_of(payout, chain)}"
        f" now: at most {shown['maxNow']} {amount.asset.symbol}.",
        field="amount",
        received=format_units(amount.units, amount.asset),
        details=shown,
    )
