"""The OpenAPI 3.1 description of the agent API and the BFF, made of the tables and the settings.

    openapi_document(site)   the whole document

Schemas, examples and the meaning of errors come from schemas.py. What does not live here: serving
the document (discovery.py), the BFF's calls (openapi_bff.py), JSON-RPC (openrpc.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Final

from rpcsvc import errors
from rpcsvc.operations.discovery import schemas_of
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.table import Effect, Operation
from rpcsvc.transport import schemas
from rpcsvc.transport.documents import links, signatures
from rpcsvc.transport.documents.agent import description
from rpcsvc.transport.documents.quickstart import quickstart
from rpcsvc.transport.documents.recording import START_MS
from rpcsvc.transport.openapi_bff import INTEGRATOR_KEY, bff_paths, bff_schemas, integrator_key
from rpcsvc.transport.openapi_parts import (
    ANY_BODY,
    ANY_CALL,
    ANY_OPERATION,
    BEFORE_CHARGE,
    JSON,
    ErrorClass,
    by_status,
    header_ref,
    header_refs,
    parameter_ref,
    response,
)
from rpcsvc.transport.schemas import ref
from rpcsvc.transport.site import API_ROOT, Site

# The version of the API, which is not that of the program (spec 9).
VERSION: Final = "1.0.0"

TAGS: Final = {
    "discovery": "What the service is, whether it is well, and what it can do.",
    "swap": "Planning, pricing, making and following orders.",
    "support": "Tickets for the operator, and refund addresses.",
    "bff": "The same orders for front ends: flat answers, amounts in atomic units.",
    "sandbox": "Simulated deposits and faults; there only while the sandbox engine settles.",
}
_EFFECTS: Final = {
    Effect.READ: "Changes nothing.",
    Effect.WRITE: "Changes what is stored, and moves no money.",
    Effect.MOVES_MONEY: "Money moves on the strength of this call.",
}


def openapi_document(site: Site) -> Json:
    """OpenAPI 3.1 of the agent API and the BFF. It depends on nothing but the site."""
    offered = [op for op in site.operations if op.path is not None]
    paths = {
        "/health": {"get": _health(site)},
        links.QUICKSTART.removeprefix(API_ROOT): {"get": _quickstart(site)},
    }
    for operation in offered:
        paths[operation.path or ""] = {operation.method.lower(): _operation(site, operation)}
    for path, calls in bff_paths(site).items():
        paths[path] = calls
    responses = _shared_responses(site, offered)
    named = schemas.component_schemas(site) | _document_schemas(site) | bff_schemas()
    document = {
        "openapi": "3.1.0",
        "info": _info(site),
        "servers": [{"url": site.absolute(API_ROOT), "description": "The agent API."}],
        "externalDocs": {
            "description": "The whole flow on one page, with real requests and answers.",
            "url": site.absolute(links.LLMS_FULL),
        },
        "tags": _tags(paths),
        "paths": paths,
        "components": {
            "schemas": schemas.reachable(named, paths, responses),
            "parameters": _parameters(),
            "headers": _headers(site),
            "responses": responses,
            "securitySchemes": {INTEGRATOR_KEY: integrator_key()},
        },
    }
    # Parts of it are kept by others: the recording, the operations' schemas.
    return deepcopy(document)


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


# --- operations ---


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


def _operation(site: Site, operation: Operation) -> Json:
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
        schemas_of(operation)["result"]["description"],
        ref(schemas.envelope_name(operation)),
        header_refs(site, charged=True, replayable=operation.idempotent),
        answers,
    )
    followed = _links(site, operation)
    if followed:
        good["links"] = followed
    called["responses"] = {"200": good, **_error_responses(site, operation)}
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
    if operation.method != "GET":
        return shared
    params = schemas.params_schema(operation)
    return [*(_parameter(site, operation, name, params) for name in params["properties"]), *shared]


def _parameter(site: Site, operation: Operation, name: str, params: Json) -> Json:
    schema = {k: v for k, v in params["properties"][name].items() if k != "description"}
    if isinstance(schema.get("type"), list):
        schema["type"] = next(kind for kind in schema["type"] if kind != "null")
    in_path = f"{{{name}}}" in (operation.path or "")
    examples = {
        _slug(example.name): _with_note(
            {"value": schemas.params_of(site, example)[name]}, needed=name == schemas.ORDER_ID
        )
        for example in operation.examples
        if name in example.params
    }
    return {
        "name": name,
        "in": "path" if in_path else "query",
        "required": name in params.get("required", ()),
        "description": params["properties"][name]["description"],
        "schema": schema,
        **({"examples": examples} if examples else {}),
    }


def _request_body(site: Site, operation: Operation) -> Json:
    examples = {
        _slug(example.name): _with_note(
            {"summary": example.name, "value": schemas.params_of(site, example)},
            needed=schemas.needs_order(example),
        )
        for example in operation.examples
    }
    name = schemas.request_name(operation)
    return {"required": True, "content": {JSON: {"schema": ref(name), "examples": examples}}}


def _with_note(entry: Json, *, needed: bool) -> Json:
    return {**entry, "description": schemas.OWN_ORDER} if needed else entry


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _links(site: Site, operation: Operation) -> Json:
    """What can be called next with nothing but the order's id, which this answer tells."""
    if "order" not in schemas_of(operation)["result"]["properties"] or not operation.creates:
        return {}
    order_id = "$response.body#/data/order/orderId"
    found: Json = {}
    for other in site.operations:
        if other.path is None or schemas_of(other)["params"].get("required") != ["orderId"]:
            continue
        given = {"orderId": order_id}
        sent = {"parameters": given} if other.method == "GET" else {"requestBody": given}
        found[operation_id(other)] = {
            "operationId": operation_id(other),
            "description": other.summary,
            **sent,
        }
    return found


