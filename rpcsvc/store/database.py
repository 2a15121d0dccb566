"""What the aggregates ask of a database, whichever backend it is.

Queries are written in the subset of SQL that SQLite and PostgreSQL share: ``:name`` stands for a
value, ``IN :name`` for a list of values, and rows give their columns by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

# One row of a query: row["column"]. Its values are in the order of its keys().
Row = Any
Values = Mapping[str, Any]


class Statement(NamedTuple):
    """One row's worth of a write.

    ``first``: others of its transaction refer to this row. ``finds``: it has to change a row, and
    raises orders.ports.store.StaleWrite where there is none.
    """

    sql: str
    values: Values = MappingProxyType({})
    first: bool = False
    finds: bool = False


class Tables(Protocol):
    """What the stores and ledgers are made over. Everything may raise errors.Unavailable."""

    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        """All rows of a query over committed state."""
        ...

    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        """The first row, or None."""
        ...

    async def write(self, statements: Sequence[Statement]) -> None:
        """Commit the statements, all or none; durable when this returns.

        Raises StoreConflict, and StaleWrite for a statement that did not find its row.
        """
        ...


class StoreConflict(Exception):
    """A write broke a constraint: a bug or a second writer. Nothing of it was kept."""


class BooksUnreadable(Exception):
    """There is no database, or it can't be read; the message says why."""


def insert(table: str, columns: Iterable[str]) -> str:
    """The text that inserts a row of these columns."""
    names = list(columns)
    places = ", ".join(f":{name}" for name in names)
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({places})"


def upsert(table: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Insert, or update all but the key; triggers refuse to change what must stay."""
    updates = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"{insert(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}"


def update(table: str, columns: Iterable[str], where: str) -> str:
    """The text that changes these columns of the rows that ``where`` finds."""
    return f"UPDATE {table} SET {', '.join(f'{name} = :{name}' for name in columns)} WHERE {where}"


def fields_of(row: Row) -> dict[str, Any]:
    """A row as a dictionary: for one of many columns, quicker than to ask it for each."""
    return dict(zip(row.keys(), row, strict=True))
