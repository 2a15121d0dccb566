"""Reading committed rows over one connection, in one read transaction.. A read never suspends."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Any, Final

import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.sqlite.sql import compiled
from rpcsvc.store.database import Row

log = structlog.get_logger(__name__)

UNAVAILABLE: Final = (
    "The order book can't be written or read right now; nothing was changed."
    " Try again, with the same idempotency key if the call had one."
)


class Reader:
    """Reads over a connection in autocommit mode, all of them within one read transaction.

    Taking the locks of WAL mode anew for each read would cost as much as the read itself.
    """

    def __init__(self, reader: sqlite3.Connection) -> None:
        self._reader = reader
        self._reader.row_factory = sqlite3.Row
        self._is_damaged = False

    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        """All rows of a query over committed state. Raises errors.Unavailable."""
        text, bind, _ = compiled(sql)
        try:
            self._hold_snapshot()
            return self._reader.execute(text, bind(values)).fetchall()
        except sqlite3.Error as error:
            raise self._told(error) from error

    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        """The first row, or None. Raises errors.Unavailable."""
        text, bind, _ = compiled(sql)
        try:
            self._hold_snapshot()
            return self._reader.execute(text, bind(values)).fetchone()
        except sqlite3.Error as error:
            raise self._told(error) from error

    def _told(self, error: sqlite3.Error) -> Exception:
        """What the caller is told of an error of SQLite; of a damaged file, so is the operator."""
        if isinstance(error, sqlite3.OperationalError):
            return unavailable(error)
        self._note_damage(error)
        return error

    def _note_damage(self, error: Exception) -> None:
        """Remember that the file is damaged, if that is what the error says: nothing mends it."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) and not self._is_damaged:
            self._is_damaged = True
            report("critical", "database_damaged", reason=str(error))

    def _hold_snapshot(self) -> None:
        """Keep the read transaction open from one read to the next."""
        if not self._reader.in_transaction:
            self._reader.execute("BEGIN")


def unavailable(error: sqlite3.Error) -> Unavailable:
    """What callers are told. The text of the SQLite error stays in the log: it can name paths."""
    report("error", "database_unavailable", reason=str(error))
    return Unavailable(UNAVAILABLE)


def report(level: str, event: str, **details: str) -> None:
    """Log it, if that is possible.

    A log on the disk that is full can't be written either: that must not end the writer, whose
    callers are told anyway.
    """
    with suppress(OSError):
        getattr(log, level)(event, **details)
