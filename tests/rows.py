"""Rows of a database in SQLite's own SQL, with ``?`` and by position, for what a test looks at."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from itertools import count
from typing import Any

from rpcsvc.store.backends.sqlite.database import Database
from rpcsvc.store.database import Statement


def all_rows(database: Database, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All rows of a query over what is committed."""
    uri = f"{database.path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as reader:
        return reader.execute(sql, values).fetchall()


def one_row(database: Database, sql: str, values: tuple[Any, ...] = ()) -> Any:
    """The first row, or None."""
    return next(iter(all_rows(database, sql, values)), None)


def statement(sql: str, values: tuple[Any, ...] = (), *, first: bool = False) -> Statement:
    """A write."""
    number = count()
    named = re.sub(r"\?", lambda _: f":p{next(number)}", sql)
    return Statement(named, {f"p{n}": value for n, value in enumerate(values)}, first)
