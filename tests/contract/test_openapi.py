"""Every example of the OpenAPI document is sent, every error provoked, all answers checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.http.documents import links
from rpcsvc.http.site import API_ROOT, site_of
from rpcsvc.operations import dispatch
from tests.contract.described import Json, check, check_response, filled, openapi_of, resolved
from tests.contract.serving import (
    BACK,
    EVM,
    JSON,
    SWAP,
    UNKNOWN_ORDER,
    Answer,
    Served,
    serving,
    with_live_ticket,
)

PLAN, QUOTE, CREATE, STATUS, PAY = (
    f"{API_ROOT}/agent/swap/{name}"
    for name in ("plan", "quote", "create", "status/{orderId}", "fund/{orderId}")
)
# What a path may name; a call takes what is in neither its path nor its body as an unknown input.
UNKNOWN = {"orderId": UNKNOWN_ORDER, "ticketId": "tkt_" + "0" * 26}
CAPABILITIES, TICKETS = f"{API_ROOT}/agent/capabilities", f"{API_ROOT}/agent/support/tickets"
FUND, FAULT = f"{API_ROOT}/sandbox/fund", f"{API_ROOT}/sandbox/fault"
PROXIED = {"x-forwarded-for": "203.0.113.7", "x-forwarded-proto": "http"}
ORDER_ID = re.compile(r"ord_[0-9A-Z]{26}")


async def send(
    served: Served, method: str, path: str, params: Json | None = None, **kwargs: Any
) -> Answer:
    """One call; its answer is validated by the document."""
    target, left = filled(path, params or {})
    if method == "get":
        kwargs["params"] = left
    elif params is not None:
        kwargs["json"] = left
    answer = await served.http(method.upper(), target.removeprefix(API_ROOT), **kwargs)
    document = openapi_of(served)
    check_response(document, path, method, answer.status, answer.headers, answer.body)
    return answer


def calls(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Every operation of the agent API in the document: method, path, description."""
    for path, item in document["paths"].items():
        if not path.startswith(API_ROOT):
            continue  # test_bff_openapi.py, test_rates.py
        for method, operation in item.items():
            yield method, path, operation


def request_examples(document: Json, operation: Json) -> Iterator[Json]:
    """The params of every example of the body, with those of the path and the query."""
    parameters = [resolved(document, each) for each in operation["parameters"]]
    given = {each["name"]: each["example"] for each in parameters if "example" in each}
    content = operation.get("requestBody", {"content": {}})["content"]
    bodies = content.get("application/json", {"examples": {"none": {"value": {}}}})["examples"]
    for body in bodies.values():
        yield {**given, **body["value"]}


async def test_every_request_example_works_as_it_stands(served: Served) -> None:
    sent = 0
    document = openapi_of(served)
    for method, path, operation in calls(document):
        for params in request_examples(document, operation):
            made = BACK if path == PAY else SWAP
            answer = await send(served, method, path, await with_live_order(served, params, made))
            good = (402, False) if path == PAY else (200, True)
            assert (answer.status, answer.body["ok"]) == good, (path, params, answer.body)
            sent += 1
    assert sent >= 17


async def with_live_order(served: Served, params: Json, order: Json = SWAP) -> Json:
    """The params with a new order in place of the recorded one."""
    text = json.dumps(params)
    if not ORDER_ID.search(text):
        return await with_live_ticket(served, params)
    made = (await send(served, "post", CREATE, order)).body["data"]
    found: Json = json.loads(ORDER_ID.sub(made["order"]["orderId"], text))
    return {**found, **({"sessionId": made["sessionId"]} if "sessionId" in found else {})}


async def test_every_example_keeps_to_the_schema_beside_it(served: Served) -> None:
    document = openapi_of(served)
    shown = list(examples_in(document))
    assert len(shown) > 50
    for schema, value in shown:
        check(document, schema, value)


def examples_in(document: Json) -> Iterator[tuple[Json, Any]]:
    """Every example in the document, of parameters and of bodies, with its schema."""

    def within(part: Any) -> Iterator[tuple[Json, Any]]:
        if isinstance(part, dict):
            if isinstance(part.get("schema"), dict):
                if "example" in part:
                    yield part["schema"], part["example"]
                for example in part.get("examples", {}).values():
                    if "externalValue" not in example:
                        yield part["schema"], resolved(document, example)["value"]
            part = list(part.values())
        if isinstance(part, list):
            for each in part:
                yield from within(each)

    yield from within(document)


