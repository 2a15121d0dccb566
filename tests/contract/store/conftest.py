"""An empty database of each backend: what a new one has to pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite.database import Database
from rpcsvc.store.database import Tables

# Each opens a database, and closes it again.
BACKENDS: dict[str, Callable[[Path], Awaitable[Database]]] = {"sqlite": Database.open}


@pytest.fixture(params=BACKENDS)
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tables]:
    """A new database."""
    opened = await BACKENDS[request.param](tmp_path)
    yield opened
    await opened.close()
