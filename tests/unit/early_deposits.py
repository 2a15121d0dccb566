"""Orders on chains that a test extends and reorganises, settled by the service's own code.

Deposits are watched, confirmed, counted and written by the product; the chains are a model that
knows nothing of tiers but how deep a deposit is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

from msgspec import Struct, field
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.finality import FinalityLimits
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import DepositKey, DepositState, Order, TransferKind, TransferState
from rpcsvc.domain.pricing import ONE_XMR, Direction
from rpcsvc.domain.reservations import counted
from rpcsvc.orders.deposits import DepositWatcher
from rpcsvc.orders.ports.venue import Rate
from rpcsvc.orders.ports.wallets import DepositSighting, Observation
from rpcsvc.orders.processor import OrderProcessor, Quarantine
from rpcsvc.settlement.onchain.thresholds import Thresholds, threshold_of
from rpcsvc.store.checks import BOOKS
from rpcsvc.store.database import Tables
from rpcsvc.store.orders import OrderStore
from tests.sandbox import ManualClock
from tests.unit.orders import HOUR, NOW, created, terms

RATE = 165_000_000
USD = 10**6


class PlacedDeposit(Struct):
    """A deposit of a payer. ``block``: None while it is in no block."""

    address: str
    units: int
    block: int | None
    acknowledged: DepositState | None = None


class TieredChains(Struct):
    """The chains with their tiers, as the wallets of the service see them."""

    tiers: Mapping[str, Thresholds]
    heights: dict[str, int] = field(default_factory=dict)
    placed: dict[DepositKey, PlacedDeposit] = field(default_factory=dict)

    @property
    def networks(self) -> frozenset[str]:
        return frozenset(self.tiers)

    def depth(self, key: DepositKey) -> int:
        block = self.placed[key].block
        return 0 if block is None else self.heights.get(key.network, 0) - block + 1

    def pay(self, network: str, name: str, address: str, units: int) -> DepositKey:
        """Put a payment into a new block."""
        key = DepositKey(network, name, 0)
        self.placed[key] = PlacedDeposit(address, units, self.grow(network))
        return key

    def grow(self, network: str, blocks: int = 1) -> int:
        self.heights[network] = self.heights.get(network, 0) + blocks
        return self.heights[network]

    def reorganise(self, network: str, depth: int) -> list[DepositKey]:
        """Replace the newest blocks by as many, without the payments in them."""
        gone = [k for k in self.placed if k.network == network and 0 < self.depth(k) <= depth]
        for key in gone:
            self.placed[key].block = None
        return gone

    def _state(self, key: DepositKey) -> DepositState:
        item = self.placed[key]
        if item.block is None:
            return DepositState.REMOVED
        if item.acknowledged is DepositState.CONFIRMED:
            return DepositState.CONFIRMED
        there = [each for each in self.placed.values() if each.block is not None]
        total = sum(each.units for each in there if each.address == item.address)
        needed = threshold_of(self.tiers[key.network], total).depth
        assert isinstance(needed, int)
        return DepositState.CONFIRMED if self.depth(key) >= needed else DepositState.SEEN

    def is_paused(self) -> bool:
        return False

    async def observe(self) -> Observation:
        found = [
            DepositSighting(key, item.address, item.units, "sender", NOW, self._state(key))
            for key, item in self.placed.items()
            if self._state(key) is not item.acknowledged
        ]
        return Observation(found, dict.fromkeys(self.networks, NOW))

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        for item in sightings:
            self.placed[item.key].acknowledged = item.state

    async def is_final(self, key: DepositKey) -> bool:
        final = self.tiers[key.network][-1].depth
        assert isinstance(final, int)
        return self.depth(key) >= final

    def rate(self) -> Rate:
        return Rate(RATE, NOW, "the model")


class EarlyExchange:
    """A service over a database; several may share one, as replicas do."""

    def __init__(
        self, database: Tables, chains: TieredChains, limits: FinalityLimits, clock: ManualClock
    ) -> None:
        self.database, self.chains, self.clock = database, chains, clock
        self.store = OrderStore(database, lambda: "key")
        self.processor = OrderProcessor(self.store, clock, lambda _order: None, counted, limits)
        anything = cast("Any", chains)
        self.quarantine = Quarantine()
        self.watcher = DepositWatcher(
            self.store, anything, self.processor, anything, self.quarantine, clock, limits
        )

    async def open(self, name: str, direction: Direction, chain: str, units: int) -> Order:
        """Make an order for a deposit of that many units."""
        to_usdc = direction is Direction.XMR_TO_USDC
        agreed = replace(
            terms(direction),
            order_id=f"ord_{name}",
            chain=chain,
            deposit_network="monero" if to_usdc else chain,
            payout_network=chain if to_usdc else "monero",
            deposit_address=sha256(name.encode()).hexdigest()[:40],
            deposit_amount=units,
            min_deposit=1,
            max_deposit=100 * units,
            expires_at=NOW + 1000 * HOUR,
        )
        order = open_order(agreed)
        await self.store.commit(created(order))
        return order

    async def settle(self) -> None:
        """One pass: deposits are recorded, and planned payouts and refunds are made."""
        await self.watcher.reconcile()
        assert self.quarantine.health().ok
        for pending in await self.store.pending_effects():
            if isinstance(pending.effect, ev.AdvanceTransfer):
                name = pending.effect.transfer_id
                found = (await self.order(pending.order_id.removeprefix("ord_"))).transfer(name)
                if found is None or found.state is TransferState.CANCELLED:
                    continue
                signed = ev.TransferPrepared(name, f"tx of {name}", "00")
                await self.processor.apply(pending.order_id, signed)
                await self.processor.apply(
                    pending.order_id, ev.TransferSettled(name), done=(pending.effect,)
                )

    async def order(self, name: str) -> Order:
        found = await self.store.order(f"ord_{name}")
        assert found is not None
        return found

    async def problems(self) -> list[str]:
        """Return the problems that ``db check`` finds."""
        return [text for text, sql in BOOKS if await self.database.fetch(sql)]


def paid_usd(order: Order) -> int:
    """USDC units that left the wallets for an order, by the rate of the model."""
    total = 0
    for transfer in order.transfers:
        if transfer.state is TransferState.SETTLED:
            is_xmr = (transfer.kind is TransferKind.PAYOUT) is (
                order.terms.direction is Direction.USDC_TO_XMR
            )
            total += transfer.units * RATE // ONE_XMR if is_xmr else transfer.units
    return total
