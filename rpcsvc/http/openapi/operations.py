"""The agent API's calls in the OpenAPI document: a loop over the operation table.

What does not live here: what calls are refused with (responses.py).
"""

from __future__ import annotations

import re
from typing import Final

from rpcsvc.http import schemas
from rpcsvc.http.documents import links
from rpcsvc.http.openapi.parts import (
    JSON,
    header_refs,
    parameter_ref,
    response,
)
from rpcsvc.http.openapi.responses import error_responses
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import Site
from rpcsvc.operations.discovery import schemas_of
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.operation import Effect, Example, Operation

_EFFECTS: Final = {
    Effect.READ: "Changes nothing.",
    Effect.WRITE: "Changes what is stored, and moves no money.",
    Effect.MOVES_MONEY: "Money moves on the strength of this call.",
}


def operation_id(operation: Operation) -> str:
    """``swap.plan`` as ``swapPlan``."""
    return schemas.camel(operation.name)


def tag_of(operation: Operation) -> str:
    """The tag under which an operation is listed."""
    group, dot, _ = operation.name.partition(".")
    return group if dot else "discovery"


def effect_sentence(operation: Operation) -> str:
    """What a call of an operation does to the world, in a sentence."""
    return _EFFECTS[operation.effect]


def operation_item(site: Site, operation: Operation) -> Json:
    """An operation as an OpenAPI operation object."""
    called: Json = {
        "operationId": operation_id(operation),
        "tags": [tag_of(operation)],
        "summary": operation.summary,
        "description": _description(site, operation),
        "parameters": _call_parameters(site, operation),
    }
    if operation.method == "POST":
        called["requestBody"] = _request_body(site, operation)
    answers = [e for e in schemas.exchanges(operation) if e.answer["ok"]]
    good = response(
        schemas_of(operation, site.networks)["result"]["description"],
        ref(schemas.envelope_name(operation)),
        header_refs(site, charged=True, replayable=operation.idempotent),
        answers,
    )
    followed = _links(site, operation)
    if followed:
        good["links"] = followed
    called["responses"] = {"200": good, **error_responses(site, operation)}
    return called


def _description(site: Site, operation: Operation) -> str:
    parts = [operation.summary, effect_sentence(operation)]
    if operation.idempotent:
        parts.append(
            f"Send the header `{links.IDEMPOTENCY_HEADER}` with a new value for each order, and"
            " the same value when the call is repeated: then a retry can't make a second order."
        )
    parts.append(
        f"The same over JSON-RPC: `{site.rpc_method(operation)}`; on the command line:"
        f" `rpcsvc {operation.command}`."
    )
    return " ".join(parts)


def _call_parameters(site: Site, operation: Operation) -> list[Json]:
    shared = [parameter_ref("RequestId")]
    if operation.idempotent:
        shared.append(parameter_ref("IdempotencyKey"))
    params = schemas.params_schema(site, operation)
    names = [
        name
        for name in params["properties"]
        if operation.method == "GET" or schemas.in_path(name, operation.path)
    ]
    return [*(_parameter(site, operation, name, params) for name in names), *shared]


def _parameter(site: Site, operation: Operation, name: str, params: Json) -> Json:
    schema = {k: v for k, v in params["properties"][name].items() if k != "description"}
    if isinstance(schema.get("type"), list):
        schema["type"] = next(kind for kind in schema["type"] if kind != "null")
    examples = {
        _slug(example.name): _with_note(
            {"value": schemas.params_of(site, example)[name]}, needed=name == schemas.ORDER_ID
        )
        for example in operation.examples
        if name in example.params
    }
    return {
        "name": name,
        "in": "path" if schemas.in_path(name, operation.path) else "query",
        "required": name in params.get("required", ()),
        "description": params["properties"][name]["description"],
        "schema": schema,
        **({"examples": examples} if examples else {}),
    }


def _request_body(site: Site, operation: Operation) -> Json:
    examples = {
        _slug(example.name): _with_note(
            {"summary": example.name, "value": _body_of(site, operation, example)},
            needed=schemas.needs_order(example),
        )
        for example in operation.examples
    }
    name = schemas.request_name(operation)
    return {"required": True, "content": {JSON: {"schema": ref(name), "examples": examples}}}


def _body_of(site: Site, operation: Operation, example: Example) -> Json:
    params = schemas.params_of(site, example)
    return {k: v for k, v in params.items() if not schemas.in_path(k, operation.path)}


def _with_note(entry: Json, *, needed: bool) -> Json:
    return {**entry, "description": schemas.OWN_ORDER} if needed else entry


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _links(site: Site, operation: Operation) -> Json:
    """What can be called next with nothing but the order's id, which this answer tells."""
    if "order" not in operation.result.model_fields or not operation.creates:
        return {}
    order_id = "$response.body#/data/order/orderId"
    found: Json = {}
    for other in site.operations:
        needed = schemas_of(other, site.networks)["params"].get("required")
        if not other.path or needed != ["orderId"]:
            continue
        given = {"orderId": order_id}
        sent = {"parameters": given} if other.method == "GET" else {"requestBody": given}
        found[operation_id(other)] = {
            "operationId": operation_id(other),
            "description": other.summary,
            **sent,
        }
    return found
