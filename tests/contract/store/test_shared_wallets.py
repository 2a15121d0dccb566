"""Wallets that one replica settles from: what it publishes, and the orders made by it elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

import pytest
from msgspec.structs import replace

from rpcsvc.domain.money import USDC, XMR, Asset, Money
from rpcsvc.domain.order import DepositKey, Order
from rpcsvc.domain.reservations import Holdings, counted, reservations_of
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import NetworkState
from rpcsvc.orders.shared_wallets import EVERY_MS, MAX_AGE_MS, PublishedWallets, WalletPublisher
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.changes import Change, HistoryEntry, PooledOrder
from rpcsvc.store.database import Database, StaleWrite, StoreConflict, Tables
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.replicas import SharedWallets, WalletState
from tests.rows import statement
from tests.unit.orders import NOW, VIEW
from tests.unit.reserving import numbered

POOL: Final = 8
NEEDED: Final = reservations_of(numbered(1))["arbitrum"]
NETWORKS: Final = ("arbitrum", "monero")


class Settling:
    """The wallets of the replica that settles: as much as it publishes."""

    networks = frozenset(NETWORKS)

    def __init__(self) -> None:
        self.numbers = count(1)
        self.free: dict[str, int | None] = {"arbitrum": 10 * NEEDED, "monero": 10**12}
        self.fees: dict[str, int | None] = {"arbitrum": 7, "monero": 70}
        self.refusal: str | None = None
        self.ready = 10**6

    def require_ready(self) -> None:
        if self.refusal is not None:
            raise Unavailable(self.refusal)

    def deposit_address(self, asset: Asset) -> str:
        if self.ready == 0:
            raise Unavailable("none is ready")
        self.ready -= 1
        return f"{asset.symbol} {next(self.numbers)}"

    def fee(self, network: str) -> int:
        fee = self.fees[network]
        if fee is None:
            raise Unavailable("no fee is known")
        return fee

    def states(self) -> Mapping[str, NetworkState]:
        return {name: NetworkState(node_height=100) for name in NETWORKS}

    def holdings(self, network: str) -> Holdings:
        free = self.free[network]
        if free is None:
            raise Unavailable(f"{network} is short")
        return Holdings(free, 5, 60)

    # What taking orders needs besides, and publishing doesn't.

    def pooled(self, address: str, network: str) -> None:
        raise AssertionError((address, network))

    def is_paused(self) -> bool:
        return False

    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        raise AssertionError((network, address, field))

    def estimated_seconds(self, deposit: Money, chain: str) -> int:
        return len(chain) + deposit.units

    async def confirmations(self, key: DepositKey) -> int:
        raise AssertionError(key)

    async def confirmations_at(self, key: DepositKey, height: int) -> int:
        return height - key.output_index

    def required_confirmations(self, network: str, units: int) -> int:
        return len(network) + units

    async def health(self) -> Health:
        return Health(True)


class Replicas:
    """The replica that settles, and others, over one database. ``now`` is their steady clock."""

    def __init__(self, database: Tables) -> None:
        self.now = 1
        self.rows = SharedWallets(database)
        self.settling = Settling()
        self.publisher = self.another_settler()
        self.begun: list[WalletPublisher] = []

    async def publish(self) -> None:
        self.now += EVERY_MS
        await self.publisher.publish()

    def another_settler(self) -> WalletPublisher:
        wallets = self.settling
        return WalletPublisher(self.rows, wallets, wallets.holdings, POOL, steady=lambda: self.now)

    async def joined(self, rows: SharedWallets | None = None) -> PublishedWallets:
        """One that has started now."""
        made = PublishedWallets(rows or self.rows, self.settling, bytes, steady=lambda: self.now)
        await made.refresh()
        return made

    async def pass_(self, *joined: PublishedWallets) -> None:
        """The next publication, and its reading; a settler's first has no addresses."""
        if self.publisher not in self.begun:
            self.begun.append(self.publisher)
            await self.publish()
        await self.publish()
        for each in joined:
            await each.refresh()


@asynccontextmanager
async def another(database: Database) -> AsyncIterator[Database]:
    """The database as another process opens it; with SQLite no other may."""
    if not isinstance(database, PostgresqlDatabase):
        yield database
        return
    opened = await PostgresqlDatabase.open(database.url)
    try:
        yield opened
    finally:
        await opened.close()


async def make(store: OrderStore, order: Order, pooled: PooledOrder) -> None:
    """Commit an order as a replica does that doesn't settle."""
    await store.commit(
        Change(
            order=order,
            view=VIEW,
            is_new=True,
            history=HistoryEntry(order.version, NOW, "e", order.status.value, {}),
            reservation=counted(None, order, "token:a"),
            pooled=pooled,
        )
    )


