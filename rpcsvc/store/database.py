"""What the aggregates ask of a database, whichever backend it is: queries, and writes that are
committed all or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Insert(NamedTuple):
    """An INSERT of any number of rows: ``{rows}`` in ``sql`` stands for ``row``, repeated."""

    sql: str
    row: str


class Update(NamedTuple):
    """An UPDATE that has to find its row: StaleWrite where it does not."""

    sql: str


class Statement(NamedTuple):
    """One row's worth of a write. ``first``: others of its transaction refer to this row."""

    sql: str | Insert | Update
    values: tuple[Any, ...] | Mapping[str, Any]
    first: bool = False


class Tables(Protocol):
    """What the stores and ledgers are made over. Everything may raise errors.Unavailable."""

    def read(self, sql: str, values: tuple[Any, ...] = (), /, **named: Any) -> list[Any]:
        """All rows of a query over committed state."""
        ...

    def read_one(self, sql: str, values: tuple[Any, ...] = (), /, **named: Any) -> Any:
        """The first row, or None."""
        ...

    async def write(self, statements: Sequence[Statement]) -> None:
        """Commit the statements, all or none; durable when this returns."""
        ...


class StoreConflict(Exception):
    """A write broke a constraint: a bug or a second writer. Nothing of it was kept."""


class BooksUnreadable(Exception):
    """There is no database, or it can't be read; the message says why."""
