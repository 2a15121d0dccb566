"""The form for a swap in a browser: from the front page to the payout, with and without scripts."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.browsing import (
    DONE_MS,
    FOCUSED,
    NARROW,
    SAY,
    USABLE,
    check_on_screens,
    check_screens,
    findings,
    heading,
    is_too_wide,
    reading,
)
from tests.contract.serving import EVM, MONERO, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def click(page: Page, key: str) -> None:
    await page.get_by_role("button", name=SAY(key), exact=True).click()


async def fill(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        await page.locator(f"#{name}").fill(value)


async def check_narrow(page: Page, *, has_script: bool) -> None:
    assert page.viewport_size == NARROW
    if has_script:  # axe, and measuring, need scripts
        assert await findings(page) == []
        assert not await is_too_wide(page)


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
@pytest.mark.parametrize("has_script", [True, False])
async def test_newcomer_sees_a_whole_swap_by_clicks(
    browser: Browser, served: Served, has_script: bool, direction: str
) -> None:
    options = {"java_script_enabled": has_script, "viewport": NARROW}
    async with reading(browser, served.url, **options) as page:
        await page.goto(served.url)
        await page.get_by_role("link", name=SAY(f"swap.direction_{direction}")).click()
        await check_narrow(page, has_script=has_script)
        await click(page, "swap.ask")
        await expect(page.locator("h1")).to_contain_text("for about")
        await check_narrow(page, has_script=has_script)
        await click(page, "swap.order")
        await heading(page, "awaiting_deposit")
        await check_narrow(page, has_script=has_script)
        await click(page, "sandbox.fund")
        await heading(page, "completed")
        await expect(page.get_by_role("button", name=SAY("sandbox.fund"))).to_have_count(0)
        await check_narrow(page, has_script=has_script)


@pytest.mark.parametrize("has_script", [True, False])
async def test_order_opens_with_its_secret_for_later(
    browser: Browser, served: Served, has_script: bool
) -> None:
    grants = ["clipboard-read", "clipboard-write"]
    options = {"java_script_enabled": has_script, "permissions": grants}
    async with reading(browser, served.url, **options) as page:
        await page.goto(f"{served.url}/swap")
        await fill(page, amount="0.8", to=EVM, refundAddress=MONERO)
        await click(page, "swap.ask")
        await click(page, "swap.order")
        await heading(page, "awaiting_deposit")
        if not has_script:
            link = page.url
        else:
            assert "#" not in page.url
            await page.get_by_text(SAY("checkout.owner_heading")).click()
            assert await findings(page) == []
            await page.locator("#owner .copy").click()
            link = await page.evaluate("navigator.clipboard.readText()")
            await expect(page.locator("#owner-link")).to_have_text(link)
            await click(page, "sandbox.provoke")  # a form of the page keeps the link
            await page.wait_for_load_state()
            await expect(page.locator("#owner-link")).to_have_text(link)
        path, _, session = link.partition("#session=")
        order_id = path.rpartition("/")[2]
        params = {"sessionId": session}
        answer = await served.post(f"/agent/swap/cancel/{order_id}", params)
        assert answer.status == 200, answer.body


async def test_page_without_the_secret_offers_no_link(browser: Browser, served: Served) -> None:
    async with reading(browser, served.url) as page:
        await page.goto(f"{served.url}/swap?example=x2u")
        await click(page, "swap.ask")
        await click(page, "swap.order")
        await expect(page.locator("#owner")).to_be_visible()
        await page.goto(page.url)
        await page.reload()
        await heading(page, "awaiting_deposit")
        await expect(page.locator("#owner")).to_be_hidden()


@pytest.mark.parametrize("has_script", [True, False])
async def test_reload_and_second_click_make_one_order(
    browser: Browser, served: Served, has_script: bool
) -> None:
    async with reading(browser, served.url, java_script_enabled=has_script) as page:
        await page.goto(f"{served.url}/swap?example=u2x")
        await click(page, "swap.ask")
        await page.reload()  # which sends the form again
        assert served.count("orders") == 0
        await page.get_by_role("button", name=SAY("swap.order")).dblclick()
        await heading(page, "awaiting_deposit")
        assert served.count("orders") == 1
        await page.reload()
        await heading(page, "awaiting_deposit")
        assert served.count("orders") == 1


@pytest.mark.parametrize("has_script", [True, False])
async def test_wrong_field_is_marked_and_keeps_its_text(
    browser: Browser, served: Served, has_script: bool
) -> None:
    options = {"java_script_enabled": has_script, "viewport": NARROW}
    async with reading(browser, served.url, **options) as page:
        await page.goto(f"{served.url}/swap")
        await fill(page, amount="0.8", to=MONERO, refundAddress=EVM)
        await click(page, "swap.ask")
        wrong = page.locator("#to")
        await expect(wrong).to_have_attribute("aria-invalid", "true")
        await expect(wrong).to_have_value(MONERO)
        await expect(page.locator("#amount")).not_to_have_attribute("aria-invalid", "true")
        await expect(page.locator("#to-wrong")).to_contain_text(SAY("swap.wrong_to"))
        if has_script:
            await check_on_screens(page, "wrong")
        await fill(page, to=EVM, refundAddress=MONERO)
        await click(page, "swap.ask")
        await click(page, "swap.change")
        await expect(page.locator("#to")).to_have_value(EVM)
        await expect(page.locator("#amount")).to_have_value("0.8")


async def test_swap_form_is_accessible(browser: Browser, served: Served) -> None:
    await check_screens(browser, served.url, "/swap", "form")
    async with reading(browser, served.url) as page:
        await page.goto(f"{served.url}/swap?example=x2u")
        await click(page, "swap.ask")
        await check_on_screens(page, "quote")


@pytest.mark.parametrize("has_script", [True, False])
async def test_menu_lets_a_payment_leave_the_chain(
    browser: Browser, served: Served, has_script: bool
) -> None:
    async with reading(browser, served.url, java_script_enabled=has_script) as page:
        await page.goto(f"{served.url}/swap?example=x2u")
        await click(page, "swap.ask")
        await click(page, "swap.order")
        await page.locator("#do").select_option("payout_fails")
        await click(page, "sandbox.provoke")
        await click(page, "sandbox.fund")
        await heading(page, "refunded")
        await page.locator("#do").select_option("restore_deposit")
        await click(page, "sandbox.provoke")
        alert = page.locator("#sandbox [role=alert]")
        await expect(alert).to_contain_text(SAY("sandbox.refused"), timeout=DONE_MS)


async def test_tab_reaches_all_of_the_swap_form(browser: Browser, served: Served) -> None:
    async with reading(browser, served.url) as page:
        await page.goto(f"{served.url}/swap?example=x2u")
        expected = await page.evaluate(USABLE)
        assert len(expected) == 10
        reached = []
        for _ in expected:
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate(FOCUSED))
        assert reached == [[name, True] for name in expected]
