"""The envelope to the letter: keys, states, request ids, sessions, and calls to go on with."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jsonschema
import pytest

from rpcsvc.domain.order import AGENT_STATE_OF
from rpcsvc.errors import ForbiddenOrigin, InputError, InputErrors, ServiceError
from rpcsvc.operations.discovery import ENVELOPE_SCHEMA
from rpcsvc.operations.dispatch import code_of
from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS
from tests.contract.error_codes import all_errors
from tests.contract.following import until_status
from tests.contract.serving import EVM, MONERO, SWAP, UNKNOWN_ORDER, Served, split_path

KEYS = ["ok", "operation", "state", "missingInputs", "validationErrors", "nextActions", "data"]
SESSION = "3F2B8C1E-7D64-4F0A-9C1B-2A5E8D7F6C90"
U2X = {"direction": "u2x", "chain": 8453, "amount": "150", "to": MONERO}
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


async def over_both(served: Served, name: str, params: Any) -> list[dict[str, Any]]:
    """The envelopes of one call over JSON-RPC and over HTTPS."""
    answers = [(await served.rpc(name, params)).body["result"]]
    operation = _BY_NAME[name]
    if not operation.path:
        return answers
    path, rest = split_path(operation.path, params)
    if operation.method == "GET":
        answers.append((await served.http("GET", path, params=rest)).body)
    else:
        answers.append((await served.post(path, rest)).body)
    return answers


async def ordered(served: Served, params: dict[str, Any] | None = None) -> str:
    made = (await served.post("/agent/swap/execute", params or SWAP)).body
    return str(made["data"]["order"]["orderId"])


@pytest.mark.parametrize(
    ("name", "params", "state", "code"),
    [
        ("swap.plan", {"amount": 0.8}, "invalid_input", "invalid_input"),
        ("swap.plan", {"direction": "sell"}, "invalid_input", "unsupported_direction"),
        ("swap.quote", {}, "needs_input", "missing_input"),
        ("swap.quote", {**SWAP, "to": EVM}, "invalid_input", "invalid_input"),
        ("swap.create", {}, "needs_input", "missing_input"),
        ("swap.create", {**SWAP, "chain": "solana"}, "invalid_input", "unsupported_chain"),
        ("swap.create", {**SWAP, "amount": "0.01"}, "invalid_input", "amount_below_minimum"),
        ("swap.execute", {**SWAP, "amount": "400"}, "invalid_input", "amount_above_maximum"),
        ("swap.execute", {**SWAP, "to": MONERO}, "invalid_input", "invalid_destination"),
        ("swap.execute", {**SWAP, "sessionId": "mine"}, "invalid_input", "invalid_input"),
        ("swap.status", {"orderId": UNKNOWN_ORDER}, "not_found", "order_not_found"),
        ("swap.status", {"orderId": "1"}, "invalid_input", "invalid_input"),
        ("swap.cancel", {"orderId": UNKNOWN_ORDER}, "needs_input", "missing_input"),
        ("support.create", {}, "needs_input", "missing_input"),
        ("support.create", {"message": "m", "orderId": "1"}, "invalid_input", "invalid_input"),
        ("sandbox.fund", {"orderId": UNKNOWN_ORDER}, "not_found", "order_not_found"),
        ("sandbox.fault", {"fault": "fire"}, "invalid_input", "invalid_input"),
    ],
)
async def test_a_failure_is_an_envelope_and_an_error_envelope_at_once(
    served: Served, name: str, params: dict[str, Any], state: str, code: str
) -> None:
    first, second = await over_both(served, name, params)
    for answer in (first, second):
        assert list(answer) == [*KEYS, "requestId", "error"]
        assert (answer["ok"], answer["operation"], answer["state"]) == (False, name, state)
        assert list(answer["error"])[:3] == ["code", "message", "retryable"]
        assert answer["error"]["code"] == code
        assert code in _BY_NAME[name].errors
        assert list(answer["data"]) == ["network", "sessionId", "sessionSource"]
        jsonschema.Draft202012Validator(ENVELOPE_SCHEMA).validate(answer)
        for problem in answer["validationErrors"]:
            assert {"field", "code", "message", "received"} <= set(problem)
            assert set(problem) <= {"field", "code", "message", "received", "allowed"}
    assert {**first, "requestId": ""} == {**second, "requestId": ""}


async def test_status_reports_each_row_of_the_state_table(served: Served) -> None:
    order_id = await ordered(served)
    waiting = await until_status(served, order_id, state="waiting_for_funding")
    assert waiting["data"]["order"]["onDeadline"] == "expire"
    await served.post("/sandbox/fault", {"fault": "pause_blocks"})
    await served.post("/sandbox/fund", {"orderId": order_id})
    detected = await until_status(served, order_id, state="deposit_detected")
    assert detected["data"]["order"]["deadlineAt"]
    await served.post("/sandbox/fault", {"fault": "resume_blocks"})
    done = await until_status(served, order_id, state="completed")
    assert done["data"]["outcome"] == "completed"
    assert "deadlineAt" not in done["data"]["order"]


async def test_unfunded_order_ends_as_failure_and_offers_a_ticket(
    served: Served,
) -> None:
    order_id = await ordered(served)
    await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 86_400})
    ended = await until_status(served, order_id, state="terminal_failure")
    assert ended["data"]["outcome"] == "expired"
    (ticket,) = [action for action in ended["nextActions"] if "operation" in action]
    for answer in await over_both(served, ticket["operation"], ticket["params"]):
        assert (answer["ok"], answer["state"]) == (True, "ticket_created")


async def test_suggested_calls_can_be_sent_over_both_transports(
    served: Served,
) -> None:
    order_id = await ordered(served, U2X)
    given = [
        *await over_both(served, "capabilities", {}),
        *await over_both(served, "swap.plan", U2X),
        *await over_both(served, "swap.execute", U2X),
        *await over_both(served, "swap.status", {"orderId": order_id}),
        *await over_both(served, "support.create", {"message": "m", "orderId": order_id}),
        *await over_both(served, "sandbox.fund", {"orderId": order_id, "amount": "1"}),
    ]
    calls = {json.dumps(a) for one in given for a in one["nextActions"] if "operation" in a}
    assert len(calls) >= 9
    unless = {
        # At the second of two fundings no amount is due.
        ("sandbox.fund", "invalid_input"),
        # x402 sends the payment to sign in an error.
        ("swap.fund", "payment_required"),
        ("swap.fund", "order_not_fundable"),
    }
    for call in map(json.loads, calls):
        for answer in await over_both(served, call["operation"], call["params"]):
            assert answer["ok"] or (call["operation"], answer["error"]["code"]) in unless


async def test_answer_names_the_source_of_the_session(served: Served) -> None:
    given, _ = await over_both(served, "swap.create", {**SWAP, "sessionId": SESSION})
    made, _ = await over_both(served, "swap.create", SWAP)
    plan, _ = await over_both(served, "swap.plan", SWAP)
    ticket, _ = await over_both(served, "support.create", {"message": "m", "sessionId": SESSION})
    reported = [(a["data"]["sessionSource"], a["data"]["sessionId"]) for a in (given, plan, ticket)]
    assert reported == [("request", SESSION.lower()), ("none", None), ("request", SESSION.lower())]
    assert made["data"]["sessionSource"] == "generated"
    assert len(made["data"]["sessionId"]) == 36


async def test_public_documents_name_no_session_to_order_with(
    served: Served,
) -> None:
    """Every reader who copied it would have the owner secret of the others' orders."""
    examples = [
        *(
            example.params
            for operation in (*OPERATIONS, *BFF_OPERATIONS)
            for example in operation.examples
        ),
    ]
    named = {example["sessionId"] for example in examples if example.get("sessionId")}
    assert named == {"$sessionId"}
    for answer in await over_both(served, "swap.execute", {**SWAP, "sessionId": "mine"}):
        assert not re.search(r"[0-9a-f]{8}-", answer["error"]["message"])


