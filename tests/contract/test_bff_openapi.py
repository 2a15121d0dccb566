"""The BFF's part of the OpenAPI document: every example is sent, every answer validated."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openapi_spec_validator import validate

from rpcsvc.http.site import BFF_ROOT
from rpcsvc.operations.table import BFF_OPERATIONS
from tests.contract.bff import ORDER, TABLES, call
from tests.contract.described import Json, check_response, filled, openapi_of, resolved
from tests.contract.serving import EVM, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the calls below change nothing."""
    return shared


# The spec table of each answer.
TABLE_OF = {
    "BffHealth": "Health",
    "BffChain": "Chain",
    "BffQuote": "Quote response",
    "IntegratorFee": "integratorFee",
    "BffNewOrder": "Order create response",
    "BffOrder": "Order",
    "Twap": "twap",
    "BffListItem": "Order list item",
    "BffTicket": "Support ticket response",
    "BridgeRate": "rate",
    "ReferenceRate": "wagyuRate",
    "BridgeRates": "Bridge rate list",
    "BridgeOpened": "Bridge order response",
    "BridgeOrderView": "Bridge order",
}


async def send(served: Served, path: str, method: str, params: Json, **headers: str) -> Any:
    """One call; its answer is validated by the document."""
    target, left = filled(path.removeprefix(BFF_ROOT), params)
    kwargs: Json = {"params": left} if method == "get" else {"json": left}
    answer = await call(served, method.upper(), target, headers=headers, **kwargs)
    document = openapi_of(served)
    check_response(document, path, method, answer.status, answer.headers, answer.body)
    return answer


async def test_the_document_is_valid_and_has_every_call(served: Served) -> None:
    document = openapi_of(served)
    validate(document)
    for operation in BFF_OPERATIONS:
        assert operation.method.lower() in document["paths"][BFF_ROOT + operation.path]


async def test_every_example_works_as_it_stands(served: Served) -> None:
    made = await send(served, f"{BFF_ROOT}/orders", "post", ORDER)
    bridged = await send(served, f"{BFF_ROOT}/bridge/deposit", "post", {"toAddress": EVM})
    document, sent = openapi_of(served), 0
    for path, item in document["paths"].items():
        if not path.startswith(BFF_ROOT):
            continue
        for method, described in item.items():
            params = example_of(document, described)
            if "{orderId}" in path:
                order = bridged if "/bridge/" in path else made
                params["orderId"] = order.body["orderId"]
            if path.endswith("/cancel"):
                params["sessionId"] = ORDER["sessionId"]
            answer = await send(served, path, method, params)
            assert answer.status == 200, (path, answer.body)
            sent += 1
    assert sent == len(BFF_OPERATIONS) + 1


def example_of(document: Json, described: Json) -> Json:
    parameters = [resolved(document, each) for each in described["parameters"]]
    in_path = {each["name"]: each["example"] for each in parameters if "example" in each}
    if "requestBody" in described:
        content = described["requestBody"]["content"]["application/json"]
        return {**in_path, **next(iter(content["examples"].values()))["value"]}
    return in_path


async def test_errors_are_declared(served: Served) -> None:
    orders, one = f"{BFF_ROOT}/orders", f"{BFF_ROOT}/orders/{{orderId}}"
    nobodys = "ord_" + "0" * 26
    assert (await send(served, orders, "post", {})).status == 400
    assert (await send(served, orders, "post", ORDER, **{"x-api-key": "wrong"})).status == 401
    assert (await send(served, one, "get", {"orderId": nobodys})).status == 404
    key = {"idempotency-key": "k-0123456789abcd"}
    made = await send(served, orders, "post", ORDER, **key)
    wrong = {"orderId": made.body["orderId"], "verify": nobodys}
    assert (await send(served, one, "get", wrong)).status == 403
    other = {**ORDER, "fromAmount": "900000000000"}
    assert (await send(served, orders, "post", other, **key)).status == 409
    assert "idempotent-replayed" in (await send(served, orders, "post", ORDER, **key)).headers


async def test_advice_in_a_refusal_can_be_followed_over_the_bff(served: Served) -> None:
    orders = f"{BFF_ROOT}/orders"
    document = openapi_of(served)
    advice = document["components"]["schemas"]["ErrorCode"]["description"]
    reported = document["paths"][orders]["post"]["responses"]
    assert "`unauthorized`" in resolved(document, reported["401"])["description"]
    assert re.search("`unauthorized`: .*x-api-key", advice)
    wrong = {**ORDER, "fromAmount": 1}
    for params in ({}, wrong):
        error = (await send(served, orders, "post", params)).body["error"]
        assert error["details"]["problems"]
        assert f"`{error['code']}`" in resolved(document, reported["400"])["description"]
        line = re.search(f"`{error['code']}`: .*", advice)
        assert line is not None
        assert "`details.problems`" in line[0]


async def test_the_schemas_name_the_fields_of_the_spec(served: Served) -> None:
    named = openapi_of(served)["components"]["schemas"]
    for schema, table in TABLE_OF.items():
        wanted = TABLES[table]
        assert set(named[schema]["properties"]) == set(wanted), schema
        optional = {name for name, kind in wanted.items() if kind.endswith("?")}
        assert set(named[schema]["required"]) == set(wanted) - optional, schema
        for name, kind in wanted.items():
            shape = named[schema]["properties"][name]
            nullable = "null" in json.dumps(resolved(openapi_of(served), shape))
            assert nullable == (kind.endswith(("|null", "?"))), (schema, name)


async def test_every_call_lists_the_refusal_of_a_wrong_key(served: Served) -> None:
    document = openapi_of(served)
    for operation in BFF_OPERATIONS:
        described = document["paths"][BFF_ROOT + operation.path][operation.method.lower()]
        assert "401" in described["responses"], operation.name
