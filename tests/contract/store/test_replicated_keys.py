"""One idempotency key at several replicas at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from rpcsvc.orders.idempotency import Claim, Idempotency
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.changes import Change, RelayRecord, RelayState
from rpcsvc.store.database import StaleWrite, Tables
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import created, fresh, response

CLAIM = Claim("public", "k", "swap.create", {"amount": "1"})
CALLS, REPLICAS = 200, 3


async def test_one_key_at_three_replicas_makes_one_order(database: Tables) -> None:
    """All calls are answered with the bytes of the first commit, and make no further orders."""
    if not isinstance(database, PostgresqlDatabase):
        pytest.skip("one process at a time writes an SQLite file")
    async with AsyncExitStack() as opened:
        databases = [database]
        for _ in range(REPLICAS - 1):
            other = await PostgresqlDatabase.open(database.url)
            opened.push_async_callback(other.close)
            databases.append(other)
        stores = [OrderStore(each, lambda: "key") for each in databases]
        replicas = [(store, Idempotency(store)) for store in stores]

        async def call(number: int) -> tuple[bytes, bool]:
            store, idempotency = replicas[number % REPLICAS]

            async def make() -> bytes:
                answer = replace(response("k"), body=b"%d" % number)
                await store.commit(created(fresh(number), answer))
                return answer.body

            return await idempotency.once(CLAIM, make)

        answers = await asyncio.gather(*map(call, range(CALLS)))
    assert len({body for body, _ in answers}) == 1
    assert [is_replay for _, is_replay in answers].count(False) == 1
    (row,) = await database.fetch("SELECT order_id FROM orders")
    assert row["order_id"] == f"ord_{answers[0][0].decode()}"


async def test_two_stores_of_one_database_make_one_order(database: Tables) -> None:
    """As in two processes: neither sees that the other is answering the key."""
    stores = [OrderStore(database, lambda: "key") for _ in range(2)]
    opened = asyncio.Barrier(2)

    async def call(number: int) -> tuple[bytes, bool]:
        async def make() -> bytes:
            await opened.wait()  # both have found the key free
            answer = replace(response("k"), body=b"%d" % number)
            await stores[number].commit(created(fresh(number), answer))
            return answer.body

        return await Idempotency(stores[number]).once(CLAIM, make)

    answers = await asyncio.gather(call(0), call(1))
    assert answers[0][0] == answers[1][0]
    assert sorted(is_replay for _, is_replay in answers) == [False, True]
    assert len(await database.fetch("SELECT order_id FROM orders")) == 1


async def test_an_answered_key_is_not_claimed_again(database: Tables) -> None:
    """A replica that found the key free may come when another's claim has ended in an order."""
    store = OrderStore(database, lambda: "key")
    late = RelayRecord("ord_late", RelayState.CLAIMED, 0, "s", namespace="public", key="k")
    await store.commit(created(fresh(1), response("k")))
    with pytest.raises(StaleWrite):
        await store.commit(Change(relay=late))
    await store.commit(Change(relay=replace(late, key="another")))
    (row,) = await database.fetch("SELECT idempotency_key FROM relays")
    assert row["idempotency_key"] == "another"
