"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.serving import Served, serving


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A service without token and rate limits."""
    async with serving(tmp_path) as ready:
        yield ready
