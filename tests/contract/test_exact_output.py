"""An order for exactly what is to arrive, on every surface."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.client import QuoteChanged, Swap, Unverified
from rpcsvc.domain.money import USDC, XMR, as_units, format_units
from rpcsvc.orders.quoted import read_digest
from rpcsvc.settlement.upstream.answers import UpstreamOrder
from rpcsvc.verify import Expected, TermsMismatch, verify_attestation
from tests.contract import bff
from tests.contract.paying import finished, fund, header, offered, signed
from tests.contract.serving import BACK, EVM, MONERO, SWAP, TOKEN, Answer, Served, serving
from tests.contract.sidecar import STAGENET, beside
from tests.contract.swap_clients import client_of
from tests.contract.v1_api import V1Api, v1_api
from tests.mcp import call as mcp_call
from tests.rows import all_rows, one_row

Json = dict[str, Any]
KEY = "9d3c1a7e-4b52-4f0e-8a61-2c7d5e9f0b34"
API_KEY = "integrator-key-0123456789abcdef"
ACME = f"acme:0.75:{hashlib.sha256(API_KEY.encode()).hexdigest()}"
EXACT: Json = {"direction": "x2u", "chain": "arbitrum", "receiveAmount": "100.000001", "to": EVM}
EXACT_BACK: Json = {
    "direction": "u2x",
    "chain": "base",
    "receiveAmount": "0.777777777777",
    "to": MONERO,
}
BOTH_WAYS = [EXACT, EXACT_BACK]
UNITS = {"x2u": "100000001", "u2x": "777777777777"}
# What a unit of the deposit is worth of the payout, at most.
STEP = {"x2u": 1, "u2x": 10**12 // 165_000_000 + 1}
TOO_BIG = {"x2u": "6000000", "u2x": "40000"}
Operate = Callable[[Served, str, Json], Awaitable[Json]]


async def over_http(served: Served, name: str, params: Json) -> Json:
    return dict((await served.post(f"/agent/swap/{name}", params)).body)


async def over_rpc(served: Served, name: str, params: Json) -> Json:
    return dict((await served.rpc(f"swap.{name}", params)).body["result"])


TOOLS = {"plan": "plan_swap", "quote": "get_quote", "create": "create_swap"}


async def over_mcp(served: Served, name: str, params: Json) -> Json:
    if name == "create":
        params = {"sessionId": "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c91", **params}
    result = await mcp_call(served, TOOLS[name], {"detail": "full", **params})
    return dict(json.loads(result["content"][0]["text"]))


SURFACES = [over_http, over_rpc, over_mcp]


def priced(swap: Json) -> Json:
    return {name: value for name, value in swap.items() if name != "to"}


def units_of(text: str, direction: str) -> int:
    return int(as_units(text, XMR if direction == "x2u" else USDC))


async def paid(served: Served, order_id: str, amount: str | None = None) -> Json:
    """The status once the order is over, after a deposit of what is due, or of ``amount``."""
    sent = {} if amount is None else {"amount": amount}
    assert (await served.post("/sandbox/fund", {"orderId": order_id, **sent})).status == 200
    return await finished(served, order_id)


async def set_rate(served: Served, rate: str) -> None:
    assert (await served.post("/sandbox/fault", {"fault": "set_rate", "rate": rate})).body["ok"]


def problems(answer: Json) -> list[tuple[str, str]]:
    return [(each["field"], each["code"]) for each in answer["validationErrors"]]


# --- plan, quote, create, execute ---


@pytest.mark.parametrize("operate", SURFACES)
@pytest.mark.parametrize("swap", BOTH_WAYS, ids=["x2u", "u2x"])
async def test_exact_deposit_pays_the_amount_to_the_unit(
    served: Served, operate: Operate, swap: Json
) -> None:
    direction, wanted = swap["direction"], swap["receiveAmount"]
    planned = await operate(served, "plan", swap)
    assert (planned["state"], planned["missingInputs"]) == ("ready", [])
    assert planned["data"]["intent"]["receiveAmount"] == wanted
    named = [each["params"]["receiveAmount"] for each in planned["nextActions"]]
    assert named == [wanted, wanted]
    quote = (await operate(served, "quote", priced(swap)))["data"]["quote"]
    assert quote["receiveAmount"] == quote["expectedOutput"] == quote["minReceived"] == wanted
    made = await operate(served, "create", swap)
    order = made["data"]["order"]
    units = UNITS[direction]
    assert order["receiveAmount"] == order["expectedOutput"] == units
    assert int(order["depositAmount"]) == units_of(quote["depositAmount"], direction)
    assert made["data"]["fundingInstructions"]["amount"] == quote["depositAmount"]
    done = (await paid(served, order["orderId"]))["data"]
    assert done["order"]["actualOutput"] == done["order"]["receiveAmount"] == units
    assert [each["amount"] for each in done["transfers"]] == [wanted]


@pytest.mark.parametrize("swap", BOTH_WAYS, ids=["x2u", "u2x"])
async def test_quoted_deposit_is_the_least_that_brings_the_amount(
    served: Served, swap: Json
) -> None:
    direction = swap["direction"]
    sent, received = (XMR, USDC) if direction == "x2u" else (USDC, XMR)
    quote = (await over_http(served, "quote", priced(swap)))["data"]["quote"]
    units = units_of(quote["depositAmount"], direction)

    async def output(deposit: int) -> int:
        terms = {"direction": direction, "chain": swap["chain"]}
        body = {**terms, "amount": format_units(deposit, sent)}
        answer = (await over_http(served, "quote", body))["data"]["quote"]
        assert "receiveAmount" not in answer
        return int(as_units(answer["expectedOutput"], received))

    wanted = int(UNITS[direction])
    assert wanted <= await output(units) < wanted + STEP[direction]
    assert await output(units - 1) < wanted


async def test_execute_makes_an_exact_order(served: Served) -> None:
    made = (await over_http(served, "execute", EXACT))["data"]
    assert made["quote"]["receiveAmount"] == EXACT["receiveAmount"]
    done = await paid(served, made["order"]["orderId"])
    assert done["data"]["order"]["actualOutput"] == UNITS["x2u"]
    sql = "SELECT receive_amount, min_received, expected_output FROM orders"
    assert set(one_row(served.up.database, sql)) == {int(UNITS["x2u"])}


async def test_order_that_named_its_deposit_is_not_exact(served: Served) -> None:
    made = (await over_http(served, "execute", SWAP))["data"]
    assert "receiveAmount" not in made["order"] | made["quote"]
    assert all_rows(served.up.database, "SELECT receive_amount FROM orders") == [(None,)]


@pytest.mark.parametrize("operate", SURFACES)
@pytest.mark.parametrize("name", ["quote", "create"])
async def test_both_amounts_or_neither_are_refused_by_field(
    served: Served, operate: Operate, name: str
) -> None:
    swap = EXACT if name == "create" else priced(EXACT)
    both = await operate(served, name, {**swap, "amount": "0.8"})
    assert problems(both) == [("receiveAmount", "invalid_input")]
    assert "in place of amount" in both["validationErrors"][0]["message"]
    neither = await operate(served, name, {**swap, "receiveAmount": None})
    assert (neither["state"], neither["missingInputs"]) == ("needs_input", ["amount"])
    assert "receiveAmount" in neither["error"]["message"]


async def test_plan_refuses_both_amounts_and_asks_for_one(served: Served) -> None:
    both = await over_http(served, "plan", {**EXACT, "amount": "0.8"})
    assert problems(both) == [("receiveAmount", "invalid_input")]
    neither = await over_http(served, "plan", {**EXACT, "receiveAmount": None})
    assert neither["missingInputs"] == ["amount"]


async def test_all_problems_are_told_with_a_missing_amount(served: Served) -> None:
    answer = await over_http(served, "create", {"direction": "x2u", "chain": 5.5, "to": EVM})
    assert (problems(answer), answer["missingInputs"]) == ([("chain", "invalid_input")], ["amount"])


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ("100.0000001", "invalid_input"),
        ("-1", "invalid_input"),
        ("0", "invalid_input"),
        (100, "invalid_input"),
        ("1", "amount_below_minimum"),
        ("9" * 30, "amount_above_maximum"),
    ],
)
@pytest.mark.parametrize("name", ["plan", "quote", "create"])
async def test_wrong_amount_to_arrive_is_refused_by_its_field(
    served: Served, name: str, wrong: Any, code: str
) -> None:
    swap = EXACT if name != "quote" else priced(EXACT)
    answer = await over_http(served, name, {**swap, "receiveAmount": wrong})
    assert problems(answer) == [("receiveAmount", code)]


@pytest.mark.parametrize("swap", BOTH_WAYS, ids=["x2u", "u2x"])
async def test_limits_are_told_in_both_assets(served: Served, swap: Json) -> None:
    refused = await over_http(served, "quote", {**priced(swap), "receiveAmount": "0.01"})
    limits = refused["error"]["details"]
    quotes = []
    for wanted in (limits["receiveMinimum"], limits["receiveMaximum"]):
        told = await over_http(served, "quote", {**priced(swap), "receiveAmount": wanted})
        quotes.append(told["data"]["quote"])
    assets = limits["asset"], limits["receiveAsset"]
    assert {(each["depositAsset"], each["payoutAsset"]) for each in quotes} == {assets}
    big = {**priced(swap), "receiveAmount": TOO_BIG[swap["direction"]]}
    above = await over_http(served, "quote", big)
    assert above["error"]["code"] == "amount_above_maximum"
    assert above["error"]["details"] == limits


# --- keys and digests ---


async def test_key_is_of_the_amount_to_arrive(served: Served) -> None:
    first = await served.post("/agent/swap/create", EXACT, idempotency_key=KEY)
    again = await served.post("/agent/swap/create", EXACT, idempotency_key=KEY)
    assert again.body["data"] == first.body["data"]
    more = {**EXACT, "receiveAmount": "100.000002"}
    by_deposit = {
        **priced(EXACT),
        "to": EVM,
        "amount": first.body["data"]["quote"]["depositAmount"],
    }
    del by_deposit["receiveAmount"]
    for other, fields in ((more, ["receiveAmount"]), (by_deposit, ["amount", "receiveAmount"])):
        conflict = await served.post("/agent/swap/create", other, idempotency_key=KEY)
        assert conflict.body["error"]["code"] == "idempotency_conflict"
        assert sorted(conflict.body["error"]["details"]["fields"]) == fields


@pytest.mark.parametrize(
    ("swap", "worse", "better"), [(EXACT, "150", "190"), (EXACT_BACK, "190", "150")]
)
async def test_digest_refuses_a_larger_deposit_only(
    served: Served, swap: Json, worse: str, better: str
) -> None:
    await set_rate(served, "170")
    quoted = (await over_http(served, "quote", priced(swap)))["data"]
    assert read_digest(quoted["quoteDigest"]).receive_amount == int(UNITS[swap["direction"]])
    held = {**swap, "quoteDigest": quoted["quoteDigest"]}
    await set_rate(served, worse)
    refused = await over_http(served, "execute", held)
    assert refused["error"]["code"] == "quote_changed"
    (found,) = refused["error"]["details"]["worse"]
    assert (found["field"], found["quoted"]) == ("depositAmount", quoted["quote"]["depositAmount"])
    await set_rate(served, better)
    made = (await over_http(served, "execute", held))["data"]["quote"]
    assert float(made["depositAmount"]) < float(quoted["quote"]["depositAmount"])
    assert made["expectedOutput"] == swap["receiveAmount"]


async def test_digest_is_of_the_named_amount(served: Served) -> None:
    exact, plain = [
        (await over_http(served, "quote", priced(swap)))["data"] for swap in (EXACT, SWAP)
    ]
    by_deposit = {**SWAP, "amount": exact["quote"]["depositAmount"]}
    more = {**EXACT, "receiveAmount": "100.000002"}
    for swap, digest in ((by_deposit, exact), (more, exact), (EXACT, plain)):
        refused = await over_http(served, "create", {**swap, "quoteDigest": digest["quoteDigest"]})
        assert problems(refused) == [("quoteDigest", "invalid_input")]
    back = (await over_http(served, "quote", priced(BACK)))["data"]["quoteDigest"]
    same_units = {**EXACT_BACK, "receiveAmount": "0.00015", "quoteDigest": back}
    refused = await over_http(served, "create", same_units)
    assert problems(refused) == [("quoteDigest", "invalid_input")]


# --- after the price lock, more and less ---


@pytest.mark.parametrize("rate", ["165", "166"])
async def test_after_the_lock_it_is_paid_in_full(served: Served, rate: str) -> None:
    made = (await over_http(served, "execute", EXACT))["data"]["order"]
    await set_rate(served, rate)
    await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 1_000})
    done = (await paid(served, made["orderId"]))["data"]
    assert done["order"]["actualOutput"] == UNITS["x2u"]


async def test_after_the_lock_a_worse_rate_makes_it_late(served: Served) -> None:
    refund = {"refundAddress": MONERO}
    made = (await over_http(served, "execute", {**EXACT, **refund}))["data"]["order"]
    await set_rate(served, "164.9")
    await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 1_000})
    done = (await paid(served, made["orderId"]))["data"]
    assert (done["outcome"], done["order"]["actualOutput"]) == ("refunded", None)
    assert "late" in done["order"]["errorMessage"]


async def test_more_than_due_is_all_swapped(served: Served) -> None:
    made = (await over_http(served, "execute", EXACT))["data"]["order"]
    done = (await paid(served, made["orderId"], "2"))["data"]
    plain = (await over_http(served, "quote", {**priced(SWAP), "amount": "2"}))["data"]["quote"]
    assert [each["amount"] for each in done["transfers"]] == [plain["expectedOutput"]]


async def test_less_than_due_is_swapped_when_the_order_expires(served: Served) -> None:
    made = (await over_http(served, "execute", EXACT))["data"]["order"]
    sent = {"orderId": made["orderId"], "amount": "0.3"}
    assert (await served.post("/sandbox/fund", sent)).status == 200
    quote = {**priced(SWAP), "amount": "0.3"}
    plain = (await over_http(served, "quote", quote))["data"]["quote"]
    status = await served.http("GET", f"/agent/swap/status/{made['orderId']}?waitSec=5")
    assert status.body["data"]["amountDue"] is not None
    await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 4_000})
    done = (await finished(served, made["orderId"]))["data"]
    assert [each["amount"] for each in done["transfers"]] == [plain["expectedOutput"]]


# --- fees ---


async def test_gas_of_a_signed_payment_is_paid_by_the_deposit(served: Served) -> None:
    paying = {**EXACT_BACK, "funding": "x402"}
    plain, quote = [
        (await over_http(served, "quote", priced(swap)))["data"]["quote"]
        for swap in (EXACT_BACK, paying)
    ]
    assert quote["expectedOutput"] == plain["expectedOutput"] == EXACT_BACK["receiveAmount"]
    assert units_of(quote["depositAmount"], "u2x") > units_of(plain["depositAmount"], "u2x")
    made = (await over_http(served, "create", paying))["data"]["order"]
    payment = await signed(await offered(served, made["orderId"]))
    assert (await fund(served, made["orderId"], **header(payment))).status == 200
    done = (await finished(served, made["orderId"]))["data"]
    assert done["order"]["actualOutput"] == UNITS["u2x"]


# --- the BFF ---

TO_USDC = {**bff.TO_USDC, "fromAmount": None, "toAmount": UNITS["x2u"]}
TO_XMR = {**bff.TO_XMR, "fromAmount": None, "toAmount": UNITS["u2x"]}
ENDS = {"x2u": EVM, "u2x": MONERO}


def bff_problem(answer: Answer) -> tuple[str, str]:
    (problem,) = answer.body["error"]["details"]["problems"]
    return problem["field"], answer.body["error"]["code"]


async def bff_order(served: Served, terms: Json, direction: str, **headers: str) -> Answer:
    return await bff.post(served, "/orders", {**terms, "toAddress": ENDS[direction]}, **headers)


@pytest.mark.parametrize(("terms", "direction"), [(TO_USDC, "x2u"), (TO_XMR, "u2x")])
async def test_bff_order_pays_the_amount_to_the_unit(
    tmp_path: Path, terms: Json, direction: str
) -> None:
    """The fees of an integrator included."""
    async with serving(tmp_path, {"RPCSVC_INTEGRATORS": ACME}) as served:
        headers = {"x_api_key": API_KEY}
        quote = (await bff.post(served, "/quote", terms, **headers)).body
        bff.check("Quote response", quote)
        assert quote["toAmount"] == quote["minReceived"] == UNITS[direction]
        assert quote["integratorFee"]["percent"] == 0.75
        made = (await bff_order(served, terms, direction, **headers)).body
        bff.check("Order create response", made)
        assert made["receiveAmount"] == made["expectedOutput"] == UNITS[direction]
        assert made["depositAmount"] == quote["fromAmount"]
        assert (await served.post("/sandbox/fund", {"orderId": made["orderId"]})).status == 200
        done = await bff.until_completed(served, f"/orders/{made['orderId']}", "Order")
        assert done["actualOutput"] == done["receiveAmount"] == UNITS[direction]


async def test_bff_refuses_both_amounts_or_neither_by_field(served: Served) -> None:
    for path, more in (("/quote", {}), ("/orders", {"toAddress": EVM})):
        both = await bff.post(served, path, {**bff.TO_USDC, **more, "toAmount": "100000000"})
        assert bff_problem(both) == ("toAmount", "invalid_input")
        neither = await bff.post(served, path, {**bff.TO_USDC, **more, "fromAmount": None})
        assert bff_problem(neither) == ("fromAmount", "missing_input")
        for wrong, code in (
            ("1.5", "invalid_input"),
            ("0", "invalid_input"),
            ("1" * 41, "invalid_input"),
            ("1000000", "amount_below_minimum"),
            ("9" * 20, "amount_above_maximum"),
        ):
            answer = await bff.post(served, path, {**TO_USDC, **more, "toAmount": wrong})
            assert bff_problem(answer) == ("toAmount", code)


async def test_bff_tells_limits_in_units_of_both_assets(served: Served) -> None:
    refused = await bff.post(served, "/quote", {**TO_USDC, "toAmount": "1000000"})
    limits = refused.body["error"]["details"]
    for wanted in (limits["receiveMinimum"], limits["receiveMaximum"]):
        assert (await bff.post(served, "/quote", {**TO_USDC, "toAmount": wanted})).status == 200


async def test_bff_refuses_chunks_for_an_exact_amount(served: Served) -> None:
    large = {**TO_USDC, "toAmount": "900000000"}
    for cut in ({}, {"disabled": False}, {"chunkSizeUsd": 250}):
        refused = await bff_order(served, {**large, "twapConfig": cut}, "x2u")
        assert bff_problem(refused) == ("toAmount", "invalid_input")
        assert "the rate of its moment" in refused.body["error"]["message"]
    assert served.count("orders") == 0
    for config in ({"disabled": True}, None):
        made = await bff_order(served, {**large, "twapConfig": config}, "x2u")
        assert made.status == 200
    assert set(all_rows(served.up.database, "SELECT twap_chunk_units FROM orders")) == {(None,)}


async def test_bff_key_is_of_the_amount_to_arrive(served: Served) -> None:
    first = await bff_order(served, TO_USDC, "x2u", idempotency_key=KEY)
    again = await bff_order(served, TO_USDC, "x2u", idempotency_key=KEY)
    assert again.body == first.body
    other = await bff_order(
        served, {**TO_USDC, "toAmount": "100000002"}, "x2u", idempotency_key=KEY
    )
    assert other.body["error"]["details"]["fields"] == ["toAmount"]


# --- attestation and client ---


async def test_attestation_says_what_arrives_exactly(served: Served) -> None:
    keys = await (await served.client.get("/.well-known/jwks.json")).json()
    made = (await over_http(served, "create", {**EXACT, "refundAddress": MONERO}))["data"]
    mine: Json = {
        "direction": "x2u", "chain_id": 42161, "to": EVM, "refund_to": MONERO,
        "issuer": "http://127.0.0.1:8080", "receive_amount": EXACT["receiveAmount"],
        "max_deposit": made["quote"]["depositAmount"],
    }  # fmt: skip

    def verified(**changes: Any) -> Any:
        expected = Expected(**{**mine, **changes})
        token, now = made["order"]["attestation"], datetime.now(UTC)
        return verify_attestation(token, keys, expected, now=now)

    assert verified().terms.receive_amount == int(UNITS["x2u"])
    assert verified(amount=made["quote"]["depositAmount"]).terms.min_received == int(UNITS["x2u"])
    for change, named in (
        ({"receive_amount": "100.000002"}, ("receiveAmount",)),
        ({"max_deposit": "0.1"}, ("depositAmount",)),
        ({"amount": "0.8"}, ("depositAmount",)),
    ):
        with pytest.raises(TermsMismatch) as caught:
            verified(**change)
        assert caught.value.fields == named


def swap_of(terms: Json, **more: Any) -> Swap:
    return Swap.model_validate({**terms, **more})


async def test_client_makes_an_exact_order_held_to_its_quote(served: Served) -> None:
    async with client_of(served.url) as client:
        swap = swap_of(EXACT, refund_address=MONERO)
        quote = await client.quote(swap)
        assert quote.receive_amount == quote.min_received == EXACT["receiveAmount"]
        held = swap.held_to(quote)
        assert held.max_deposit == quote.deposit_amount
        placed = await client.create(swap, quote=quote)
        assert placed.order.receive_amount == UNITS["x2u"]
        await client.sandbox_fund(placed.order_id)
        status = await client.wait(placed.order_id)
        assert [each.amount for each in status.transfers] == [EXACT["receiveAmount"]]
        await set_rate(served, "150")
        with pytest.raises(QuoteChanged):
            await client.create(swap_of(EXACT, refund_address=MONERO), quote=quote)
        greedy = swap_of(EXACT, refund_address=MONERO, max_deposit=quote.deposit_amount)
        with pytest.raises(Unverified, match="depositAmount"):
            await client.create(greedy)


def test_client_takes_one_amount() -> None:
    for amounts in ({}, {"amount": "1", "receive_amount": "1"}):
        with pytest.raises(ValueError, match="give amount"):
            swap_of({"direction": "x2u", "chain": "base", "to": EVM}, **amounts)


# --- sidecars ---


@pytest.mark.parametrize("swap", BOTH_WAYS, ids=["x2u", "u2x"])
async def test_sidecar_passes_the_amount_through(
    served: Served, tmp_path: Path, short_pauses: None, swap: Json
) -> None:
    swap = {**swap, "to": EVM if swap["direction"] == "x2u" else STAGENET}
    units = UNITS[swap["direction"]]
    async with beside(served, tmp_path / "sidecar") as sidecar:
        quote = (await over_http(sidecar, "quote", priced(swap)))["data"]["quote"]
        assert quote["minReceived"] == quote["expectedOutput"] == swap["receiveAmount"]
        made = (await over_http(sidecar, "create", swap))["data"]
        order = made["order"]
        assert order["receiveAmount"] == order["expectedOutput"] == units
        assert made["quote"]["depositAmount"] == quote["depositAmount"]
        here = one_row(served.up.database, "SELECT order_id, receive_amount FROM orders")
        assert here[1] == int(units)
        assert (await served.post("/sandbox/fund", {"orderId": here[0]})).status == 200
        done = (await finished(sidecar, order["orderId"]))["data"]
        assert done["order"]["actualOutput"] == units
        little = {**swap, "receiveAmount": "0.01"}
        planned = await over_http(sidecar, "plan", little)
        assert problems(planned) == [("receiveAmount", "amount_below_minimum")]
        refused = await over_http(sidecar, "quote", priced(little))
        assert problems(refused) == [("receiveAmount", "amount_below_minimum")]
        assert refused["error"]["message"].count("to arrive") == 1
        asset = "USDC" if swap["direction"] == "x2u" else "XMR"
        limits = refused["error"]["details"]
        assert limits["receiveAsset"] == asset
        again = {**priced(swap), "receiveAmount": limits["receiveMinimum"]}
        assert (await over_http(sidecar, "quote", again))["ok"]


def beside_v1(api: V1Api) -> dict[str, str]:
    return {
        "RPCSVC_ENGINE": "upstream",
        "RPCSVC_UPSTREAM__URL": api.server.url,
        "RPCSVC_UPSTREAM__DIALECT": "v1",
        "RPCSVC_UPSTREAM__MONERO_NETWORK": "stagenet",
    }


async def test_sidecar_refuses_what_another_computed(tmp_path: Path, short_pauses: None) -> None:
    """The one in the middle promises no more than its upstream does."""
    swap = {**EXACT_BACK, "chain": "arbitrum", "to": STAGENET}
    async with (
        v1_api() as api,
        serving(tmp_path / "central", beside_v1(api)) as central,
        beside(central, tmp_path / "sidecar") as sidecar,
    ):
        refused = await over_http(sidecar, "create", swap)
        assert refused["error"]["code"] == "unavailable"
        assert central.count("orders") == 0


async def test_digest_holds_while_others_ask_for_quotes(tmp_path: Path, short_pauses: None) -> None:
    """Several deposits bring the amount; which one is found depends on the quote before."""
    async with v1_api() as api, serving(tmp_path, beside_v1(api)) as sidecar:
        quoted = (await over_http(sidecar, "quote", priced(EXACT)))["data"]
        await over_http(sidecar, "quote", {**priced(EXACT), "receiveAmount": "150"})
        made = await over_http(sidecar, "create", {**EXACT, "quoteDigest": quoted["quoteDigest"]})
        assert made["data"]["quote"]["depositAmount"] == quoted["quote"]["depositAmount"]


@pytest.mark.parametrize("swap", BOTH_WAYS, ids=["x2u", "u2x"])
async def test_sidecar_computes_the_deposit_by_quotes_of_its_upstream(
    tmp_path: Path, short_pauses: None, swap: Json
) -> None:
    swap = {**swap, "chain": "arbitrum", "to": EVM if swap["direction"] == "x2u" else STAGENET}
    wanted, step = int(UNITS[swap["direction"]]), STEP[swap["direction"]]
    async with v1_api() as api, serving(tmp_path, beside_v1(api)) as sidecar:
        quote = (await over_http(sidecar, "quote", priced(swap)))["data"]["quote"]
        assert quote["expectedOutput"] == swap["receiveAmount"]
        received = USDC if swap["direction"] == "x2u" else XMR
        least = int(as_units(quote["minReceived"], received))
        assert wanted * 98 // 100 < least < wanted, "its upstream promises 99 %"
        assert "receiveAmount" not in quote
        answer = (await over_http(sidecar, "create", swap))["data"]
        made = answer["order"]
        assert answer["quote"]["minReceived"] == quote["minReceived"]
        assert "receiveAmount" not in made
        assert wanted <= int(made["expectedOutput"]) <= wanted + step
        (order,) = api.orders.values()
        assert order["depositAmount"] == made["depositAmount"]
        assert api.sent("POST", "/v1/quote") <= 8
        api.change = {"expectedOutput": str(wanted - 1)}
        below = await over_http(sidecar, "create", swap)
        assert below["error"]["code"] == "unavailable"
        assert sidecar.count("orders") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"expected_output": 100_000_000},
        {"expected_output": 100_000_002},
        {"deposit_amount": 700_000_000_000},
    ],
)
async def test_sidecar_makes_no_order_that_is_not_exact(
    tmp_path: Path, short_pauses: None, monkeypatch: pytest.MonkeyPatch, change: Json
) -> None:
    """An upstream that promises another amount, or asks for much more than it quoted."""
    read = UpstreamOrder.read
    monkeypatch.setattr(
        UpstreamOrder, "read", lambda answer: read(answer).model_copy(update=change)
    )
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar") as sidecar,
    ):
        refused = await over_http(sidecar, "create", EXACT)
        assert refused["error"]["code"] == "unavailable"
        assert (sidecar.count("orders"), central.count("orders")) == (0, 1)


async def test_digest_bounds_an_order_that_is_asked_for_again(
    tmp_path: Path, short_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome of the first call is not known; the second asks for a larger deposit."""
    read = UpstreamOrder.read
    changes = [{"expected_output": 1}, {"deposit_amount": 700_000_000_000}]
    monkeypatch.setattr(
        UpstreamOrder, "read", lambda answer: read(answer).model_copy(update=changes.pop(0))
    )
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar") as sidecar,
    ):
        digest = (await over_http(sidecar, "quote", priced(EXACT)))["data"]["quoteDigest"]
        swap = {**EXACT, "quoteDigest": digest}
        for _ in range(2):
            refused = await sidecar.post("/agent/swap/create", swap, idempotency_key=KEY)
            assert refused.body["error"]["code"] == "unavailable"
        assert changes == []
        assert sidecar.count("orders") == 0


async def test_token_callers_name_the_amount_too(tmp_path: Path) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        answer = await served.rpc("swap.execute", EXACT, x_agent_rpc_token=TOKEN)
        assert answer.body["result"]["data"]["order"]["receiveAmount"] == UNITS["x2u"]
