"""SQLite only: one owner, strict tables, durable commits, damage, backups."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from rpcsvc.store.backends.sqlite.database import (
    DATABASE_NAME,
    LOCK_NAME,
    SNAPSHOT_SECONDS,
    DataDirInUse,
    OwnerLock,
    SqliteDatabase,
)
from rpcsvc.store.backends.sqlite.maintenance import BackupFailed, backup_database, check_database
from rpcsvc.store.changes import Change, Ticket
from rpcsvc.store.database import StoreConflict
from rpcsvc.store.orders import OrderStore
from tests.rows import all_rows, statement
from tests.unit.orders import NOW, created, fresh


@pytest.fixture
def store(database: SqliteDatabase) -> OrderStore:
    return OrderStore(database, lambda: "key")


async def test_value_beyond_sqlite_is_refused_and_the_next_write_works(
    store: OrderStore,
) -> None:
    for bad in ("\ud800", 2**63, object()):
        ticket = Ticket("t", NOW, "agent", bad, None, None, None)  # type: ignore[arg-type] # bad
        with pytest.raises(StoreConflict):
            await store.commit(Change(ticket=ticket))
    await store.commit(created(fresh()))
    assert await store.order("ord_1") is not None


def test_what_others_write_is_seen_within_a_second() -> None:
    assert 0 < SNAPSHOT_SECONDS <= 1


def test_every_table_is_strict_and_no_column_takes_a_real(database: SqliteDatabase) -> None:
    tables = all_rows(
        database,
        "SELECT name, strict FROM pragma_table_list"
        " WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
    )
    assert {"orders", "deposits", "transfers", "idempotency_keys"} <= {name for name, _ in tables}
    assert [name for name, strict in tables if not strict] == []
    columns = all_rows(
        database,
        "SELECT DISTINCT c.type FROM pragma_table_list t JOIN pragma_table_info(t.name) c"
        " WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'",
    )
    assert {kind for (kind,) in columns} <= {"INTEGER", "TEXT", "BLOB"}


MONEY_COLUMNS = [
    ("orders", "deposit_amount"),
    ("deposits", "units"),
    ("transfers", "units"),
    ("sandbox_transactions", "units"),
]


@pytest.mark.parametrize("units", ["9223372036854775808", 0.5, 1e30])
def test_money_is_an_integer_or_is_not_taken(database: SqliteDatabase, units: object) -> None:
    """A non-strict column would keep it as a REAL. ``database`` has made the tables."""
    [(_, _, path)] = all_rows(database, "PRAGMA database_list")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        for table, column in MONEY_COLUMNS:
            columns = [row[1:3] for row in other.execute(f"PRAGMA table_info({table})")]
            names = ", ".join(name for name, _ in columns)
            values = [units if name == column else 1 if kind == "INTEGER" else "1"
                      for name, kind in columns]  # fmt: skip
            marks = ", ".join("?" * len(values))
            with pytest.raises(sqlite3.IntegrityError, match=rf"{table}\.{column}"):
                other.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)


async def test_commit_is_on_disk_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[aiosqlite.Connection] = []
    connect = aiosqlite.connect

    def noted(*args: Any, **kwargs: Any) -> aiosqlite.Connection:
        opened.append(connect(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(aiosqlite, "connect", noted)
    database = await SqliteDatabase.open(tmp_path)
    pragmas = [f"PRAGMA {name}" for name in ("journal_mode", "synchronous")]
    found = [list(await opened[0].execute_fetchall(pragma)) for pragma in pragmas]
    await database.close()
    assert found == [[("wal",)], [(2,)]]  # 2 is FULL


def test_a_data_directory_has_one_owner(tmp_path: Path) -> None:
    first = OwnerLock(tmp_path)
    first.acquire()
    with pytest.raises(DataDirInUse):
        OwnerLock(tmp_path).acquire()
    first.release()
    OwnerLock(tmp_path).acquire()


def test_removed_lock_file_lets_no_second_service_in(
    tmp_path: Path,
) -> None:
    first = OwnerLock(tmp_path)
    first.acquire()
    (tmp_path / LOCK_NAME).unlink()
    second = OwnerLock(tmp_path)
    with pytest.raises(DataDirInUse):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("damaged", ["name = 'orders'", "tbl_name = 'orders' AND rootpage > 0"])
async def test_a_damaged_page_is_in_health_once_it_was_met(tmp_path: Path, damaged: str) -> None:
    await (await SqliteDatabase.open(tmp_path)).close()
    file = tmp_path / DATABASE_NAME
    with closing(sqlite3.connect(file)) as db:
        roots = db.execute(f"SELECT rootpage FROM sqlite_schema WHERE {damaged}").fetchall()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with file.open("r+b") as raw:
        for (root,) in roots:
            raw.seek((root - 1) * size)
            raw.write(b"\xff" * size)
    database = await SqliteDatabase.open(tmp_path)
    try:
        assert await database.fetch("SELECT * FROM tickets") == [], "all else can be read"
        with pytest.raises(sqlite3.DatabaseError, match="malformed"):
            await database.fetch("SELECT * FROM orders")
        health = database.health()
        assert not health.ok
        assert health.detail is not None
        assert "is damaged" in health.detail
    finally:
        await database.close()


async def test_backup_is_complete_and_never_overwritten(store: OrderStore, tmp_path: Path) -> None:
    await store.commit(created(fresh()))
    copy = tmp_path / "copy" / DATABASE_NAME
    copy.parent.mkdir()
    backup_database(tmp_path, copy)
    assert check_database(copy.parent) == []
    with closing(sqlite3.connect(copy)) as database:
        assert database.execute("SELECT order_id FROM orders").fetchall() == [("ord_1",)]
    with pytest.raises(BackupFailed):
        backup_database(tmp_path, copy)


async def test_a_check_finds_books_that_do_not_balance(
    store: OrderStore, database: SqliteDatabase, tmp_path: Path
) -> None:
    await store.commit(created(fresh()))
    assert check_database(tmp_path) == []
    await database.write([statement("UPDATE orders SET version = 5", ())])
    assert "history has a gap" in check_database(tmp_path)[0]
    await database.write(
        [statement("UPDATE orders SET status = 'completed', deadline_at = NULL", ())]
    )
    assert any("without a settled payout" in line for line in check_database(tmp_path))
