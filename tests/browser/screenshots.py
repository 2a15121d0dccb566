"""Writes a picture of each state of an order, light and dark: ``make screenshots``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.async_api import Browser

from tests.browser.browsing import browsing, reading
from tests.browser.states import Staged, moving_states, settled_states

FOLDER = Path(__file__).parents[2] / "docs" / "screenshots"


async def _picture(browser: Browser, staged: Staged) -> None:
    url = staged.served.url
    for name, order in staged.orders.items():
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            size = {"width": 820, "height": 900}
            async with reading(browser, url, color_scheme=scheme, viewport=size) as page:
                await page.goto(url + order.path)
                await page.screenshot(path=FOLDER / f"{name}{suffix}.png")


async def _main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for staging in (settled_states, moving_states):
        with TemporaryDirectory() as data_dir:
            async with browsing() as browser, staging(Path(data_dir)) as staged:
                await _picture(browser, staged)


if __name__ == "__main__":
    asyncio.run(_main())
