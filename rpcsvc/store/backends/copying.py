"""Copies all rows from one database to another of the other kind: ``rpcsvc db copy``.

The target is new: its tables are made, filled and compared with the source row by row, and only
then get their triggers and foreign keys, in one transaction. A failed copy leaves nothing behind.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import asyncpg

from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.postgresql import schema as postgresql
from rpcsvc.store.backends.postgresql.reader import Connection, connect
from rpcsvc.store.backends.sqlite import migrations as sqlite
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, OwnerLock, open_reader
from rpcsvc.store.database import DatabaseInUse, DatabaseUnusable
from rpcsvc.store.schema import APPLICATION_ID, scripts

BATCH: Final = 2_000

Row = tuple[Any, ...]
# Called with the action and its table, the rows done, and the rows in all.
Progress = Callable[[str, int, int], None]


class NotCopied(Exception):
    """Nothing was copied; the message says why."""


class Table(NamedTuple):
    """A table of the schema; ``columns`` are the stored ones, without computed ones."""

    name: str
    columns: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def query(self) -> str:
        """All its rows, in the order of its key."""
        columns, keys = ", ".join(self.columns), ", ".join(self.keys)
        return f"SELECT {columns} FROM {self.name} ORDER BY {keys}"


class Source(Protocol):
    """A database to copy from, read at one moment."""

    def rows(self, table: Table) -> AsyncIterator[Sequence[Row]]:
        """The rows of a table in key order, in chunks."""
        ...

    async def count(self, table: Table) -> int:
        """Return how many rows a table has."""
        ...


class Target(Source, Protocol):
    """A database to copy to: its tables have no triggers until ``finish``."""

    async def add(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows."""
        ...

    async def finish(self, tables: Sequence[Table]) -> None:
        """Add triggers and keys."""
        ...


def tables() -> list[Table]:
    """The tables of the schema; those that others refer to come first."""
    found = []
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        sqlite.migrate(made)
        names = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        for (name,) in made.execute(f"{names} ORDER BY rowid").fetchall():
            # Each row: number, name, type, NOT NULL, default, place in the key, computed.
            columns = made.execute(f"PRAGMA table_xinfo({name})").fetchall()
            stored = tuple(column[1] for column in columns if not column[6])
            keys = sorted((column[5], column[1]) for column in columns if column[5])
            found.append(Table(name, stored, tuple(key for _, key in keys)))
    return found


async def copy(source: Source, target: Target, progress: Progress) -> dict[str, int]:
    """Copy all rows and compare them; returns how many each table has. Raises NotCopied."""
    counts: dict[str, int] = {}
    every = tables()
    total = sum([await source.count(table) for table in every])
    for table in every:
        before, done = sum(counts.values()), 0
        async for rows in source.rows(table):
            await target.add(table, rows)
            done += len(rows)
            progress(f"copying {table.name}", before + done, total)
        counts[table.name] = done
    compared = 0
    for table in every:

        def report(seen: int, table: Table = table, before: int = compared) -> None:
            progress(f"comparing {table.name}", before + seen, total)

        await _compare(source, target, table, counts[table.name], report)
        compared += counts[table.name]
    await target.finish(every)
    return counts


async def _compare(
    source: Source, target: Target, table: Table, expected: int, report: Callable[[int], None]
) -> None:
    """Raises NotCopied at the first row that is not the same in both."""
    theirs = target.rows(table)
    seen = 0
    async for rows in source.rows(table):
        if list(rows) != list(await anext(theirs, ())):
            raise NotCopied(f"after row {seen} of {table.name} the copy differs from its source")
        seen += len(rows)
        report(seen)
    if seen != expected or [rows async for rows in theirs]:
        raise NotCopied(f"the copy of {table.name} does not have {expected} rows")


class _Server:
    """A PostgreSQL database, in one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._late: list[str] = []
        self._cursors = count()

    async def make(self) -> None:
        """Make the tables. Raises NotCopied where the database is not empty."""
        if await self._connection.fetchval(postgresql.HAS_TABLES):
            raise NotCopied("the PostgreSQL database is not empty: make a new one with createdb")
        texts = [script for _, _, script in scripts()]
        statements = [each for text in texts for each in postgresql.translated(text)]
        self._late = [each for each in statements if _comes_late(each)]
        early = [each for each in statements if not _comes_late(each)]
        await self._connection.execute(";\n".join(early))

    async def rows(self, table: Table) -> AsyncIterator[Sequence[Row]]:
        # A cursor of asyncpg stays open, and then the table takes no trigger.
        name = f"rows_{next(self._cursors)}"
        await self._connection.execute(f"DECLARE {name} NO SCROLL CURSOR FOR {table.query}")
        while rows := await self._connection.fetch(f"FETCH {BATCH} FROM {name}"):
            yield [tuple(row) for row in rows]
        await self._connection.execute(f"CLOSE {name}")

    async def count(self, table: Table) -> int:
        return int(await self._connection.fetchval(f"SELECT count(*) FROM {table.name}"))

    async def add(self, table: Table, rows: Sequence[Row]) -> None:
        await self._connection.copy_records_to_table(
            table.name, records=rows, columns=table.columns
        )

    async def finish(self, tables: Sequence[Table]) -> None:
        for table in tables:
            if table.keys == ("seq",):
                await self._connection.execute(
                    f"SELECT setval(pg_get_serial_sequence('{table.name}', 'seq'), max(seq))"
                    f" FROM {table.name}"
                )
        await self._connection.execute(";\n".join(self._late))
        await postgresql.sign(self._connection)


class _File:
    """An SQLite database, in one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def rows(self, table: Table) -> AsyncIterator[Sequence[Row]]:
        cursor = self._connection.execute(table.query)
        while rows := cursor.fetchmany(BATCH):
            yield rows

    async def count(self, table: Table) -> int:
        (rows,) = self._connection.execute(f"SELECT count(*) FROM {table.name}").fetchone()
        return int(rows)

    async def add(self, table: Table, rows: Sequence[Row]) -> None:
        places = ", ".join("?" * len(table.columns))
        self._connection.executemany(
            f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({places})", rows
        )

    async def finish(self, tables: Sequence[Table]) -> None:  # noqa: ARG002 - the port has it
        for statement in self._statements(late=True):
            self._connection.execute(statement)
        broken = self._connection.execute("PRAGMA foreign_key_check").fetchone()
        if broken is not None:
            raise NotCopied(f"row {broken[1]} of {broken[0]} refers to nothing in {broken[2]}")

    def make(self) -> None:
        """Make the tables."""
        for statement in self._statements(late=False):
            self._connection.execute(statement)

    def _statements(self, *, late: bool) -> Iterator[str]:
        for _, _, script in scripts():
            for statement in postgresql.statements(script):
                if _comes_late(statement) is late:
                    yield statement


