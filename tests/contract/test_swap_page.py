"""The form at /swap over HTTP: its steps, its limits, and the sandbox's menu on an order's page."""

from __future__ import annotations

import asyncio
import html
import re
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.http.pages.rendering import Catalogues
from rpcsvc.orders.local_venue import LocalVenue
from rpcsvc.orders.ports.venue import FaultKind
from tests.contract.checkout import X2U, Ordered, fault, fund, make_order, status_of, until
from tests.contract.serving import EVM, MONERO, Served, serving
from tests.contract.sidecar import STAGENET, beside
from tests.e2e.processes import until as wait_until
from tests.sandbox import give_wallets

TYPED = {
    "direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM, "refundAddress": MONERO,
}  # fmt: skip
BACK = {**TYPED, "direction": "u2x", "amount": "150", "to": MONERO, "refundAddress": EVM}
SAY = Catalogues().choose("en").say
FORM = {"content-type": "application/x-www-form-urlencoded"}


class Page:
    """An answer of a page: status, headers and markup."""

    def __init__(self, status: int, headers: Any, text: str) -> None:
        self.status = status
        self.headers = headers
        self.text = text
        self.words = html.unescape(re.sub(r"<[^>]*>", "", text))

    def typed(self) -> dict[str, str]:
        """The values of the form at /swap, as a browser would send them."""
        fields = re.findall(
            r'<input[^>]* name="(\w+)"[^>]* value="([^"]*)"(?: required)?( checked)?', self.text
        )
        found = {name: html.unescape(value) for name, value, _ in fields if name != "direction"}
        directions = [value for name, value, mark in fields if name == "direction" and mark]
        directions += re.findall(r'type="hidden" name="direction" value="(\w+)"', self.text)
        chains = re.findall(r'<option value="(\w+)" selected', self.text)
        if not found.get("receiveAmount"):
            found.pop("receiveAmount", None)
        if directions:
            found["direction"] = directions[0]
        if chains:
            found["chain"] = chains[0]
        return found

    def at(self, field: str) -> str:
        """The words of the problem at a field; empty without one."""
        found = re.search(rf'<p class="error" id="{field}-wrong">(.*?)</p>', self.text)
        return "" if found is None else html.unescape(re.sub(r"<[^>]*>", "", found[1]))


async def get(served: Served, path: str, **headers: str) -> Page:
    response = await served.client.get(path, headers=headers, allow_redirects=False)
    return Page(response.status, response.headers, await response.text())


async def send(served: Served, fields: dict[str, str], path: str = "/swap", **headers: str) -> Page:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await served.client.post(path, data=fields, headers=names, allow_redirects=False)
    return Page(response.status, response.headers, await response.text())


async def quoted(served: Served, typed: dict[str, str]) -> dict[str, str]:
    """The fields of the page with a quote, with which its order is made."""
    page = await send(served, typed)
    assert page.status == 200, page.words
    return {**page.typed(), "step": "order"}


def made(page: Page) -> Ordered:
    """The order that a page leads to."""
    assert page.status == 303, page.words
    found = re.fullmatch(r"/orders/(ord_\w{26})#session=([0-9a-f-]{36})", page.headers["location"])
    assert found is not None, page.headers["location"]
    return Ordered(found[1], found[2])


@pytest.mark.parametrize("typed", [TYPED, BACK], ids=["x2u", "u2x"])
async def test_form_makes_an_order_in_two_steps(served: Served, typed: dict[str, str]) -> None:
    priced = await send(served, typed)
    answer = await served.post("/agent/swap/quote", {name: typed[name] for name in list(typed)[:3]})
    quote = answer.body["data"]["quote"]
    fees = quote["fees"]
    shown = [
        f"{quote['depositAmount']} {quote['depositAsset']}",
        f"{quote['expectedOutput']} {quote['payoutAsset']}",
        f"{quote['minReceived']} {quote['payoutAsset']}",
        SAY("swap.rate_is", rate=quote["rate"]),
        f"{fees['spread']} {fees['asset']}",
        f"{fees['network']} {fees['asset']}",
        f"{fees['refundNetwork']} {fees['refundAsset']}",
        typed["to"],
        typed["refundAddress"],
    ]
    assert priced.status == 200
    assert [each for each in shown if each not in priced.words] == []
    assert served.count("orders") == 0
    order = made(await send(served, {**priced.typed(), "step": "order"}))
    status = await status_of(served, order)
    assert status["order"]["toAddress"] == typed["to"]
    assert status["order"]["refundAddress"] == typed["refundAddress"]
    cancelled = await served.post(
        f"/agent/swap/cancel/{order.order_id}", {"sessionId": order.session_id}
    )
    assert cancelled.status == 200, "the fragment has the order's secret"


