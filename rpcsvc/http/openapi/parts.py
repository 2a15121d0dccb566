"""What both halves of the OpenAPI document are made of: headers, parameters, errors by status.

What does not live here: the agent API's calls (operations.py), the BFF's (bff.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from rpcsvc import errors
from rpcsvc.errors import ServiceError
from rpcsvc.http import schemas
from rpcsvc.http.documents.recording import Exchange
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json

ErrorClass = type[ServiceError]

JSON: Final = "application/json"
ANY_CALL: Final = (
    errors.TlsRequired,
    errors.MisdirectedRequest,
    errors.MethodNotAllowed,
    errors.InternalError,
)
# An unknown field, a query that names one twice; and the store may be down for any of them.
ANY_OPERATION: Final = (errors.InvalidInput, errors.InvalidRequest, errors.Unavailable)
ANY_BODY: Final = (errors.InvalidJson, errors.PayloadTooLarge, errors.UnsupportedMediaType)
# These are found before the caller's budget is charged, so that no answer tells of it.
BEFORE_CHARGE: Final = frozenset(
    {errors.TlsRequired, errors.MisdirectedRequest, errors.MethodNotAllowed}
)


def by_status(classes: Iterable[ErrorClass]) -> dict[int, list[ErrorClass]]:
    """Errors grouped by their HTTP status, in its order."""
    ordered = sorted(classes, key=lambda cls: cls.http_status)
    return {status: list(group) for status, group in groupby(ordered, lambda c: c.http_status)}


def response(text: str, schema: Json, headers: Json, examples: Iterable[Exchange]) -> Json:
    """A response object with recorded answers as its examples."""
    content: Json = {"schema": schema}
    shown = {e.name: {"summary": schemas.label(e), "value": e.answer} for e in examples}
    if shown:
        content["examples"] = shown
    return {"description": text, "headers": headers, "content": {JSON: content}}


def header_ref(name: str) -> Json:
    """A reference to a shared header."""
    return {"$ref": f"#/components/headers/{name}"}


def header_refs(site: Site, *, charged: bool, replayable: bool = False) -> Json:
    """The headers that a response has; ``charged``: the caller's budget was."""
    names = ["x-request-id"]
    if replayable:
        names.append("idempotent-replayed")
    if charged and site.rate_limit.enabled:
        names += ["RateLimit", "RateLimit-Policy"]
    names += site.signature_headers
    return {name: header_ref(name) for name in names}


def parameter_ref(name: str) -> Json:
    """A reference to a shared parameter."""
    return {"$ref": f"#/components/parameters/{name}"}