def paid_at(order: Order, address: str) -> Order:
    """The order with another deposit address."""
    return replace(order, terms=replace(order.terms, deposit_address=address))


@pytest.fixture
def replicas(database: Tables) -> Replicas:
    return Replicas(database)


@pytest.fixture
def store(database: Tables) -> OrderStore:
    return OrderStore(database, lambda: "key")


async def test_replicas_see_the_published_state(replicas: Replicas) -> None:
    there = await replicas.joined()
    with pytest.raises(Unavailable, match="no fresh state"):
        there.require_ready()
    assert not (await there.health()).ok
    await replicas.pass_(there)
    there.require_ready()
    assert (await there.health()).ok
    assert there.holdings("arbitrum") == Holdings(10 * NEEDED, 5, 60)
    assert (there.fee("arbitrum"), there.fee("monero")) == (7, 70)
    assert await there.confirmations(DepositKey("monero", "t", 97)) == 3
    assert there.states()["monero"] == NetworkState(node_height=100)
    replicas.settling.free["arbitrum"] = replicas.settling.fees["arbitrum"] = None
    await replicas.pass_(there)
    with pytest.raises(Unavailable, match="arbitrum is short"):
        there.holdings("arbitrum")
    with pytest.raises(Unavailable, match="USDC on arbitrum can't be settled"):
        there.fee("arbitrum")
    assert there.fee("monero") == 70
    replicas.settling.refusal = "XMR can't be settled."
    await replicas.pass_(there)
    with pytest.raises(Unavailable, match=r"XMR can't be settled\."):
        there.require_ready()


async def test_it_is_read_and_published_once_a_second(replicas: Replicas) -> None:
    there = await replicas.joined()
    await replicas.pass_(there)
    replicas.settling.fees["arbitrum"] = 8
    replicas.now += EVERY_MS - 1
    await replicas.publisher.publish()
    await there.refresh()
    assert there.fee("arbitrum") == 7
    replicas.now += 1
    await replicas.publisher.publish()
    await there.refresh()
    assert there.fee("arbitrum") == 8


async def test_old_state_takes_no_orders(replicas: Replicas, database: Tables) -> None:
    """By the clock of the replica, and by that of the database."""
    there = await replicas.joined()
    await replicas.pass_(there)
    replicas.now += MAX_AGE_MS
    with pytest.raises(Unavailable, match="no fresh state"):
        there.holdings("monero")
    assert not there.states()["monero"].is_up
    await replicas.pass_(there)
    aged = "UPDATE wallet_states SET published_at = published_at - ?"
    await database.write([statement(aged, (MAX_AGE_MS,))])
    pooled = there.pooled(there.deposit_address(XMR), "arbitrum")
    with pytest.raises(StaleWrite):
        await make(OrderStore(database, lambda: "key"), numbered(1), pooled._replace(since=0))


async def test_pool_is_filled_in_portions_up_to_its_size(replicas: Replicas) -> None:
    filled = []
    for _ in range(7):
        await replicas.publish()
        filled.append([len(await replicas.rows.addresses(asset)) for asset in (XMR, USDC)])
    assert filled == [[0, 0], [2, 2], [4, 4], [6, 6], [8, 8], [8, 8], [8, 8]]
    assert next(replicas.settling.numbers) == 2 * POOL + 1, "no more were taken of the wallet"


async def test_pool_takes_the_wallets_ready_addresses(replicas: Replicas) -> None:
    there = await replicas.joined()
    replicas.settling.ready = 1
    await replicas.pass_(there)
    assert await replicas.rows.addresses(XMR) == ["XMR 1"]
    with pytest.raises(Unavailable, match="No USDC deposit address is ready"):
        there.require_ready()
    with pytest.raises(Unavailable, match="No USDC deposit address is ready"):
        there.deposit_address(USDC)


async def test_next_settler_empties_the_pool(replicas: Replicas, store: OrderStore) -> None:
    """A restored database has addresses in it that orders may have got since the copy."""
    there = await replicas.joined()
    await replicas.pass_(there)
    old = there.pooled(there.deposit_address(XMR), "arbitrum")
    replicas.publisher = replicas.another_settler()
    await replicas.pass_()
    with pytest.raises(StaleWrite):
        await make(store, numbered(1), old)
    assert await replicas.rows.addresses(XMR) == ["XMR 5", "XMR 6"]


