"""Collections with their newest entries in memory and all others in a temporary file: an audit of
many orders takes no more memory than one of some thousands.

A small collection opens no file. A file is a database of SQLite without a name: it is gone with its
collection, at the latest with the process.
"""

from __future__ import annotations

import asyncio
import sqlite3
from abc import abstractmethod
from collections.abc import (
    AsyncIterator,
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
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
V_co = TypeVar("V_co", covariant=True)
K = TypeVar("K", str, int)

# Entries of one collection in memory.
IN_MEMORY = 2_000
_PAGE: Final = 500
# What is read of a file is mapped: the kernel can drop it at any time.
_MAPPED_BYTES: Final = 1 << 40


class SpilledList(Generic[T]):
    """Values of one type, in sequence."""

    def __init__(self, kind: Any, values: Iterable[T] = ()) -> None:
        self._decoder = json.Decoder(list[kind])
        self._new: list[T] = []
        self._file: _SpilledEntries | None = None
        self._pages = 0
        self.extend(values)

    def append(self, value: T) -> None:
        """Add a value."""
        self._new.append(value)
        if len(self._new) >= IN_MEMORY:
            self._spill()

    def extend(self, values: Iterable[T]) -> None:
        """Add values."""
        for some in batches(values, _PAGE):
            self._new += some
            if len(self._new) >= IN_MEMORY:
                self._spill()

    def cut(self, length: int) -> None:
        """Drop all values but the first ``length``."""
        spilled = self._pages * _PAGE
        if self._file is not None and length < spilled:
            whole, rest = divmod(length, _PAGE)
            kept = self._page(self._file, whole)[:rest]
            self._file.fetch("DELETE FROM entries WHERE number >= ?", whole)
            self._pages, self._new = whole, kept
        else:
            del self._new[length - spilled :]

    def __iter__(self) -> Iterator[T]:
        if self._file is not None:
            for page in range(self._pages):
                yield from self._page(self._file, page)
        yield from self._new

    def __len__(self) -> int:
        return self._pages * _PAGE + len(self._new)

    def _spill(self) -> None:
        """Move whole pages to the file."""
        file = self._file = self._file or _SpilledEntries()
        pages = len(self._new) // _PAGE
        file.add(
            (self._pages + page, None, json.encode(self._new[page * _PAGE : (page + 1) * _PAGE]))
            for page in range(pages)
        )
        self._pages += pages
        del self._new[: pages * _PAGE]

    def _page(self, file: _SpilledEntries, page: int) -> list[T]:
        ((encoded,),) = file.fetch("SELECT value FROM entries WHERE number = ?", page)
        values: list[T] = self._decoder.decode(encoded)
        return values


class _Spilled(Mapping[K, V_co]):
    """Entries by key: the newest in ``_new``, all others in a file. Keys are ascending."""

    _new: dict[K, V_co]
    _file: _SpilledEntries | None = None

    @abstractmethod
    def ascending(self) -> Iterator[tuple[K, V_co]]:
        """Yield each key with what is under it."""

    @override
    def __contains__(self, key: object) -> bool:
        if key in self._new:
            return True
        return self._file is not None and self._file.last_of(key) is not None

    @override
    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.ascending())

    @override
    def __len__(self) -> int:
        return len(self._new) if self._file is None else sum(1 for _ in self)

    @override
    def items(self) -> ItemsView[K, V_co]:
        return _Items(self)


class SpilledGroups(_Spilled[K, list[T]]):
    """Values of one type under keys, several under one, in sequence. Keys are listed ascending."""

    def __init__(self, kind: Any, entries: Iterable[tuple[K, T]] = ()) -> None:
        self._decode: Callable[[bytes], T] = json.Decoder(kind).decode
        self._new: dict[K, list[T]] = {}
        self._count = 0
        self._file: _SpilledEntries | None = None
        for key, value in entries:
            self.add(key, value)

    def add(self, key: K, value: T) -> None:
        """Add a value to those of a key."""
        if (found := self._new.get(key)) is None:
            self._new[key] = [value]
        else:
            found.append(value)
        self._count += 1
        if self._count >= IN_MEMORY:
            self._spill()

    @override
    def __getitem__(self, key: K) -> list[T]:
        spilled = [] if self._file is None else self._file.of(key)
        values = [self._decode(value) for (value,) in spilled]
        values += self._new.get(key, ())
        if not values:
            raise KeyError(key)
        return values

    @override
    def ascending(self) -> Iterator[tuple[K, list[T]]]:
        if self._file is None:
            yield from sorted(self._new.items(), key=itemgetter(0))
            return
        self._spill()
        for key, entries in groupby(self._file.by_key(), itemgetter(0)):
            yield key, [self._decode(value) for _, value in entries]

    def _spill(self) -> None:
        file = self._file = self._file or _SpilledEntries()
        keys = sorted(self._new)
        file.add((None, key, json.encode(value)) for key in keys for value in self._new[key])
        self._new.clear()
        self._count = 0


