"""Fixtures of many quick tests: an empty database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite.database import SqliteDatabase


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    """A new database in the test's own directory."""
    opened = await SqliteDatabase.open(tmp_path)
    yield opened
    await opened.close()
