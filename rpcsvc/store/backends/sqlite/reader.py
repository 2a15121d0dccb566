"""Reads committed rows over one connection, in one read transaction; compiles the shared text of
queries for SQLite. A read never suspends."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

import orjson
import structlog
from typing_extensions import override

from rpcsvc.errors import Unavailable
from rpcsvc.store.database import Query, Row, Tables

MAX_ROWS = 64

_PLACE: Final = re.compile(r"(?P<many>\bIN )?:(?P<name>[a-z]\w*)")
_INSERT: Final = re.compile(
    r"(?P<head>INSERT INTO .+? VALUES )(?P<row>\(.+?\))(?P<tail>(?: ON CONFLICT .+)?)", re.DOTALL
)


class SqliteQuery(NamedTuple):
    """SQL with ``?``, and the order of its values.

    ``insert``: the parts of an INSERT of given values: before its row, the row, and after it.
    """

    text: str
    bind: Callable[[Mapping[str, Any]], Sequence[Any]]
    insert: tuple[str, str, str] | None


@lru_cache(maxsize=1024)
def compiled(sql: str) -> SqliteQuery:
    """The SQL for SQLite. ``bind`` raises KeyError if a value is missing."""
    places = [(found["name"], found["many"] is not None) for found in _PLACE.finditer(sql)]
    text = _PLACE.sub(_mark, sql)
    found = _INSERT.fullmatch(text)
    return SqliteQuery(
        text,
        _binder(places),
        None if found is None else (found["head"], found["row"], found["tail"]),
    )


def inserts(insert: tuple[str, str, str], count: int) -> Iterator[tuple[str, int, int]]:
    """Statements that insert ``count`` rows, each with its first row and its number of rows.

    Sizes are powers of two, so few statements are prepared.
    """
    start = 0
    while start < count:
        size = min(MAX_ROWS, 1 << ((count - start).bit_length() - 1))
        yield _of_rows(insert, size), start, size
        start += size


@lru_cache(maxsize=512)
def _of_rows(insert: tuple[str, str, str], size: int) -> str:
    head, row, tail = insert
    return head + ", ".join([row] * size) + tail


def _mark(found: re.Match[str]) -> str:
    return "?" if found["many"] is None else "IN (SELECT value FROM json_each(?))"


def _binder(places: list[tuple[str, bool]]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    names = [name for name, _ in places]
    if any(many for _, many in places):
        return lambda values: [
            orjson.dumps(list(values[name])).decode() if many else values[name]
            for name, many in places
        ]
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: [values[name] for name in names]


log = structlog.get_logger(__name__)

UNAVAILABLE: Final = (
    "The order book can't be written or read right now; nothing was changed."
    " Try again, with the same idempotency key if the call had one."
)


class SqliteReader(Tables):
    """Reads over a connection in autocommit mode, within one read transaction.

    Taking the locks of WAL mode for each read would cost as much as the read itself.
    """

    def __init__(self, reader: sqlite3.Connection) -> None:
        self._reader = reader
        self._reader.row_factory = sqlite3.Row
        self._is_damaged = False

    @override
    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        text, bind, _ = compiled(sql)
        try:
            self._hold_snapshot()
            return self._reader.execute(text, bind(values)).fetchall()
        except sqlite3.Error as error:
            raise self._reported(error) from error

    @override
    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        text, bind, _ = compiled(sql)
        try:
            self._hold_snapshot()
            return self._reader.execute(text, bind(values)).fetchone()
        except sqlite3.Error as error:
            raise self._reported(error) from error

    @override
    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        return [await self.fetch(sql, **values) for sql, values in queries]

    def _reported(self, error: sqlite3.Error) -> Exception:
        """The error for the caller of a failed read; a damaged file is logged."""
        if isinstance(error, sqlite3.OperationalError):
            return unavailable(error)
        self._note_damage(error)
        return error

    def _note_damage(self, error: Exception) -> None:
        """Remember that the file is damaged, if the error says so: nothing repairs it."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) and not self._is_damaged:
            self._is_damaged = True
            report("critical", "database_damaged", reason=str(error))

    def _hold_snapshot(self) -> None:
        """Keep the read transaction open for further reads."""
        if not self._reader.in_transaction:
            self._reader.execute("BEGIN")


def unavailable(error: sqlite3.Error) -> Unavailable:
    """The error text for callers. SQLite's own text stays in the log: it can name paths."""
    report("error", "database_unavailable", reason=str(error))
    return Unavailable(UNAVAILABLE)


def report(level: str, event: str, **details: str) -> None:
    """Log an error, if possible.

    A log on the same full disk may fail, too: that must not end the writer, whose callers get the
    error anyway.
    """
    with suppress(OSError):
        getattr(log, level)(event, **details)
