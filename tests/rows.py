"""Queries with ``?`` placeholders and rows by position, for assertions of tests."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from typing import Any

import asyncpg

from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.database import Database, Statement


def all_rows(database: Database, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All rows of a query over what is committed."""
    if isinstance(database, PostgresqlDatabase):
        # In another thread: the loop of this thread runs the service.
        with ThreadPoolExecutor(1) as other:
            return other.submit(asyncio.run, _rows(database.url, sql, values)).result()
    assert isinstance(database, SqliteDatabase)
    uri = f"{database.path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as reader:
        return reader.execute(sql, values).fetchall()


async def _rows(url: str, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    number = count(1)
    connection = await asyncpg.connect(url)
    try:
        text = re.sub(r"\?", lambda _: f"${next(number)}", sql)
        return [tuple(row) for row in await connection.fetch(text, *values)]
    finally:
        await connection.close()


def one_row(database: Database, sql: str, values: tuple[Any, ...] = ()) -> Any:
    """The first row, or None."""
    return next(iter(all_rows(database, sql, values)), None)


def statement(sql: str, values: tuple[Any, ...] = (), *, first: bool = False) -> Statement:
    """A write. Bytes may stand in it as x'00', which is bits to PostgreSQL."""
    given, bound = iter(values), dict[str, Any]()

    def bind(found: re.Match[str]) -> str:
        name = f"p{len(bound)}"
        bound[name] = next(given) if found[1] is None else bytes.fromhex(found[1])
        return f":{name}"

    return Statement(re.sub(r"\?|\bx'([0-9a-f]*)'", bind, sql), bound, first)


async def set_rates(database: Database, ages_ms: Mapping[int, int]) -> None:
    """Replace the published rates by these: rate (USDC units per XMR) by age in ms."""
    sql = "INSERT INTO rates (published_at, usdc_per_xmr, token) VALUES (now_ms() - ?, ?, 1)"
    rows = [statement(sql, (age, rate)) for rate, age in ages_ms.items()]
    await database.write([statement("DELETE FROM rates"), *rows])
