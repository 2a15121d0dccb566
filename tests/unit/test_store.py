"""The store: whole changes or none, one owner, history that stays, neighbours that don't suffer."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer, PriceLateDeposit
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositKey, OnDeadline, Order
from rpcsvc.orders.ports.store import (
    Change,
    HistoryEntry,
    PendingEffect,
    StatusView,
    StoredResponse,
    Ticket,
)
from rpcsvc.store.backends.sqlite.database import (
    DATABASE_NAME,
    LOCK_NAME,
    SNAPSHOT_SECONDS,
    Database,
    DataDirInUse,
    OwnerLock,
)
from rpcsvc.store.backends.sqlite.maintenance import BackupFailed, backup_database, check_database
from rpcsvc.store.backends.sqlite.migrations import UnknownSchema
from rpcsvc.store.database import StoreConflict
from rpcsvc.store.operator_books import SqlOperatorBooks
from rpcsvc.store.orders import SqlOrderStore
from rpcsvc.store.wallets import SqlUnrecordedLedger
from tests.rows import all_rows, statement
from tests.unit.orders import NOW, terms

VIEW = StatusView(b'{"view":1}', NOW + 1000)


@pytest.fixture
def store(database: Database) -> SqlOrderStore:
    return SqlOrderStore(database, lambda: "key")


def fresh(number: int = 1) -> Order:
    agreed = replace(terms(), order_id=f"ord_{number}", deposit_address=f"address {number}")
    return open_order(agreed)


def created(order: Order, response: StoredResponse | None = None) -> Change:
    entry = HistoryEntry(1, NOW, "OrderCreated", order.status.value, {})
    return Change(order=order, view=VIEW, is_new=True, history=entry, response=response)


def response(key: str) -> StoredResponse:
    return StoredResponse("public", key, "swap.create", {"amount": "1"}, b'{"ok":true}', NOW)


async def test_an_order_comes_back_as_it_was_committed(
    store: SqlOrderStore, database: Database
) -> None:
    order = fresh()
    await store.commit(created(order))
    assert await store.order("ord_1") == order
    for event in (
        ev.DepositSeen(DepositKey("monero", "tx", 0), 2**53 + 1, None, NOW),
        ev.DepositConfirmed(DepositKey("monero", "tx", 0)),
    ):
        result = transition(order, event, NOW)
        order = result.order
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        await store.commit(Change(order=order, view=VIEW, history=entry, effects=result.effects))
    assert await store.order("ord_1") == order
    versions = "SELECT version FROM order_events WHERE order_id = 'ord_1' ORDER BY version"
    assert all_rows(database, versions) == [(1,), (2,), (3,)]


async def test_key_order_and_answer_are_kept_together_or_not_at_all(
    store: SqlOrderStore, database: Database
) -> None:
    await store.commit(created(fresh(1), response("k")))
    with pytest.raises(StoreConflict):
        await store.commit(created(fresh(2), response("k")))
    assert await store.order("ord_2") is None
    assert all_rows(database, "SELECT count(*) FROM event_log") == [(1,)]
    assert all_rows(database, "SELECT count(*) FROM idempotency_keys") == [(1,)]


async def test_one_bad_write_does_not_take_its_neighbours_down(store: SqlOrderStore) -> None:
    await store.commit(created(fresh(0), response("taken")))
    keys = ["a", "taken", "b", "c"]
    changes = [created(fresh(n), response(key)) for n, key in enumerate(keys, start=1)]
    results = await asyncio.gather(*map(store.commit, changes), return_exceptions=True)
    assert [isinstance(result, StoreConflict) for result in results] == [False, True, False, False]
    assert [await store.order(f"ord_{n}") is not None for n in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]


async def test_what_sqlite_can_not_hold_is_refused_and_the_next_write_goes_on(
    store: SqlOrderStore,
) -> None:
    for bad in ("\ud800", 2**63, object()):
        ticket = Ticket("t", NOW, "agent", bad, None, None, None)  # type: ignore[arg-type] # bad
        with pytest.raises(StoreConflict):
            await store.commit(Change(ticket=ticket))
    await store.commit(created(fresh()))
    assert await store.order("ord_1") is not None


async def test_a_version_happens_once(store: SqlOrderStore) -> None:
    await store.commit(created(fresh()))
    again = replace(fresh(), version=2)
    entry = HistoryEntry(1, NOW, "again", "awaiting_deposit", {})
    with pytest.raises(StoreConflict):
        await store.commit(Change(order=again, view=VIEW, history=entry))


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE event_log SET event = 'other'",
        "DELETE FROM event_log",
        "UPDATE deposits SET units = 1",
        "UPDATE transfers SET address = 'thief'",
        "UPDATE transfers SET units = units + 1",
        "UPDATE transfers SET raw = 'other'",
        "INSERT INTO transfers SELECT NULL, transfer_id || 'x', order_id, kind, network, asset,"
        " address, units, fee, state, 'other', raw, reason, integrator_fee, receipt FROM transfers",
    ],
)
async def test_the_database_refuses_to_change_what_has_happened(
    store: SqlOrderStore, database: Database, sql: str
) -> None:
    order = fresh()
    await store.commit(created(order))
    for event in (
        ev.DepositSeen(DepositKey("monero", "tx", 0), order.terms.deposit_amount, None, NOW),
        ev.DepositConfirmed(DepositKey("monero", "tx", 0)),
        ev.TransferPrepared("ord_1/payout/1", "id", "raw"),
    ):
        order = transition(order, event, NOW).order
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        await store.commit(Change(order=order, view=VIEW, history=entry))
    with pytest.raises(StoreConflict):
        await database.write([statement(sql, ())])


async def test_a_status_view_holds_for_its_time_and_its_version_of_the_service(
    store: SqlOrderStore, database: Database
) -> None:
    await store.commit(created(fresh()))
    assert await store.status_view("ord_1", NOW) == ("pay here", VIEW.body)
    assert await store.status_view("ord_1", NOW + 1000) is None
    assert await SqlOrderStore(database, lambda: "other").status_view("ord_1", NOW) is None


async def test_pending_effects_come_back_with_prepared_transfers_first(
    store: SqlOrderStore,
) -> None:
    for number in (1, 2):
        order = fresh(number)
        await store.commit(created(order))
        deposit = DepositKey("monero", f"tx{number}", 0)
        steps: list[ev.Event] = [
            ev.DepositSeen(deposit, order.terms.deposit_amount, None, NOW),
            ev.DepositConfirmed(deposit),
        ]
        if number == 2:
            steps.append(ev.TransferPrepared("ord_2/payout/1", "id", "raw"))
        for event in steps:
            result = transition(order, event, NOW)
            order = result.order
            entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
            await store.commit(
                Change(order=order, view=VIEW, history=entry, effects=result.effects)
            )
    first, second = (
        PendingEffect(f"ord_{n}", AdvanceTransfer(f"ord_{n}/payout/1")) for n in (2, 1)
    )
    assert await store.pending_effects() == [first, second]
    await store.commit(Change(done=(first, PendingEffect("ord_1", PriceLateDeposit()))))
    assert await store.pending_effects() == [second]


async def test_overdue_orders_may_be_asked_for_without_those_to_be_refunded(
    store: SqlOrderStore,
) -> None:
    waiting, stuck = fresh(1), fresh(2)
    for order in (waiting, replace(stuck, on_deadline=OnDeadline.REFUND)):
        await store.commit(created(order))
    late = waiting.deadline_at or 0
    assert await store.overdue(late, 9, {}) == ["ord_1", "ord_2"]
    assert await store.overdue(late, 9, {}, but=OnDeadline.REFUND) == ["ord_1"]
    assert await store.overdue(late, 1, {}) == ["ord_1"]
    assert await store.overdue(NOW, 9, {}) == []


async def test_overdue_orders_wait_until_the_deposits_of_their_network_are_known(
    store: SqlOrderStore,
) -> None:
    waiting, paying = fresh(1), replace(fresh(2), on_deadline=OnDeadline.REPUBLISH)
    for order in (waiting, paying):
        await store.commit(created(order))
    late, network = waiting.deadline_at or 0, waiting.terms.deposit_network
    assert await store.overdue(late + 9, 9, {network: late - 1}) == ["ord_2"]
    assert await store.overdue(late + 9, 9, {network: 0, "elsewhere": late}) == ["ord_2"]
    assert await store.overdue(late + 9, 9, {network: late}) == ["ord_1", "ord_2"]
    assert await store.overdue(late + 9, 9, {"elsewhere": 0}) == ["ord_1", "ord_2"]


async def test_orders_that_are_not_over_are_open(store: SqlOrderStore) -> None:
    waiting, over = fresh(1), fresh(2)
    for order in (waiting, over):
        await store.commit(created(order))
    over = transition(over, ev.DeadlinePassed(), over.deadline_at or 0).order
    assert over.status.is_terminal
    assert sorted(await store.open_orders()) == ["ord_1", "ord_2"]
    entry = HistoryEntry(over.version, NOW, "e", over.status.value, {})
    await store.commit(Change(order=over, view=VIEW, history=entry))
    assert await store.open_orders() == ["ord_1"]


async def test_an_annotation_is_read_back_until_it_is_removed(database: Database) -> None:
    ledger, books = SqlUnrecordedLedger(database), SqlOperatorBooks(database)
    assert await ledger.explained("monero") == []
    await books.annotate("monero", "tx", "paid by hand", NOW)
    assert await ledger.explained("monero") == ["tx"]
    await books.remove_annotation("monero", "tx")
    assert await ledger.explained("monero") == []


def test_what_others_write_is_seen_within_a_second() -> None:
    assert 0 < SNAPSHOT_SECONDS <= 1


async def test_several_changes_are_committed_together_or_not_at_all(
    store: SqlOrderStore,
) -> None:
    await store.commit(created(fresh(1)))
    with pytest.raises(StoreConflict):
        await store.commit(created(fresh(2)), created(fresh(1)))
    assert await store.order("ord_2") is None
    await store.commit(created(fresh(2)), created(fresh(3)))
    assert await store.order("ord_2") is not None
    assert await store.order("ord_3") is not None


async def test_old_keys_are_forgotten_and_young_ones_kept(store: SqlOrderStore) -> None:
    for number, key in enumerate(["old", "older", "young"]):
        kept = replace(response(key), created_at=NOW + number * 1000)
        await store.commit(created(fresh(number), kept))
    assert await store.forget_responses(NOW + 2000) == 2
    assert await store.response("public", "old") is None
    assert await store.response("public", "young") is not None
    assert await store.forget_responses(NOW + 2000) == 0


async def test_a_clock_set_weeks_ahead_drops_no_young_keys(store: SqlOrderStore) -> None:
    hour, month = 3_600_000, 30 * 86_400_000
    for number, hours in enumerate((0, 1, 24)):
        kept = replace(response(f"after {hours} h"), created_at=NOW + hours * hour)
        await store.commit(created(fresh(number), kept))
    assert await store.forget_responses(NOW + month) == 2
    assert await store.response("public", "after 24 h") is not None
    assert await store.forget_responses(NOW + month) == 1
    assert await store.forget_responses(NOW + month) == 0


def test_every_table_is_strict_and_no_column_takes_a_real(database: Database) -> None:
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
def test_money_is_an_integer_or_is_not_taken(database: Database, units: object) -> None:
    """What a loose column would keep as a REAL. ``database`` has made the tables."""
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


async def test_a_commit_is_on_disk_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[aiosqlite.Connection] = []
    connect = aiosqlite.connect

    def noted(*args: Any, **kwargs: Any) -> aiosqlite.Connection:
        opened.append(connect(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(aiosqlite, "connect", noted)
    database = await Database.open(tmp_path)
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


def test_who_removes_the_lock_file_of_a_running_service_lets_no_second_one_in(
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
    await (await Database.open(tmp_path)).close()
    file = tmp_path / DATABASE_NAME
    with closing(sqlite3.connect(file)) as db:
        roots = db.execute(f"SELECT rootpage FROM sqlite_schema WHERE {damaged}").fetchall()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with file.open("r+b") as raw:
        for (root,) in roots:
            raw.seek((root - 1) * size)
            raw.write(b"\xff" * size)
    database = await Database.open(tmp_path)
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


async def test_the_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    await (await Database.open(tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(UnknownSchema):
        await Database.open(tmp_path)


async def test_a_backup_is_whole_and_is_never_written_over(
    store: SqlOrderStore, tmp_path: Path
) -> None:
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
    store: SqlOrderStore, database: Database, tmp_path: Path
) -> None:
    await store.commit(created(fresh()))
    assert check_database(tmp_path) == []
    await database.write([statement("UPDATE orders SET version = 5", ())])
    assert "history has a gap" in check_database(tmp_path)[0]
    await database.write(
        [statement("UPDATE orders SET status = 'completed', deadline_at = NULL", ())]
    )
    assert any("without a settled payout" in line for line in check_database(tmp_path))