async def test_form_sent_many_times_makes_one_order(served: Served) -> None:
    fields = await quoted(served, TYPED)
    pages = await asyncio.gather(*(send(served, fields) for _ in range(10)))
    assert len({made(page) for page in pages}) == 1
    assert made(await send(served, fields)) == made(pages[0])
    assert served.count("orders") == 1


async def test_form_with_other_entries_makes_no_second_order(served: Served) -> None:
    fields = await quoted(served, TYPED)
    made(await send(served, fields))
    page = await send(served, {**fields, "refundAddress": STAGENET})
    assert (page.status, SAY("swap.used") in page.words) == (409, True)
    assert served.count("orders") == 1


async def test_each_quote_has_a_key_of_its_own(served: Served) -> None:
    first, second = await quoted(served, TYPED), await quoted(served, TYPED)
    assert first["key"] != second["key"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("direction", "", "swap.missing"),
        ("direction", "x2x", "swap.wrong_direction"),
        ("chain", "nowhere", "swap.wrong_chain"),
        ("amount", "", "swap.missing"),
        ("amount", "0,8", "swap.wrong_amount"),
        ("amount", "-1", "swap.wrong_amount"),
        ("to", "", "swap.missing"),
        ("to", MONERO, "swap.wrong_to"),
        ("to", "<script>alert(1)</script>", "swap.wrong_to"),
        ("refundAddress", "", "swap.missing"),
        ("refundAddress", EVM, "swap.wrong_refundAddress"),
    ],
)
async def test_problem_stands_at_its_field(
    served: Served, field: str, value: str, says: str
) -> None:
    sent = {**TYPED, field: value}
    page = await send(served, sent)
    assert (page.status, SAY("swap.look") in page.words) == (400, True)
    assert page.at(field).startswith(SAY(says))
    assert [name for name in TYPED if name != field and page.at(name)] == []
    kept = page.typed()
    assert {name: kept.get(name, "") for name in ("amount", "to", "refundAddress")} == {
        name: sent[name] for name in ("amount", "to", "refundAddress")
    }
    assert "<script" not in page.text


async def test_problem_of_an_address_names_no_param(served: Served) -> None:
    page = await send(served, {**TYPED, "to": "0x123", "refundAddress": EVM})
    assert page.at("to").startswith(f"{SAY('swap.wrong_to')} It has 5 characters")
    says = f"{SAY('swap.wrong_refundAddress')} It is an EVM address"
    assert page.at("refundAddress").startswith(says)


async def test_all_problems_of_a_form_are_shown_at_once(served: Served) -> None:
    page = await send(served, {"direction": "x2u", "chain": "x", "to": "y"})
    assert [name for name in TYPED if page.at(name)] == ["chain", "amount", "to", "refundAddress"]


async def test_amount_to_arrive_is_ordered_exactly(served: Served) -> None:
    exact = {**TYPED, "amount": "", "receiveAmount": "100.25"}
    priced = await send(served, exact)
    assert SAY("swap.you_get_exact") in priced.words
    assert "for exactly 100.25 USDC" in priced.words
    order = made(await send(served, {**priced.typed(), "step": "order"}))
    assert (await status_of(served, order))["order"]["receiveAmount"] == "100250000"


async def test_both_amounts_are_refused_at_the_second(served: Served) -> None:
    page = await send(served, {**TYPED, "receiveAmount": "100"})
    assert page.at("receiveAmount").startswith(SAY("swap.wrong_receiveAmount"))
    assert page.typed()["receiveAmount"] == "100"


async def test_limits_are_said_at_the_amount_to_arrive(served: Served) -> None:
    exact = {**TYPED, "amount": "", "receiveAmount": "0.5"}
    page = await send(served, exact)
    assert re.fullmatch(r"At least \d+\.\d+ USDC has to arrive\.", page.at("receiveAmount"))
    page = await send(served, {**exact, "receiveAmount": "9000000"})
    assert re.fullmatch(r"At most \d+\.\d+ USDC can arrive\.", page.at("receiveAmount"))


async def test_limits_are_said_at_the_amount(served: Served) -> None:
    page = await send(served, {**TYPED, "amount": "0.001"})
    assert re.fullmatch(r"Send at least 0\.06\d+ XMR\.", page.at("amount"))
    page = await send(served, {**TYPED, "amount": "100000"})
    assert re.fullmatch(r"Send at most 303\.\d+ XMR\.", page.at("amount"))


async def test_form_can_be_changed_after_the_quote(served: Served) -> None:
    fields = await quoted(served, BACK)
    page = await send(served, {**fields, "step": "change"})
    assert page.status == 200
    assert page.typed() == BACK
    assert SAY("swap.look") not in page.words