async def test_every_result_is_shown_by_an_operation(served: Served) -> None:
    """An example that several operations have is shown by one of them."""
    without = [
        path
        for _, path, operation in calls(openapi_of(served))
        if not {"example", "examples"} & set(good_content(operation))
    ]
    shown_elsewhere = {f"{API_ROOT}/agent/swap/{name}" for name in ("execute", "cancel/{orderId}")}
    assert set(without) <= {links.HEALTH, FAULT, *shown_elsewhere}


def good_content(operation: Json) -> Json:
    content: Json = operation["responses"]["200"]["content"]["application/json"]
    return content


async def test_calls_that_show_themselves_answer_as_described(served: Served) -> None:
    root = site_of(served.up.settings, served.up.service).url
    document, shown = openapi_of(served), 0
    for path, item in document["paths"].items():
        for operation in item.values():
            live = good_content(operation).get("examples", {}).get("live")
            if live is not None:
                assert live["externalValue"] == root + path
                answer = await (await served.client.get(path)).json()
                check(document, good_content(operation)["schema"], answer)
                shown += 1
    assert shown >= 4


async def test_every_link_leads_to_an_answer(served: Served) -> None:
    document = openapi_of(served)
    by_id = {operation["operationId"]: (m, p) for m, p, operation in calls(document)}
    linked = [
        (method, path, link)
        for method, path, operation in calls(document)
        for link in operation["responses"]["200"].get("links", {}).values()
    ]
    assert len(linked) > 1
    for method, path, link in linked:
        made = await send(served, method, path, SWAP)
        given = json.dumps(link["parameters"]).replace(
            "$response.body#/data/order/orderId", made.body["data"]["order"]["orderId"]
        )
        answer = await send(served, *by_id[link["operationId"]], json.loads(given))
        assert answer.body["ok"]


@pytest.mark.parametrize(
    ("method", "path", "params", "status", "code"),
    [
        ("post", PLAN, {"amount": "0"}, 400, "invalid_input"),
        ("post", PLAN, {"to": "0x00"}, 400, "invalid_destination"),
        ("post", QUOTE, {}, 400, "missing_input"),
        ("post", QUOTE, {**SWAP, "direction": "up"}, 400, "unsupported_direction"),
        ("post", CREATE, {**SWAP, "chain": "solana"}, 400, "unsupported_chain"),
        ("post", CREATE, {**SWAP, "amount": "0.01"}, 400, "amount_below_minimum"),
        ("post", CREATE, {**SWAP, "amount": "999999"}, 400, "amount_above_maximum"),
        ("post", CREATE, {**SWAP, "sessionId": "x" * 500, "what": [1]}, 400, "invalid_input"),
        ("post", TICKETS, {"message": ""}, 400, "invalid_input"),
        ("post", FUND, {"orderId": UNKNOWN_ORDER}, 404, "order_not_found"),
        ("post", FAULT, {"fault": "payout_fails"}, 400, "missing_input"),
        ("get", STATUS, {"orderId": UNKNOWN_ORDER}, 404, "order_not_found"),
        ("get", STATUS, {"orderId": "x"}, 400, "invalid_input"),
        ("get", STATUS, {"orderId": UNKNOWN_ORDER, "verfy": EVM}, 400, "invalid_input"),
        ("get", CAPABILITIES, {"what": "x"}, 400, "invalid_input"),
    ],
)
async def test_openapi_declares_the_refusals_of_an_operation(
    served: Served, method: str, path: str, params: Json, status: int, code: str
) -> None:
    answer = await send(served, method, path, params)
    assert (answer.status, answer.body["error"]["code"]) == (status, code)


async def test_another_destination_is_a_declared_refusal(served: Served) -> None:
    made = await send(served, "post", CREATE, SWAP)
    params = {"orderId": made.body["data"]["order"]["orderId"], "verify": "0x" + "1" * 40}
    assert (await send(served, "get", STATUS, params)).status == 403


