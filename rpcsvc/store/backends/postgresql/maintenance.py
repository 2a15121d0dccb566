"""``rpcsvc db check`` over a PostgreSQL database, also while a service runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.postgresql.connection import Connection, connect
from rpcsvc.store.backends.postgresql.reader import compiled
from rpcsvc.store.backends.postgresql.schema import other_schema, version_of
from rpcsvc.store.checks import BOOKS, reservation_problems
from rpcsvc.store.database import DatabaseUnusable, Query, Row, Statement


class _Snapshot:
    """Reads within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        """All rows of a query."""
        form = compiled(sql)
        return list(await self._connection.fetch(form.text, *form.bind(values)))

    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        """The first row, or None."""
        return next(iter(await self.fetch(sql, **values)), None)

    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        """The rows of each query."""
        return [await self.fetch(sql, **values) for sql, values in queries]

    async def write(self, statements: Sequence[Statement]) -> None:
        """Refused. Raises errors.Unavailable."""
        raise Unavailable(f"A moment is only read, and {len(statements)} statements came.")


async def check_server(url: str) -> list[str]:
    """All problems of the books at one moment; empty when all is well."""
    try:
        connection = await connect(url, default_transaction_read_only="on")
    except (DatabaseUnusable, Unavailable) as error:
        return [f"the database can't be read: {error.__cause__ or error}"]
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            if not await version_of(connection):
                return ["the database is empty: rpcsvc serve makes its tables"]
            other = await other_schema(connection)
            if other is not None:
                return [f"{other}, so the books were not checked"]
            problems = [
                f"{problem}: {row[0]}"
                for problem, query in BOOKS
                for row in await connection.fetch(query)
            ]
            now = await connection.fetchval("SELECT now_ms()")
            return problems or await reservation_problems(_Snapshot(connection), now)
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        return [f"the database can't be read: {error}"]
    finally:
        connection.terminate()
