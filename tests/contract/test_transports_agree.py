"""Every example of the operation table has the same answer over every transport."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import jsonschema
import pytest

from rpcsvc import errors
from rpcsvc.operations.discovery import ENVELOPE_SCHEMA
from rpcsvc.operations.models import schema_of
from rpcsvc.operations.service import Operation
from rpcsvc.operations.table import OPERATIONS
from tests.command_line import clean_environ, run_here
from tests.contract.error_codes import all_errors
from tests.contract.serving import MONERO, SWAP, Served, placed, split_path
from tests.mcp import call as call_tool

Transport = Callable[[Served, Operation, dict[str, Any]], Awaitable[dict[str, Any]]]
# Values that differ between two runs of one call: ids, times, addresses, transactions, and
# signatures over them.
_VARYING = re.compile(
    r"\beyJ[\w-]+\.[\w-]+\.[\w-]{86}|(ord|tkt|tks|req)_[0-9A-Za-z]+|\d{4}-\d\d-\d\dT[\d:.]+Z|[0-9a-f]{8}-[0-9a-f-]{27}"
    r"|(?<=quoteDigest\": \")[^\"]+"
    r"|\b0x[0-9a-fA-F]{40}\b|\b[1-9A-HJ-NP-Za-km-z]{95}\b|\b[0-9a-f]{64}\b"
)


async def over_rpc(served: Served, operation: Operation, params: dict[str, Any]) -> dict[str, Any]:
    answer = await served.rpc(operation.name, params)
    assert answer.status == 200
    return dict(answer.body["result"])


async def over_http(served: Served, operation: Operation, params: dict[str, Any]) -> dict[str, Any]:
    path, rest = split_path(operation.path or "", params)
    if operation.method == "GET":
        return dict((await served.http("GET", path, params=rest)).body)
    return dict((await served.post(path, rest)).body)


async def over_cli(served: Served, operation: Operation, params: dict[str, Any]) -> dict[str, Any]:
    arguments = [operation.command, "--url", served.url, "--stateless"]
    done = await asyncio.to_thread(
        run_here, [*arguments, "--params", json.dumps(params)], clean_environ()
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if answer["ok"] else 1)
    return answer


async def over_mcp(served: Served, operation: Operation, params: dict[str, Any]) -> dict[str, Any]:
    assert operation.tool is not None
    arguments = {"detail": "full", **params}
    return dict((await call_tool(served, operation.tool.name, arguments))["structuredContent"])


TRANSPORTS: dict[str, Transport] = {
    "rpc": over_rpc,
    "http": over_http,
    "cli": over_cli,
    "mcp": over_mcp,
}


def has(operation: Operation, transport: str) -> bool:
    """Whether a transport accepts the examples of an operation unchanged."""
    if transport == "http":
        return bool(operation.path)
    # Over MCP operations that make orders need a session (test_mcp.py).
    return transport != "mcp" or (operation.tool is not None and not operation.idempotent)


def masked(answer: dict[str, Any]) -> Any:
    answer = {**answer, "requestId": "masked"}
    return json.loads(_VARYING.sub("masked", json.dumps(answer)))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
async def test_every_example_is_answered_alike_over_every_transport(
    served: Served, operation: Operation
) -> None:
    for example in operation.examples:
        answers = {}
        for name, transport in TRANSPORTS.items():
            if not has(operation, name):
                continue
            params = await placed(served, example.params, in_usdc=operation.payable)
            answers[name] = await transport(served, operation, params)
            check_shape(operation, answers[name])
        first = masked(answers["rpc"])
        for name, answer in answers.items():
            assert masked(answer) == first, f"{example.name} over {name}"


def check_shape(operation: Operation, answer: dict[str, Any]) -> None:
    assert answer["operation"] == operation.name
    jsonschema.Draft202012Validator(ENVELOPE_SCHEMA).validate(answer)
    if operation.payable:  # no example has a signature of the reader
        assert answer["error"]["code"] == "payment_required"
        return
    assert answer["ok"], answer
    result = schema_of(operation.result)
    jsonschema.Draft202012Validator(result).validate(answer["data"])
    keys = ["ok", "operation", "state", "missingInputs", "validationErrors", "nextActions"]
    assert list(answer) == [*keys, "data", "requestId"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_every_operation_has_a_summary_examples_and_known_errors(operation: Operation) -> None:
    known = {cls.code for cls in all_errors(errors.ServiceError)}
    assert operation.summary.endswith(".")
    assert operation.examples
    assert set(operation.errors) <= known


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
async def test_an_unknown_property_is_a_known_error_of_every_operation(
    served: Served, operation: Operation
) -> None:
    answer = await served.rpc(operation.name, {"unheardOf": 1})
    problems = answer.body["result"]["validationErrors"]
    assert [p["code"] for p in problems if p["field"] == "unheardOf"] == ["invalid_input"]
    assert "invalid_input" in operation.errors


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
async def test_a_store_that_is_down_is_a_known_error_of_what_needs_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise errors.Unavailable("The store is down.")

    made = await served.rpc("swap.create", SWAP)
    order = {"orderId": made.body["result"]["data"]["order"]["orderId"]}
    calls: dict[str, dict[str, Any]] = {
        "swap.create": SWAP,
        "swap.execute": SWAP,
        "swap.status": order,
        "swap.cancel": {**order, "sessionId": made.body["result"]["data"]["sessionId"]},
        "swap.events": order,
        "swap.list": {"sessionId": made.body["result"]["data"]["sessionId"]},
        "swap.check": {**order, "paymentUri": "monero:8"},
        "swap.fund": order,
        "swap.refundAddress": {
            **order,
            "sessionId": made.body["result"]["data"]["sessionId"],
            "address": MONERO,
        },
        "swap.webhookDeliveries": {
            **order,
            "sessionId": made.body["result"]["data"]["sessionId"],
        },
        "support.create": {"message": "Where is it?"},
        "sandbox.fund": order,
        "sandbox.fault": {"fault": "pause_blocks"},
    }
    for access in ("fetch", "fetch_one", "write"):
        monkeypatch.setattr(type(served.up.database), access, fail)
    answer = await served.rpc(operation.name, calls.get(operation.name, {}))
    error = answer.body["result"].get("error") or {}
    is_down = error.get("code") == "unavailable"
    assert is_down == (operation.name in calls)
    assert not is_down or "unavailable" in operation.errors


async def test_every_next_action_with_a_call_can_be_sent_as_it_stands(served: Served) -> None:
    made = (await served.post("/agent/swap/execute", SWAP)).body
    plan = (await served.post("/agent/swap/plan", SWAP)).body
    order_id = made["data"]["order"]["orderId"]
    status = (await served.http("GET", f"/agent/swap/status/{order_id}")).body
    actions = [*made["nextActions"], *plan["nextActions"], *status["nextActions"]]
    calls = [action for action in actions if "operation" in action]
    assert {call["operation"] for call in calls} == {
        "swap.quote", "swap.execute", "swap.status", "sandbox.fund"
    }  # fmt: skip
    for call in calls[::-1]:
        answer = await served.rpc(call["operation"], call["params"])
        nothing_due = answer.body["result"].get("error", {}).get("code") == "invalid_input"
        assert answer.body["result"]["ok"] or (call["operation"] == "sandbox.fund" and nothing_due)


async def test_the_schemas_operation_gives_the_schemas_of_all(served: Served) -> None:
    answer = await served.rpc("schemas", {})
    described = answer.body["result"]["data"]["operations"]
    assert set(described) == {operation.name for operation in OPERATIONS}
    for schema in described.values():
        jsonschema.Draft202012Validator.check_schema(schema["params"])
        jsonschema.Draft202012Validator.check_schema(schema["result"])
