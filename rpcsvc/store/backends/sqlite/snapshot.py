"""The database as it was at one moment, read-only, beside a running service or without one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, open_reader
from rpcsvc.store.backends.sqlite.migrations import migrate, other_schema
from rpcsvc.store.backends.sqlite.reader import Reader
from rpcsvc.store.database import BooksUnreadable, Statement


class Snapshot(Reader):
    """One read transaction under the interface that the stores and ledgers are made over.

    While it is open the log of the running service can't begin anew: read, and let go.
    """

    async def write(self, statements: Sequence[Statement]) -> None:
        """Refused. Raises errors.Unavailable."""
        raise Unavailable(f"A snapshot is only read, and {len(statements)} statements came.")


@contextmanager
def snapshot(data_dir: Path) -> Iterator[Snapshot]:
    """What is committed now, while the block lasts. Raises BooksUnreadable."""
    path = data_dir / DATABASE_NAME
    if not path.is_file():
        raise BooksUnreadable(f"There is no database at {path}.")
    try:
        with closing(open_reader(path)) as reader:
            _require_known_schema(path, reader)
            yield Snapshot(reader)
    except (sqlite3.Error, Unavailable) as error:
        reason = error.__cause__ or error
        raise BooksUnreadable(f"{path} can't be read: {reason}.") from error


@contextmanager
def empty_snapshot() -> Iterator[Snapshot]:
    """A database in which nothing ever happened, for use before the first start."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(connection)
        yield Snapshot(connection)


def _require_known_schema(path: Path, reader: sqlite3.Connection) -> None:
    other = other_schema(reader)
    if other is not None:
        raise BooksUnreadable(
            f"{path} can't be read: {other}. Use the version that the service runs; a start of the"
            " service brings an older database up to date."
        )
