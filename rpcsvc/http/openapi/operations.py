"""OpenAPI's operation objects, for the operations of the agent API and of the BFF alike."""

from __future__ import annotations

import re
from typing import Final

from rpcsvc.http import schemas, x402
from rpcsvc.http.documents import links
from rpcsvc.http.event_stream import EVENT_STREAM
from rpcsvc.http.openapi.parts import (
    JSON,
    RefusalResponses,
    Surface,
    header_ref,
    live_example,
    parameter_ref,
    refused_with,
    response,
)
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import Site
from rpcsvc.operations.service import Effect, Example, Operation
from rpcsvc.strict_json import Json

INTEGRATOR_KEY: Final = "integratorKey"
_EFFECTS: Final = {
    Effect.READ: "Changes nothing.",
    Effect.WRITE: "Changes what is stored, and moves no money.",
    Effect.MOVES_MONEY: "Money moves on the strength of this call.",
}
_STREAM: Final = (
    "Server-sent events: each has a `cursor` as its `id`, and as its `data` one event in JSON, as"
    " `data.events` has them. Lines that begin with a colon say that the connection is alive. The"
    " response is not signed, the status answer is."
)


def operation_id(operation: Operation) -> str:
    """``swap.plan`` as ``swapPlan``."""
    return schemas.camel(operation.name)


def tag_of(operation: Operation) -> str:
    """The tag under which an operation is listed."""
    group, dot, _ = operation.name.partition(".")
    return group if dot else "discovery"


def effect_sentence(operation: Operation) -> str:
    """The side effect of an operation, as a sentence."""
    return _EFFECTS[operation.effect]


def operation_item(
    site: Site, surface: Surface, operation: Operation, refusals: RefusalResponses
) -> Json:
    """An operation as an OpenAPI operation object; its refusals are noted in ``refusals``."""
    called: Json = {
        "operationId": operation_id(operation),
        "tags": [tag_of(operation)],
        "summary": operation.summary,
        "description": _description(operation),
        "parameters": _parameters(site, operation),
    }
    if "unauthorized" in operation.errors:
        called["security"] = [{}, {INTEGRATOR_KEY: []}]
    if operation.method == "POST":
        called["requestBody"] = _request_body(site, operation)
    goods = _goods(site, surface, operation)
    if operation.follow is not None:
        called["parameters"].append(parameter_ref("LastEventId"))
        stream = {"schema": {"type": "string", "description": _STREAM}}
        goods["200"]["content"][EVENT_STREAM] = stream
        ended = "As a stream: the order is over, and nothing is left to send."
        goods["204"] = {"description": ended}
    name = schemas.pascal(operation.name)
    refused = refusals.of(surface, name, refused_with(site, surface, operation))
    called["responses"] = {**goods, **refused}
    return called


def _description(operation: Operation) -> str:
    parts = [effect_sentence(operation)]
    if operation.idempotent:
        parts.append(
            f"Send the header `{links.IDEMPOTENCY_HEADER}` with a new value for each order, and"
            " the same value when the call is repeated: then a retry can't make a second order."
        )
    return " ".join(parts)


def _parameters(site: Site, operation: Operation) -> list[Json]:
    params = schemas.params_schema(site, operation)
    found = [
        _parameter(site, operation, name, params)
        for name in params.get("properties", {})
        if operation.method == "GET" or schemas.in_path(name, operation.path)
    ]
    found.append(parameter_ref("RequestId"))
    if operation.idempotent:
        found.append(parameter_ref("IdempotencyKey"))
    if operation.payable:
        found.append(parameter_ref("PaymentSignature"))
    return found


def _parameter(site: Site, operation: Operation, name: str, params: Json) -> Json:
    if name == schemas.ORDER_ID and schemas.in_path(name, operation.path):
        return parameter_ref("OrderId")
    described = schemas.without_null(params["properties"][name])
    shown = [example for example in operation.examples if name in example.params]
    return {
        "name": name,
        "in": "path" if schemas.in_path(name, operation.path) else "query",
        "required": name in params.get("required", ()),
        "description": described["description"],
        "schema": {key: value for key, value in described.items() if key != "description"},
        **({"example": schemas.params_of(site, shown[0])[name]} if shown else {}),
    }


def _request_body(site: Site, operation: Operation) -> Json:
    examples = {
        _slug(example.name): _body_example(site, operation, example)
        for example in operation.examples
    }
    content = {JSON: {"schema": ref(schemas.request_name(operation)), "examples": examples}}
    return {"required": not operation.payable, "content": content}


def _body_example(site: Site, operation: Operation, example: Example) -> Json:
    params = schemas.params_of(site, example)
    body = {k: v for k, v in params.items() if not schemas.in_path(k, operation.path)}
    note = {"description": schemas.OWN_ORDER} if schemas.ORDER_ID in body else {}
    return {"value": body, **note}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _goods(site: Site, surface: Surface, operation: Operation) -> Json:
    """The success responses of an operation; two of one that takes a payment."""
    replayed = "idempotent-replayed"
    headers = {replayed: header_ref(replayed)} if operation.idempotent else {}
    good = response("The answer.", surface.answer(operation), headers)
    content, recorded = good["content"][JSON], schemas.shown(operation)
    if operation.method == "GET" and not operation.params.model_fields:
        content["examples"] = live_example(site, surface.root + operation.path)
    elif recorded is not None:
        content["example"] = recorded.answer
    followed = _links(site, operation)
    if followed:
        good["links"] = followed
    if not operation.payable:
        return {"200": good}
    unknown = "It is not known yet what became of the payment: sign no other, watch the order."
    settled = {**headers, x402.RESPONSE: header_ref(x402.RESPONSE)}
    return {"200": {**good, "headers": settled}, "202": {**good, "description": unknown}}


def _links(site: Site, operation: Operation) -> Json:
    """The calls that need no more than the order's id in their path, which this answer contains.

    A link can give a body by one expression only, so calls with a body have none.
    """
    if "order" not in operation.result.model_fields or not operation.creates:
        return {}
    found: Json = {}
    for other in site.operations:
        needed = schemas.params_schema(site, other).get("required")
        in_path = schemas.in_path(schemas.ORDER_ID, other.path)
        if other.method == "GET" and in_path and needed == [schemas.ORDER_ID]:
            found[operation_id(other)] = {
                "operationId": operation_id(other),
                "description": other.summary,
                "parameters": {schemas.ORDER_ID: "$response.body#/data/order/orderId"},
            }
    return found
