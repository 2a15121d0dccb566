"""db check and db backup: sound books pass, every planted fault is named, copies are safe."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite import maintenance
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from rpcsvc.store.backends.sqlite.maintenance import (
    PARTIAL,
    BackupFailed,
    backup_database,
    check_database,
)
from tests.sandbox import MONERO, sandbox


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with orders completed, refunded, in payout and awaiting a deposit."""
    data_dir = tmp_path_factory.mktemp("sound")

    async def fill() -> None:
        async with sandbox(data_dir) as box:
            completed, refunded = await box.order("x2u"), await box.order("x2u")
            await completed.fund()
            await refunded.fund("400")
            await box.settle()
            await refunded.give_refund_address(MONERO)
            await box.settle()
            paid = await box.order("u2x")
            await paid.fund()
            for _ in range(8):
                if (await paid.status())["state"] != "swap_processing":
                    await box.settle(0.5)
            await box.order("u2x")

    asyncio.run(fill())
    return data_dir


@pytest.fixture
def books(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound data directory, which a test may damage."""
    return Path(shutil.copytree(sound, tmp_path / "books"))


def spoil(data_dir: Path, *statements: str) -> None:
    """Change rows with triggers, checks and foreign keys off."""
    with closing(sqlite3.connect(data_dir / DATABASE_NAME, isolation_level=None)) as database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        for name, kind in database.execute(
            "SELECT name, type FROM sqlite_schema WHERE type = 'trigger' OR name = ?",
            ("one_payout_per_order",),
        ).fetchall():
            database.execute(f"DROP {kind} {name}")
        for statement in statements:
            changed = database.execute(statement)
            assert changed.rowcount > 0, f"plants nothing: {statement}"


def test_a_sound_database_has_no_problems(books: Path) -> None:
    statuses = "SELECT DISTINCT status FROM orders ORDER BY status"
    with closing(sqlite3.connect(books / DATABASE_NAME)) as database:
        found = [status for (status,) in database.execute(statuses)]
    assert found == ["awaiting_deposit", "completed", "executing_swap", "refunded"]
    assert check_database(books) == []


PAYOUT = "SELECT transfer_id FROM transfers WHERE kind = 'payout' AND state = 'settled'"
REFUND = "SELECT transfer_id FROM transfers WHERE kind = 'refund'"
COMPLETED = "SELECT order_id FROM orders WHERE status = 'completed'"
NEWEST = "SELECT seq FROM orders ORDER BY seq DESC LIMIT 1"

FAULTS = {
    "a deposit is spent on a transfer of another order": [
        f"UPDATE deposits SET transfer_id = ({REFUND}) WHERE transfer_id = ({PAYOUT})"
    ],
    "a deposit is spent on a transfer that does not exist": [
        f"UPDATE deposits SET transfer_id = 'nothing' WHERE transfer_id = ({PAYOUT})"
    ],
    "an order has more than one payout that is, or may be, paid": [
        "INSERT INTO transfers SELECT NULL, 'second', order_id, kind, network, asset, address,"
        " units, fee, 'published', NULL, NULL, NULL, 0, NULL"
        f" FROM transfers WHERE transfer_id = ({PAYOUT})"
    ],
    "a refund is not its deposits less the fee": [
        f"UPDATE transfers SET units = units + 1 WHERE transfer_id = ({REFUND})"
    ],
    "a payout goes to another address than was ordered": [
        f"UPDATE transfers SET address = 'thief' WHERE transfer_id = ({PAYOUT})"
    ],
    "an order is completed without a settled payout": [
        f"UPDATE transfers SET state = 'failed' WHERE transfer_id = ({PAYOUT})"
    ],
    "an order that is over has a deadline, or one that is not has none": [
        f"UPDATE orders SET deadline_at = 1 WHERE order_id = ({COMPLETED})"
    ],
    "an order's history has a gap": [
        "DELETE FROM event_log WHERE version = 2 AND order_seq ="
        f" (SELECT seq FROM orders WHERE order_id = ({COMPLETED}))"
    ],
    "a transfer that is not over has no pending effect": ["DELETE FROM effects"],
    "the file is damaged: CHECK constraint failed in orders": [
        f"UPDATE orders SET deposit_amount = -1 WHERE order_id = ({COMPLETED})"
    ],
}


@pytest.mark.parametrize("problem", FAULTS)
def test_each_planted_fault_is_named(books: Path, problem: str) -> None:
    spoil(books, *FAULTS[problem])
    assert any(line.startswith(problem) for line in check_database(books)), check_database(books)


def test_a_planted_fault_is_reported_with_the_order_that_has_it(books: Path) -> None:
    spoil(books, f"UPDATE orders SET deadline_at = NULL WHERE seq = ({NEWEST})")
    with closing(sqlite3.connect(books / DATABASE_NAME)) as database:
        (order_id,) = database.execute(
            f"SELECT order_id FROM orders WHERE seq = ({NEWEST})"
        ).fetchone()
    assert any(line.endswith(f": {order_id}") for line in check_database(books))


def test_history_that_does_not_begin_at_version_1_has_a_gap(books: Path) -> None:
    seq = f"SELECT seq FROM orders WHERE order_id = ({COMPLETED})"
    spoil(books, f"UPDATE event_log SET version = 0 WHERE version = 1 AND order_seq = ({seq})")
    assert any("history has a gap" in line for line in check_database(books))


def test_a_row_without_its_order_is_found(books: Path) -> None:
    spoil(books, f"DELETE FROM orders WHERE order_id = ({COMPLETED})")
    problems = check_database(books)
    assert any("of deposits refers to nothing in orders" in line for line in problems)


def test_check_reports_a_file_that_is_no_database(tmp_path: Path) -> None:
    assert check_database(tmp_path) == [f"there is no database at {tmp_path / DATABASE_NAME}"]
    (tmp_path / DATABASE_NAME).write_bytes(b"this is no database" * 100)
    assert check_database(tmp_path) == ["the file can't be read: file is not a database"]


@pytest.mark.parametrize("version", [0, 99])
def test_the_books_of_another_schema_are_not_judged(books: Path, version: int) -> None:
    with closing(sqlite3.connect(books / DATABASE_NAME)) as database:
        database.execute(f"PRAGMA user_version = {version}")
        database.execute("ALTER TABLE effects RENAME TO works")
    (problem,) = check_database(books)
    assert problem.startswith(f"the schema is version {version};")


def test_damaged_pages_are_found(books: Path) -> None:
    path = books / DATABASE_NAME
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = DELETE")
        (page,) = database.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'deposits'"
        ).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    problems = check_database(books)
    assert any(line.startswith(("the file is damaged", "the file can't")) for line in problems)


async def test_a_check_and_a_backup_work_while_the_service_runs(tmp_path: Path) -> None:
    data_dir = tmp_path / "live"
    copy = tmp_path / "copy" / DATABASE_NAME
    copy.parent.mkdir(mode=0o700)
    async with sandbox(data_dir) as box:
        placed = await box.order("x2u")
        assert check_database(data_dir) == []
        assert backup_database(data_dir, copy) == []
        await placed.fund()
        await box.settle()
        assert check_database(data_dir) == []
    with closing(sqlite3.connect(copy)) as database:
        rows = database.execute("SELECT order_id, status FROM orders").fetchall()
    assert rows == [(placed.order_id, "awaiting_deposit")]


def test_a_backup_is_one_private_file(books: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    before = os.umask(0)
    try:
        assert backup_database(books, folder / DATABASE_NAME) == []
    finally:
        os.umask(before)
    assert [path.name for path in folder.iterdir()] == [DATABASE_NAME]
    assert stat.S_IMODE((folder / DATABASE_NAME).stat().st_mode) == 0o600
    # the header says: no write-ahead log, so it can be read on a read-only file system
    assert (folder / DATABASE_NAME).read_bytes()[18:20] == b"\x01\x01"
    assert check_database(folder) == []


def test_a_service_goes_on_from_a_backup(books: Path, tmp_path: Path) -> None:
    restored = tmp_path / "restored"
    restored.mkdir(mode=0o700)
    backup_database(books, restored / DATABASE_NAME)

    async def go_on() -> str:
        async with sandbox(restored) as box:
            placed = await box.order("u2x")
            await placed.fund()
            await box.settle()
            return str((await placed.status())["state"])

    assert asyncio.run(go_on()) == "completed"
    assert check_database(restored) == []


def test_a_backup_never_replaces_a_file(books: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("precious")
    with pytest.raises(BackupFailed, match=r"taken exists\. Name a new file"):
        backup_database(books, taken)
    assert taken.read_text() == "precious"


def test_a_backup_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    destination = tmp_path / "copy"
    with pytest.raises(BackupFailed, match="There is no database"):
        backup_database(data_dir, destination)
    (data_dir / DATABASE_NAME).write_bytes(b"this is no database" * 100)
    with pytest.raises(BackupFailed, match="could not be copied: file is not a database"):
        backup_database(data_dir, destination)
    with pytest.raises(BackupFailed, match="can't be made: No such file or directory"):
        backup_database(data_dir, tmp_path / "nowhere" / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_backup_copies_one_moment_and_says_how_far_it_is(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_PAGES_AT_ONCE", 8)
    copy, steps = tmp_path / "copy", list[tuple[str, int, int]]()

    def report(what: str, done: int, total: int) -> None:
        steps.append((what, done, total))
        if what == "copying":
            assert not copy.exists(), "a part has another name"
            with closing(sqlite3.connect(books / DATABASE_NAME)) as writer, writer:
                writer.execute("INSERT INTO settle_times VALUES (1, ?, 1, 1)", (f"late {done}",))

    assert backup_database(books, copy, report) == []
    copied = [(done, total) for what, done, total in steps if what == "copying"]
    assert len(copied) > 5
    assert [done for done, _ in copied] == sorted({done for done, _ in copied})
    assert copied[-1][0] == copied[-1][1]
    assert {what for what, _, _ in steps} == {"copying", "checking the file", "checking the books"}
    with closing(sqlite3.connect(copy)) as database:
        late = "SELECT count(*) FROM settle_times WHERE kind LIKE 'late %'"
        assert database.execute(late).fetchone() == (0,)


def test_interrupted_backup_leaves_no_file(books: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()

    def interrupt(_what: str, _done: int, _total: int) -> None:
        assert [each.name for each in folder.iterdir()] == [f"copy{PARTIAL}"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup_database(books, folder / "copy", interrupt)
    assert list(folder.iterdir()) == []


def test_backup_whose_folder_cannot_be_synced_is_reported(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(maintenance, "sync_directory", refuse)
    with pytest.raises(BackupFailed, match="copy is whole, but a power failure may take its name"):
        backup_database(books, tmp_path / "copy")
    assert (tmp_path / "copy").is_file()


def test_backup_beside_the_part_of_another_is_refused(books: Path, tmp_path: Path) -> None:
    part = tmp_path / f"copy{PARTIAL}"
    part.write_text("of a killed process")
    with pytest.raises(BackupFailed, match="Delete it if none is"):
        backup_database(books, tmp_path / "copy")
    assert part.read_text() == "of a killed process"


def test_backup_needs_no_hard_links(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    assert backup_database(books, tmp_path / "copy") == []
    assert not (tmp_path / f"copy{PARTIAL}").exists()


def test_backup_of_damaged_books_is_kept_with_its_problems(books: Path, tmp_path: Path) -> None:
    spoil(books, *FAULTS["a transfer that is not over has no pending effect"])
    copy = tmp_path / "copy"
    assert backup_database(books, copy) == check_database(books)
    assert check_database(books)
    assert copy.is_file()
