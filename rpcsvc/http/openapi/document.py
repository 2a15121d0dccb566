"""The OpenAPI document of the agent API and the BFF, and the operation objects in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import orjson
from msgspec import Struct

from rpcsvc import errors
from rpcsvc.domain.pricing import Direction
from rpcsvc.http import mpp, schemas, x402
from rpcsvc.http.documents import links
from rpcsvc.http.documents.agent import description, quickstart
from rpcsvc.http.documents.recording import of_site
from rpcsvc.http.event_stream import EVENT_STREAM
from rpcsvc.http.openapi.parts import (
    AGENT,
    ANY_CALL,
    BFF,
    JSON,
    RefusalResponses,
    Surface,
    header_ref,
    live_example,
    parameter_ref,
    refused_with,
    response,
    shared_headers,
    shared_parameters,
)
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import BFF_ROOT, Site
from rpcsvc.operations import bff_models
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.lean import is_cut, lean_head
from rpcsvc.operations.models import schema_of
from rpcsvc.operations.params import DETAIL
from rpcsvc.operations.service import Effect, Example, Operation
from rpcsvc.operations.table import BFF_OPERATIONS
from rpcsvc.strict_json import Json, dumps

# The version of the API, which is not that of the program (spec 9).
VERSION: Final = "1.0.0"

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
TAGS: Final = {
    "discovery": "What the service is, whether it is well, and what it can do.",
    "swap": "Planning, pricing, making and following orders.",
    "support": "Tickets for the operator, and refund addresses.",
    "bff": "The same orders for front ends: flat answers, amounts in atomic units.",
    "sandbox": "Simulated deposits and faults; there only while the sandbox engine settles.",
}


def openapi_document(site: Site) -> Json:
    """OpenAPI 3.1 of the agent API and the BFF. It depends on nothing but the site."""
    refusals = RefusalResponses(site)
    paths: Json = {
        links.HEALTH: {"get": _health(refusals)},
        links.QUICKSTART: {"get": _quickstart(site, refusals)},
        f"{BFF_ROOT}/health": {"get": _bff_health(refusals)},
        links.RATES_JSON: {"get": _rates(site, refusals)},
    }
    offered = [op for op in site.operations if op.path]
    for surface, operations in ((AGENT, offered), (BFF, BFF_OPERATIONS)):
        for operation in operations:
            item = paths.setdefault(surface.root + operation.path, {})
            item[operation.method.lower()] = operation_item(site, surface, operation, refusals)
    named = schemas.component_schemas(site) | _more_schemas(site)
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
            "schemas": schemas.reachable(named, paths, refusals.responses),
            "parameters": shared_parameters(),
            "headers": shared_headers(site),
            "responses": refusals.responses,
            "examples": refusals.examples,
            "securitySchemes": {INTEGRATOR_KEY: _integrator_key()},
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
            " the same keys; a failed call has `error` beside them, and the schema `ErrorCode` says"
            " what each code means and what to do about it. Answers may gain fields, and states and"
            " codes may gain values, within this version: ignore what you don't know.",
            "Every response has the headers of the default one, `Allow` apart, and one to a call"
            " that was charged those of the budget, as 429 has. Six of them sign the response:"
            f" {site.absolute(links.LLMS_FULL)} says how to check them.",
            f"{site.absolute(links.AGENT)} names the JSON-RPC method and the command of each"
            " operation of the agent API.",
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


# --- calls that are no operations ---


def _health(refusals: RefusalResponses) -> Json:
    """GET /health of the agent API."""
    waits = {"Retry-After": header_ref("Retry-After")}
    text = "It is not well: `ok` is false, and `error` says what is wrong."
    bad = response(text, ref("DegradedEnvelope"), waits)
    return _health_of(AGENT, "health", "HealthEnvelope", bad, refusals)


def _bff_health(refusals: RefusalResponses) -> Json:
    """GET /health of the BFF."""
    bad = response("It is not well.", ref("BffHealth"), {})
    return _health_of(BFF, "bffHealth", "BffHealth", bad, refusals)


def _health_of(
    surface: Surface, name: str, schema: str, bad: Json, refusals: RefusalResponses
) -> Json:
    return {
        "operationId": name,
        "tags": ["bff" if surface is BFF else "discovery"],
        "summary": "Whether the service is well.",
        "description": "Whether the service is well and may take orders. Changes nothing.",
        "parameters": [parameter_ref("RequestId")],
        "responses": {
            "200": response("It is well.", ref(schema), {}),
            "503": bad,
            **refusals.of(surface, name, ANY_CALL),
        },
    }


def _quickstart(site: Site, refusals: RefusalResponses) -> Json:
    """GET of the quickstart."""
    headers = {name: header_ref(name) for name in ("ETag", "Cache-Control")}
    good = response("The quickstart.", ref("QuickstartDocument"), headers)
    good["content"][JSON]["examples"] = live_example(site, links.QUICKSTART)
    charged = {errors.RateLimited} if site.rate_limit.enabled else set()
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
            **refusals.of(AGENT, "Quickstart", ANY_CALL | charged),
        },
    }


def _rates(site: Site, refusals: RefusalResponses) -> Json:
    """GET of the listing of rates. Its XML is for monitors and not for generated clients."""
    headers = {name: header_ref(name) for name in ("ETag", "Cache-Control")}
    charged = {errors.RateLimited} if site.rate_limit.enabled else set()
    return {
        "operationId": "rates",
        "tags": ["discovery"],
        "summary": "Amounts and rates on offer now.",
        "description": "Each listed amount brings at least `out` for each `in`, fees included."
        f" `{links.RATES_XML}` has the same in the form that rate listings read. Changes nothing.",
        "parameters": [parameter_ref("IfNoneMatch"), parameter_ref("RequestId")],
        "responses": {
            "200": response("The listing.", ref("RatesDocument"), headers),
            "304": {"description": "The client's copy is current.", "headers": headers},
            **refusals.of(AGENT, "Rates", ANY_CALL | {errors.Unavailable} | charged),
        },
    }


# --- schemas of no operation of the agent API ---


def _more_schemas(site: Site) -> Json:
    """The schemas of the BFF, and of health and quickstart, by name."""
    found: Json = {}
    for operation in BFF_OPERATIONS:
        parts = schemas.lifted(operation.params.input_schema(site.networks), is_answer=False)
        name = schemas.request_name(operation)
        if "properties" in parts[name]:
            parts[name] = schemas.in_body(parts[name], operation.path)
        found |= parts | _answer_schemas(operation.result)
    return schemas.with_named_types(
        site,
        {
            **found,
            **_answer_schemas(bff_models.BffHealth),
            "BffError": _bff_error_schema(),
            "HealthEnvelope": _health_schema("ok", {}),
            "DegradedEnvelope": _health_schema("degraded", {"error": ref("Failure")}),
            "QuickstartDocument": _quickstart_schema(site),
            "RatesDocument": _rates_schema(),
        },
    )


def _answer_schemas(result: type[Struct]) -> Json:
    return schemas.lifted(schema_of(result), is_answer=True)


def _bff_error_schema() -> Json:
    details = {
        "type": "object",
        "additionalProperties": True,
        "description": "For programs: limits, allowed values, problems by field.",
    }
    message = {"type": "string", "description": "What was wrong and what to send."}
    properties = {"code": ref("ErrorCode"), "message": message, "details": details}
    failure = _object(properties, optional=("details",))
    return {"description": "The answer when the call failed.", **_object({"error": failure})}


def _integrator_key() -> Json:
    """The security scheme of integrators."""
    return {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "Names an integrator, whose fee is part of the price. No call needs it.",
    }


def _health_schema(status: str, more: Json) -> Json:
    own = {
        "ok": {"const": status == "ok"},
        "operation": {"const": "health"},
        "data": ref("Data"),
        **more,
        "status": {"const": status},
        "version": {"type": "string", "description": "The program's version."},
        "time": {"type": "string", "format": "date-time"},
    }
    return {"description": "The service's health, in the envelope.", **schemas.envelope(own)}


def _quickstart_schema(site: Site) -> Json:
    """The schema of spec 2.2, its keys those of the document itself."""
    made = quickstart(site, 0, "")
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
        "endpoints": _map(made["quickstart"]["endpoints"], text),
    }
    propagation = {
        "preferredCitationText": text,
        "preferredCitationUrl": uri,
        "citationSnippets": _map(("plain", "markdown"), text),
        "signatureHeaders": {"type": "array", "items": text},
        "discoveryOrder": {"type": "array", "items": uri},
    }
    return _object(
        {
            "ok": {"const": True},
            "operation": {"const": "quickstart"},
            "brand": _map(("name", "motto", "domain"), text),
            "trust": _object(trust),
            "links": _map(made["links"], uri),
            "quickstart": _object(quick),
            "examples": _map(("plan", "execute"), _object(call, optional=("headers",))),
            "generatedAt": {"type": "string", "format": "date-time"},
            "propagation": _object(propagation),
        },
        optional=("examples",),
    )


def _map(names: Iterable[str], value: Json) -> Json:
    """Schema of an object whose properties, the named ones at least, are all alike."""
    return {"type": "object", "required": list(names), "additionalProperties": value}


def _rates_schema() -> Json:
    text = {"type": "string"}
    amounts = ("in", "out", "amount", "minamount", "maxamount")
    offer = {
        "from": {**text, "description": "A code of rate listings."},
        "to": {**text, "description": "A code of rate listings."},
        **dict.fromkeys(amounts, ref("Decimal")),
        "direction": {"enum": [each.value for each in Direction]},
        "chain": text,
        "chainId": {"type": "integer"},
    }
    return _object(
        {
            "network": text,
            "rates": {"type": "array", "items": _object(offer)},
        }
    )


def _object(properties: Json, optional: tuple[str, ...] = ()) -> Json:
    return {
        "type": "object",
        "required": [name for name in properties if name not in optional],
        "properties": properties,
    }


# --- operations ---


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
    refused = refusals.of(surface, name, refused_with(site, operation))
    called["responses"] = {**goods, **refused}
    return called


def _description(operation: Operation) -> str:
    parts = [effect_sentence(operation)]
    if operation.idempotent:
        parts.append(f"Send the header `{IDEMPOTENCY_KEY}`.")
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
        found += [parameter_ref("PaymentSignature"), parameter_ref("PaymentAuthorization")]
    return found


def _parameter(site: Site, operation: Operation, name: str, params: Json) -> Json:
    if name == schemas.ORDER_ID and schemas.in_path(name, operation.path):
        return parameter_ref("OrderId")
    if name == DETAIL:
        return parameter_ref("Detail")
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
    if operation.method == "GET" and operation.params.asks_nothing():
        content["examples"] = live_example(site, surface.root + operation.path)
    elif recorded is not None:
        content["example"] = _abridged(operation, recorded.answer)
        if is_cut(operation.result):
            good["description"] = "The answer; the example is lean."
    followed = _links(site, operation)
    if followed:
        good["links"] = followed
    if not operation.payable:
        return {"200": good}
    unknown = "It is not known yet what became of the payment: sign no other, watch the order."
    paid = {name: header_ref(name) for name in (x402.RESPONSE, mpp.RECEIPT)}
    settled = {**headers, **paid}
    pending = response(unknown, surface.answer(operation), headers)
    return {"200": {**good, "headers": settled}, "202": pending}


def _abridged(operation: Operation, answer: Json) -> Json:
    """A recorded answer as ``detail: lean`` has it, with the first and the last of its events. The
    whole is in llms-full.txt.
    """
    lean: Json = answer
    if is_cut(operation.result):
        lean = orjson.loads(lean_head(operation.result, dumps(answer)))
    data = lean["data"]
    if len(events := data.get("events", ())) > 1:
        return {**lean, "data": {**data, "events": [events[0], events[-1]]}}
    return lean


def _links(site: Site, operation: Operation) -> Json:
    """The calls that need no more than the order's id in their path, which this answer contains.

    A link can give a body by one expression only, so calls with a body have none.
    """
    if "order" not in operation.result.__struct_fields__ or not operation.creates:
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