async def test_every_answer_names_the_network(served: Served) -> None:
    for operation in OPERATIONS:
        for answer in await over_both(served, operation.name, {"nothing": 1}):
            assert answer["data"]["network"] == "sandbox"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/agent/swap/plan", 405), ("POST", "/agent/swap/plan", 415)],
)
async def test_a_refused_request_has_its_request_id_too(
    served: Served, method: str, path: str, status: int
) -> None:
    answer = await served.http(method, path, headers={"x-request-id": "mine"})
    assert answer.status == status
    assert (answer.body["requestId"], answer.headers["x-request-id"]) == ("mine", "mine")
    assert list(answer.body) == [*KEYS, "requestId", "error"]


async def test_a_protocol_fault_of_json_rpc_has_its_request_id_too(served: Served) -> None:
    for body in (b"{", b"[]", b'{"jsonrpc":"2.0","id":1,"method":"service.nothing"}'):
        answer = await served.raw(body, x_request_id="mine")
        assert answer.body["error"]["data"]["requestId"] == "mine"
        assert answer.headers["x-request-id"] == "mine"


async def test_answer_lists_problems_of_every_kind_at_once(served: Served) -> None:
    wrong = {
        "direction": "sideways", "chain": "nowhere", "amount": "1,5", "to": "0x1", "extra": 1
    }  # fmt: skip
    for answer in await over_both(served, "swap.execute", {**wrong, "sessionId": 1}):
        fields = {problem["field"] for problem in answer["validationErrors"]}
        assert fields == {*wrong, "sessionId"}
    for answer in await over_both(served, "swap.execute", {**SWAP, "to": "0x1", "sessionId": "1"}):
        fields = {problem["field"] for problem in answer["validationErrors"]}
        assert fields == {"to", "sessionId"}