async def test_order_is_never_worse_than_the_quote_shown(served: Served) -> None:
    fields = await quoted(served, TYPED)
    await fault(served, "set_rate", rate="150")
    page = await send(served, fields)
    assert (page.status, SAY("swap.changed") in page.words) == (409, True)
    assert SAY("swap.rate_is", rate="150") in page.words
    assert served.count("orders") == 0
    made(await send(served, {**page.typed(), "step": "order"}))


@pytest.mark.parametrize(
    "changed", [{"quoteDigest": ""}, {"quoteDigest": "A" * 40}, {"key": ""}, {"key": "short"}]
)
async def test_order_needs_a_quote_and_a_key(served: Served, changed: dict[str, str]) -> None:
    page = await send(served, {**await quoted(served, TYPED), **changed})
    assert (page.status, SAY("swap.unreadable") in page.words) == (400, True)
    assert served.count("orders") == 0


async def test_order_needs_a_refund_address(served: Served) -> None:
    page = await send(served, {**await quoted(served, TYPED), "refundAddress": ""})
    assert (page.status, page.at("refundAddress") != "") == (400, True)
    assert served.count("orders") == 0


async def test_failed_order_is_tried_again_under_its_key(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = await quoted(served, TYPED)

    def opening(*_: object) -> None:
        raise Unavailable("The wallet does not answer.", retry_after=7)

    with monkeypatch.context() as broken:
        broken.setattr(LocalVenue, "opening", opening)
        page = await send(served, fields)
    assert (page.status, page.headers["retry-after"]) == (503, "7")
    assert SAY("swap.failed") in page.words
    assert {**page.typed(), "step": "order"} == fields
    made(await send(served, {**page.typed(), "step": "order"}))


async def test_form_is_kept_while_there_is_no_price(served: Served) -> None:
    await fault(served, "rates_down")
    page = await send(served, TYPED)
    assert (page.status, page.typed(), SAY("swap.failed") in page.words) == (503, TYPED, True)


async def test_form_takes_the_budgets_of_the_api(tmp_path: Path) -> None:
    """Orders cost what they cost over the API, and every page is a request."""
    flags: dict[str, Any] = {"enabled": True, "orders_per_minute": 2, "requests_per_minute": 7}
    limits = {f"rate_limit__{name}": value for name, value in flags.items()}
    async with serving(tmp_path, **limits) as served:
        fields = await quoted(served, TYPED)
        made(await send(served, fields))
        answer = await served.post("/agent/swap/create", X2U, idempotency_key="k" * 16)
        assert answer.status == 200
        page = await send(served, fields)
        assert (page.status, SAY("swap.order_again") in page.words) == (429, True)
        assert int(page.headers["retry-after"]) > 0
        assert page.typed()["key"] == fields["key"]
        statuses = [(await get(served, "/swap")).status for _ in range(5)]
        assert statuses == [200, 200, 200, 200, 429]


async def test_order_of_the_form_counts_as_a_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_wallets(monkeypatch, {"monero": 1_500 * 10**12}, 250_000 * 10**6)
    async with serving(tmp_path, orders__unfunded_address_orders=1) as served:
        first, second = await quoted(served, TYPED), await quoted(served, TYPED)
        made(await send(served, first))
        page = await send(served, second)
        assert (page.status, served.count("orders")) == (429, 1)
        assert SAY("swap.order_again") in page.words
        page = await send(served, TYPED)
        assert (page.status, page.typed()) == (429, TYPED)
        assert (await served.post("/agent/swap/create", X2U)).status == 429


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
async def test_swap_form_of_another_site_is_refused(served: Served, site: str) -> None:
    fields = await quoted(served, TYPED)
    for sent in (TYPED, fields):
        page = await send(served, sent, sec_fetch_site=site)
        assert (page.status, SAY("swap.cross_site") in page.words) == (403, True)
        assert EVM not in page.words
    assert served.count("orders") == 0


@pytest.mark.parametrize(
    "body",
    [b"amount", b"amount=1&amount=2", b"session=1", b"to=%ff\xff", b"step=sell&amount=1",
     b"&".join([b"amount=1"] * 9)],
)  # fmt: skip
async def test_swap_form_that_is_none_is_refused(served: Served, body: bytes) -> None:
    response = await served.client.post("/swap", data=body, headers=FORM)
    assert response.status == 400
    assert SAY("swap.unreadable") in html.unescape(await response.text())


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data"])
async def test_swap_form_is_read_as_a_form_alone(served: Served, kind: str) -> None:
    response = await served.client.post("/swap", data=b"amount=1", headers={"content-type": kind})
    assert response.status == 400


async def test_swap_form_has_an_end(served: Served) -> None:
    page = await send(served, {**TYPED, "to": "x" * 5_000})
    assert page.status == 413


@pytest.mark.parametrize("path", ["/swap", "/"])
async def test_form_can_be_neither_framed_nor_scripted(served: Served, path: str) -> None:
    page = await get(served, path)
    policy = dict(
        rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; ")
    )
    assert policy["frame-ancestors"] == policy["script-src"] == policy["default-src"] == "'none'"
    assert policy["form-action"] == "'self'"
    assert page.headers["cache-control"] == "no-store, no-transform"
    assert '<form method="post" action="/swap"' in page.text
    assert "<script" not in page.text


async def test_link_fills_in_no_address(served: Served) -> None:
    page = await get(served, f"/swap?to={EVM}&refundAddress={MONERO}&amount=1&example=u2u")
    assert page.typed() == {"direction": "x2u", "amount": "", "to": "", "refundAddress": ""}


async def test_quote_and_form_are_listed_nowhere(served: Served) -> None:
    page = await send(served, TYPED)
    assert 'name="robots" content="noindex"' in page.text
    assert page.headers["referrer-policy"] == "same-origin"


async def test_swap_through_a_sidecar_begins_at_its_form(central: Served, tmp_path: Path) -> None:
    async with beside(central, tmp_path / "sidecar") as sidecar:
        page = await get(sidecar, "/swap?example=x2u")
        assert page.typed()["to"] == ""  # nobody's address is no example for real money
        fields = await quoted(sidecar, {**TYPED, "refundAddress": STAGENET})
        order = made(await send(sidecar, fields))
        assert (sidecar.count("orders"), central.count("orders")) == (1, 1)
        text = (await get(sidecar, order.path)).text
        assert "/sandbox" not in text
        assert (await send(sidecar, {"do": "fund"}, f"{order.path}/sandbox")).status == 404


# --- the sandbox -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_sandbox_swaps_an_example_by_clicks_alone(served: Served, direction: str) -> None:
    example = (await get(served, f"/swap?example={direction}")).typed()
    order = made(await send(served, await quoted(served, example)))
    path = f"{order.path}/sandbox"
    assert f'action="{path}"' in (await get(served, order.path)).text
    for _ in range(2):  # a second click sends nothing more
        page = await send(served, {"do": "fund"}, path)
        assert (page.status, page.headers["location"]) == (303, order.path)
    done = await until(served, order, status="completed")
    assert len(done["deposits"]) == 1
    assert 'value="fund"' not in (await get(served, order.path)).text


@pytest.mark.parametrize("kind", FaultKind)
async def test_sandbox_menu_has_every_fault(served: Served, kind: FaultKind) -> None:
    order = await make_order(served, X2U, refundAddress=MONERO)
    await fund(served, order, amount="0.3")

    async def is_confirmed() -> bool:
        deposits = (await status_of(served, order))["deposits"]
        return [each["status"] for each in deposits] == ["confirmed"]

    await wait_until(is_confirmed)
    if kind is FaultKind.RESTORE_DEPOSIT:
        await fault(served, "drop_deposit", orderId=order.order_id)
    page = await get(served, order.path)
    assert f'<option value="{kind.value}">' in page.text
    assert SAY(f"sandbox.fault_{kind.value}") in page.words
    page = await send(served, {"do": kind.value}, f"{order.path}/sandbox")
    assert (page.status, page.headers["location"]) == (303, order.path)


async def test_sandbox_rate_falls_by_a_tenth(served: Served) -> None:
    order = await make_order(served, X2U)
    await send(served, {"do": "set_rate"}, f"{order.path}/sandbox")
    assert "1 XMR = 148.5 USDC" in (await get(served, "/")).words


@pytest.mark.parametrize("choice", ["drop_deposit", "nothing", "", "<b>"])
async def test_sandbox_says_what_it_can_not_do(served: Served, choice: str) -> None:
    order = await make_order(served, X2U)
    page = await send(served, {"do": choice}, f"{order.path}/sandbox")
    assert (page.status, SAY("sandbox.refused") in page.words) == (400, True)
    assert "<b>" not in page.text


async def test_sandbox_form_of_another_site_is_refused(served: Served) -> None:
    order = await make_order(served, X2U)
    path = f"{order.path}/sandbox"
    page = await send(served, {"do": "fund"}, path, sec_fetch_site="cross-site")
    assert page.status == 403
    assert (await send(served, {"seconds": "1"}, path)).status == 400
    assert (await status_of(served, order))["deposits"] == []


async def test_address_of_the_sandbox_form_leads_to_the_order(served: Served) -> None:
    order = await make_order(served, X2U)
    page = await get(served, f"{order.path}/sandbox")
    assert (page.status, page.headers["location"]) == (303, order.path)