async def test_restored_state_counts_for_nobody(
    replicas: Replicas, store: OrderStore, database: Tables
) -> None:
    """Neither for a replica that starts on the copy, nor for one that saw newer states."""
    saw = await replicas.joined()
    await replicas.pass_(saw)
    address = saw.deposit_address(XMR)
    earlier = "UPDATE wallet_states SET published_at = published_at - 5000"
    await database.write([statement(earlier)])
    started = await replicas.joined()
    replicas.now += EVERY_MS
    for each in (saw, started):
        await each.refresh()
        with pytest.raises(Unavailable, match="no fresh state"):
            each.require_ready()
        with pytest.raises(Unavailable, match="No XMR deposit address"):
            each.deposit_address(XMR)
    with pytest.raises(StaleWrite):
        await make(store, numbered(1), saw.pooled(address, "arbitrum"))
    await replicas.pass_(saw, started)
    for each in (saw, started):
        each.require_ready()


async def test_pooled_address_serves_one_order(replicas: Replicas, store: OrderStore) -> None:
    here, there = await replicas.joined(), await replicas.joined()
    await replicas.pass_(here, there)
    both = here.deposit_address(XMR), there.deposit_address(XMR)
    assert both[0] == both[1], "the same random bytes"
    await make(store, paid_at(numbered(1), both[0]), here.pooled(both[0], "arbitrum"))
    with pytest.raises(StaleWrite):
        await make(store, paid_at(numbered(2), both[1]), there.pooled(both[1], "arbitrum"))
    assert await store.order("ord_2") is None
    assert both[0] not in await replicas.rows.addresses(XMR)
    await make(store, numbered(2), there.pooled(there.deposit_address(XMR), "arbitrum"))


async def test_failed_order_leaves_its_address(replicas: Replicas, store: OrderStore) -> None:
    there = await replicas.joined()
    await replicas.pass_(there)
    address = there.deposit_address(XMR)
    await make(store, numbered(1), there.pooled(address, "arbitrum"))
    other = there.deposit_address(XMR)
    with pytest.raises((StaleWrite, StoreConflict)):
        await make(store, numbered(1), there.pooled(other, "arbitrum"))
    assert other in await replicas.rows.addresses(XMR)


async def test_nothing_is_made_while_the_settler_refuses(
    replicas: Replicas, store: OrderStore
) -> None:
    there = await replicas.joined()
    await replicas.pass_(there)
    replicas.settling.refusal = "Payouts are paused."
    await replicas.pass_()
    pooled = there.pooled(there.deposit_address(XMR), "arbitrum")
    with pytest.raises(StaleWrite):
        await make(store, numbered(1), pooled)
    replicas.settling.refusal, replicas.settling.free["arbitrum"] = None, None
    await replicas.pass_()
    with pytest.raises(StaleWrite):
        await make(store, numbered(1), pooled)


async def test_orders_at_once_never_reserve_more_than_the_wallet_holds(
    replicas: Replicas, database: Database
) -> None:
    """Each of two replicas sees the whole pool; a sum at the limit is still paid."""
    replicas.settling.free["arbitrum"] = 5 * NEEDED
    async with another(database) as other:
        joined = [await replicas.joined(), await replicas.joined(SharedWallets(other))]
        for _ in range(5):
            await replicas.pass_(*joined)
        stores = [OrderStore(each, lambda: "key") for each in (database, other)]

        async def order(number: int) -> str:
            at = joined[number % 2]
            address = at.deposit_address(XMR)
            pooled = at.pooled(address, "arbitrum")
            await make(stores[number % 2], numbered(number), pooled)
            return address

        made = await asyncio.gather(*map(order, range(POOL)), return_exceptions=True)
    addresses = [each for each in made if isinstance(each, str)]
    refused = [each for each in made if not isinstance(each, str)]
    assert all(isinstance(each, StaleWrite) for each in refused), refused
    assert addresses
    assert len(set(addresses)) == len(addresses) <= 5
    sums = await OrderStore(database, lambda: "key").reserved("arbitrum")
    assert sums.total == len(addresses) * NEEDED
    left = await replicas.rows.addresses(XMR)
    assert len(left) == POOL - len(addresses)


def test_pooled_address_is_for_new_orders_only() -> None:
    with pytest.raises(ValueError, match="new order"):
        Change(pooled=PooledOrder("a", "arbitrum", 0, 1))


async def test_state_reads_back_as_it_was(replicas: Replicas) -> None:
    states = [
        WalletState("monero", True, 5, 1, Holdings(1, 2, 3), None, None),
        WalletState("arbitrum", False, None, None, None, "short", "refused"),
    ]
    await replicas.rows.publish(states, {}, is_first=False)
    found = await replicas.rows.states()
    assert {each.state.network: each.state for each in found} == {
        each.network: each for each in states
    }
    assert all(0 <= each.age_ms < 60_000 for each in found)
