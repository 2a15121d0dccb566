"""Health and quickstart in the OpenAPI document: calls that are not operations of the table.

What does not live here: what they answer (http/health.py, http/documents/quickstart.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rpcsvc import errors
from rpcsvc.http import schemas
from rpcsvc.http.documents.quickstart import quickstart
from rpcsvc.http.documents.recording import START_MS
from rpcsvc.http.openapi.parts import (
    ANY_CALL,
    JSON,
    ErrorClass,
    header_ref,
    header_refs,
    parameter_ref,
    response,
)
from rpcsvc.http.openapi.responses import shared_response
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json

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
