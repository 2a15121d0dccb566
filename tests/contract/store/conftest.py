"""An empty database of each backend. A new backend is added here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.database import Database
from tests.postgres import new_database


@asynccontextmanager
async def _sqlite(folder: Path, _server: Callable[[], str]) -> AsyncIterator[Database]:
    opened = await SqliteDatabase.open(folder)
    yield opened
    await opened.close()


@asynccontextmanager
async def _postgresql(_folder: Path, server: Callable[[], str]) -> AsyncIterator[Database]:
    async with new_database(server()) as url:
        opened = await PostgresqlDatabase.open(url)
        yield opened
        await opened.close()


Opened = Callable[[Path, Callable[[], str]], AbstractAsyncContextManager[Database]]
BACKENDS: dict[str, Opened] = {"sqlite": _sqlite, "postgresql": _postgresql}


@pytest.fixture(params=BACKENDS)
async def database(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: Callable[[], str]
) -> AsyncIterator[Database]:
    """A new database."""
    async with BACKENDS[request.param](tmp_path, postgres) as opened:
        yield opened
