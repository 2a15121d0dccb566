"""Fixtures of many quick tests: an empty database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite.database import Database


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """A new database in the test's own directory."""
    opened = await Database.open(tmp_path)
    yield opened
    await opened.close()
