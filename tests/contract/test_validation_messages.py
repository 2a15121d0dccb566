"""Validation messages: the field, the value received, the allowed values, and a correction.

And next actions of answers: they are calls that complete the caller's task.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rpcsvc.orders.ports.venue import FaultKind
from tests.contract import bff
from tests.contract.bff import ORDER, ORDER_BACK, TO_USDC
from tests.contract.described import openapi_of
from tests.contract.serving import EVM, MONERO, SWAP, UNKNOWN_ORDER, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the calls below change nothing."""
    return shared


TICKETS = "/agent/support/tickets"
U2X = {"direction": "u2x", "chain": "base", "amount": "150"}


def problem(answer: dict[str, Any]) -> dict[str, Any]:
    """The only problem of an envelope or of an answer of the BFF."""
    flat = answer["error"].get("details", {}).get("problems")
    (only,) = flat or answer["validationErrors"]
    return dict(only)


# --- unknown properties ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", ["idempotencyKey", "idempotency_key", "Idempotency-Key", "x-idempotency-key"]
)
async def test_misspelt_idempotency_key_gets_its_place(served: Served, spelling: str) -> None:
    params = {**SWAP, spelling: "mine"}
    over_rpc = (await served.rpc("swap.create", params)).body["result"]
    over_http = (await served.post("/agent/swap/create", params)).body
    flat = (await bff.post(served, "/orders", {**ORDER, spelling: "mine"})).body
    for answer in (over_rpc, over_http, flat):
        assert problem(answer)["field"] == spelling
        assert "header idempotency-key over HTTPS" in problem(answer)["message"]
        assert "param idempotency-key over JSON-RPC" in problem(answer)["message"]
    assert served.count("orders") == 0


async def test_misplaced_idempotency_key_learns_where_it_goes(served: Served) -> None:
    body = await served.post("/agent/swap/create", {**SWAP, "idempotency-key": "mine-0123456789a"})
    plan = await served.rpc("swap.plan", {"idempotency-key": "mine-0123456789a"})
    for answer in (body.body, plan.body["result"]):
        assert "of calls that create an order" in problem(answer)["message"]


@pytest.mark.parametrize(
    ("name", "near"), [("chunksizeusd", "chunkSizeUsd"), ("interval_ms", "intervalMs")]
)
async def test_unknown_nested_property_is_named_with_the_nearest(
    served: Served, name: str, near: str
) -> None:
    answer = await bff.post(served, "/orders", {**ORDER, "twapConfig": {name: 1000}})
    assert answer.status == 400
    reported = problem(answer.body)
    assert reported["field"] == f"twapConfig.{name}"
    assert f"Did you mean {near}?" in reported["message"]
    assert reported["allowed"] == ["disabled", "chunkSizeUsd", "intervalMs"]


async def test_a_property_that_is_called_like_a_type_is_named_whole(served: Served) -> None:
    for name in ("str", "int"):
        top = await served.post("/agent/swap/plan", {name: 1})
        assert problem(top.body)["field"] == name
        within = await bff.post(served, "/orders", {**ORDER, "twapConfig": {name: 1}})
        assert problem(within.body)["field"] == f"twapConfig.{name}"


# --- types and bounds ------------------------------------------------------------------------


async def test_answer_lists_all_problems_of_a_property_at_once(served: Served) -> None:
    wrong = {"chunkSizeUsd": 249, "intervalMs": 60_001, "disabled": "no"}
    answer = await bff.post(served, "/orders", {**ORDER, "twapConfig": wrong})
    reported = {p["field"]: p for p in answer.body["error"]["details"]["problems"]}
    assert reported["twapConfig.chunkSizeUsd"]["allowed"] == {"minimum": 250}
    assert reported["twapConfig.intervalMs"]["allowed"] == {"maximum": 60_000}
    assert reported["twapConfig.chunkSizeUsd"]["message"].endswith("at least 250.")
    assert reported["twapConfig.intervalMs"]["message"].endswith("at most 60000.")
    assert (
        reported["twapConfig.disabled"]["message"] == "twapConfig.disabled must be true or false."
    )


@pytest.mark.parametrize("config", [[], "fast", 1, True])
async def test_property_that_is_no_object_reveals_no_code(served: Served, config: Any) -> None:
    answer = await bff.post(served, "/orders", {**ORDER, "twapConfig": config})
    reported = problem(answer.body)["message"]
    assert "twapConfig must be an object" in reported
    assert '{"disabled": true}' in reported
    assert "TwapConfig" not in json.dumps(answer.body)


