"""The OpenAPI document: the agent API's half, and its assembly with the BFF's half."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rpcsvc import errors
from rpcsvc.http import schemas, x402
from rpcsvc.http.documents import links
from rpcsvc.http.documents.agent import description, quickstart
from rpcsvc.http.documents.recording import START_MS, of_site
from rpcsvc.http.event_stream import EVENT_STREAM
from rpcsvc.http.openapi.bff import INTEGRATOR_KEY, bff_paths, bff_schemas, integrator_key
from rpcsvc.http.openapi.parts import (
    ANY_CALL,
    JSON,
    ErrorClass,
    error_responses,
    header_ref,
    header_refs,
    parameter_ref,
    response,
    shared_headers,
    shared_parameters,
    shared_response,
    shared_responses,
)
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import API_ROOT, Site
from rpcsvc.operations.discovery import schemas_of
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.service import Effect, Example, Operation

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
    """The side effect of an operation, as a sentence."""
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
    goods = _settlements(good) if operation.payable else {"200": good}
    called["responses"] = {**goods, **error_responses(site, operation)}
    if operation.follow is not None:
        called["parameters"].append(parameter_ref("LastEventId"))
        good["content"][EVENT_STREAM] = {"schema": {"type": "string", "description": _STREAM}}
        ended = {"description": "As a stream: the order is over, and nothing is left to send."}
        called["responses"]["204"] = {**ended, "headers": header_refs(site, charged=True)}
    return called


_STREAM: Final = (
    "Server-sent events: each has a `cursor` as its `id`, and as its `data` one event in JSON, as"
    " `data.events` has them. Lines that begin with a colon say that the connection is alive. The"
    " response is not signed, the status answer is."
)


def _settlements(good: Json) -> Json:
    """The success responses of an operation that takes a payment."""
    headers = {**good["headers"], x402.RESPONSE: header_ref(x402.RESPONSE)}
    unknown = "It is not known yet what became of the payment: sign no other, watch the order."
    return {"200": {**good, "headers": headers}, "202": {**good, "description": unknown}}


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
    if operation.payable:
        shared.append(parameter_ref("PaymentSignature"))
    params = schemas.params_schema(site, operation)
    names = [
        name
        for name in params["properties"]
        if operation.method == "GET" or schemas.in_path(name, operation.path)
    ]
    return [*(_parameter(site, operation, name, params) for name in names), *shared]


def _parameter(site: Site, operation: Operation, name: str, params: Json) -> Json:
    described = schemas.without_null(params["properties"][name])
    schema = {key: value for key, value in described.items() if key != "description"}
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
        "description": described["description"],
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
    content = {JSON: {"schema": ref(name), "examples": examples}}
    return {"required": not operation.payable, "content": content}


def _body_of(site: Site, operation: Operation, example: Example) -> Json:
    params = schemas.params_of(site, example)
    return {k: v for k, v in params.items() if not schemas.in_path(k, operation.path)}


def _with_note(entry: Json, *, needed: bool) -> Json:
    return {**entry, "description": schemas.OWN_ORDER} if needed else entry


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _links(site: Site, operation: Operation) -> Json:
    """The calls that need no more than the order's id in their path, which this answer contains.

    A link can give a body by one expression only, so calls with a body have none.
    """
    if "order" not in operation.result.model_fields or not operation.creates:
        return {}
    found: Json = {}
    for other in site.operations:
        needed = schemas_of(other, site.networks)["params"].get("required")
        if (
            other.method == "GET"
            and schemas.in_path(schemas.ORDER_ID, other.path)
            and needed == [schemas.ORDER_ID]
        ):
            found[operation_id(other)] = {
                "operationId": operation_id(other),
                "description": other.summary,
                "parameters": {schemas.ORDER_ID: "$response.body#/data/order/orderId"},
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
    good = response("The quickstart.", ref("QuickstartDocument"), headers, ())
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
    """The schemas of the health and quickstart responses, by name."""
    return {
        "HealthEnvelope": _health_schema("ok", {}),
        "DegradedEnvelope": _health_schema("degraded", {"error": ref("Failure")}),
        "QuickstartDocument": _quickstart_schema(site),
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


# The version of the API, which is not that of the program (spec 9).
VERSION: Final = "1.0.0"

TAGS: Final = {
    "discovery": "What the service is, whether it is well, and what it can do.",
    "swap": "Planning, pricing, making and following orders.",
    "support": "Tickets for the operator, and refund addresses.",
    "bff": "The same orders for front ends: flat answers, amounts in atomic units.",
    "sandbox": "Simulated deposits and faults; there only while the sandbox engine settles.",
}


def openapi_document(site: Site) -> Json:
    """OpenAPI 3.1 of the agent API and the BFF. It depends on nothing but the site."""
    offered = [op for op in site.operations if op.path]
    paths = {
        links.HEALTH: {"get": health_item(site)},
        links.QUICKSTART: {"get": quickstart_item(site)},
    }
    for operation in offered:
        item = {operation.method.lower(): operation_item(site, operation)}
        paths[f"{API_ROOT}{operation.path}"] = item
    paths |= bff_paths(site)
    responses = shared_responses(site, offered)
    named = schemas.component_schemas(site) | site_schemas(site) | bff_schemas(site)
    document = {
        "openapi": "3.1.0",
        "info": _info(site),
        "servers": [{"url": site.url, "description": "The site."}],
        "security": [],
        "externalDocs": {
            "description": "The whole flow on one page, with real requests and answers.",
            "url": site.absolute(links.LLMS_FULL),
        },
        "tags": _tags(paths),
        "paths": paths,
        "components": {
            "schemas": schemas.reachable(named, paths, responses),
            "parameters": shared_parameters(),
            "headers": shared_headers(site),
            "responses": responses,
            "securitySchemes": {INTEGRATOR_KEY: integrator_key()},
        },
    }
    # A copy: parts of it are kept by others, the recording and the operations' schemas.
    return of_site(site, document)


def _info(site: Site) -> Json:
    return {
        "title": f"{site.brand.name} agent API",
        "version": VERSION,
        "summary": "XMR and USDC swaps for software agents.",
        "description": _introduction(site),
        "contact": contact(site),
    }


def _introduction(site: Site) -> str:
    return "\n\n".join(
        (
            description(site),
            "No API key is needed. Amounts are decimal strings. Every answer is an envelope with"
            " the same keys; a failed call has `error` beside them. Answers may gain fields, and"
            " states and codes may gain values, within this version: ignore what you don't know.",
            "Answers are signed: see the six"
            f" `x-{site.brand.slug}-` headers, and {site.absolute(links.LLMS_FULL)} for how to"
            " check them.",
        )
    )


def contact(site: Site) -> Json:
    """The operator's contact; without one, the site itself."""
    found: Json = {"name": site.brand.name, "url": site.absolute(links.HOME)}
    if site.contact is None:
        return found
    if site.contact.startswith("mailto:"):
        return {**found, "email": site.contact.removeprefix("mailto:").partition("?")[0]}
    return {**found, "url": site.contact}


def _tags(paths: Json) -> list[Json]:
    used = {tag for path in paths.values() for call in path.values() for tag in call["tags"]}
    return [{"name": name, "description": text} for name, text in TAGS.items() if name in used]