class SpilledDict(_Spilled[K, T]):
    """A value of one type for each key; without values, a set of keys."""

    def __init__(self, kind: Any, entries: Iterable[tuple[K, T]] = ()) -> None:
        self._decode: Callable[[bytes], T] = json.Decoder(kind).decode
        self._new: dict[K, T] = {}
        self._file: _SpilledEntries | None = None
        self.update(entries)

    def update(self, entries: Iterable[tuple[K, T]]) -> None:
        """Set the values of keys."""
        for key, value in entries:
            self[key] = value

    def __setitem__(self, key: K, value: T) -> None:
        self._new[key] = value
        if len(self._new) >= IN_MEMORY:
            self._spill()

    @override
    def __getitem__(self, key: K) -> T:
        if key in self._new:
            return self._new[key]
        found = None if self._file is None else self._file.last_of(key)
        if found is None:
            raise KeyError(key)
        return self._decode(found)

    @override
    def values(self) -> ValuesView[T]:
        return _Values(self)

    @override
    def ascending(self) -> Iterator[tuple[K, T]]:
        if self._file is None:
            yield from sorted(self._new.items(), key=itemgetter(0))
            return
        self._spill()
        for key, entries in groupby(self._file.by_key(), itemgetter(0)):
            *_, (_, value) = entries
            yield key, self._decode(value)

    def _spill(self) -> None:
        file = self._file = self._file or _SpilledEntries()
        file.add((None, key, json.encode(self._new[key])) for key in sorted(self._new))
        self._new.clear()


class _Items(ItemsView[Any, Any]):
    def __init__(self, mapping: _Spilled[Any, Any]) -> None:
        super().__init__(mapping)
        self._ascending = mapping.ascending

    @override
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._ascending()


class _Values(ValuesView[Any]):
    def __init__(self, mapping: SpilledDict[Any, Any]) -> None:
        super().__init__(mapping)
        self._ascending = mapping.ascending

    @override
    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._ascending())


class _SpilledEntries:
    """Entries with a number, a key and a value. Everything raises BooksUnreadable.

    Values are JSON, which holds units of more than 64 bits, too. No cursor stays open. The index is
    made at the first look-up, which takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        finalize(self, self._db.close)
        self._has_index = False
        # A write that finds no room leaves the file as it was.
        for sql in (
            "PRAGMA journal_mode = MEMORY",
            "PRAGMA synchronous = OFF",
            "PRAGMA cache_size = -200",
            f"PRAGMA mmap_size = {_MAPPED_BYTES}",
            "CREATE TABLE entries (number INTEGER PRIMARY KEY, key, value)",
        ):
            self.fetch(sql)

    def add(self, entries: Iterable[tuple[int | None, Any, bytes]]) -> None:
        """Add entries; those without a number get the next one."""
        try:
            with self._db:
                self._db.execute("BEGIN")
                self._db.executemany("INSERT INTO entries VALUES (?, ?, ?)", entries)
        except sqlite3.Error as error:
            raise _unusable(error) from error

    def of(self, key: Any) -> list[tuple[bytes]]:
        """Return the values of a key in sequence."""
        self._index()
        return self.fetch("SELECT value FROM entries WHERE key = ? ORDER BY number", key)

    def last_of(self, key: Any) -> bytes | None:
        """Return the last value that was added to a key."""
        self._index()
        found = self.fetch(
            "SELECT value FROM entries WHERE key = ? ORDER BY number DESC LIMIT 1", key
        )
        return found[0][0] if found else None

    def by_key(self) -> Iterator[tuple[Any, bytes]]:
        """Yield all entries by key, ascending, and in sequence."""
        self._index()
        where, after = "", ()
        while page := self.fetch(
            f"SELECT key, number, value FROM entries {where} ORDER BY key, number"  # noqa: S608 - of constants
            f" LIMIT {_PAGE}",
            *after,
        ):
            where, after = "WHERE (key, number) > (?, ?)", page[-1][:2]
            yield from ((key, value) for key, _, value in page)

    def fetch(self, sql: str, *values: Any) -> list[Any]:
        """Return all rows of a statement."""
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _unusable(error) from error

    def _index(self) -> None:
        if not self._has_index:
            self.fetch("CREATE INDEX entries_by_key ON entries (key)")
            self._has_index = True


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
