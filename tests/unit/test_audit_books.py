"""An audit beside a running service reads one snapshot of the database and writes nothing."""

from __future__ import annotations

import errno
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.audit import books
from rpcsvc.audit.books import read_books
from rpcsvc.audit.records import Books
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, open_reader
from rpcsvc.store.backends.sqlite.migrations import migrate

_TOUCH = "UPDATE evm_wallet SET reserved_to = reserved_to + 1"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """An open connection of a service to the database in ``tmp_path``."""
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        migrate(database)
        database.execute("INSERT INTO evm_wallet VALUES (1, '0xaa', 0)")
        yield database


def test_an_audit_makes_no_file(
    tmp_path: Path, service: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("mkdtemp", "mkstemp"):
        monkeypatch.setattr(tempfile, name, full)
    service.execute(_TOUCH)
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert read_books(tmp_path).evm_hot == "0xaa"
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == before


class Meanwhile:
    """A reader, with a commit of the service before each query."""

    def __init__(self, reader: sqlite3.Connection, service: sqlite3.Connection) -> None:
        self._reader = reader
        self._service = service
        self.commits = 0

    def execute(self, sql: str) -> sqlite3.Cursor:
        if sql in books._ALL:
            self.commits += 1
            row = self.commits, f"0x{self.commits:040x}"
            self._service.execute("INSERT INTO evm_addresses VALUES (?, ?)", row)
        return self._reader.execute(sql)

    def close(self) -> None:
        self._reader.close()


def test_books_show_one_moment_during_writes(
    tmp_path: Path, service: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[Meanwhile] = []

    def opened(path: Path) -> Meanwhile:
        readers.append(Meanwhile(open_reader(path), service))
        return readers[-1]

    monkeypatch.setattr(books, "open_reader", opened)
    assert set(read_books(tmp_path).evm_addresses) == set()
    monkeypatch.undo()
    (reader,) = readers
    assert len(read_books(tmp_path).evm_addresses) == reader.commits > 10


def test_service_may_restart_its_log_while_records_are_made(
    tmp_path: Path, service: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, busy = books._books, []

    def made(rows: books.Rows) -> Books:
        service.execute(_TOUCH)
        busy.append(service.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0])
        return real(rows)

    monkeypatch.setattr(books, "_books", made)
    read_books(tmp_path)
    assert busy == [0]
