"""Inputs in the wrong place are refused by name: ignoring a key could make two orders."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS
from tests.contract import bff
from tests.contract.serving import JSON, SWAP, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the calls below change nothing."""
    return shared


CREATE = "/agent/swap/create"
CREATING = [CREATE, "/agent/swap/execute"]
KEY_NAMES = ["x-idempotency-key", "X-Idempotency-Key", "idempotency_key", "idempotencykey"]


def problem(reported: Any) -> dict[str, Any]:
    """The only validation error of an envelope."""
    assert reported["error"]["code"] == "invalid_input"
    [found] = reported["validationErrors"]
    return dict(found)


def named(path: str) -> str:
    return path.replace("{orderId}", "ord_" + "0" * 26).replace("{ticketId}", "tkt_" + "0" * 26)


@pytest.mark.parametrize("path", [op.path for op in OPERATIONS if op.path and op.method == "POST"])
async def test_a_post_of_the_agent_api_refuses_a_query_by_name(served: Served, path: str) -> None:
    answer = await served.http("POST", f"{named(path)}?direction=x2u", json=SWAP)

    assert answer.status == 400
    found = problem(answer.body)
    assert (found["field"], found["received"]) == ("direction", "x2u")
    assert "JSON body" in found["message"]


@pytest.mark.parametrize("path", [op.path for op in BFF_OPERATIONS if op.method == "POST"])
async def test_a_post_of_the_bff_refuses_a_query_by_name(served: Served, path: str) -> None:
    answer = await bff.call(served, "POST", f"{named(path)}?toAddress=x", json=bff.ORDER)

    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_input")
    [found] = answer.body["error"]["details"]["problems"]
    assert found["field"] == "toAddress"
    assert "JSON body" in found["message"]


@pytest.mark.parametrize("name", ["idempotency-key", "Idempotency-Key", "idempotencyKey"])
@pytest.mark.parametrize("path", CREATING)
async def test_key_in_the_query_gets_its_header(served: Served, path: str, name: str) -> None:
    answer = await served.http("POST", f"{path}?{name}=k", json=SWAP)

    assert "the header idempotency-key" in problem(answer.body)["message"]
    assert served.count("orders") == 0


async def test_header_name_in_the_query_is_reported_as_a_header(served: Served) -> None:
    for name in ("x-request-id", "x-api-key"):
        answer = await bff.call(served, "POST", f"/quote?{name}=k", json=bff.TO_USDC)
        assert f"the header {name}" in answer.body["error"]["message"]


async def test_names_in_the_query_are_listed_up_to_a_bound(served: Served) -> None:
    two = await served.http("POST", "/agent/swap/plan?a=1&b=2&a=3", json={})
    assert [found["field"] for found in two.body["validationErrors"]] == ["a", "b"]
    many = "&".join(f"x{number}=1" for number in range(500))
    answer = await served.http("POST", f"/agent/swap/plan?{many}", json={})
    assert (answer.status, len(answer.body["validationErrors"])) == (400, 16)


@pytest.mark.parametrize("query", ["%ff=1", "%ed%a0%80=1", "=", "a", f"{'x' * 3000}=1"])
async def test_a_strange_query_is_a_client_s_error_too(served: Served, query: str) -> None:
    answer = await served.http("POST", f"/agent/swap/plan?{query}", json={})

    assert answer.status == 400
    assert len(problem(answer.body)["field"]) <= 64


async def test_an_empty_query_holds_nothing_to_refuse(served: Served) -> None:
    response = await served.client.post("/api/v1/agent/swap/plan?", json={})

    assert response.status == 200


async def test_json_rpc_reads_no_query_either(served: Served) -> None:
    call = {"jsonrpc": "2.0", "id": "1", "method": "service.swap.create", "params": SWAP}

    answer = await served.raw(json.dumps(call).encode(), "/rpc?idempotency-key=k")

    assert (answer.status, answer.body["error"]["code"]) == (400, -32600)
    assert "idempotency-key" in answer.body["error"]["message"]
    assert "params" in answer.body["error"]["message"]
    assert served.count("orders") == 0


@pytest.mark.parametrize("name", KEY_NAMES)
@pytest.mark.parametrize("path", CREATING)
async def test_key_in_a_wrong_header_gets_the_right_name(
    served: Served, path: str, name: str
) -> None:
    for more in ({}, {"idempotency-key": "k-0123456789abcd"}):
        answer = await served.http("POST", path, json=SWAP, headers={name: "k", **more})

        assert answer.status == 400
        found = problem(answer.body)
        assert (found["field"], found["received"]) == (name, "k")
        assert "the header idempotency-key" in found["message"]
    assert served.count("orders") == 0


async def test_a_key_in_a_header_of_another_name_is_refused_on_the_bff(served: Served) -> None:
    answer = await bff.call(
        served, "POST", "/orders", json=bff.ORDER, headers={"x-idempotency-key": "k"}
    )

    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_input")
    assert served.count("orders") == 0


async def test_calls_that_take_no_key_do_not_look_for_one(served: Served) -> None:
    headers = {"idempotency-key": "k-0123456789abcd", "x-idempotency-key": "k"}

    over_http = await served.http("POST", "/agent/swap/plan", json=SWAP, headers=headers)
    over_rpc = await served.raw(
        rpc("swap.plan"), x_idempotency_key="k-0123456789abcd", idempotency_key="k-0123456789abcd"
    )

    assert (over_http.status, over_http.body["ok"]) == (200, True)
    assert over_rpc.body["result"]["ok"] is True


def rpc(method: str, **more: Any) -> bytes:
    return json.dumps(
        {"jsonrpc": "2.0", "id": "1", "method": f"service.{method}", "params": {**SWAP, **more}}
    ).encode()


@pytest.mark.parametrize("name", ["idempotency-key", *KEY_NAMES])
@pytest.mark.parametrize("method", ["swap.create", "swap.execute"])
async def test_key_in_a_json_rpc_header_is_reported_as_a_param(
    served: Served, method: str, name: str
) -> None:
    for more in ({}, {"idempotency-key": "k-0123456789abcd"}):
        response = await served.client.post(
            "/rpc", data=rpc(method, **more), headers={**JSON, name: "k"}
        )

        found = problem((await response.json())["result"])
        assert (response.status, found["field"], found["received"]) == (200, name, "k")
        assert "the param idempotency-key" in found["message"]
    assert served.count("orders") == 0


async def test_batch_with_a_key_header_refuses_only_creating_calls(
    served: Served,
) -> None:
    batch = b"[%b,%b,%b]" % (rpc("swap.create"), rpc("swap.plan"), rpc("swap.execute"))

    answer = await served.raw(batch, idempotency_key="k-0123456789abcd")

    assert [one["result"]["ok"] for one in answer.body] == [False, True, False]
    assert served.count("orders") == 0


@pytest.mark.parametrize("method", ["swap.create", "swap.execute"])
async def test_a_key_that_is_null_is_no_key(served: Served, method: str) -> None:
    answer = await served.raw(rpc(method, **{"idempotency-key": None}))

    found = problem(answer.body["result"])
    assert (found["field"], found["received"]) == ("idempotency-key", None)
    assert served.count("orders") == 0


async def test_bad_json_rpc_key_does_not_hide_the_other_problems(served: Served) -> None:
    answer = await served.raw(rpc("swap.create", amount=1, **{"idempotency-key": 7}))

    errors = answer.body["result"]["validationErrors"]
    assert [error["field"] for error in errors] == ["idempotency-key", "amount"]