async def test_a_retry_and_a_conflict_are_declared(served: Served) -> None:
    headers = {"idempotency-key": "one-0123456789ab"}
    await send(served, "post", CREATE, SWAP, headers=headers)
    again = await send(served, "post", CREATE, SWAP, headers=headers)
    assert again.headers["idempotent-replayed"] == "true"
    other = await send(served, "post", CREATE, {**SWAP, "amount": "0.9"}, headers=headers)
    assert (other.status, other.body["state"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b'{"a":1,"a":2}', JSON, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b" " * 70_000, JSON, 413),
    ],
)
async def test_a_body_that_can_t_be_read_is_a_declared_refusal(
    served: Served, body: bytes, headers: dict[str, str], status: int
) -> None:
    for path in (PLAN, CREATE, TICKETS, FUND):
        answer = await send(served, "post", path, data=body, headers=headers)
        assert answer.status == status


async def test_another_http_method_is_a_declared_refusal(served: Served) -> None:
    document = openapi_of(served)
    for method, path, _ in calls(document):
        target, _ = filled(path, UNKNOWN)
        answer = await served.http("DELETE", target.removeprefix(API_ROOT))
        check_response(document, path, method, answer.status, answer.headers, answer.body)
        assert answer.status == 405
        assert method.upper() in answer.headers["allow"]


async def test_plain_http_through_a_proxy_is_a_declared_refusal(tmp_path: Path) -> None:
    async with serving(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        for method, path, _ in calls(openapi_of(served)):
            params = UNKNOWN if "{" in path else {}
            answer = await send(served, method, path, params, headers=PROXIED)
            assert (answer.status, answer.body["error"]["code"]) == (403, "tls_required")


async def test_budgets_and_their_refusal_are_declared(tmp_path: Path) -> None:
    limits: dict[str, Any] = {
        "rate_limit__enabled": True,
        "rate_limit__orders_per_minute": 1,
        "rate_limit__requests_per_minute": 1,
    }
    async with serving(tmp_path, **limits) as served:
        for method, path, params in (("post", PLAN, {}), ("post", CREATE, SWAP)):
            good = await send(served, method, path, params)
            assert {"ratelimit", "ratelimit-policy"} <= {name.lower() for name in good.headers}
            assert (await send(served, method, path, params)).status == 429
        for method, path, _ in calls(openapi_of(served)):
            params = UNKNOWN if "{" in path else {}
            answer = await send(served, method, path, params)
            assert answer.status == (200 if path == links.HEALTH else 429)


async def test_openapi_declares_503_with_retry_after(served: Served) -> None:
    await send(served, "post", FAULT, {"fault": "engine_down"})
    for method, path, params in (
        ("post", CREATE, SWAP),
        ("post", QUOTE, {k: v for k, v in SWAP.items() if k != "to"}),
    ):
        answer = await send(served, method, path, params)
        assert (answer.status, answer.body["state"]) == (503, "unavailable")
    assert (await send(served, "get", links.HEALTH)).status == 503


@pytest.mark.parametrize(
    ("fault", "status"), [(RuntimeError(), 500), (Unavailable("The store is down."), 503)]
)
async def test_a_fault_of_the_service_is_declared_for_every_operation(
    served: Served, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int
) -> None:
    def fail(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(dispatch, "parse_call", fail)
    for method, path, _ in calls(openapi_of(served)):
        if path in (links.HEALTH, links.QUICKSTART):
            continue
        params = UNKNOWN if "{" in path else {}
        assert (await send(served, method, path, params)).status == status


async def test_health_and_every_state_of_an_order_are_as_declared(served: Served) -> None:
    assert (await send(served, "get", links.HEALTH)).body["status"] == "ok"
    made = await send(served, "post", CREATE, SWAP)
    order = {"orderId": made.body["data"]["order"]["orderId"]}
    await send(served, "post", FUND, order)
    seen: list[str] = []
    while not seen or seen[-1] not in ("completed", "terminal_failure"):
        answer = await send(served, "get", STATUS, order)
        if [answer.body["state"]] != seen[-1:]:
            seen.append(answer.body["state"])
    assert seen[-1] == "completed"


async def test_the_quickstart_is_as_declared_and_no_copy_is_kept(served: Served) -> None:
    """Its example has an idempotency key for one reader."""
    path = links.QUICKSTART
    first = await send(served, "get", path)
    assert first.headers["cache-control"].startswith("no-store")
    tag = {"if-none-match": first.headers["etag"]}
    assert (await send(served, "get", path, headers=tag)).status == 200
