"""One read is one snapshot, also with commits meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import DepositKey
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.store.backends.sqlite.database import GroupConnection, SqliteDatabase
from rpcsvc.store.changes import StatusView
from rpcsvc.store.orders import OrderStore
from tests.sandbox import ManualClock
from tests.unit.orders import NOW, terms


class HeldCommit:
    """Commits that wait until released; then ``done`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go, self.done = (threading.Event() for _ in range(3))
        commit = GroupConnection.commit

        def held(connection: GroupConnection) -> None:
            self.begun.set()
            assert self.let_go.wait(10)
            commit(connection)
            self.done.set()

        monkeypatch.setattr(GroupConnection, "commit", held)


async def test_order_reads_consistent_while_its_next_version_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await SqliteDatabase.open(tmp_path)
    store = OrderStore(database, lambda: "key")
    clock = ManualClock()
    clock.now = NOW
    processor = OrderProcessor(store, clock, lambda _order: StatusView(b"{}", None))
    terms_of_a = replace(terms(Direction.USDC_TO_XMR), order_id="a", deposit_amount=10**9)
    await processor.open(open_order(terms_of_a), None, None)

    async def deposit(txid: str) -> None:
        key = DepositKey("arbitrum", txid, 0)
        await processor.apply("a", ev.DepositSeen(key, 1, "sender", NOW))

    await deposit("first")
    held = HeldCommit(monkeypatch)
    second = asyncio.create_task(deposit("second"))
    await asyncio.to_thread(held.begun.wait, 10)
    read_one = database.fetch_one

    async def read_row_and_let_the_commit_end(sql: str, **values: Any) -> Any:
        row = await read_one(sql, **values)
        held.let_go.set()
        assert held.done.wait(10)
        return row

    monkeypatch.setattr(database, "fetch_one", read_row_and_let_the_commit_end)
    order = await store.order("a")
    monkeypatch.undo()
    await second

    assert order is not None
    assert (order.version, len(order.deposits)) == (2, 1)
    after = await store.order("a")
    assert after is not None
    assert (after.version, len(after.deposits)) == (3, 2)
    await database.close()
