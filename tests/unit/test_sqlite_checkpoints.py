"""The write-ahead log restarts while the service runs, without long waits."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite import database as sqlite
from rpcsvc.store.backends.sqlite.database import BUSY_TIMEOUT_MS, DATABASE_NAME, SqliteDatabase
from tests.rows import statement

MOVES = 10
_INSERT = "INSERT INTO sandbox_settings (name, value) VALUES (?, 1)"


@contextmanager
def reading(data_dir: Path) -> Iterator[None]:
    """Another process, such as a backup, that reads as of one moment."""
    path = (data_dir / DATABASE_NAME).absolute().as_uri()
    with closing(sqlite3.connect(f"{path}?mode=ro", uri=True, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM sandbox_settings").fetchone()
        yield


async def write_and_move(database: SqliteDatabase, name: str) -> None:
    """Write one row, and wait for the checkpoint that it starts."""
    await database.write([statement(_INSERT, (name,))])
    async with asyncio.timeout(60):
        while not database._checkpoints.wants_restart:  # noqa: ASYNC110 - a thread of its own moves
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def each_row_starts_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "ROWS_BETWEEN", 1)
    monkeypatch.setattr(sqlite, "LONG_LOG_FRAMES", 0)


async def test_whoever_reads_beside_the_service_keeps_no_write_waiting(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path)
    wal = tmp_path / f"{DATABASE_NAME}-wal"
    try:
        await write_and_move(database, "first")
        with reading(tmp_path):
            # Each of them tries to restart the log, which the reader prevents.
            async with asyncio.timeout(MOVES * BUSY_TIMEOUT_MS / 1000 / 2):
                for number in range(MOVES):
                    await write_and_move(database, f"beside {number}")
        await write_and_move(database, "after")  # restarts the log ...
        size = wal.stat().st_size
        for number in range(MOVES):  # ... as do these: the file does not grow
            await write_and_move(database, f"alone {number}")
        assert wal.stat().st_size == size
    finally:
        await database.close()
