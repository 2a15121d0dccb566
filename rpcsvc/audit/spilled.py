"""Collections with their newest entries in memory and all others in a temporary file: an audit of
many orders takes no more memory than one of some thousands.

A small collection opens no file. A file is a database of SQLite without a name: it is gone with its
collection, at the latest with the process.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import (
    AsyncIterator,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    ValuesView,
)
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar
from weakref import finalize

from msgspec import json
from typing_extensions import override

from rpcsvc.store.database import BooksUnreadable

T = TypeVar("T")
K = TypeVar("K", str, int)

# Entries of one collection in memory.
IN_MEMORY = 2_000
_PAGE: Final = 500


class SpilledList(Generic[T]):
    """Values of one type, in sequence."""

    def __init__(self, kind: Any, values: Iterable[T] = ()) -> None:
        self._decoder = json.Decoder(kind)
        self._new: list[T] = []
        self._file: _File | None = None
        self.extend(values)

    def append(self, value: T) -> None:
        """Add a value."""
        self._new.append(value)
        if len(self._new) >= IN_MEMORY:
            self._file = self._file or _File()
            self._file.add((None, value) for value in self._new)
            self._new.clear()

    def extend(self, values: Iterable[T]) -> None:
        """Add values."""
        for value in values:
            self.append(value)

    def cut(self, length: int) -> None:
        """Drop all values but the first ``length``."""
        spilled = 0 if self._file is None else self._file.count
        if self._file is not None and length < spilled:
            self._file.cut(length)
        del self._new[max(0, length - spilled) :]

    def __iter__(self) -> Iterator[T]:
        if self._file is not None:
            yield from map(self._decoder.decode, self._file.in_sequence())
        yield from self._new

    def __len__(self) -> int:
        return len(self._new) + (0 if self._file is None else self._file.count)


class SpilledGroups(Mapping[K, list[T]]):
    """Values of one type under keys, several under one, in sequence. Keys are listed ascending."""

    def __init__(self, kind: Any, entries: Iterable[tuple[K, T]] = ()) -> None:
        self._decoder = json.Decoder(kind)
        self._new: dict[K, list[T]] = {}
        self._count = 0
        self._file: _File | None = None
        for key, value in entries:
            self.add(key, value)

    def add(self, key: K, value: T) -> None:
        """Add a value to those of a key."""
        self._new.setdefault(key, []).append(value)
        self._count += 1
        if self._count >= IN_MEMORY:
            self._file = self._file or _File()
            self._spill(self._file)

    def newest(self, key: K) -> T:
        """Return the last value that was added to a key. Raises KeyError."""
        if key in self._new:
            return self._new[key][-1]
        found = [] if self._file is None else self._file.of(key, "DESC LIMIT 1")
        if not found:
            raise KeyError(key)
        value: T = self._decoder.decode(found[0])
        return value

    @override
    def __getitem__(self, key: K) -> list[T]:
        found = [] if self._file is None else self._file.of(key)
        values = [*map(self._decoder.decode, found), *self._new.get(key, ())]
        if not values:
            raise KeyError(key)
        return values

    @override
    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.ascending())

    @override
    def __len__(self) -> int:
        return len(self._new) if self._file is None else sum(1 for _ in self)

    @override
    def items(self) -> ItemsView[K, list[T]]:
        return _Items(self)

    def ascending(self) -> Iterator[tuple[K, list[T]]]:
        """Yield each key with its values."""
        if self._file is None:
            yield from sorted(self._new.items(), key=itemgetter(0))
            return
        self._spill(self._file)
        for key, entries in groupby(self._file.by_key(), itemgetter(0)):
            yield key, [self._decoder.decode(value) for _, value in entries]

    def _spill(self, file: _File) -> None:
        file.add((key, value) for key in sorted(self._new) for value in self._new[key])
        self._new.clear()
        self._count = 0


class SpilledDict(MutableMapping[K, T]):
    """A value of one type for each key; without values, a set of keys. They are listed ascending.

    Nothing is deleted.
    """

    def __init__(self, kind: Any, entries: Iterable[tuple[K, T]] = ()) -> None:
        self._entries = SpilledGroups[K, T](kind, entries)

    @override
    def __setitem__(self, key: K, value: T) -> None:
        self._entries.add(key, value)

    @override
    def __getitem__(self, key: K) -> T:
        return self._entries.newest(key)

    @override
    def __delitem__(self, key: K) -> None:
        raise NotImplementedError

    @override
    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    @override
    def __len__(self) -> int:
        return len(self._entries)

    @override
    def items(self) -> ItemsView[K, T]:
        return _Items(self)

    @override
    def values(self) -> ValuesView[T]:
        return _Values(self)

    def ascending(self) -> Iterator[tuple[K, T]]:
        """Yield each key with its value."""
        return ((key, values[-1]) for key, values in self._entries.ascending())


class _Items(ItemsView[Any, Any]):
    @override
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        mapping: Any = self._mapping
        return iter(mapping.ascending())


class _Values(ValuesView[Any]):
    @override
    def __iter__(self) -> Iterator[Any]:
        mapping: Any = self._mapping
        return (value for _, value in mapping.ascending())


class _File:
    """Entries with their number, from 1 on, and a key. Everything raises BooksUnreadable.

    Values are JSON, which holds units of more than 64 bits, too. Rows are read in pages: no cursor
    stays open. The index is made at the first look-up, which takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        finalize(self, self._db.close)
        self._has_index = False
        self.count = 0
        # A write that finds no room leaves the file as it was.
        for sql in (
            "PRAGMA journal_mode = MEMORY",
            "PRAGMA synchronous = OFF",
            "CREATE TABLE entries (number INTEGER PRIMARY KEY, key, value)",
        ):
            self._fetch(sql)

    def add(self, entries: Iterable[tuple[Any, Any]]) -> None:
        numbered = enumerate(entries, self.count + 1)
        rows = [(number, key, json.encode(value)) for number, (key, value) in numbered]
        try:
            with self._db:
                self._db.execute("BEGIN")
                self._db.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise _unusable(error) from error
        self.count += len(rows)

    def cut(self, count: int) -> None:
        self._fetch("DELETE FROM entries WHERE number > ?", count)
        self.count = count

    def of(self, key: Any, which: str = "") -> list[bytes]:
        """Return the values of a key in sequence."""
        self._index()
        sql = f"SELECT value FROM entries WHERE key = ? ORDER BY number {which}"  # noqa: S608
        return [value for (value,) in self._fetch(sql, key)]

    def in_sequence(self) -> Iterator[bytes]:
        sql = "SELECT value FROM entries WHERE number > ? ORDER BY number LIMIT ?"
        for at in range(0, self.count, _PAGE):
            yield from (value for (value,) in self._fetch(sql, at, _PAGE))

    def by_key(self) -> Iterator[tuple[Any, bytes]]:
        """Yield all entries by key, ascending, and in sequence."""
        self._index()
        where, after = "", ()
        while True:
            page = self._fetch(
                f"SELECT key, number, value FROM entries {where} ORDER BY key, number"  # noqa: S608
                f" LIMIT {_PAGE}",
                *after,
            )
            if not page:
                return
            where, after = "WHERE (key, number) > (?, ?)", page[-1][:2]
            yield from ((key, value) for key, _, value in page)

    def _index(self) -> None:
        if not self._has_index:
            self._fetch("CREATE INDEX entries_by_key ON entries (key)")
            self._has_index = True

    def _fetch(self, sql: str, *values: Any) -> list[Any]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _unusable(error) from error


def _unusable(error: sqlite3.Error) -> BooksUnreadable:
    return BooksUnreadable(
        f"A temporary file of the audit can't be used: {error}. It is in SQLITE_TMPDIR, TMPDIR,"
        " /var/tmp or /tmp, the first of them that is set and writable."
    )


async def in_turns(values: Iterable[T]) -> AsyncIterator[T]:
    """Yield values, and let other tasks run after each page of them."""
    for number, value in enumerate(values, 1):
        yield value
        if number % _PAGE == 0:
            await asyncio.sleep(0)


def batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield values in lists of ``size``, and of the rest."""
    left = iter(values)
    while some := list(islice(left, size)):
        yield some
