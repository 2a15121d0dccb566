"""Shared by the operations of the OpenAPI document: surfaces, headers, parameters, responses.

A part that more than one operation has stands once, under components.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from msgspec import Struct
from pydantic import TypeAdapter

from rpcsvc import errors
from rpcsvc.errors import ServiceError
from rpcsvc.http import mpp, schemas, x402
from rpcsvc.http.documents import links, signatures
from rpcsvc.http.event_stream import LAST_EVENT_ID
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import API_ROOT, BFF_ROOT, Site
from rpcsvc.ids import REQUEST_ID_PATTERN
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY, LEAST_PUBLIC_KEY, key_pattern
from rpcsvc.operations.params import DETAIL, ORDER_ID_PATTERN, Detail
from rpcsvc.operations.service import Operation
from rpcsvc.strict_json import Json

ErrorClass = type[ServiceError]
JSON: Final = "application/json"
_BASE64: Final = "^[A-Za-z0-9+/]+={0,2}$"
# The default response, which stands once for each surface.
ANY_CALL: Final = frozenset(
    {
        errors.TlsRequired,
        errors.MisdirectedRequest,
        errors.MethodNotAllowed,
        errors.InternalError,
        errors.PayloadTooLarge,
        errors.UnsupportedMediaType,
        errors.Forbidden,
    }
)
# An unknown field, a query that names one twice; and the store may be down for any of them.
# A token is optional, and a wrong one is refused.
ANY_OPERATION: Final = (
    errors.InvalidInput,
    errors.InvalidRequest,
    errors.Unauthorized,
    errors.Unavailable,
)


class Surface(Struct, frozen=True):
    """A surface of HTTP. ``refusal`` names the schema of its refusals, ``prefix`` tells its shared
    responses from others.
    """

    root: str
    prefix: str
    refusal: str

    def answer(self, operation: Operation) -> Json:
        """A reference to the schema of an operation's answer."""
        if self is AGENT:
            return ref(schemas.envelope_name(operation))
        return ref(operation.result.__name__)


AGENT: Final = Surface(API_ROOT, "", "ErrorEnvelope")
BFF: Final = Surface(BFF_ROOT, "Bff", "BffError")


def refused_with(site: Site, operation: Operation) -> list[ErrorClass]:
    """All errors that a call of the operation may be refused with."""
    by_code = schemas.errors_by_code()
    found = [by_code[code] for code in operation.errors]
    found += [*ANY_OPERATION, *ANY_CALL]
    if operation.method == "POST":
        found.append(errors.InvalidJson)
    if site.rate_limit.enabled:
        found.append(errors.RateLimited)
    return list(dict.fromkeys(found))


class RefusalResponses:
    """The responses of refusals and their examples, noted at the first reference to each."""

    def __init__(self, site: Site) -> None:
        self.responses: Json = {}
        self.examples: Json = {}
        self._site = site
        self._names: dict[tuple[Surface, tuple[ErrorClass, ...]], str] = {}

    def of(self, surface: Surface, name: str, classes: Iterable[ErrorClass]) -> Json:
        """References to the responses of these errors, by HTTP status.

        A response of several errors is named after the first operation that has it. Those of any
        call are the default response.
        """
        found = {}
        for status, own in _by_status(classes).items():
            if not ANY_CALL.issuperset(own):
                named = surface.prefix + own[0].__name__ if len(own) == 1 else f"{name}{status}"
                found[str(status)] = self._reference(surface, named, own)
        any_call = tuple(cls for group in _by_status(ANY_CALL).values() for cls in group)
        return {**found, "default": self._reference(surface, f"{surface.prefix}Refused", any_call)}

    def _reference(self, surface: Surface, name: str, group: tuple[ErrorClass, ...]) -> Json:
        known = self._names.setdefault((surface, group), name)
        if known not in self.responses:
            self.responses[known] = self._response(surface, group)
        return {"$ref": f"#/components/responses/{known}"}

    def _response(self, surface: Surface, group: tuple[ErrorClass, ...]) -> Json:
        statuses = dict.fromkeys(cls.http_status for cls in group)
        codes = [
            (f"{cls.http_status} " if len(statuses) > 1 else "") + f"`{cls.code}`" for cls in group
        ]
        text = f"Error: {', '.join(dict.fromkeys(codes))}."
        made = response(text, ref(surface.refusal), _headers_of(self._site, group))
        shown = schemas.refused({cls.code for cls in group}) if surface is AGENT else []
        for exchange in shown:
            example = {"summary": schemas.label(exchange), "value": exchange.answer}
            self.examples[exchange.name] = example
            examples = made["content"][JSON].setdefault("examples", {})
            examples[exchange.name] = {"$ref": f"#/components/examples/{exchange.name}"}
        return made


