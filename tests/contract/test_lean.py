"""detail=lean: what it keeps, how many bytes it has on each surface, and that replays honour it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from functools import partial
from typing import Any

import orjson
import pytest

from rpcsvc.clock import day_of
from rpcsvc.domain.settle_times import SwapKind
from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.site import site_of
from rpcsvc.operations.lean import is_cut, lean_head
from rpcsvc.operations.models import StatusResult
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.store.database import Statement
from rpcsvc.verify import Exchange, verify_response
from tests.command_line import clean_environ, run_here
from tests.contract import bff
from tests.contract.described import check
from tests.contract.serving import BACK, EVM, JSON, MONERO, SWAP, Served
from tests.contract.signatures import jwks
from tests.e2e.processes import until
from tests.mcp import call, swap

KEY = "0f6c2b9a-5d1e-4c37-9a40-6b1d2f8e7c05"
REFUNDABLE = {"x2u": {**SWAP, "refundAddress": MONERO}, "u2x": {**BACK, "refundAddress": EVM}}
TOOLS = {
    "swap.create": "create_swap",
    "swap.status": "get_swap_status",
    "swap.quote": "get_quote",
    "capabilities": "get_capabilities",
}
MOST = {"swap.create": 1_500, "swap.status": 1_000, "swap.quote": 800, "capabilities": 2_000}
Json = dict[str, Any]


async def over_http(served: Served, operation: str, params: Json) -> Json:
    given = {**params, "detail": "lean"}
    if operation == "swap.status":
        path = f"/agent/swap/status/{given.pop('orderId')}"
        return dict((await served.http("GET", path, params=given)).body)
    if operation == "capabilities":
        return dict((await served.http("GET", "/agent/capabilities", params=given)).body)
    return dict((await served.post(f"/agent/{operation.replace('.', '/')}", given)).body)


async def over_rpc(served: Served, operation: str, params: Json) -> Json:
    return dict((await served.rpc(operation, {**params, "detail": "lean"})).body["result"])


async def over_mcp(served: Served, operation: str, params: Json) -> Json:
    given = params
    if operation == "swap.create":
        given = {**swap(), **params}
        if "receiveAmount" in given:
            del given["amount"]
    return dict((await call(served, TOOLS[operation], given))["structuredContent"])


async def over_cli(served: Served, operation: str, params: Json) -> Json:
    command = f"agent:{operation.replace('.', ':')}"
    arguments = [command, "--url", served.url, "--stateless", "--detail", "lean"]
    done = await asyncio.to_thread(
        run_here, [*arguments, "--params", json.dumps(params)], clean_environ()
    )
    return dict(json.loads(done.stdout))


def size(answer: Json) -> int:
    """Return the bytes of an answer without the sandbox's own step, which no real network has."""
    steps = [step for step in answer["nextActions"] if step["action"] != "simulate_deposit"]
    return len(orjson.dumps({**answer, "nextActions": steps}))


async def fill_observed_times(served: Served) -> None:
    """Count so many orders of each kind that quotes and status say what they took."""
    kinds = [
        SwapKind(f"{direction}/{chain}/{size}")
        for direction, chain in (("x2u", "arbitrum"), ("u2x", "base"))
        for size in range(4)
    ]
    day = day_of(served.up.service.clock.now_ms())
    rows = [
        {"day": day, "kind": kind, "bucket": bucket, "orders": orders}
        for kind in kinds
        for bucket, orders in ((20, 140), (30, 10))
    ]
    into = "INSERT INTO settle_times (day, kind, bucket, orders) VALUES"
    await served.up.database.write(
        [Statement(f"{into} (:day, :kind, :bucket, :orders)", row) for row in rows]
    )