# --- responses ---


def _refusals(site: Site, operation: Operation) -> list[ErrorClass]:
    """Everything that a call of the operation may be refused with."""
    by_code = schemas.errors_by_code()
    found = [by_code[code] for code in operation.errors]
    found += [*ANY_OPERATION, *ANY_CALL]
    if operation.method == "POST":
        found += ANY_BODY
    if site.rate_limit.enabled:
        found.append(errors.RateLimited)
    return list(dict.fromkeys(found))


def _error_responses(site: Site, operation: Operation) -> Json:
    return {
        str(status): _error_response(site, operation, group)
        for status, group in by_status(_refusals(site, operation)).items()
    }


def _error_response(site: Site, operation: Operation, group: list[ErrorClass]) -> Json:
    if len(group) == 1:
        return _shared(group[0])
    return _refusal(site, group, operation)


def _shared(cls: ErrorClass) -> Json:
    return {"$ref": f"#/components/responses/{cls.__name__}"}


def _refusal(site: Site, group: list[ErrorClass], operation: Operation | None = None) -> Json:
    shown = schemas.refused(operation, {cls.code for cls in group})
    charged = not BEFORE_CHARGE.intersection(group)
    headers = header_refs(site, charged=charged and errors.InternalError not in group)
    if errors.MethodNotAllowed in group:
        headers["Allow"] = header_ref("Allow")
    if {errors.RateLimited, errors.Unavailable}.intersection(group):
        headers["Retry-After"] = header_ref("Retry-After")
    return response(schemas.error_lines(group), ref("ErrorEnvelope"), headers, shown)


def _shared_responses(site: Site, offered: list[Operation]) -> Json:
    """The error responses that are the same for every operation which has them."""
    alone = {
        group[0]
        for operation in offered
        for group in by_status(_refusals(site, operation)).values()
        if len(group) == 1
    }
    alone.update(ANY_CALL)
    ordered = sorted(alone, key=lambda cls: (cls.http_status, cls.__name__))
    return {cls.__name__: _refusal(site, [cls]) for cls in ordered}


