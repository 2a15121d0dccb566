"""The whole OpenAPI document.

openapi_document(site)
"""

from __future__ import annotations

from typing import Final

from rpcsvc.http import schemas
from rpcsvc.http.documents import links
from rpcsvc.http.documents.agent import description
from rpcsvc.http.openapi.bff import INTEGRATOR_KEY, bff_paths, bff_schemas, integrator_key
from rpcsvc.http.openapi.operations import (
    health_item,
    operation_item,
    quickstart_item,
    site_schemas,
)
from rpcsvc.http.openapi.parts import shared_headers, shared_parameters, shared_responses
from rpcsvc.http.site import API_ROOT, Site
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.examples import on_network

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
        "/health": {"get": health_item(site)},
        links.QUICKSTART.removeprefix(API_ROOT): {"get": quickstart_item(site)},
    }
    for operation in offered:
        paths[operation.path or ""] = {operation.method.lower(): operation_item(site, operation)}
    for path, calls in bff_paths(site).items():
        paths[path] = calls
    responses = shared_responses(site, offered)
    named = schemas.component_schemas(site) | site_schemas(site) | bff_schemas(site)
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
            "parameters": shared_parameters(),
            "headers": shared_headers(site),
            "responses": responses,
            "securitySchemes": {INTEGRATOR_KEY: integrator_key()},
        },
    }
    # A copy: parts of it are kept by others, the recording and the operations' schemas.
    return on_network(document, site.network)


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
