"""The agent API in the OpenAPI document: the operation table, health and quickstart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rpcsvc import errors
from rpcsvc.http import schemas
from rpcsvc.http.documents import links
from rpcsvc.http.documents.agent import quickstart
from rpcsvc.http.documents.recording import START_MS
from rpcsvc.http.openapi.parts import (
    ANY_CALL,
    JSON,
    ErrorClass,
    error_responses,
    header_ref,
    header_refs,
    parameter_ref,
    response,
    shared_response,
)
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


# A key that stands in a document is used by all of its readers.
_OWN_KEY: Final = "<a UUID made for this order>"


def health_item(site: Site) -> Json:
    """GET /health as an OpenAPI operation object."""
    headers = header_refs(site, charged=False)
    return {
        "operationId": "health",
        "tags": ["discovery"],
        "summary": "Whether the service is well.",
        "description": "Whether the service is well and may take orders. Changes nothing.",
        "parameters": [parameter_ref("RequestId")],
        "responses": {
            "200": response("It is well.", ref("HealthEnvelope"), headers, ()),
            **_call_errors(ANY_CALL),
            "503": response(
                "It is not well: `ok` is false, and `error` says what is wrong.",
                ref("DegradedEnvelope"),
                {**headers, "Retry-After": header_ref("Retry-After")},
                (),
            ),
        },
    }


def quickstart_item(site: Site) -> Json:
    """GET of the quickstart as an OpenAPI operation object."""
    charged = site.rate_limit.enabled
    headers = header_refs(site, charged=charged)
    headers |= {name: header_ref(name) for name in ("ETag", "Cache-Control")}
    good = response("The quickstart.", ref("Quickstart"), headers, ())
    example = {
        "summary": "As this installation answers",
        "value": quickstart(site, START_MS, _OWN_KEY),
    }
    good["content"][JSON]["examples"] = {"quickstart": example}
    refused = (*ANY_CALL, *((errors.RateLimited,) if charged else ()))
    return {
        "operationId": "quickstart",
        "tags": ["discovery"],
        "summary": "What an agent reads first.",
        "description": "What the service is, the flow of a swap, and two requests that work as"
        " they stand. Changes nothing.",
        "parameters": [parameter_ref("IfNoneMatch"), parameter_ref("RequestId")],
        "responses": {
            "200": good,
            "304": {"description": "The client's copy is current.", "headers": headers},
            **_call_errors(refused),
        },
    }


def _call_errors(classes: Iterable[ErrorClass]) -> Json:
    ordered = sorted(classes, key=lambda cls: cls.http_status)
    return {str(cls.http_status): shared_response(cls) for cls in ordered}


def site_schemas(site: Site) -> Json:
    """The schemas of what these calls answer, by name."""
    return {
        "HealthEnvelope": _health_schema("ok", {}),
        "DegradedEnvelope": _health_schema("degraded", {"error": ref("Failure")}),
        "Quickstart": _quickstart_schema(site),
    }


def _health_schema(status: str, more: Json) -> Json:
    envelope = schemas.envelope(
        "The envelope with the service's health beside it.",
        {"ok": {"const": status == "ok"}, "operation": {"const": "health"}},
        ref("NoData"),
    )
    beside = {
        **more,
        "status": {"const": status},
        "version": {"type": "string", "description": "The program's version."},
        "time": {"type": "string", "format": "date-time"},
    }
    envelope["properties"] |= beside
    envelope["required"] += beside
    return envelope


def _quickstart_schema(site: Site) -> Json:
    """The schema of spec 2.2, its keys those of the document itself."""
    made = quickstart(site, START_MS, _OWN_KEY)
    uri = {"type": "string", "format": "uri"}
    text = {"type": "string"}
    call = {
        "method": text,
        "path": text,
        "headers": {"type": "object", "additionalProperties": text},
        "body": {"type": "object", "additionalProperties": True},
    }
    trust = {name: {"type": "boolean"} for name in made["trust"]} | {"idempotencyHeader": text}
    quick = {
        "flow": {"type": "array", "items": text},
        "endpoints": _object(dict.fromkeys(made["quickstart"]["endpoints"], text)),
    }
    propagation = {
        "preferredCitationText": text,
        "preferredCitationUrl": uri,
        "citationSnippets": _object({"plain": text, "markdown": text}),
        "signatureHeaders": {"type": "array", "items": text},
        "discoveryOrder": {"type": "array", "items": uri},
    }
    return _object(
        {
            "ok": {"const": True},
            "operation": {"const": "quickstart"},
            "brand": _object({"name": text, "motto": text, "domain": text}),
            "trust": _object(trust),
            "links": _object(dict.fromkeys(made["links"], uri)),
            "quickstart": _object(quick),
            "examples": _object(
                {"plan": _object(call, optional=("headers",)), "execute": _object(call)}
            ),
            "generatedAt": {"type": "string", "format": "date-time"},
            "propagation": _object(propagation),
        },
        optional=("examples",),
    )


def _object(properties: Json, optional: tuple[str, ...] = ()) -> Json:
    return {
        "type": "object",
        "required": [name for name in properties if name not in optional],
        "properties": properties,
    }
