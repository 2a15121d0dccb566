"""Shared by both halves of the OpenAPI document: headers, parameters, refusals by status.

Responses that are the same for every operation that has them stand once, under components.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from rpcsvc import errors
from rpcsvc.errors import ServiceError
from rpcsvc.http import schemas, x402
from rpcsvc.http.documents import links, signatures
from rpcsvc.http.documents.recording import RecordedCall
from rpcsvc.http.event_stream import LAST_EVENT_ID
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.inputs import LEAST_PUBLIC_KEY, key_pattern
from rpcsvc.operations.service import Operation

ErrorClass = type[ServiceError]
JSON: Final = "application/json"
_BASE64: Final = "^[A-Za-z0-9+/]+={0,2}$"
ANY_CALL: Final = (
    errors.TlsRequired,
    errors.MisdirectedRequest,
    errors.MethodNotAllowed,
    errors.InternalError,
)
# An unknown field, a query that names one twice; and the store may be down for any of them.
ANY_OPERATION: Final = (errors.InvalidInput, errors.InvalidRequest, errors.Unavailable)
ANY_BODY: Final = (errors.InvalidJson, errors.PayloadTooLarge, errors.UnsupportedMediaType)
# Raised before the caller's budget is charged, so their responses have no RateLimit headers.
BEFORE_CHARGE: Final = frozenset(
    {errors.TlsRequired, errors.MisdirectedRequest, errors.MethodNotAllowed}
)


def by_status(classes: Iterable[ErrorClass]) -> dict[int, list[ErrorClass]]:
    """Errors grouped by their HTTP status, in its order."""
    ordered = sorted(classes, key=lambda cls: cls.http_status)
    return {status: list(group) for status, group in groupby(ordered, lambda c: c.http_status)}


def response(text: str, schema: Json, headers: Json, examples: Iterable[RecordedCall]) -> Json:
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


def shared_parameters() -> Json:
    """``components.parameters``."""
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
            "description": "16 to 255 printable ASCII characters, such as a UUID made for this"
            " order: who knows the key can have the order's session. With an `x-api-key`, which"
            " has keys of its own, 1 to 255.",
            # The stricter of the two lengths: every caller may use it. Blanks around a header's
            # value are not part of it (RFC 9110, section 5.5).
            "schema": {"type": "string", "pattern": f"^{key_pattern(LEAST_PUBLIC_KEY)}$"},
        },
        "LastEventId": {
            "name": LAST_EVENT_ID,
            "in": "header",
            "description": "Of a stream, where it has to be the id of one of its events: the last"
            " that the client has. It counts before `after`. Answers in JSON do not read it.",
            "schema": {"type": "string"},
        },
        "PaymentSignature": {
            "name": x402.SIGNATURE,
            "in": "header",
            "description": "The signed payment, a PaymentPayload of x402 version 2 as Base64 of its"
            " JSON; here or as `payment` in the body.",
            "schema": {"type": "string"},
        },
        "IfNoneMatch": {
            "name": "if-none-match",
            "in": "header",
            "description": "The ETag of the copy that the client has.",
            "schema": {"type": "string"},
        },
    }


def shared_headers(site: Site) -> Json:
    """``components.headers``."""
    found = {
        "x-request-id": _header(
            "The request id, as in the body.", "^[A-Za-z0-9._:-]{1,128}$", required=True
        ),
        "idempotent-replayed": _header(
            "`true` on the stored answer to an idempotency key that was used before.", "^true$"
        ),
        "Allow": _header("The HTTP methods of this path.", "^[A-Z]+(, ?[A-Z]+)*$", required=True),
        "Retry-After": _header("Seconds to wait.", "^[1-9][0-9]*$", required=True),
        "WWW-Authenticate": _header(
            "Which header the credential goes into.", '^ApiKey header="[a-z-]+"$', required=True
        ),
        "ETag": _header("The tag of these bytes.", '^"[0-9a-f]+"$', required=True),
        "Cache-Control": _header(
            "For how long a copy may be kept.", "^(public, max-age=[0-9]+|no-store), no-transform$",
            required=True,
        ),
        x402.REQUIRED: _header(
            "PaymentRequired of x402 version 2, as Base64 of its JSON: `details.paymentRequired`.",
            _BASE64, required=True,
        ),
        x402.RESPONSE: _header(
            "SettlementResponse of x402 version 2, as Base64 of its JSON: `paymentResponse`.",
            _BASE64, required=True,
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


def refusals(site: Site, operation: Operation) -> list[ErrorClass]:
    """All errors that a call of the operation may be refused with."""
    by_code = schemas.errors_by_code()
    found = [by_code[code] for code in operation.errors]
    found += [*ANY_OPERATION, *ANY_CALL]
    if operation.method == "POST":
        found += ANY_BODY
    if site.rate_limit.enabled:
        found.append(errors.RateLimited)
    return list(dict.fromkeys(found))


def error_responses(site: Site, operation: Operation) -> Json:
    """The refusals of an operation by HTTP status."""
    return {
        str(status): _error_response(site, operation, group)
        for status, group in by_status(refusals(site, operation)).items()
    }


def _error_response(site: Site, operation: Operation, group: list[ErrorClass]) -> Json:
    if len(group) == 1:
        return shared_response(group[0])
    return _refusal(site, group, operation)


def shared_response(cls: ErrorClass) -> Json:
    """A reference to the response of an error that stands under components."""
    return {"$ref": f"#/components/responses/{cls.__name__}"}


def _refusal(site: Site, group: list[ErrorClass], operation: Operation | None = None) -> Json:
    shown = schemas.refused(operation, {cls.code for cls in group})
    charged = not BEFORE_CHARGE.intersection(group)
    headers = header_refs(site, charged=charged and errors.InternalError not in group)
    if errors.MethodNotAllowed in group:
        headers["Allow"] = header_ref("Allow")
    if errors.PaymentRequired in group:
        headers[x402.REQUIRED] = header_ref(x402.REQUIRED)
    if {errors.RateLimited, errors.Unavailable}.intersection(group):
        headers["Retry-After"] = header_ref("Retry-After")
    return response(schemas.error_lines(group), ref("ErrorEnvelope"), headers, shown)


def shared_responses(site: Site, offered: list[Operation]) -> Json:
    """The error responses that are the same for every operation which has them."""
    alone = {
        group[0]
        for operation in offered
        for group in by_status(refusals(site, operation)).values()
        if len(group) == 1
    }
    alone.update(ANY_CALL)
    ordered = sorted(alone, key=lambda cls: (cls.http_status, cls.__name__))
    return {cls.__name__: _refusal(site, [cls]) for cls in ordered}
