"""Writes a picture of each state of an order, of the site root, /status and /swap, light and
dark: ``make screenshots``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from playwright.async_api import Browser

from tests.browser.browsing import browsing, reading
from tests.browser.states import STAGINGS
from tests.contract.serving import Served, serving
from tests.rows import set_rates

FOLDER = Path(__file__).parents[2] / "docs" / "screenshots"


_HOUR_MS: Final = 3_600_000
# USDC units per XMR in the last day, and how long ago (ms).
_RATES: Final = {
    164_000_000 + 35_000 * (hours * 17 % 23): hours * _HOUR_MS for hours in range(1, 24)
}


async def _picture(browser: Browser, served: Served, paths: Mapping[str, str]) -> None:
    for name, path in paths.items():
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            size = {"width": 820, "height": 900}
            async with reading(browser, served.url, color_scheme=scheme, viewport=size) as page:
                await page.goto(served.url + path)
                await page.screenshot(path=FOLDER / f"{name}{suffix}.png")


async def _main() -> None:
    FOLDER.mkdir(exist_ok=True)
    async with browsing() as browser:
        for staging in STAGINGS:
            with TemporaryDirectory() as data_dir:
                async with staging(Path(data_dir)) as (served, orders):
                    paths = {name: order.path for name, order in orders.items()}
                    await _picture(browser, served, paths)
        with TemporaryDirectory() as data_dir:
            async with serving(Path(data_dir)) as served:
                await set_rates(served.up.database, _RATES)
                await _picture(
                    browser, served, {"home": "/", "status": "/status", "swap": "/swap?example=x2u"}
                )


if __name__ == "__main__":
    asyncio.run(_main())