@pytest.mark.parametrize("over", [over_http, over_rpc, over_mcp, over_cli])
@pytest.mark.parametrize("direction", ["x2u", "u2x"])
@pytest.mark.parametrize("sum_of", ["amount", "receiveAmount"])
async def test_lean_answers_stay_small_on_every_surface(
    served: Served, over: Any, direction: str, sum_of: str
) -> None:
    await fill_observed_times(served)
    order = {**REFUNDABLE[direction]}
    if sum_of == "receiveAmount":
        del order["amount"]
        order["receiveAmount"] = {"x2u": "131.29", "u2x": "0.904445454544"}[direction]
    priced = {name: order[name] for name in ("direction", "chain", sum_of)}
    made = await over(served, "swap.create", order)
    order_id = made["data"]["order"]["orderId"]
    answers = {
        "swap.create": made,
        "swap.status": await over(served, "swap.status", {"orderId": order_id}),
        "swap.quote": await over(served, "swap.quote", priced),
        "capabilities": await over(served, "capabilities", {}),
    }
    assert all(answer["ok"] for answer in answers.values())
    assert answers["swap.status"]["data"]["observedTime"]["samples"] == 150
    assert {name: size(each) < MOST[name] for name, each in answers.items()} == dict.fromkeys(
        MOST, True
    ), {name: size(each) for name, each in answers.items()}


async def test_lean_status_stays_small_in_every_state(served: Served) -> None:
    document = openapi_document(site_of(served.up.settings, served.up.service))
    schema = {"$ref": "#/components/schemas/SwapStatusEnvelope"}
    for fault, order in (
        (None, REFUNDABLE["x2u"]),
        ("payout_fails", REFUNDABLE["x2u"]),
        ("payout_fails", SWAP),
        (None, REFUNDABLE["u2x"]),
    ):
        made = (await served.post("/agent/swap/create", order)).body["data"]["order"]
        order_id, cursor, states = made["orderId"], 0, set()
        if fault:
            await served.post("/sandbox/fault", {"fault": fault, "orderId": order_id})
        await served.post("/sandbox/fund", {"orderId": order_id})
        while True:
            wait = {"detail": "lean", "waitSec": "2", "sinceCursor": str(cursor)}
            answer = (await served.http("GET", f"/agent/swap/status/{order_id}", params=wait)).body
            check(document, schema, answer)
            states.add(answer["state"])
            assert size(answer) < MOST["swap.status"], orjson.dumps(answer).decode()
            data, cursor = answer["data"], answer["data"]["cursor"]
            if data.get("outcome") or data.get("actionRequired"):
                break
        assert len(states) > 1


async def test_lean_keeps_what_the_next_call_needs(served: Served) -> None:
    sent = {**REFUNDABLE["x2u"], "sessionId": KEY}
    full = (await served.post("/agent/swap/create", sent)).body["data"]
    path = f"/agent/swap/status/{full['order']['orderId']}"
    lean = (await served.http("GET", f"{path}?detail=lean")).body
    order, funding = lean["data"]["order"], lean["data"]["fundingInstructions"]
    for name in ("orderId", "status", "expectedOutput", "expiresAt", "refundAddress"):
        assert order[name] == full["order"][name]
    for name in ("depositAddress", "amount", "asset", "network"):
        assert funding[name] == full["fundingInstructions"][name]
    digest = hashlib.sha256(full["order"]["attestation"].encode()).digest()
    assert order["attestationDigest"] == base64.urlsafe_b64encode(digest).decode().rstrip("=")
    assert {"attestation", "warnings"}.isdisjoint(order | funding)
    whole = (await served.http("GET", path)).body
    assert [each["action"] for each in lean["nextActions"]] == [
        each["action"] for each in whole["nextActions"]
    ]
    assert "attestationDigest" not in whole["data"]["order"]


async def test_lean_order_leads_to_its_page_once(served: Served) -> None:
    """The user checks the address on the page, where no agent stands between."""
    made = (await call(served, "create_swap", swap()))["structuredContent"]["data"]["order"]
    assert made["checkoutUrl"].endswith(f"/orders/{made['orderId']}")
    later = await call(served, "get_swap_status", {"orderId": made["orderId"]})
    assert "checkoutUrl" not in later["structuredContent"]["data"]["order"]


