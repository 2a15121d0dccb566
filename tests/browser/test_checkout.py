"""The checkout page in a browser: with and without scripts, in each state, on several screens."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Request, expect

from rpcsvc.http.pages import routes
from rpcsvc.http.pages.rendering import FOLDER, Catalogues
from tests.browser.browsing import (
    DONE_MS,
    FOCUSED,
    SAY,
    USABLE,
    check_on_screens,
    check_screens,
    findings,
    heading,
    reading,
)
from tests.browser.states import STAGINGS, Staging
from tests.contract.checkout import (
    U2X,
    X2U,
    Ordered,
    awaiting_refund_address,
    fault,
    fund,
    make_order,
    until,
)
from tests.contract.serving import MONERO, Served, serving
from tests.contract.sidecar import SWAPS, beside, upstream_id
from tests.rows import set_rates

pytestmark = pytest.mark.asyncio(loop_scope="module")
POLL = "document.dispatchEvent(new Event('visibilitychange'))"
# The seconds left, by the countdown and by the bar, which is full at one hour.
SHOWN = """(() => {
  const styleOf = (what, part) => getComputedStyle(document.querySelector(what), part);
  return {
    countdown: +styleOf(".countdown").getPropertyValue("--t"),
    bar: 3600 * new DOMMatrix(styleOf(".bar", "::before").transform).a,
  };
})()"""


@pytest.mark.parametrize("swap", [X2U, U2X], ids=["x2u", "u2x"])
async def test_page_follows_a_swap_in_place(browser: Browser, served: Served, swap: Any) -> None:
    order = await make_order(served, swap)
    async with reading(browser, served.url) as page:
        await page.goto(served.url + order.path)
        await heading(page, "awaiting_deposit")
        await page.evaluate("window.wasReloaded = false")
        await fund(served, order)
        await heading(page, "completed")
        assert await page.evaluate("window.wasReloaded") is False
        await expect(page.locator("#pay")).to_be_hidden()
        await expect(page.locator("#sent .card")).to_have_count(1)


async def test_events_update_the_page_without_polls(browser: Browser, served: Served) -> None:
    order = await make_order(served, X2U)
    async with reading(browser, served.url) as page:
        await page.add_init_script("window.setTimeout = () => 0")  # no poll is ever due
        opened: list[Request] = []

        def keep(request: Request) -> None:
            opened.append(request)

        page.on("request", keep)
        await page.goto(served.url + order.path)
        await heading(page, "awaiting_deposit")
        await fund(served, order)
        await heading(page, "completed")
    streams = [each for each in opened if "/swap/events/" in each.url]
    assert [each.headers["accept"] for each in streams] == ["text/event-stream"]
    assert len(opened) > 2, "one for the page, one for the stream, one for each event"


async def test_page_polls_where_streams_are_refused(browser: Browser, served: Served) -> None:
    order = await make_order(served, X2U)
    async with reading(browser, served.url) as page:
        await page.route("**/swap/events/**", lambda route: route.fulfill(status=429))
        async with page.expect_response("**/swap/events/**"):
            await page.goto(served.url + order.path)
        await fund(served, order)
        await heading(page, "completed")


@pytest.mark.parametrize("swap", [X2U, U2X], ids=["x2u", "u2x"])
async def test_page_follows_a_swap_without_a_script(
    browser: Browser, served: Served, swap: Any
) -> None:
    order = await make_order(served, swap)
    async with reading(browser, served.url, java_script_enabled=False) as page:
        await page.goto(served.url + order.path)
        await heading(page, "awaiting_deposit")
        await expect(page.locator(".copy").first).to_be_hidden()
        await fund(served, order)
        await until(served, order, status="completed")
        await heading(page, "completed")  # it loads itself again


@pytest.mark.parametrize("staging", STAGINGS)
async def test_page_of_each_state_is_accessible(
    browser: Browser, tmp_path: Path, staging: Staging
) -> None:
    async with staging(tmp_path) as (served, orders):
        for name, order in orders.items():
            await check_screens(browser, served.url, order.path, name)


async def test_removed_deposit_is_shown_at_the_top(browser: Browser, tmp_path: Path) -> None:
    async with (
        serving(tmp_path, sandbox__usdc_block_ms=3_600_000) as served,
        reading(browser, served.url) as page,
    ):
        order = await make_order(served, U2X)
        await page.goto(served.url + order.path)
        await fund(served, order, amount="50")
        await heading(page, "partial")
        says = SAY("checkout.removed", amount="50 USDC")
        await expect(page.locator("#state")).not_to_contain_text(says)
        await fault(served, "drop_deposit", orderId=order.order_id)
        await heading(page, "awaiting_deposit")
        await expect(page.locator("#state")).to_contain_text(says)


@pytest.mark.parametrize("path", ["/", "/status", "/orders/none"])
async def test_front_page_is_accessible(browser: Browser, served: Served, path: str) -> None:
    await check_screens(browser, served.url, path, path)


async def test_front_page_with_a_chart_is_accessible(browser: Browser, served: Served) -> None:
    await set_rates(served.up.database, {164_000_000: 3_600_000, 166_500_000: 1_200_000})
    await check_screens(browser, served.url, "/", "chart")
    async with reading(browser, served.url) as page:
        await page.goto(served.url)
        caption = await page.locator("figure.chart figcaption").inner_text()
        assert "164 to 166.5" in caption


async def test_front_page_without_an_engine_is_accessible(browser: Browser, served: Served) -> None:
    await fault(served, "engine_down")
    await check_screens(browser, served.url, "/", "down")


async def test_page_fits_a_script_from_right_to_left(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    english = (FOLDER / "en.toml").read_text()
    (folder / "en.toml").write_text(english)
    turned = english.replace('lang = "en"\ndir = "ltr"', 'lang = "ar"\ndir = "rtl"')
    (folder / "ar.toml").write_text(turned)
    monkeypatch.setattr(routes, "Catalogues", partial(Catalogues, folder))
    data_dir = tmp_path / "data"
    async with serving(data_dir) as served:
        order = await make_order(served, X2U, refundAddress=MONERO)
        await fund(served, order, amount="0.3")
        await until(served, order, amountDue="0.5")
        async with reading(browser, served.url, locale="ar-EG") as page:
            await page.goto(served.url + order.path)
            assert await page.locator("html").get_attribute("dir") == "rtl"
            await check_on_screens(page, "partial")


@pytest.mark.parametrize("has_script", [True, False])
async def test_refund_address_is_named_on_the_page(
    browser: Browser, served: Served, has_script: bool
) -> None:
    order = await awaiting_refund_address(served)
    async with reading(browser, served.url, java_script_enabled=has_script) as page:
        await page.goto(f"{served.url}{order.path}#session={order.session_id}")
        secret = page.locator("#secret")
        if has_script:
            await expect(secret).to_have_value(order.session_id)
            assert "#" not in page.url
        else:
            await secret.fill(order.session_id)
        await page.locator("#address").fill(MONERO)
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text(SAY("refund.confirm_heading"))
        if has_script:  # axe needs scripts
            assert await findings(page) == []
        await page.get_by_role("button", name=SAY("refund.confirm")).click()
        await page.wait_for_url(f"**{order.path}")
        found = await until(served, order, status="refunded")
        assert [each["address"] for each in found["transfers"]] == [MONERO]
        await heading(page, "refunded")


async def test_page_after_a_wrong_secret_stays_up_to_date(browser: Browser, served: Served) -> None:
    order = await awaiting_refund_address(served)
    async with reading(browser, served.url) as page:
        await page.goto(served.url + order.path)
        await page.locator("#address").fill(MONERO)
        await page.locator("#secret").fill("f" * 36)
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/refund")
        alert = page.locator("#refund-form [role=alert]")
        await expect(alert).to_have_text(SAY("refund.wrong_secret"))
        await page.locator("#secret").fill("typed")
        async with page.expect_response(f"**{order.path}") as polled:
            await page.evaluate(POLL)
        await (await polled.value).finished()
        await page.wait_for_timeout(500)
        await expect(page.locator("#stale")).to_be_hidden()
        await expect(alert).to_be_visible()  # the typed input is kept
        await expect(page.locator("#address")).to_have_value(MONERO)
        await expect(page.locator("#secret")).to_have_value("typed")
        params = {"sessionId": order.session_id, "address": MONERO}
        answer = await served.post(f"/agent/swap/refund-address/{order.order_id}", params)
        assert answer.status == 200, answer.body
        await heading(page, "refunded")


@pytest.mark.parametrize("has_script", [True, False])
async def test_person_writes_to_the_operator_and_back(
    browser: Browser, served: Served, has_script: bool
) -> None:
    order = await make_order(served, X2U)
    async with reading(browser, served.url, java_script_enabled=has_script) as page:
        await page.goto(served.url + order.path)
        await page.get_by_role("link", name=SAY("checkout.support_write")).click()
        await page.wait_for_url("**/support")
        if has_script:
            await check_on_screens(page, "support")
        await page.locator("#message").fill("Where is it? " + "x" * 200)
        await page.get_by_role("button", name=SAY("support.send")).click()
        await expect(page.locator("h1")).to_have_text(SAY("support.heading"))
        if has_script:
            await check_on_screens(page, "conversation")
        await page.locator("#message").fill("Thank you.")
        await page.get_by_role("button", name=SAY("support.send")).click()
        await expect(page.locator(".said .text").last).to_have_text("Thank you.")
        assert await page.locator(".said").count() == 2


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
async def test_page_of_an_upstream_order_is_accessible(
    browser: Browser, served: Served, tmp_path: Path, swap: Any
) -> None:
    async with beside(served, tmp_path / "sidecar") as sidecar:
        order = await make_order(sidecar, swap)
        await check_screens(browser, sidecar.url, order.path, "awaiting")
        async with reading(browser, sidecar.url) as page:
            await page.goto(sidecar.url + order.path)
            await heading(page, "awaiting_deposit")
            await expect(page.locator("#cases")).to_contain_text(SAY("checkout.case_upstream_says"))
            central = Ordered(await upstream_id(sidecar, order.order_id), "")
            await fund(served, central)
            await heading(page, "completed")
        await check_screens(browser, sidecar.url, order.path, "completed")


async def test_page_counts_down_without_a_script(browser: Browser, served: Served) -> None:
    order = await make_order(served, X2U)
    left = "getComputedStyle(document.querySelector('.countdown')).getPropertyValue('--t')"
    async with reading(browser, served.url) as page:
        await page.goto(served.url + order.path)
        first = int(await page.evaluate(left))
        assert 3_580 < first <= 3_600
        async with asyncio.timeout(10):
            while int(await page.evaluate(left)) >= first:
                await page.wait_for_timeout(100)


async def test_updates_keep_the_countdown_at_its_speed(browser: Browser, served: Served) -> None:
    order = await make_order(served, X2U)
    async with reading(browser, served.url) as page:
        await page.goto(served.url + order.path)
        for _ in range(2):
            await page.wait_for_timeout(4_000)
            async with page.expect_response(f"**{order.path}"):
                await page.evaluate(POLL)
        await page.wait_for_timeout(500)
        shown = await page.evaluate(SHOWN)
        text = await (await served.client.get(order.path)).text()
        left = int(text.partition('data-left="')[2].partition('"')[0])
        assert left < 3_595
        assert shown == pytest.approx({"countdown": left, "bar": left}, abs=3)


async def test_buttons_copy_what_they_stand_beside(browser: Browser, served: Served) -> None:
    order = await make_order(served, U2X)
    shown = (await served.http("GET", f"/agent/swap/status/{order.order_id}")).body["data"]
    funding = shown["fundingInstructions"]
    grants = ["clipboard-read", "clipboard-write"]
    async with reading(browser, served.url, permissions=grants) as page:
        await page.goto(served.url + order.path)
        for name, value in (("amount", funding["amount"]), ("address", funding["depositAddress"])):
            await page.locator(f"#pay .{name} .copy").click()
            await expect(page.locator("#said")).to_have_text(SAY("common.copied"))
            assert await page.evaluate("navigator.clipboard.readText()") == value


@pytest.mark.parametrize("state", ["awaiting", "refund-address"])
async def test_tab_reaches_all_that_can_be_used(
    browser: Browser, served: Served, state: str
) -> None:
    """In the order of the page, and one sees where the focus is."""
    needs_address = state == "refund-address"
    order = await (awaiting_refund_address(served) if needs_address else make_order(served, U2X))
    async with reading(browser, served.url) as page:
        await page.goto(served.url + order.path)
        expected = await page.evaluate(USABLE)
        assert len(expected) > 4
        reached = []
        for _ in expected:
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate(FOCUSED))
        assert reached == [[name, True] for name in expected]
        if not needs_address:
            await page.locator("#pay summary").focus()
            await page.keyboard.press("Enter")
            await page.keyboard.press("Tab")
            await expect(page.locator("#pay details a")).to_be_focused()


async def test_updates_keep_the_focus_and_what_is_open(browser: Browser, served: Served) -> None:
    order = await make_order(served, U2X)
    async with reading(browser, served.url) as page:
        await page.goto(served.url + order.path)
        due = page.locator("#pay .amount strong")
        await page.locator("#pay summary").click()
        for focused, paid, left in (("summary", "50", "100"), (".address .copy", "60", "40")):
            await page.locator(f"#pay {focused}").focus()
            await fund(served, order, amount=paid)
            await expect(due).to_have_text(f"{left} USDC", timeout=DONE_MS)
            await expect(page.locator(f"#pay {focused}")).to_be_focused()
            await expect(page.locator("#pay details")).to_have_attribute("open", "")
        await fund(served, order)  # then the page has no address to copy
        await expect(page.locator("#pay")).to_be_hidden(timeout=DONE_MS)
        await expect(page.locator("h1")).to_be_focused()
        await heading(page, "completed")
        await expect(page.locator("h1")).to_be_focused()


async def test_page_says_when_it_may_be_out_of_date(browser: Browser, served: Served) -> None:
    order = await make_order(served, X2U)
    async with reading(browser, served.url) as page:
        await page.goto(served.url + order.path)
        await page.context.set_offline(True)
        await expect(page.locator("#stale")).to_be_visible(timeout=DONE_MS)
        await page.context.set_offline(False)
        await expect(page.locator("#stale")).to_be_hidden(timeout=DONE_MS)


async def test_request_to_another_site_fails_a_test(browser: Browser, served: Served) -> None:
    """The check in ``reading`` that all tests of this folder rely on."""
    with pytest.raises(AssertionError, match="localhost:1"):
        async with reading(browser, served.url) as page:
            await page.goto(f"{served.url}/logo.svg")
            await page.evaluate(
                "void fetch('http://localhost:1/', {mode: 'no-cors'}).catch(() => 0)"
            )
