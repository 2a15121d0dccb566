"""``rpcsvc db copy``: to PostgreSQL and back, and its refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositKey, Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import counted
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.store.backends import copying
from rpcsvc.store.backends.copying import NotCopied, from_server, tables, to_server
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.backends.postgresql.schema import check_server
from rpcsvc.store.backends.sqlite.database import (
    DATABASE_NAME,
    OwnerLock,
    SqliteDatabase,
    open_reader,
)
from rpcsvc.store.backends.sqlite.maintenance import check_database
from rpcsvc.store.changes import Change, HistoryEntry, StatusView
from rpcsvc.store.database import Statement, StoreConflict, Tables, insert
from rpcsvc.store.leases import SETTLER, Leases
from rpcsvc.store.orders import OrderStore
from tests.postgres import new_database
from tests.unit.evm_chain import HOT, OURS
from tests.unit.orders import NOW, terms

KEY = DepositKey("arbitrum", "t" * 64, 0)


@pytest.fixture
async def url(postgres: Callable[[], str]) -> AsyncIterator[str]:
    """An empty database, without tables."""
    async with new_database(postgres(), empty=True) as made:
        yield made


def silent(_what: str, _rows: int, _total: int) -> None:
    """No progress."""


async def fill(database: Tables) -> None:
    """Write an order with view, deposit and history, addresses, and more rows than a batch has."""
    store = OrderStore(database, lambda: "key")
    order = open_order(terms(Direction.USDC_TO_XMR))
    seen = ev.DepositSeen(KEY, order.terms.deposit_amount, "0xSender", NOW)
    before: Order | None = None
    for now in (order, transition(order, seen, NOW).order):
        entry = HistoryEntry(now.version, NOW, "e", now.status.value, {"n": "ü"})
        view = StatusView(b'{"a":1}', None)
        await store.commit(
            Change(
                order=now,
                view=view,
                is_new=before is None,
                history=entry,
                reservation=counted(before, now, "token:a"),
            )
        )
        before = now
    ledger = EvmDepositLedger(database)
    await ledger.adopt_wallet(HOT)
    await ledger.add_addresses(OURS)
    rows = [{"name": f"s{n}", "value": n} for n in range(2 * copying.BATCH + 1)]
    add = insert("sandbox_settings", ("name", "value"))
    await database.write([Statement(add, each) for each in rows])


def content(data_dir: Path) -> dict[str, list[tuple[object, ...]]]:
    with closing(open_reader(data_dir / DATABASE_NAME)) as reader:
        return {table.name: reader.execute(table.query).fetchall() for table in tables()}


async def test_reduced_history_is_copied_out_and_back(tmp_path: Path, url: str) -> None:
    database = await SqliteDatabase.open(tmp_path)
    store = OrderStore(database, lambda: "key")
    order = open_order(terms(Direction.USDC_TO_XMR))
    for now in (order, transition(order, ev.Cancelled(), NOW).order):
        entry = HistoryEntry(now.version, NOW, "e", now.status.value, {})
        await store.commit(Change(order=now, is_new=now is order, history=entry))
    assert await store.reduce_history(NOW + 1, 10) == 1
    await database.close()
    assert (await to_server(tmp_path, url, silent))["event_log"] == 1
    assert await check_server(url) == []
    assert (await from_server(url, tmp_path / "back", silent))["event_log"] == 1
    assert content(tmp_path / "back") == content(tmp_path)
    assert check_database(tmp_path / "back") == []


async def test_a_copy_goes_out_and_back_row_by_row(tmp_path: Path, url: str) -> None:
    database = await SqliteDatabase.open(tmp_path)
    await fill(database)
    await database.close()
    seen: list[tuple[str, int, int]] = []
    counts = await to_server(tmp_path, url, lambda *step: seen.append(step))
    before = content(tmp_path)
    assert counts == {name: len(rows) for name, rows in before.items()}
    steps = [what for what, _, _ in seen]
    assert steps.count("copying sandbox_settings") == 3
    assert steps.count("comparing sandbox_settings") == 3
    total = sum(counts.values())
    assert {of for _, _, of in seen} == {total}
    done = [rows for _, rows, _ in seen]
    half = done.index(total) + 1
    assert done[:half] == sorted(done[:half])
    assert done[half:] == sorted(done[half:])
    assert done[-1] == total
    assert await check_server(url) == []

    there = await PostgresqlDatabase.open(url)
    order = await OrderStore(there, lambda: "key").order("ord_1")
    assert order is not None
    assert [deposit.key for deposit in order.deposits] == [KEY]
    with pytest.raises(StoreConflict, match="stays"):
        await there.write([Statement("DELETE FROM orders")])
    more = (
        "INSERT INTO tickets (ticket_id, created_at, category, message, secret_hash)"
        " VALUES ('t', 1, 'c', 'm', 'h')"
    )
    await there.write([Statement(more)])
    await there.close()

    back = tmp_path / "back"
    counts = await from_server(url, back, silent)
    after = content(back)
    assert counts["tickets"] == 1
    assert {**after, "tickets": []} == before
    assert check_database(back) == []
    assert (back / DATABASE_NAME).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in back.iterdir()) == [DATABASE_NAME, "rpcsvc.lock"]
    again = await SqliteDatabase.open(back)
    with pytest.raises(StoreConflict, match="stays"):
        await again.write([Statement("DELETE FROM orders")])
    await again.close()


async def test_rows_made_after_a_copy_go_on_from_its_numbers(tmp_path: Path, url: str) -> None:
    database = await SqliteDatabase.open(tmp_path)
    await fill(database)
    await database.close()
    await to_server(tmp_path, url, silent)
    there = await PostgresqlDatabase.open(url)
    other = open_order(
        replace(terms(Direction.USDC_TO_XMR), order_id="ord_2", deposit_address="0xAnother")
    )
    entry = HistoryEntry(1, NOW, "e", other.status.value, {})
    await OrderStore(there, lambda: "key").commit(
        Change(order=other, view=StatusView(b"{}", None), is_new=True, history=entry)
    )
    rows = await there.fetch("SELECT seq FROM orders ORDER BY seq")
    assert [row["seq"] for row in rows] == [1, 2]
    await there.close()


async def test_a_copy_is_refused_where_a_service_runs(tmp_path: Path, url: str) -> None:
    with pytest.raises(NotCopied, match="no database"):
        await to_server(tmp_path, url, silent)
    await (await SqliteDatabase.open(tmp_path)).close()
    lock = OwnerLock(tmp_path)
    lock.acquire()
    with pytest.raises(NotCopied, match="Another process already serves"):
        await to_server(tmp_path, url, silent)
    lock.release()
    there = await PostgresqlDatabase.open(url)
    leases = Leases(there)
    token = await leases.take(SETTLER, "a service", 3_600_000)
    assert token is not None
    for copying_there in (
        to_server(tmp_path, url, silent),
        from_server(url, tmp_path / "b", silent),
    ):
        with pytest.raises(NotCopied, match="a service runs"):
            await copying_there
    await leases.release(SETTLER, token)
    await there.close()
    with pytest.raises(NotCopied, match="not empty"):
        await to_server(tmp_path, url, silent)
    with pytest.raises(NotCopied, match="exists"):
        await from_server(url, tmp_path, silent)


async def test_a_copy_that_differs_leaves_nothing_behind(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await SqliteDatabase.open(tmp_path)
    await fill(database)
    await database.close()
    add = copying._Server.add

    async def lose_one(self: object, table: copying.Table, rows: list[tuple[object, ...]]) -> None:
        await add(self, table, rows[:-1] if table.name == "evm_addresses" else rows)  # type: ignore[arg-type]

    monkeypatch.setattr(copying._Server, "add", lose_one)
    with pytest.raises(NotCopied, match="evm_addresses"):
        await to_server(tmp_path, url, silent)
    connection = await asyncpg.connect(url)
    assert (
        await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
    )
    await connection.close()
