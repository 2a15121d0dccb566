"""Pages in a real Chromium, which may send requests to the service only."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, ViewportSize, async_playwright, expect

from rpcsvc.http.pages.rendering import Catalogues

AXE = Path(__file__).parents[2] / "tools" / "browser" / "node_modules" / "axe-core" / "axe.min.js"
SAY = Catalogues().choose("en").say
WIDE: ViewportSize = {"width": 1000, "height": 900}
NARROW: ViewportSize = {"width": 320, "height": 700}
SCREENS: list[tuple[ViewportSize, dict[str, Any]]] = [
    (WIDE, {"color_scheme": "light"}),
    (NARROW, {"color_scheme": "light"}),
    (NARROW, {"color_scheme": "dark"}),
    (WIDE, {"color_scheme": "dark"}),
    (NARROW, {"forced_colors": "active"}),
]
DONE_MS = 60_000
# The names of all that can be used, in the order of the page.
USABLE = """[...document.querySelectorAll("a[href], button, summary, select," +
    "input:not([type=radio]), input:checked, [tabindex='0']")]
  .filter((it) => it.checkVisibility())
  .map((it) => it.ariaLabel || it.id || it.textContent)"""
# The name of what has the focus, and whether one sees that.
FOCUSED = """(() => {
  const it = document.activeElement;
  const isSeen = getComputedStyle(it).outline.includes("solid 3px");
  return [it.ariaLabel || it.id || it.textContent, isSeen];
})()"""
# For root, without a network, headless.
_SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def chromium() -> str | None:
    """The path of Chromium; None if it is not installed."""
    return shutil.which("chromium")


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """The machine's own Chromium, started."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=_SWITCHES)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def reading(browser: Browser, url: str, **options: Any) -> AsyncIterator[Page]:
    """A page in a fresh profile. At the end it requires that all requests went to ``url``, and that
    the page's content security policy refused nothing.
    """
    context = await browser.new_context(**{"viewport": {"width": 1000, "height": 900}, **options})
    asked: list[str] = []
    complaints: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = await context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    try:
        yield page
    finally:
        await context.close()
    assert asked
    elsewhere = [each for each in asked if not each.startswith(f"{url}/")]
    assert not elsewhere, elsewhere
    refused = [each for each in complaints if "Content Security Policy" in each]
    assert not refused, refused


async def findings(page: Page) -> list[str]:
    """Findings of axe on the page, its best practices included."""
    if not await page.evaluate("'axe' in window"):
        # Not as a script of the page, which its content security policy would refuse.
        await page.evaluate(AXE.read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"]}
    found = await page.evaluate("(it) => axe.run(it).then((found) => found.violations)", options)
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


async def is_too_wide(page: Page) -> bool:
    """Whether the page has to be scrolled sideways."""
    script = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    return bool(await page.evaluate(script))


async def heading(page: Page, key: str) -> None:
    found = expect(page.locator("h1"))
    await found.to_have_text(SAY(f"checkout.heading_{key}"), timeout=DONE_MS)


async def check_screens(browser: Browser, url: str, path: str, name: str) -> None:
    async with reading(browser, url) as page:
        await page.goto(url + path)
        await check_on_screens(page, name)


async def check_on_screens(page: Page, name: str) -> None:
    for size, media in SCREENS:
        await page.set_viewport_size(size)
        await page.emulate_media(**media)
        assert await findings(page) == [], (name, size, media)
        assert not await is_too_wide(page), (name, size, media)
