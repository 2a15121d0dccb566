"""Fixtures of the browser tests. Without Chromium and axe-core they are skipped, unless
BROWSER_REQUIRED is set; tools/browser/install brings both.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.browser.browsing import AXE, browsing, chromium
from tests.contract.serving import Served, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """A browser for all tests of a module, each in profiles of its own; they run in the module's
    loop.
    """
    if chromium() is None or not AXE.exists():
        if os.environ.get("BROWSER_REQUIRED"):
            pytest.fail("chromium or axe-core is missing: run tools/browser/install")
        pytest.skip("needs chromium and axe-core: run tools/browser/install")
    async with browsing() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A service whose chains take seconds."""
    async with serving(tmp_path, sandbox__xmr_block_ms=300, sandbox__usdc_block_ms=300) as ready:
        yield ready
