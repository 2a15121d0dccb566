"""Checkpoints: moves committed pages from the write-ahead log into the database file.

By default SQLite lets the commit that fills the log do this, and every order that shares the commit
waits for the whole move: hundreds of milliseconds if the pages lie far apart. Here a separate
connection moves pages while the writer appends. Only the last step, restarting the log, pauses the
writer, and by then little is left to move.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import aiosqlite
import structlog

log = structlog.get_logger(__name__)

# A row dirties about two pages of 4 KiB, so this is some 32 MiB of log from one move to the next;
# more often would write the pages that many orders share more often.
ROWS_BETWEEN = 4_000
# Frames (pages in the log) that are few enough to be moved while the writer waits.
FEW_FRAMES = 1_000
# A log longer than this (32 MiB) is restarted; a shorter one keeps growing.
LONG_LOG_FRAMES = 8_000
MOST_PASSES = 5

# How long the writer, and every write behind it, waits for readers of other processes.
READERS_WAIT_MS = 50

_PASSIVE = "PRAGMA wal_checkpoint(PASSIVE)"
_RESTART = "PRAGMA wal_checkpoint(RESTART)"


class _Progress(NamedTuple):
    """SQLite's answer: whether others blocked the checkpoint, frames in the log, frames moved."""

    busy: int
    frames: int
    moved: int


class Checkpointer:
    """Moves pages while the writer runs. ``wants_restart`` asks the writer to pause for
    ``restart``.
    """

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._rows = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._is_well = True
        self.wants_restart = False
        self._task = asyncio.create_task(self._run(), name="checkpointer")

    @classmethod
    async def open(cls, path: Path) -> Checkpointer:
        """A checkpointer for the database at ``path``. Raises sqlite3.Error."""
        connection = await aiosqlite.connect(path, isolation_level=None)
        try:
            await connection.execute(f"PRAGMA busy_timeout = {READERS_WAIT_MS}")
            await connection.execute("PRAGMA wal_autocheckpoint = 0")
        except sqlite3.Error:
            await connection.close()  # its thread would keep the process from ending
            raise
        return cls(connection)

    def note(self, rows: int) -> None:
        """Count the rows of a commit; enough of them trigger a move."""
        self._rows += rows
        if self._rows >= ROWS_BETWEEN:
            self._rows = 0
            self._wake.set()

    async def restart(self) -> None:
        """Restart the log. The writer must pause meanwhile, and no read may hold the log.

        A running backup or audit holds it for minutes. Then the log keeps growing, and the next
        move asks again.
        """
        self.wants_restart = False
        with suppress(sqlite3.Error):
            await self._connection.execute_fetchall(_RESTART)

    async def close(self) -> None:
        """Finish a running move and close."""
        self._closing = True
        self._wake.set()
        await self._task
        await self._connection.close()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._closing:
                return
            await self._move()

    async def _move(self) -> None:
        """Move pages until few are left: each pass leaves less for concurrent commits to add."""
        try:
            progress = await self._pass()
            for _ in range(MOST_PASSES - 1):
                if progress.frames - progress.moved <= FEW_FRAMES:
                    break
                progress = await self._pass()
        except sqlite3.Error as error:
            self._report_failure(error)
            return
        self._is_well = True
        self.wants_restart = progress.frames > LONG_LOG_FRAMES

    async def _pass(self) -> _Progress:
        cursor = await self._connection.execute(_PASSIVE)
        row = await cursor.fetchone()
        await cursor.close()
        return _Progress(*row) if row is not None else _Progress(1, 0, 0)

    def _report_failure(self, error: sqlite3.Error) -> None:
        """Log a failure once: commits still go to the log, and the next move is tried as usual."""
        if self._is_well:
            log.warning("checkpoint_failed", reason=str(error))
        self._is_well = False
