"""The worth of a client's day as rows, and the orders of a client."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from rpcsvc.domain.clients import ApprovalUse, Spending
from rpcsvc.domain.order import Order
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.changes import Change, HistoryEntry, OrderBounds, RelayRecord, RelayState
from rpcsvc.store.database import StaleWrite, Statement, Tables
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import NOW, VIEW
from tests.unit.reserving import numbered

DAY = NOW // 86_400_000
WORTH = 132_000_000
MOST = 1_000_000_000


@pytest.fixture
def store(database: Tables) -> OrderStore:
    return OrderStore(database, lambda: "key")


def made_by(number: int, client: str) -> Order:
    order = numbered(number)
    return replace(order, terms=replace(order.terms, client=client))


async def make(
    store: OrderStore, number: int, client: str = "desk", day: int = DAY, units: int = WORTH
) -> None:
    """Commit an order with what it takes of its client's day. Raises StaleWrite."""
    order = made_by(number, client)
    entry = HistoryEntry(1, NOW, "OrderCreated", order.status.value, {})
    spending = Spending(day, client, units, MOST)
    change = Change(order=order, view=VIEW, is_new=True, history=entry, spending=spending)
    await store.commit(change)


async def test_50_orders_at_once_over_three_handles_keep_to_the_day(
    store: OrderStore, database: Tables
) -> None:
    """On PostgreSQL these are three replicas; an SQLite file has one process and one handle."""
    async with AsyncExitStack() as stack:
        stores = [store]
        for _ in range(2):
            handle = database
            if isinstance(database, PostgresqlDatabase):
                handle = await PostgresqlDatabase.open(database.url)
                stack.push_async_callback(handle.close)
            stores.append(OrderStore(handle, lambda: "key"))
        made = await asyncio.gather(
            *(make(stores[number % 3], number) for number in range(50)), return_exceptions=True
        )
        assert made.count(None) == MOST // WORTH
        assert all(isinstance(each, StaleWrite) for each in made if each is not None)
        for each in stores:
            assert await each.spent(DAY, ["desk"]) == {"desk": MOST // WORTH * WORTH}
        assert len(await store.orders_of_client("desk", 100)) == MOST // WORTH


async def test_last_unit_of_a_day_is_used_and_no_more(store: OrderStore) -> None:
    await make(store, 1, units=MOST - 1)
    with pytest.raises(StaleWrite):
        await make(store, 2, units=2)
    await make(store, 3, units=1)
    assert await store.spent(DAY, ["desk"]) == {"desk": MOST}
    assert await store.order("ord_2") is None


async def test_days_and_clients_are_counted_apart(store: OrderStore) -> None:
    await make(store, 1, units=MOST)
    await make(store, 2, "shop", units=MOST)
    await make(store, 3, day=DAY + 1, units=5)
    assert await store.spent(DAY, ["desk", "shop", "none"]) == {"desk": MOST, "shop": MOST}
    assert await store.spent(DAY + 1, ["desk", "shop"]) == {"desk": 5}


async def test_orders_of_a_client_are_listed_by_page_newest_first(store: OrderStore) -> None:
    for number in range(5):
        await make(store, number, "desk" if number % 2 == 0 else "shop", units=1)
    first = await store.orders_of_client("desk", 2)
    rest = await store.orders_of_client("desk", 2, first[-1].order_id)
    assert [each.order_id for each in (*first, *rest)] == ["ord_4", "ord_2", "ord_0"]
    assert await store.orders_of_client("desk", 2, "ord_1") == []
    assert first[0].terms.client == "desk"


async def test_refusal_written_twice_gives_back_once(store: OrderStore, database: Tables) -> None:
    """A commit whose outcome was not known is made again."""
    await database.write(
        [
            Statement(
                "INSERT INTO approvals (approval_id, client, idempotency_key, terms, state,"
                " requested_at, expires_at, deposit, output, shown, decided_at, decided_by)"
                " VALUES ('a', 'desk', 'k', 't', 'granted', 1, 9, 1, 1, '{}', 2, 'Ada')"
            )
        ]
    )
    spending = Spending(DAY, "desk", WORTH, MOST)
    claims = [RelayRecord(f"ord_{number}", RelayState.CLAIMED, NOW, "s") for number in range(2)]
    use = ApprovalUse("a", "ord_1", 3)
    for claim, approval in zip(claims, (None, use), strict=True):
        await store.commit(Change(relay=claim, spending=spending, approval=approval))
    assert await granted(database) == [("used", "ord_1")]
    refused = replace(claims[1], state=RelayState.REFUSED, reason="refused")
    returns = OrderBounds(spending=spending, approval=use)
    for _ in range(2):
        await store.commit(Change(relay=refused, returns=returns))
        assert await store.spent(DAY, ["desk"]) == {"desk": WORTH}
        assert await granted(database) == [("granted", None)]


async def test_refusal_of_a_closed_claim_gives_back_nothing(store: OrderStore) -> None:
    spending = Spending(DAY, "desk", WORTH, MOST)
    claim = RelayRecord("ord_1", RelayState.CLAIMED, NOW, "s")
    await store.commit(Change(relay=claim, spending=spending))
    refused = replace(claim, state=RelayState.REFUSED, reason="closed by the operator")
    await store.commit(Change(relay=refused))
    await store.commit(Change(relay=refused, returns=OrderBounds(spending=spending)))
    assert await store.spent(DAY, ["desk"]) == {"desk": WORTH}


async def granted(database: Tables) -> list[tuple[str, str | None]]:
    rows = await database.fetch("SELECT state, order_id FROM approvals")
    return [(row["state"], row["order_id"]) for row in rows]