async def test_thousands_of_wrong_inputs_get_a_short_answer(served: Served) -> None:
    answer = await served.post("/agent/swap/plan", {f"k{number}": 1 for number in range(4000)})
    assert answer.status == 400
    assert len(answer.body["validationErrors"]) == 16


@pytest.mark.parametrize("bad", ["not good!", "", "x" * 129, "a,b"])
async def test_bad_json_rpc_request_id_is_replaced_by_a_generated_one(
    served: Served, bad: str
) -> None:
    answer = await served.rpc("swap.plan", {}, x_request_id=bad)

    request_id = answer.body["result"]["requestId"]
    assert request_id.startswith("req_")
    assert answer.headers["x-request-id"] == request_id


async def test_a_batch_with_a_bad_request_id_has_one_generated_one(served: Served) -> None:
    call = b'{"jsonrpc":"2.0","id":"%b","method":"service.swap.plan"}'

    answer = await served.raw(b"[%b,%b]" % (call % b"1", call % b"2"), x_request_id="not good!")

    [request_id] = {one["result"]["requestId"] for one in answer.body}
    assert request_id.startswith("req_")
    assert answer.headers["x-request-id"] == request_id


async def test_early_refusal_has_its_request_id_in_body_and_header(
    served: Served,
) -> None:
    response = await served.client.post("/rpc", data=b"{}", headers={"x-request-id": "not good!"})

    reported = (await response.json())["error"]["data"]["requestId"]
    assert (response.status, reported) == (415, response.headers["x-request-id"])


async def test_null_stands_for_an_optional_input_that_was_left_out(served: Served) -> None:
    nothing = dict.fromkeys(["direction", "chain", "amount", "to", "hasFunds"])
    for answer in await over_both(served, "swap.plan", nothing):
        assert answer["missingInputs"] == ["direction", "chain", "amount", "to"]
    params = {**SWAP, "sessionId": None}
    for answer in await over_both(served, "swap.create", params):
        assert answer["data"]["sessionSource"] == "generated"