@pytest.mark.parametrize(
    ("operation", "field", "wrong", "expected"),
    [("swap.check", "transaction", 1, "must be an object or a string"),
     ("swap.fund", "payment", [], "must be an object or a string"),
     ("swap.execute", "quoteDigest", "x", "Send the one that quote answered")],
)  # fmt: skip
async def test_wrong_form_is_named_without_the_validators_words(
    served: Served, operation: str, field: str, wrong: Any, expected: str
) -> None:
    order = SWAP if operation == "swap.execute" else {"orderId": UNKNOWN_ORDER}
    answer = (await served.rpc(operation, {**order, field: wrong})).body["result"]
    reported = problem(answer)
    assert reported["field"] == field
    assert expected in reported["message"]
    assert not any(word in json.dumps(answer) for word in ("dict[", "pattern", "should"))


@pytest.mark.parametrize(
    ("message", "expected", "allowed"),
    [("", "at least 1 character", {"minimumLength": 1}),
     ("x" * 8001, "at most 8000 characters", {"maximumLength": 8000})],
    ids=["empty", "long"],
)  # fmt: skip
async def test_text_of_wrong_length_gets_the_allowed_length(
    served: Served, message: str, expected: str, allowed: Any
) -> None:
    reported = problem((await served.post(TICKETS, {"message": message})).body)
    assert expected in reported["message"]
    assert reported["allowed"] == allowed


async def test_unknown_fault_gets_the_nearest_and_a_missing_one_all(served: Served) -> None:
    every = [kind.value for kind in FaultKind]
    reported = problem((await served.post("/sandbox/fault", {"fault": "payout_fail"})).body)
    assert reported["allowed"] == every
    assert "Did you mean payout_fails?" in reported["message"]
    missing = (await served.post("/sandbox/fault", {})).body["error"]["message"]
    assert all(kind in missing for kind in every)


async def test_negative_number_in_a_query_is_refused_by_its_bound(served: Served) -> None:
    answer = await served.http("GET", f"/agent/swap/events/{UNKNOWN_ORDER}?after=-1")
    assert problem(answer.body)["message"] == "after must be at least 0."


# --- missing inputs --------------------------------------------------------------------------


async def test_each_missing_input_of_the_bff_says_what_to_send(served: Served) -> None:
    for path in ("/quote", "/orders", "/support/tickets", "/bridge/deposit"):
        answer = await bff.post(served, path, {})
        for reported in answer.body["error"]["details"]["problems"]:
            assert (
                "Send" in reported["message"]
                or "Ask" in reported["message"]
                or "Say" in reported["message"]
            )


async def test_ticket_fields_that_take_null_have_to_be_sent(served: Served) -> None:
    ticket = {"category": "question", "message": "m"}
    answer = await bff.post(served, "/support/tickets", ticket)
    reported = answer.body["error"]["details"]["problems"]
    assert [p["field"] for p in reported] == ["orderId", "sessionId", "walletAddress"]
    for one in reported:
        assert one["message"] == f"{one['field']} is missing. Send null if there is none."
    sent = {**ticket, **{one["field"]: None for one in reported}}
    assert (await bff.post(served, "/support/tickets", sent)).status == 200


# --- limits and allowed values in details ----------------------------------------------------


@pytest.mark.parametrize(
    ("swap", "to", "allowed"),
    [
        (SWAP, MONERO, "EVM address"),
        (SWAP, "0x" + "0" * 40, "EVM address"),
        (U2X, EVM, "Monero address"),
        (U2X, MONERO[:-1], "Monero address"),
    ],
)
async def test_refused_destination_gets_what_is_allowed(
    served: Served, swap: dict[str, Any], to: str, allowed: str
) -> None:
    for answer in (
        (await served.post("/agent/swap/execute", {**swap, "to": to})).body,
        (await served.rpc("swap.plan", {**swap, "to": to})).body["result"],
    ):
        assert answer["error"]["code"] == "invalid_destination"
        assert allowed in answer["error"]["details"]["allowed"][0]
        assert problem(answer)["allowed"] == answer["error"]["details"]["allowed"]


async def test_bff_names_a_refused_destination(served: Served) -> None:
    for order in ({**ORDER, "toAddress": MONERO}, {**ORDER_BACK, "toAddress": EVM}):
        answer = await bff.post(served, "/orders", order)
        assert answer.body["error"]["code"] == "invalid_destination"
        assert answer.body["error"]["details"]["allowed"]


async def test_deposit_address_of_the_service_is_refused_with_allowed(
    served: Served,
) -> None:
    made = await served.post("/agent/swap/execute", {**U2X, "to": MONERO})
    own = made.body["data"]["fundingInstructions"]["depositAddress"]
    answer = await served.post("/agent/swap/execute", {**SWAP, "to": own})
    assert answer.body["error"]["details"]["allowed"] == ["the user's own address"]


async def test_impossible_amount_gets_a_limit(served: Served) -> None:
    for path, call in (("/quote", TO_USDC), ("/orders", ORDER)):
        answer = await bff.post(served, path, {**call, "fromAmount": "9" * 30})
        assert answer.body["error"]["code"] == "amount_above_maximum"
        assert answer.body["error"]["details"]["maximum"] == "303030303030303"
        assert answer.body["error"]["details"]["asset"] == "XMR"
    for name in ("plan", "quote"):
        swap = {**SWAP, "amount": "9" * 30}
        answer = await served.post(f"/agent/swap/{name}", without_to(swap, name))
        assert answer.body["error"]["details"]["maximum"] == "303.030303030303"