async def test_lean_keeps_the_words_that_only_it_has(served: Served) -> None:
    made = (await served.post("/agent/swap/create", SWAP)).body["data"]["order"]
    order_id = made["orderId"]
    await served.post("/sandbox/fault", {"fault": "payout_fails", "orderId": order_id})
    await served.post("/sandbox/fund", {"orderId": order_id})
    cursor: int = 0
    answer: Json = {}
    while not answer or "actionRequired" not in answer["data"]:
        wait = {"detail": "lean", "waitSec": "2", "sinceCursor": str(cursor)}
        answer = (await served.http("GET", f"/agent/swap/status/{order_id}", params=wait)).body
        cursor = answer["data"]["cursor"]
    (give, _) = answer["nextActions"]
    assert give["action"] == "provide_refund_address"
    assert "swap.refundAddress" in give["description"]


async def test_lean_plan_says_what_an_order_needs_beside_its_params(served: Served) -> None:
    plan = (await call(served, "plan_swap", SWAP))["structuredContent"]
    (_, execute) = plan["nextActions"]
    assert "idempotency key" in execute["description"]
    assert "refundAddress" in execute["description"]


@pytest.mark.parametrize(("first", "then"), [("lean", "full"), ("full", "lean")])
async def test_replay_gives_the_detail_that_it_asks_for(
    served: Served, first: str, then: str
) -> None:
    made = await served.post("/agent/swap/create", {**SWAP, "detail": first}, idempotency_key=KEY)
    again = await served.post("/agent/swap/create", {**SWAP, "detail": then}, idempotency_key=KEY)
    assert again.status == 200
    assert again.headers["idempotent-replayed"] == "true"
    answers = {first: made.body["data"], then: again.body["data"]}
    assert answers["lean"]["order"]["orderId"] == answers["full"]["order"]["orderId"]
    assert answers["full"]["order"]["attestation"]
    assert "attestation" not in answers["lean"]["order"]
    assert served.count("orders") == 1


async def test_mcp_is_lean_unless_asked_for_all(served: Served) -> None:
    arguments = swap()
    lean = await call(served, "create_swap", arguments)
    full = await call(served, "create_swap", {**arguments, "detail": "full"})
    null = await call(served, "create_swap", {**arguments, "detail": None})
    data = [each["structuredContent"]["data"] for each in (lean, full, null)]
    assert ["warnings" in each["fundingInstructions"] for each in data] == [False, True, False]
    assert len({each["order"]["orderId"] for each in data}) == 1


async def test_lean_answer_is_signed_as_sent(served: Served) -> None:
    target, body = "/api/v1/agent/swap/create", orjson.dumps({**SWAP, "detail": "lean"})
    answer = await served.client.post(target, data=body, headers=JSON)
    sent = await answer.read()
    headers = {name.lower(): value for name, value in answer.headers.items()}
    exchange = Exchange(
        method="POST",
        target=target,
        request_body=body,
        status=answer.status,
        headers=headers,
        body=sent,
    )
    verify_response(exchange, await jwks(served))
    assert len(sent) < MOST["swap.create"]


async def test_other_details_are_refused_by_name(served: Served) -> None:
    for detail in ("short", 1):
        refused = await served.post("/agent/swap/quote", {**SWAP, "detail": detail})
        fields = [each["field"] for each in refused.body["validationErrors"]]
        assert "detail" in fields
    bff = await served.client.post("/bff/v1/orders/x/cancel", json={"detail": "lean"})
    assert bff.status == 400