def _by_status(classes: Iterable[ErrorClass]) -> dict[int, tuple[ErrorClass, ...]]:
    # By code, too: the order of a set differs from process to process.
    ordered = sorted(classes, key=lambda cls: (cls.http_status, cls.code))
    return {status: tuple(group) for status, group in groupby(ordered, lambda c: c.http_status)}


def _headers_of(site: Site, group: tuple[ErrorClass, ...]) -> Json:
    """The headers of a refusal. Those of every response are on the default response alone, those of
    a budget on the response to a budget that is used up.
    """
    budget = errors.RateLimited if site.rate_limit.enabled else None
    named = {
        "Allow": (errors.MethodNotAllowed,),
        x402.REQUIRED: (errors.PaymentRequired,),
        "WWW-Authenticate": (errors.Unauthorized, errors.PaymentRequired),
        "RateLimit": (budget,),
        "RateLimit-Policy": (budget,),
        "Retry-After": (errors.RateLimited, errors.Unavailable),
    }
    every = ("x-request-id", *site.signature_headers) if ANY_CALL.issuperset(group) else ()
    own = [name for name, classes in named.items() if {*classes} & {*group}]
    return {name: header_ref(name) for name in (*every, *own)}


def response(text: str, schema: Json, headers: Json) -> Json:
    """A response object."""
    headed = {"headers": headers} if headers else {}
    return {"description": text, **headed, "content": {JSON: {"schema": schema}}}


def live_example(site: Site, path: str) -> Json:
    """The examples of a call without inputs: the call itself."""
    live = {"summary": "As this installation answers", "externalValue": site.absolute(path)}
    return {"live": live}


def header_ref(name: str) -> Json:
    """A reference to a shared header."""
    return {"$ref": f"#/components/headers/{name}"}


def parameter_ref(name: str) -> Json:
    """A reference to a shared parameter."""
    return {"$ref": f"#/components/parameters/{name}"}


def shared_parameters() -> Json:
    """``components.parameters``."""
    return {
        "OrderId": {
            "name": schemas.ORDER_ID,
            "in": "path",
            "required": True,
            "description": "The order's id. " + schemas.OWN_ORDER,
            "schema": {"type": "string", "pattern": ORDER_ID_PATTERN},
            "example": schemas.example_order_id(),
        },
        "Detail": {
            "name": DETAIL,
            "in": "query",
            **_detail(),
        },
        "RequestId": {
            "name": "x-request-id",
            "in": "header",
            "description": "A name for this call: 1 to 128 of A-Z a-z 0-9 . _ : -, echoed in the"
            " answer. Anything else is replaced by a generated one.",
            "schema": {"type": "string"},
        },
        "IdempotencyKey": {
            "name": IDEMPOTENCY_KEY,
            "in": "header",
            "description": "A new value for each order, and the same one when the call is repeated:"
            " then a retry can't make a second order. 16 to 255 printable ASCII characters, such as"
            " a UUID: who knows the key can have the order's session. With an `x-api-key`, which"
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
        "PaymentAuthorization": {
            "name": mpp.CREDENTIAL,
            "in": "header",
            "description": "The signed payment as a credential of the HTTP authentication scheme"
            " Payment, instead of PAYMENT-SIGNATURE.",
            "schema": {"type": "string"},
        },
        "IfNoneMatch": {
            "name": "if-none-match",
            "in": "header",
            "description": "The ETag of the copy that the client has.",
            "schema": {"type": "string"},
        },
    }


def _detail() -> Json:
    schema = TypeAdapter(Detail).json_schema()
    return {"description": schema.pop("description"), "schema": schema}


def shared_headers(site: Site) -> Json:
    """``components.headers``."""
    found = {
        "x-request-id": _header(
            "The request id, as in the body.", f"^{REQUEST_ID_PATTERN}$", required=True
        ),
        "idempotent-replayed": _header(
            "`true` on the stored answer to an idempotency key that was used before.", "^true$"
        ),
        "Allow": _header("With 405: the HTTP methods of this path.", "^[A-Z]+(, ?[A-Z]+)*$"),
        "Retry-After": _header("Seconds to wait.", "^[1-9][0-9]*$", required=True),
        "WWW-Authenticate": _header(
            "Which header the credential goes into; with 402, the payment as a challenge of the"
            " scheme Payment (MPP).",
            '^(ApiKey|Payment) ', required=True
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
        mpp.RECEIPT: _header(
            "Receipt of the scheme Payment, as Base64url of its JSON.", "^[A-Za-z0-9_-]+$",
            required=True,
        ),
        **_signature_headers(site),
    }  # fmt: skip
    if site.rate_limit.enabled:
        found["RateLimit"] = _header(
            "What is left of the caller's budget: `r` calls, whole again in `t` seconds.",
            '^"[a-z]+";r=[0-9]+;t=[0-9]+$',
        )  # fmt: skip
        found["RateLimit-Policy"] = _header(
            "The budget: `q` calls in `w` seconds.", '^"[a-z]+";q=[0-9]+;w=[0-9]+$'
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