def without_to(swap: dict[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in swap.items() if name != "quote" or field != "to"}


async def test_an_amount_of_more_digits_than_are_read_is_too_long(served: Served) -> None:
    answer = await bff.post(served, "/quote", {**TO_USDC, "fromAmount": "9" * 41})
    assert answer.body["error"]["code"] == "invalid_input"
    assert "at most 40" in answer.body["error"]["message"]


@pytest.mark.parametrize("number", [10**30, -(10**30), 2**64])
async def test_a_number_of_any_size_is_judged_as_a_chain(served: Served, number: int) -> None:
    swap = {**SWAP, "chain": number}
    answers = [
        await served.post("/agent/swap/execute", swap),
        await served.rpc("swap.execute", swap),
        await bff.post(served, "/orders", {**ORDER, "toChainId": number}),
    ]
    for answer in answers:
        body = answer.body.get("result", answer.body)
        assert body["error"]["code"] == "unsupported_chain", body


async def test_an_id_that_can_not_be_written_back_is_refused(served: Served) -> None:
    message = b'{"jsonrpc":"2.0","id":%d,"method":"service.capabilities"}' % 10**30
    answer = await served.raw(message)
    assert answer.body["error"]["code"] == -32700
    assert "64 bits" in answer.body["error"]["message"]


# --- next actions ----------------------------------------------------------------------------


async def test_a_ticket_about_an_unknown_order_leads_to_no_order(served: Served) -> None:
    answer = await served.post(TICKETS, {"message": "m", "orderId": UNKNOWN_ORDER})
    step, again = answer.body["nextActions"]
    assert again["operation"] == "support.get"
    assert step["action"] == "tell_user"
    assert "operation" not in step
    assert UNKNOWN_ORDER in step["description"]


async def test_bridge_order_is_polled_over_the_bff(served: Served) -> None:
    made = await bff.post(served, "/bridge/deposit", {"toAddress": EVM})
    order_id = made.body["orderId"]
    ticket = await served.post(TICKETS, {"message": "m", "orderId": order_id})
    funded = await served.post("/sandbox/fund", {"orderId": order_id})
    for answer in (ticket, funded):
        step = answer.body["nextActions"][0]
        assert "operation" not in step, "swap.status does not know it"
        path = step["description"].split("GET /bff/v1")[1].rstrip(".")
        assert (await bff.call(served, "GET", path)).body["id"] == order_id


async def test_unknown_path_gets_the_list_of_documents(served: Served) -> None:
    for path in ("/api/v1/nothing", "/bff/v1/nothing", "/nothing"):
        answer = await (await served.client.get(path)).json()
        assert answer["error"]["code"] == "unknown_method"
        assert "GET /openapi.json" in answer["error"]["message"]


# --- the documents agree with the service ----------------------------------------------------


def _schema_of(path: str, served: Served) -> dict[str, Any]:
    document = openapi_of(served)
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return {**body["schema"], "components": document["components"]}


@pytest.mark.parametrize("order_id", ["", "x", "ORD_" + "0" * 26, "ord_" + "U" * 26, UNKNOWN_ORDER])
async def test_an_order_s_id_is_described_as_it_is_read(served: Served, order_id: str) -> None:
    ticket = {
        "orderId": order_id, "sessionId": None, "walletAddress": None, "category": "c",
        "message": "m",
    }  # fmt: skip
    answer = await bff.post(served, "/support/tickets", ticket)
    schema = _schema_of("/bff/v1/support/tickets", served)
    assert Draft202012Validator(schema).is_valid(ticket) == (answer.status == 200)


@pytest.mark.parametrize("version", "1457")
async def test_a_session_s_id_is_described_as_it_is_read(served: Served, version: str) -> None:
    params = {**SWAP, "sessionId": f"3f2b8c1e-7d64-{version}f0a-9c1b-2a5e8d7f6c90"}
    answer = await served.post("/agent/swap/create", params)
    schema = _schema_of("/api/v1/agent/swap/create", served)
    assert Draft202012Validator(schema).is_valid(params) == (answer.status == 200)


@pytest.mark.parametrize("amount", ["0.5", "0." + "0" * 37 + "1", "0." + "0" * 38 + "1", "9" * 41])
async def test_an_amount_is_described_as_it_is_judged(served: Served, amount: str) -> None:
    answer = await served.post("/agent/swap/plan", {"amount": amount})
    is_refused = answer.status != 200 and problem(answer.body)["field"] == "amount"
    schema = _schema_of("/api/v1/agent/swap/plan", served)
    assert Draft202012Validator(schema).is_valid({"amount": amount}) == (not is_refused)
