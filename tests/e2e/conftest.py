"""Fixtures of the tests that run the sandbox inside the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.sandbox import Sandbox, sandbox


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox of the test's own."""
    async with sandbox(tmp_path) as ready:
        yield ready
