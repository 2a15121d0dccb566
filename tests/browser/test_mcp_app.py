"""The MCP App in a real browser, in a frame as a host makes it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, FrameLocator, Page, expect

from rpcsvc.http.pages.rendering import Catalogues, qr_image
from rpcsvc.operations.views import monero_uri
from tests.browser.browsing import AXE, reading
from tests.contract.serving import Served
from tests.mcp import call, message, meta, stateless, swap

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAY = Catalogues().choose("en").say
APPS = {"_meta": meta(extensions={"io.modelcontextprotocol/ui": {}})}
DONE_MS = 60_000
# A host: its frame may only run scripts, and it passes tools/call on.
HOST = """<!doctype html><title>Host</title><iframe sandbox="allow-scripts"></iframe><script>
const frame = document.querySelector("iframe");
window.heard = [];
window.tell = (rest) => frame.contentWindow.postMessage({jsonrpc: "2.0", ...rest}, "*");
window.addEventListener("message", async ({data}) => {
  heard.push(data.method);
  if (data.method === "ui/initialize") {
    const hostCapabilities = {serverTools: {}, openLinks: {}};
    tell({id: data.id, result: {protocolVersion: "2026-01-26", hostInfo: {name: "t", version: "1"},
      hostCapabilities, hostContext: {theme: "dark"}}});
  }
  if (data.method === "tools/call") {
    tell({id: data.id, result: JSON.parse(await callTool(JSON.stringify(data.params)))});
  }
  if (data.method === "ui/open-link") {
    window.opened = data.params.url;
    tell({id: data.id, result: {}});
  }
});
frame.srcdoc = HTML;
</script>"""


@asynccontextmanager
async def hosting(browser: Browser, served: Served) -> AsyncIterator[tuple[Page, FrameLocator]]:
    """A host that shows the app of a service, with calls passed on to it."""
    read = await stateless(served, "resources/read", {"uri": "ui://service/order"})
    html = json.dumps(read.body["result"]["contents"][0]["text"]).replace("</", "<\\/")

    async def call_tool(params: str) -> str:
        answer = await served.raw(message("tools/call", json.loads(params)), "/mcp")
        return json.dumps(answer.body["result"])

    async with reading(browser, served.url) as page:
        await page.expose_function("callTool", call_tool)
        host = f"{served.url}/host"
        await page.route(
            host,
            lambda route: route.fulfill(body=HOST.replace("HTML", html), content_type="text/html"),
        )
        await page.goto(host)
        await page.wait_for_function("heard.includes('ui/notifications/initialized')")
        yield page, page.frame_locator("iframe")


async def reported(page: Page, result: dict[str, Any]) -> None:
    await page.evaluate("(it) => tell(it)", {"method": "ui/notifications/tool-input", "params": {}})
    notice = {"method": "ui/notifications/tool-result", "params": result}
    await page.evaluate("(it) => tell(it)", notice)


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_app_shows_an_order_until_it_is_over(
    browser: Browser, served: Served, direction: str
) -> None:
    asked = swap(direction)
    made = await call(served, "create_swap", asked, **APPS)
    data = made["structuredContent"]["data"]
    funding, order = data["fundingInstructions"], data["order"]
    async with hosting(browser, served) as (page, app):
        await expect(app.locator("h1")).to_have_text(SAY("app.waiting"))
        await reported(page, made)
        await expect(app.locator("h1")).to_have_text(SAY("checkout.heading_awaiting_deposit"))
        await expect(app.locator("#amount")).to_have_text(f"{funding['amount']} {funding['asset']}")
        await expect(app.locator("#address")).to_have_text(funding["depositAddress"])
        address, amount = funding["depositAddress"], funding["amount"]
        paid_by = monero_uri(address, amount) if direction == "x2u" else address
        await expect(app.locator("#qr")).to_have_attribute("src", qr_image(paid_by))
        assert await app.locator("#qr").evaluate("(it) => it.decode().then(() => it.naturalWidth)")
        assert await app.locator("#note").is_visible() is (direction == "u2x")
        scheme = "(it) => getComputedStyle(it).colorScheme"
        assert await app.locator("html").evaluate(scheme) == "dark"
        await app.locator("#open").click()
        await page.wait_for_function("window.opened")
        assert await page.evaluate("opened") == order["checkoutUrl"]
        await call(served, "sandbox_fund", {"orderId": order["orderId"]})
        done = SAY("checkout.heading_completed")
        await expect(app.locator("h1")).to_have_text(done, timeout=DONE_MS)
        await expect(app.locator("#pay")).to_be_hidden()
        await expect(app.locator("#sent")).to_contain_text(asked["to"])
        assert await page.evaluate("heard.includes('ui/notifications/size-changed')")


async def test_app_shows_an_error(browser: Browser, served: Served) -> None:
    refused = await call(served, "create_swap", {**swap(), "amount": "0"}, **APPS)
    async with hosting(browser, served) as (page, app):
        await reported(page, refused)
        text = refused["structuredContent"]["error"]["message"]
        await expect(app.locator("#error")).to_have_text(text)
        await expect(app.locator("#pay")).to_be_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_app_is_accessible(browser: Browser, served: Served, theme: str) -> None:
    made = await call(served, "create_swap", swap("u2x"), **APPS)
    async with hosting(browser, served) as (page, app):
        context = {"method": "ui/notifications/host-context-changed", "params": {"theme": theme}}
        await page.evaluate("(it) => tell(it)", context)
        await reported(page, made)
        await expect(app.locator("#pay")).to_be_visible()
        frame = page.frames[-1]
        await frame.evaluate(AXE.read_text(encoding="utf-8"))
        found = await frame.evaluate("axe.run().then((found) => found.violations)")
        assert [rule["id"] for rule in found] == []