def _comes_late(statement: str) -> bool:
    return statement.startswith(("CREATE TRIGGER", "CREATE FUNCTION", "ALTER TABLE"))


async def to_server(data_dir: Path, url: str, progress: Progress) -> dict[str, int]:
    """Copy the SQLite database of a stopped service to an empty PostgreSQL database.

    Returns how many rows each table has. Raises NotCopied.
    """
    with _owned(data_dir):
        path = data_dir / DATABASE_NAME
        if not path.is_file():
            raise NotCopied(f"there is no database at {path}")
        try:
            with closing(open_reader(path)) as reader:
                reader.execute("BEGIN")
                if (other := sqlite.other_schema(reader)) is not None:
                    raise NotCopied(f"{path}: {other}")
                async with _transaction(url) as connection:
                    server = _Server(connection)
                    await server.make()
                    return await copy(_File(reader), server, progress)
        except sqlite3.Error as error:
            raise NotCopied(f"{path} can't be read: {error}") from error


async def from_server(url: str, data_dir: Path, progress: Progress) -> dict[str, int]:
    """Copy the PostgreSQL database of a stopped service to a new SQLite file.

    Returns how many rows each table has. Raises NotCopied.
    """
    _make_data_dir(data_dir)
    path = data_dir / DATABASE_NAME
    fresh = data_dir / f"{DATABASE_NAME}.copying"
    with _owned(data_dir):
        # SQLite would take the commits of a log that is left there for those of the new file.
        for left in (path, path.with_name(f"{DATABASE_NAME}-wal")):
            if left.exists():
                raise NotCopied(f"{left} exists: name a data directory without a database")
        fresh.unlink(missing_ok=True)
        try:
            async with _transaction(url) as connection:
                if (other := await postgresql.other_schema(connection)) is not None:
                    raise NotCopied(f"the PostgreSQL database: {other}")
                fresh.touch(mode=0o600)
                with closing(sqlite3.connect(fresh, isolation_level=None)) as writer:
                    writer.execute("PRAGMA synchronous = FULL")
                    writer.execute("BEGIN")
                    file = _File(writer)
                    file.make()
                    counts = await copy(_Server(connection), file, progress)
                    sqlite.sign(writer)
                    writer.execute("COMMIT")
            fresh.rename(path)
        except sqlite3.Error as error:
            raise NotCopied(f"{path} can't be written: {error}") from error
        finally:
            fresh.unlink(missing_ok=True)
    return counts


def _make_data_dir(data_dir: Path) -> None:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _owned(data_dir: Path) -> Iterator[None]:
    """Hold a data directory while the block lasts. Raises NotCopied."""
    lock = OwnerLock(data_dir)
    try:
        lock.acquire()
    except (DatabaseInUse, OSError) as error:
        raise NotCopied(str(error)) from error
    try:
        yield
    finally:
        lock.release()


@asynccontextmanager
async def _transaction(url: str) -> AsyncIterator[Connection]:
    """A transaction of one moment, in a database that no service runs on. Raises NotCopied."""
    try:
        connection = await connect(url, statement_timeout="0")
    except (DatabaseUnusable, Unavailable) as error:
        raise NotCopied(f"the PostgreSQL database can't be used: {error.__cause__}") from error
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await _keep_services_out(connection)
            yield connection
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        raise NotCopied(f"the PostgreSQL database can't be used: {error}") from error
    finally:
        await connection.close()


async def _keep_services_out(connection: Connection) -> None:
    """Make a service that starts wait until the transaction ends.

    Raises NotCopied if one runs.
    """
    await connection.execute(
        "SELECT pg_advisory_xact_lock($1, $2)", APPLICATION_ID, postgresql.MIGRATING
    )
    if await connection.fetchval("SELECT to_regclass('leases')") is None:
        return
    leases = await connection.fetch("SELECT expires_at > now_ms() AS held FROM leases FOR UPDATE")
    if any(row["held"] for row in leases):
        raise NotCopied("a service runs on the PostgreSQL database: stop it first")