# --- headers and parameters ---


def _parameters() -> Json:
    return {
        "RequestId": {
            "name": "x-request-id",
            "in": "header",
            "description": "A name for this call: 1 to 128 of A-Z a-z 0-9 . _ : -, echoed in the"
            " answer. Anything else is replaced by a generated one.",
            "schema": {"type": "string"},
        },
        "IdempotencyKey": {
            "name": links.IDEMPOTENCY_HEADER,
            "in": "header",
            "description": "1 to 255 printable ASCII characters, such as a UUID made for this"
            " order. Keys are shared by all callers: take one that nobody else would.",
            # Blanks around a header's value are not part of it (RFC 9110, section 5.5).
            "schema": {"type": "string", "pattern": "^[!-~]([ -~]{0,253}[!-~])?$"},
        },
        "IfNoneMatch": {
            "name": "if-none-match",
            "in": "header",
            "description": "The ETag of the copy that the client has.",
            "schema": {"type": "string"},
        },
    }


def _headers(site: Site) -> Json:
    found = {
        "x-request-id": _header(
            "The request id, as in the body.", "^[A-Za-z0-9._:-]{1,128}$", required=True
        ),
        "idempotent-replayed": _header(
            "`true` on the stored answer to an idempotency key that was used before.", "^true$"
        ),
        "Allow": _header("The HTTP methods of this path.", "^[A-Z]+(, ?[A-Z]+)*$", required=True),
        "Retry-After": _header("Seconds to wait.", "^[1-9][0-9]*$", required=True),
        "ETag": _header("The tag of these bytes.", '^"[0-9a-f]+"$', required=True),
        "Cache-Control": _header(
            "For how long a copy may be kept.", "^public, max-age=[0-9]+, no-transform$",
            required=True,
        ),
        **_signature_headers(site),
    }  # fmt: skip
    if site.rate_limit.enabled:
        found["RateLimit"] = _header(
            "What is left of the caller's budget: `r` calls, whole again in `t` seconds.",
            '^"[a-z]+";r=[0-9]+;t=[0-9]+$', required=True,
        )  # fmt: skip
        found["RateLimit-Policy"] = _header(
            "The budget: `q` calls in `w` seconds.", '^"[a-z]+";q=[0-9]+;w=[0-9]+$', required=True
        )
    return found


def _signature_headers(site: Site) -> Json:
    version, alg, kid, sha256, signed_at, signature = site.signature_headers
    return {
        version: _header("The version of the signing procedure.", f"^{signatures.VERSION}$"),
        alg: _header("The signature's algorithm.", f"^{signatures.ALGORITHM}$"),
        kid: _header(f"Which key of {site.absolute(links.JWKS)} signed.", "^[A-Za-z0-9_-]{43}$"),
        sha256: _header("SHA-256 of the body's bytes, in hex.", "^[0-9a-f]{64}$"),
        signed_at: {
            "description": "When it was signed: RFC 3339, UTC.",
            "schema": {"type": "string", "format": "date-time"},
        },
        signature: _header("The signature, base64url without padding.", "^[A-Za-z0-9_-]{86}$"),
    }


def _header(text: str, pattern: str, *, required: bool = False) -> Json:
    header: Json = {"description": text, "schema": {"type": "string", "pattern": pattern}}
    return {**header, "required": True} if required else header


# --- health and quickstart, which are not operations of the table ---


def _health(site: Site) -> Json:
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


def _quickstart(site: Site) -> Json:
    charged = site.rate_limit.enabled
    headers = header_refs(site, charged=charged)
    headers |= {name: header_ref(name) for name in ("ETag", "Cache-Control")}
    good = response("The quickstart.", ref("Quickstart"), headers, ())
    example = {"summary": "As this installation answers", "value": quickstart(site, START_MS)}
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
    return {str(cls.http_status): _shared(cls) for cls in ordered}


def _document_schemas(site: Site) -> Json:
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
    made = quickstart(site, START_MS)
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