# The design's error table: code, HTTP status, JSON-RPC code (None: a result with ok false).
ERROR_TABLE: dict[str, tuple[int, set[int | None]]] = {
    "invalid_json": (400, {-32700}),
    # Of MCP 2026-07-28: header mismatch, missing capability, unsupported revision.
    "invalid_request": (400, {-32600, -32602, -32020, -32021, -32022}),
    "unknown_method": (404, {-32601}),
    "invalid_input": (400, {None}),
    "missing_input": (400, {None}),
    "amount_below_minimum": (400, {None}),
    "amount_above_maximum": (400, {None}),
    "unsupported_chain": (400, {None}),
    "unsupported_direction": (400, {None}),
    "unsupported_token": (400, {None}),
    "invalid_destination": (400, {None}),
    "destination_not_allowed": (400, {None}),
    "quote_changed": (409, {None}),
    "forbidden": (403, {None}),
    "spend_limit": (403, {None}),
    "approval_required": (403, {None}),
    "verification_failed": (403, {None}),
    "order_not_found": (404, {None}),
    "ticket_not_found": (404, {None}),
    "order_not_cancellable": (409, {None}),
    "order_not_fundable": (409, {None}),
    "payment_required": (402, {None}),
    "payment_refused": (402, {None}),
    "idempotency_conflict": (409, {None}),
    "payload_too_large": (413, {-32600}),
    "unsupported_media_type": (415, {-32600}),
    "unauthorized": (401, {-32001}),
    "tls_required": (403, {-32001}),
    "misdirected_request": (421, {-32600}),
    "rate_limited": (429, {-32029}),
    "unavailable": (503, {None}),
    "internal_error": (500, {-32603}),
}
# The design's state table: the answer's state for each status of an order.
STATE_TABLE = {
    "awaiting_deposit": "waiting_for_funding",
    "deposit_detected": "deposit_detected",
    "deposit_confirmed": "deposit_detected",
    "executing_swap": "swap_processing",
    "refunding": "refunding",
    "completed": "completed",
    "refunded": "terminal_failure",
    "failed": "terminal_failure",
    "expired": "terminal_failure",
}


def test_the_state_of_each_status_is_that_of_the_state_table() -> None:
    assert {status.value: state.value for status, state in AGENT_STATE_OF.items()} == STATE_TABLE


def test_the_error_tree_is_the_error_table() -> None:
    classes = all_errors(ServiceError)
    assert {cls.code for cls in classes} == set(ERROR_TABLE)
    for cls in classes:
        status, rpc_codes = ERROR_TABLE[cls.code]
        if cls.http_status not in (405, 408) and cls is not ForbiddenOrigin:
            assert (cls.http_status, cls.rpc_code in rpc_codes) == (status, True), cls
        assert cls.retryable == (cls.code in {"rate_limited", "unavailable", "internal_error"})


def test_code_of_several_problems_is_of_the_leading_one() -> None:
    kinds = [cls for cls in all_errors(InputError) if cls is not InputErrors]
    for cls in kinds:
        missing = next(kind for kind in kinds if kind.code == "missing_input")
        both = InputErrors([missing("m", field="a"), cls("m", field="b")])
        assert code_of(both) == cls.code


async def test_announced_deposit_window_is_the_one_an_order_gets(
    served: Served,
) -> None:
    reported = (await served.http("GET", "/agent/capabilities")).body["data"][
        "depositWindowSeconds"
    ]
    data = (await served.post("/agent/swap/create", SWAP)).body["data"]
    created, expires = (
        datetime.fromisoformat(data["order"][name]) for name in ("createdAt", "expiresAt")
    )
    assert reported == data["quote"]["depositWindowSeconds"] == (expires - created).total_seconds()
    assert reported == 3_600


async def test_an_error_says_that_the_caller_gave_a_session(served: Served) -> None:
    wrong = {**SWAP, "amount": "0", "sessionId": SESSION}
    for answer in await over_both(served, "swap.execute", wrong):
        reported = answer["data"]
        assert (reported["sessionId"], reported["sessionSource"]) == (SESSION.lower(), "request")
    for answer in await over_both(served, "swap.execute", {**wrong, "sessionId": "none"}):
        assert (answer["data"]["sessionId"], answer["data"]["sessionSource"]) == (None, "none")