def test_every_field_that_lean_keeps_exists() -> None:
    cut = {operation.name for operation in OPERATIONS if is_cut(operation.result)}
    assert cut == {
        "capabilities", "swap.quote", "swap.create", "swap.execute", "swap.status", "swap.cancel",
        "swap.fund",
    }  # fmt: skip


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
@pytest.mark.parametrize("sum_of", ["amount", "receiveAmount"])
async def test_lean_status_of_a_partly_paid_order_stays_small(
    served: Served, direction: str, sum_of: str
) -> None:
    await fill_observed_times(served)
    order = {**REFUNDABLE[direction]}
    if sum_of == "receiveAmount":
        del order["amount"]
        order["receiveAmount"] = {"x2u": "131.290001", "u2x": "0.904445454544"}[direction]
    order_id = (await over_http(served, "swap.create", order))["data"]["order"]["orderId"]
    part = {"x2u": ("0.100000000001", "0.100000000002"), "u2x": ("20.000001", "30.000001")}
    sizes: list[int] = []
    due: set[tuple[int, str]] = set()
    cursor = 1
    for amount in part[direction]:
        await served.post("/sandbox/fund", {"orderId": order_id, "amount": amount})
    async with asyncio.timeout(30):
        while len(due) < 2:
            wait = {"detail": "lean", "waitSec": "2", "sinceCursor": str(cursor)}
            answer = (await served.http("GET", f"/agent/swap/status/{order_id}", params=wait)).body
            cursor = answer["data"]["cursor"]
            sizes.append(size(answer))
            if answer["state"] == "deposit_detected":
                due.add((cursor, answer["data"]["fundingInstructions"]["amount"]))
    assert max(sizes) < MOST["swap.status"], sizes


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
@pytest.mark.parametrize("sum_of", ["amount", "receiveAmount"])
async def test_lean_quote_beside_an_earlier_one_stays_small(
    served: Served, direction: str, sum_of: str
) -> None:
    await fill_observed_times(served)
    order = REFUNDABLE[direction]
    priced = {"direction": direction, "chain": order["chain"], "amount": order["amount"]}
    if sum_of == "receiveAmount":
        del priced["amount"]
        priced["receiveAmount"] = {"x2u": "131.290001", "u2x": "0.904445454544"}[direction]
    first = await over_http(served, "swap.quote", priced)
    again, sizes = {**priced, "requoteOf": first["data"]["quoteDigest"]}, []
    for rate in ("164.999999", "199.999999", "4999.999999"):
        await served.post("/sandbox/fault", {"fault": "set_rate", "rate": rate})
        answer = await over_http(served, "swap.quote", again)
        assert answer["data"]["changed"]
        sizes.append(size(answer))
    assert max(sizes) < MOST["swap.quote"], sizes


async def test_lean_status_of_payout_and_refund_stays_small(served: Served) -> None:
    chunked = {
        **bff.ORDER, "fromAmount": str(4 * 10**12), "refundAddress": MONERO,
        "twapConfig": {"intervalMs": 2_000},
    }  # fmt: skip
    order_id = (await bff.post(served, "/orders", chunked)).body["orderId"]
    await served.post("/sandbox/fund", {"orderId": order_id})
    await until(partial(has_chunk, served, order_id))
    await served.post("/sandbox/fault", {"fault": "set_rate", "rate": "60"})
    await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 86_400})
    answer = await until(partial(both_settled, served, order_id))
    assert size(answer) < MOST["swap.status"]


async def has_chunk(served: Served, order_id: str) -> bool:
    found = (await bff.call(served, "GET", f"/orders/{order_id}")).body
    return bool(found["twap"]["chunksCompleted"])


async def both_settled(served: Served, order_id: str) -> Json | None:
    """The status once payout and refund have settled."""
    answer = await over_http(served, "swap.status", {"orderId": order_id})
    settled = [each for each in answer["data"].get("transfers", ()) if each["status"] == "settled"]
    return answer if len(settled) == 2 else None


def test_lean_status_has_the_newest_payout_and_refund() -> None:
    kinds = ["payout", "payout", *["refund"] * 20]
    transfers = [
        {"kind": kind, "address": EVM, "amount": "0.111111111111", "asset": "XMR",
         "status": "confirmed", "txid": f"{number:064}"}
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    order = {"orderId": "ord_1", "status": "completed"}
    data = {"order": order, "cursor": 30, "transfers": transfers}
    whole = {"operation": "swap.status", "nextActions": [], "data": data}
    lean = orjson.loads(lean_head(StatusResult, orjson.dumps(whole)))["data"]["transfers"]
    assert [int(each["txid"]) for each in lean] == [1, 21]
    assert [each["kind"] for each in lean] == ["payout", "refund"]
    assert len(orjson.dumps(lean)) < 350
