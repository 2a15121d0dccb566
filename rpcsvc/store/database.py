"""The port ``Tables`` of stores and ledgers to a database, and rows as records.

Each backend implements the port. Queries are written in the subset of SQL that SQLite and
PostgreSQL share: ``:name`` stands for a value, ``IN :name`` for a list of values, and rows give
their columns by name. A record's field is the column of its name; a value that is not of its
field's type is refused: no text becomes a number, and no number a text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct, convert, to_builtins
from msgspec.structs import fields

from rpcsvc.health import Health

# One row of a query: row["column"]. Its values are in the order of its keys().
Row = Any
Values = Mapping[str, Any]
# Called with the number of writes that shared a commit, and the seconds that it took.
CommitObserver = Callable[[int, float], None]

T = TypeVar("T", bound=Struct)

# Databases have no type for these.
_BOOLEANS: Final = {0: False, 1: True}


class Statement(Struct, frozen=True):
    """A write of one row.

    ``first``: other rows of its transaction refer to this row. ``finds``: it must change a row, and
    raises StaleWrite if it finds none. A SELECT may set it as well: the row that
    it finds is locked until the commit.
    """

    sql: str
    values: Values = MappingProxyType({})
    first: bool = False
    finds: bool = False


class Query(Struct, frozen=True):
    """SQL text and its values."""

    sql: str
    values: Values = MappingProxyType({})


class Tables(Protocol):
    """The database that stores and ledgers use. Everything may raise errors.Unavailable."""

    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        """Return all rows of a query over committed state."""
        ...

    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        """The first row, or None."""
        ...

    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        """The rows of each query, all from one snapshot: no commit comes between them."""
        ...

    async def write(self, statements: Sequence[Statement]) -> None:
        """Commit the statements, all or none; durable when this returns.

        Raises StoreConflict, and StaleWrite for a statement that did not find its row.
        """
        ...


class Database(Tables, Protocol):
    """An open database that the service runs on.

    ``lease_ms`` is how long a lease lasts (store/leases.py); None: it never ends.
    """

    lease_ms: int | None

    def health(self) -> Health:
        """Return whether it can be read and written now."""
        ...

    def on_commit(self, observer: CommitObserver) -> None:
        """Have ``observer`` called after each commit. It must not raise."""
        ...

    async def close(self) -> None:
        """Finish the writes that wait, then close. Later ones are refused."""
        ...


class DatabaseInUse(Exception):
    """Another process serves the database; the message says what to do."""


class DatabaseUnusable(OSError):
    """The database can't be opened: it can't be reached, has no room, or is not a database."""


class StaleWrite(Exception):
    """Rows that a write was decided on have changed. Nothing was written: read again."""


# Writes that a store has made ready.
Rows = Sequence[Statement]


# Commits rows together with the callee's own, in one transaction.
Commit = Callable[[Rows], Awaitable[None]]


class StoreConflict(Exception):
    """A write violated a constraint: a bug or a second writer. Nothing of it was kept."""


def unobserved(_writes: int, _seconds: float) -> None:
    """A CommitObserver that does nothing."""


class BooksUnreadable(Exception):
    """The database is missing, or can't be read; the message says why."""


def insert(table: str, columns: Iterable[str]) -> str:
    """SQL that inserts a row of these columns."""
    names = list(columns)
    places = ", ".join(f":{name}" for name in names)
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({places})"


def upsert(table: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """SQL that inserts a row, or updates all columns but the key. Triggers refuse to change fixed
    ones.
    """
    updates = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"{insert(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}"


def update(table: str, columns: Iterable[str], where: str) -> str:
    """SQL that updates these columns of the rows that ``where`` finds."""
    return f"UPDATE {table} SET {', '.join(f'{name} = :{name}' for name in columns)} WHERE {where}"


def from_row(kind: type[T], row: Row, **known: Any) -> T:
    """Return the record of a row.

    ``known`` are fields that have another name than their column, or none. Columns that are no
    field are ignored. Raises msgspec.ValidationError for a value of another type than its field.
    """
    values = fields_of(row)
    values |= known
    for name in _booleans_of(kind):
        if name in values:
            values[name] = _BOOLEANS.get(values[name], values[name])
    return convert(values, kind)


def to_row(item: Struct, **known: Any) -> dict[str, Any]:
    """Return the columns of a record: enumerations by value. ``known`` are columns that are no
    field, or have another form than theirs.
    """
    values: dict[str, Any] = to_builtins(item, builtin_types=(bytes,))
    values |= known
    return values


def fields_of(row: Row) -> dict[str, Any]:
    """Return a row as a dictionary: faster than reading many columns one by one."""
    if type(row) is dict:
        return row.copy()
    return dict(zip(row.keys(), row, strict=True))


@cache
def _booleans_of(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.type is bool)
