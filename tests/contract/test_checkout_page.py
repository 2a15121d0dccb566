"""The checkout page over HTTP: contents, access, content security policy, and its refund form."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain.order import Transfer
from rpcsvc.errors import Unavailable
from rpcsvc.http.pages import checkout
from rpcsvc.http.pages.rendering import Catalogues, qr_svg
from rpcsvc.orders.local_venue import LocalVenue
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.sandbox.engine import SandboxEngine
from rpcsvc.verify import Exchange, verify_response
from tests.contract import bff
from tests.contract.checkout import (
    U2X,
    X2U,
    Json,
    Ordered,
    awaiting_refund_address,
    fault,
    fund,
    make_order,
    status_of,
    until,
    until_paid_out,
)
from tests.contract.operator_socket import over_socket
from tests.contract.serving import EVM, MONERO, Served, a_ticket, serving
from tests.contract.signatures import jwks
from tests.mcp import call, swap

OTHER_SESSION = "9a1f0b52-3c4d-4e6f-8a7b-1c2d3e4f5a6b"
OTHER_MONERO = (
    "44AFFq5kSiGBoZ4NMDwYtN18obc8AemS33DBLWs3H7otXft3XjrpDtQGv7SqSsaBYBb98"
    "uNbr2VBBEt7f2wfn3RVGQBEP3A"
)
SAY = Catalogues().choose("en").say


async def page(served: Served, path: str, **headers: str) -> tuple[int, str]:
    response = await served.client.get(path, headers=headers)
    return response.status, await response.text()


async def send_form(
    served: Served, order: Ordered, fields: dict[str, str], **headers: str
) -> tuple[int, str]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await served.client.post(
        f"{order.path}/refund", data=fields, headers=names, allow_redirects=False
    )
    return response.status, html.unescape(await response.text())


async def test_page_shows_what_is_to_be_paid(served: Served) -> None:
    order = await make_order(served, X2U, refundAddress=MONERO)
    funding = (await status_of(served, order))["fundingInstructions"]
    status, text = await page(served, order.path)
    bare = re.sub(r"<[^>]*>", "", text)
    assert status == 200
    for shown in (funding["depositAddress"], MONERO, EVM, "0.8 XMR", "131.29 USDC"):
        assert shown in bare
    assert html.escape(funding["paymentUri"]) in text
    assert str(qr_svg(funding["paymentUri"], SAY("checkout.qr_xmr"))) in text
    assert SAY("checkout.refund_agreed") in text


async def test_page_codes_the_bare_address_of_usdc(served: Served) -> None:
    order = await make_order(served, U2X)
    funding = (await status_of(served, order))["fundingInstructions"]
    _, text = await page(served, order.path)
    address = funding["depositAddress"]
    assert str(qr_svg(address, SAY("checkout.qr_usdc"))) in text
    warning, link = (
        text.index("Some wallets misread"),
        text.index(html.escape(funding["paymentUri"])),
    )
    assert text.index("<details") < warning < link < text.index("</details>")


async def test_reason_has_the_words_of_the_catalogue(served: Served) -> None:
    order = await make_order(served, X2U)
    session = {"sessionId": order.session_id}
    assert (await served.post(f"/agent/swap/cancel/{order.order_id}", session)).status == 200
    reason = html.escape(SAY("checkout.reason_cancelled"))
    _, text = await page(served, order.path)
    assert f'<p class="reason">{reason}</p>' in text


async def test_reason_of_an_upstream_is_marked_as_english(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upstream's reason is in no catalogue of texts; here that of a cancelled order."""
    monkeypatch.setattr(checkout, "reasons_in", lambda _: [])
    order = await make_order(served, X2U)
    session = {"sessionId": order.session_id}
    assert (await served.post(f"/agent/swap/cancel/{order.order_id}", session)).status == 200
    reason = (await status_of(served, order))["order"]["errorMessage"]
    _, text = await page(served, order.path)
    assert f'<p class="reason" lang="en" dir="ltr">{html.escape(reason)}</p>' in text


