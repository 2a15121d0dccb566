"""The headers of responses, and the parameters that calls share, as OpenAPI components.

What does not live here: which response has which (parts.py).
"""

from __future__ import annotations

from rpcsvc.http.documents import links, signatures
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.inputs import LEAST_PUBLIC_KEY, key_pattern


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
