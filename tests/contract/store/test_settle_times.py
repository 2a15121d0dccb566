"""Histograms of settle times in the store, on each backend."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rpcsvc.domain.settle_times import DAYS, SettleTime, SwapKind
from rpcsvc.store.changes import Change, HistoryEntry
from rpcsvc.store.database import StaleWrite, Tables
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.settle_times import settle_time_statements, settle_times
from tests.unit.orders import NOW, VIEW, created, fresh

KIND = SwapKind("x2u/arbitrum/1")
DAY = NOW // 86_400_000


@pytest.fixture
def store(database: Tables) -> OrderStore:
    return OrderStore(database, lambda: "key")


async def test_orders_are_counted_by_kind_and_bucket(database: Tables) -> None:
    other = SwapKind("x2u/base/1")
    times = [SettleTime(KIND, 3), SettleTime(KIND, 3), SettleTime(KIND, 4), SettleTime(other, 3)]
    await asyncio.gather(*(database.write(settle_time_statements(t, DAY)) for t in times))
    assert await settle_times(database, DAY) == {KIND: {3: 2, 4: 1}, other: {3: 1}}


async def test_days_beyond_the_last_fourteen_are_dropped(database: Tables) -> None:
    for day in (DAY, DAY + DAYS - 1):
        await database.write(settle_time_statements(SettleTime(KIND, 3), day))
    assert await settle_times(database, DAY + DAYS - 1) == {KIND: {3: 2}}
    assert await settle_times(database, DAY + DAYS) == {KIND: {3: 1}}
    await database.write(settle_time_statements(SettleTime(KIND, 5), DAY + DAYS))
    rows = await database.fetch("SELECT day FROM settle_times ORDER BY day")
    assert [row["day"] for row in rows] == [DAY + DAYS - 1, DAY + DAYS]


async def test_time_is_counted_with_its_order_or_not_at_all(
    store: OrderStore, database: Tables
) -> None:
    order = fresh()
    await store.commit(created(order))
    changed = replace(order, version=2)
    entry = HistoryEntry(2, NOW, "e", order.status.value, {})
    change = Change(order=changed, view=VIEW, history=entry, settled=SettleTime(KIND, 3))
    await store.commit(change)
    with pytest.raises(StaleWrite):
        await store.commit(change)  # from a replica that was not first
    assert await settle_times(database, DAY) == {KIND: {3: 1}}