async def created(served: Served) -> Json:
    return dict((await served.post("/agent/swap/create", X2U)).body["data"]["order"])


async def executed(served: Served) -> Json:
    return dict((await served.rpc("swap.execute", X2U)).body["result"]["data"]["order"])


async def created_by_bff(served: Served) -> Json:
    return dict((await bff.post(served, "/orders", bff.ORDER)).body)


async def created_by_mcp(served: Served) -> Json:
    made = await call(served, "create_swap", swap())
    return dict(made["structuredContent"]["data"]["order"])


@pytest.mark.parametrize("make", [created, executed, created_by_bff, created_by_mcp])
async def test_order_answers_name_the_page(
    served: Served, make: Callable[[Served], Awaitable[Json]]
) -> None:
    made = await make(served)
    assert made["checkoutUrl"] == f"http://127.0.0.1:8080/orders/{made['orderId']}"
    assert (await page(served, f"/orders/{made['orderId']}"))[0] == 200


async def test_page_never_shows_the_session(served: Served) -> None:
    order = await awaiting_refund_address(served)
    _, text = await page(served, order.path)
    assert order.session_id not in text
    assert 'name="secret"' in text


@pytest.mark.parametrize("path", ["/orders/ord_1", f"/orders/ord_{'0' * 26}", "/orders/<b>"])
async def test_page_of_no_order_is_a_page(served: Served, path: str) -> None:
    status, text = await page(served, path)
    assert status == 404
    assert SAY("notice.not_found_title") in text
    assert "<b>" not in text


async def test_page_of_a_bridge_order_is_not_there(served: Served) -> None:
    body = {"toAddress": EVM}
    answer = await served.client.post("/bff/v1/bridge/deposit", json=body)
    assert (await page(served, f"/orders/{(await answer.json())['orderId']}"))[0] == 404


async def test_policy_admits_the_bytes_of_the_page_alone(served: Served) -> None:
    order = await make_order(served, X2U)
    response = await served.client.get(order.path)
    text, headers = await response.text(), response.headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    blocks = re.findall(r"<(style|script)>(.*?)</\1>", text, re.DOTALL)
    for name, content in blocks:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[f"{name}-src"].split()
    assert len(blocks) == 3
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store, no-transform"
    assert headers["referrer-policy"] == "same-origin"
    assert not re.search(r'\sstyle=|\son\w+=|(src|href)="(https?:)?//', text)


async def test_page_is_signed_and_readable_by_its_site_alone(served: Served) -> None:
    order = await make_order(served, X2U)
    response = await served.client.get(order.path, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers
    exchange = Exchange(
        method="GET",
        target=order.path,
        request_body=b"",
        status=response.status,
        headers=response.headers,
        body=await response.read(),
    )
    verify_response(exchange, await jwks(served))


async def test_page_counts_as_a_request(tmp_path: Path) -> None:
    async with serving(
        tmp_path, rate_limit__enabled=True, rate_limit__requests_per_minute=2
    ) as served:
        order = await make_order(served, X2U)
        statuses = [(await page(served, order.path))[0] for _ in range(3)]
        response = await served.client.get(order.path)
        assert statuses == [200, 200, 429]
        assert int(response.headers["retry-after"]) > 0
        assert SAY("notice.busy_title") in await response.text()


async def test_attestation_file_is_that_of_the_status(served: Served) -> None:
    order = await make_order(served, X2U)
    response = await served.client.get(f"{order.path}/attestation")
    signed = (await status_of(served, order))["order"]["attestation"]
    assert (await response.text(), response.content_type) == (signed, "application/jose")
    assert "attachment" in response.headers["content-disposition"]
    await fund(served, order)
    await until(served, order, status="completed")
    assert (await page(served, f"{order.path}/attestation"))[0] == 404


async def test_receipt_file_is_that_of_the_status(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = {"network": "arbitrum", "asset": "USDC", "txid": "0x7f", "address": EVM,
             "amount": "131.29", "block": 7, "chainId": 42161, "logIndex": 3}  # fmt: skip
    look_up = SandboxEngine.look_up

    async def proved(engine: SandboxEngine, transfer: Transfer) -> Verdict:
        found = await look_up(engine, transfer)
        is_settled = found.outcome is Outcome.SETTLED
        return replace(found, receipt=json.dumps(proof)) if is_settled else found

    monkeypatch.setattr(SandboxEngine, "look_up", proved)
    order = await make_order(served, X2U)
    path = f"{order.path}/receipt"
    _, text = await page(served, order.path)
    assert SAY("checkout.receipt_heading") not in text
    assert (await page(served, path))[0] == 404
    await fund(served, order)
    done = await until(served, order, status="completed")
    assert done["receipt"] == proof
    _, text = await page(served, order.path)
    assert SAY("checkout.receipt_heading") in text
    assert f'<a download href="{path}">' in text
    response = await served.client.get(path)
    assert (response.status, await response.json()) == (200, proof)
    name = f'attachment; filename="{order.order_id}.receipt.json"'
    assert response.headers["content-disposition"] == name


async def test_refund_form_takes_an_address_in_two_steps(served: Served) -> None:
    order = await awaiting_refund_address(served)
    fields = {"address": MONERO, "secret": order.session_id.upper()}
    status, text = await send_form(served, order, fields)
    assert (status, SAY("refund.confirm_heading") in text) == (200, True)
    assert (await status_of(served, order))["actionRequired"] == "refund_address"
    status, _ = await send_form(served, order, {**fields, "confirmed": "yes"})
    assert status == 303
    found = await until(served, order, status="refunded")
    assert [each["address"] for each in found["transfers"]] == [MONERO]
    assert served.count("tickets") == 0


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_address_of_the_form_leads_back_to_the_order(served: Served, method: str) -> None:
    order = await make_order(served, X2U)
    path = f"{order.path}/refund"
    response = await served.client.request(method, path, allow_redirects=False)
    assert (response.status, response.headers["location"]) == (303, order.path)
    assert (await page(served, f"/orders/ord_{'0' * 26}/refund"))[0] == 404


async def test_refund_form_needs_the_orders_own_secret(served: Served) -> None:
    order = await awaiting_refund_address(served)
    tickets = served.count("tickets")
    for secret in (OTHER_SESSION, "", "é", order.order_id, order.session_id[:-1]):
        fields = {"address": MONERO, "secret": secret, "confirmed": "yes"}
        status, text = await send_form(served, order, fields)
        assert status == 403
        assert f'role="alert">{SAY("refund.wrong_secret")}' in text
        assert order.session_id not in text
    assert (await status_of(served, order))["order"]["refundAddress"] is None
    assert served.count("tickets") == tickets


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
async def test_refund_form_of_another_site_is_refused(served: Served, site: str) -> None:
    order = await awaiting_refund_address(served)
    fields = {"address": MONERO, "secret": order.session_id, "confirmed": "yes"}
    status, text = await send_form(served, order, fields, sec_fetch_site=site)
    assert (status, SAY("refund.cross_site") in text) == (403, True)
    assert (await status_of(served, order))["order"]["refundAddress"] is None


@pytest.mark.parametrize("address", [EVM, MONERO[:-1], "<script>alert(1)</script>"])
async def test_refund_form_says_what_is_wrong_with_an_address(served: Served, address: str) -> None:
    order = await awaiting_refund_address(served)
    response = await served.client.post(
        f"{order.path}/refund", data={"address": address, "secret": order.session_id}
    )
    text = await response.text()
    assert response.status == 400
    alert = re.search(r'role="alert">([^<]+) <span lang="en" dir="ltr">[^<]+</span>', text)
    assert alert is not None
    assert html.unescape(alert[1]) == SAY("refund.address_refused")
    assert f'value="{html.escape(address)}"' in text
    assert "<script>alert" not in text


async def test_refund_form_moves_no_agreed_address(served: Served) -> None:
    order = await make_order(served, X2U, refundAddress=MONERO)
    await fund(served, order, amount="0.01")
    await until(served, order, status="deposit_detected", amountDue="0.79")
    await fault(served, "advance_clock", seconds=3 * 3600)
    fields = {"address": OTHER_MONERO, "secret": order.session_id, "confirmed": "yes"}
    assert (await send_form(served, order, fields))[0] == 409
    found = await until(served, order, status="refunded")
    assert [each["address"] for each in found["transfers"]] == [MONERO]


@pytest.mark.parametrize(
    "body", [b"address", b"address=a&address=b&secret=c", b"a=1", b"%ff=%ff&secret=\xff"]
)
async def test_refund_form_that_is_none_changes_nothing(served: Served, body: bytes) -> None:
    order = await make_order(served, X2U)
    kind = {"content-type": "application/x-www-form-urlencoded"}
    response = await served.client.post(f"{order.path}/refund", data=body, headers=kind)
    assert response.status == 400


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data"])
async def test_refund_form_is_read_as_a_form_alone(served: Served, kind: str) -> None:
    order = await make_order(served, X2U)
    body = b"address=a&secret=b"
    response = await served.client.post(
        f"{order.path}/refund", data=body, headers={"content-type": kind}
    )
    assert response.status == 400


async def test_page_counts_confirmations_while_they_are_awaited(tmp_path: Path) -> None:
    async with serving(tmp_path, sandbox__usdc_block_ms=3_600_000) as served:
        order = await make_order(served, U2X)
        await fund(served, order)
        await until(served, order, status="deposit_detected")
        assert (
            SAY("checkout.confirmations_of", have=0, need=2) in (await page(served, order.path))[1]
        )


async def test_page_says_that_a_deposit_has_left_the_chain(tmp_path: Path) -> None:
    async with serving(tmp_path, sandbox__usdc_block_ms=3_600_000) as served:
        order = await make_order(served, U2X)
        await fund(served, order, amount="50")
        await until(served, order, amountDue="100")
        says = SAY("checkout.removed", amount="50 USDC")
        assert says not in (await page(served, order.path))[1]
        await fault(served, "drop_deposit", orderId=order.order_id)
        await until(served, order, amountDue="150")
        _, text = await page(served, order.path)
        assert text.index('id="state"') < text.index(says) < text.index('id="pay"')
        await fault(served, "restore_deposit", orderId=order.order_id)
        await until(served, order, amountDue="100")
        assert says not in (await page(served, order.path))[1]


async def test_page_distinguishes_swapping_parts_from_paying_out(tmp_path: Path) -> None:
    async with serving(tmp_path, sandbox__usdc_block_ms=3_600_000) as served:
        parts = {"fromAmount": str(4 * 10**12), "twapConfig": {"intervalMs": 60_000}}
        made = (await bff.post(served, "/orders", {**bff.ORDER, **parts})).body
        order = Ordered(made["orderId"], bff.SESSION)
        await fund(served, order)
        await until(served, order, status="executing_swap")
        _, text = await page(served, order.path)
        assert f"<h1>{SAY('checkout.heading_swapping_chunks')}</h1>" in text
        says = [SAY("checkout.says_swapping_chunks", done=done, total=2) for done in (0, 1)]
        assert any(each in text for each in says)
        await fault(served, "advance_clock", seconds=61)
        await until_paid_out(served, order)
        _, text = await page(served, order.path)
        assert f"<h1>{SAY('checkout.heading_executing_swap')}</h1>" in text


async def test_page_is_shown_without_known_confirmations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(_venue: object, _order: object) -> None:
        raise Unavailable("No node serves arbitrum: onchain.nodes has to name one.")

    async with serving(tmp_path, sandbox__usdc_block_ms=3_600_000) as served:
        order = await make_order(served, U2X)
        await fund(served, order)
        await until(served, order, status="deposit_detected")
        monkeypatch.setattr(LocalVenue, "confirmations", unknown)
        status, text = await page(served, order.path)
        assert (status, SAY("checkout.confirmations") in text) == (200, False)


async def test_sandbox_pays_an_order_by_itself_once(tmp_path: Path) -> None:
    """Also when a client repeats an unanswered call while the order is being paid out."""
    async with serving(tmp_path, sandbox__usdc_block_ms=3_600_000) as served:
        order = await make_order(served, X2U, refundAddress=MONERO)
        await fund(served, order)
        await until_paid_out(served, order)
        again = await served.post("/sandbox/fund", {"orderId": order.order_id})
        assert (again.status, again.body["error"]["code"]) == (400, "invalid_input")


async def write(served: Served, order: Ordered, **fields: str) -> tuple[int, str]:
    response = await served.client.post(f"{order.path}/support", data=fields)
    return response.status, await response.text()


async def test_person_writes_and_reads_the_answer(served: Served) -> None:
    order = await make_order(served, X2U)
    link = f'href="{order.path}/support"'
    assert link in (await page(served, order.path))[1]
    status, text = await page(served, f"{order.path}/support")
    assert (status, 'name="message"' in text, "refresh" in text) == (200, True, False)
    status, text = await write(served, order, message="Where is it?\r\n<b>\u202e")
    assert status == 200
    assert "Where is it?\n&lt;b&gt;\\u202e</p>" in text
    found = dict(re.findall(r'name="(ticketId|ticketSecret)" value="([^"]+)"', text))
    async with over_socket(served) as at:
        said = {"ticketId": found["ticketId"], "message": "It is sent.", "by": "Ada L."}
        assert "answered" in (await at.call("admin.tickets.reply", said))["result"]
    status, text = await write(served, order, **found)
    assert (status, "It is sent." in text, "Ada" in text) == (200, True, False)
    status, text = await write(served, order, message="Thanks.", **found)
    assert (status, text.count('<div class="said">')) == (200, 3)
    assert served.count("tickets") == 1


async def test_page_shows_no_ticket_without_its_secret(served: Served) -> None:
    order = await make_order(served, X2U)
    ticket = await a_ticket(served, message="private")
    alone, wrong = {"ticketId": ticket["ticketId"]}, {**ticket, "ticketSecret": "tks_0"}
    for fields in (wrong, alone, {"message": ""}):
        status, text = await write(served, order, **fields)
        assert status in (400, 404)
        assert ('role="alert"' in text, "private" in text) == (True, False)
    response = await served.client.post(
        f"{order.path}/support", data=ticket, headers={"sec-fetch-site": "cross-site"}
    )
    assert response.status == 403


async def test_page_keeps_what_was_typed_and_says_why_it_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, support__tickets_per_client=1) as served:
        order = await make_order(served, X2U)
        status, text = await write(served, order, message="m" * 8_001)
        assert (status, "8000 characters" in text, "m" * 8_001 in text) == (400, True, True)
        _, text = await write(served, order, message="first")
        found = dict(re.findall(r'name="(ticketId|ticketSecret)" value="([^"]+)"', text))
        status, text = await write(served, order, message="a long story", **found)
        assert (status, "a long story" in text, "tickets a day" in text) == (429, True, True)
        assert text.count(f'value="{found["ticketSecret"]}"') == 2


async def test_new_tickets_secret_is_shown_although_reading_fails(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise Unavailable("The database is down.")

    order = await make_order(served, X2U)
    monkeypatch.setattr(type(served.up.service.store), "ticket_messages", fail)
    status, text = await write(served, order, message="Where is it?")
    assert (status, "Your message was sent" in text, "tks_" in text) == (503, True, True)
    assert "Where is it?" not in text  # or it would be sent twice
