"""Describes how a client verifies a signed response or order, precisely enough to implement."""

from __future__ import annotations

from dataclasses import fields

from pydantic.alias_generators import to_camel

from rpcsvc.http.documents import links
from rpcsvc.http.documents.links import code
from rpcsvc.http.site import Site
from rpcsvc.verify import (
    ALGORITHM,
    JWS_ALGORITHM,
    JWS_TYPE,
    LABEL,
    UNREAD,
    UNREAD_STATUSES,
    VERSION,
    OrderTerms,
    signed_head,
    signed_rest,
)

__all__ = ["ALGORITHM", "LABEL", "SIGNED_LINES", "VERSION", "attested_terms", "signature_check"]

SIGNED_LINES = (
    "label", "version", "alg", "kid", "signed-at", "request method", "request target", "status",
    "request body sha256", "content-sha256",
)  # fmt: skip


def attested_terms() -> list[str]:
    """The names of the terms that an attestation covers."""
    return [to_camel(field.name) for field in fields(OrderTerms)]


def signature_check(site: Site) -> str:
    """The Markdown section on checking signatures."""
    return "\n\n".join(
        (
            "Every answer of the agent API, of the documents and of `/rpc` is signed, errors"
            f" included. The public keys are at {site.absolute(links.JWKS)}. To check an answer:",
            _before_the_text(site),
            code(_signed_text()),
            _after_the_text(site),
            "Method, target (path and query) and request body are those that you sent: take none"
            " of them from the answer. Because they are signed, an answer to another request"
            " can't be passed off as yours.",
            f"`rpcsvc verify response --slug {site.brand.slug}` and the Python module"
            " `rpcsvc.verify`, which needs PyNaCl only, do the same.",
            _attestation(site),
        )
    )


def _before_the_text(site: Site) -> str:
    version, alg, kid, sha256, _, _ = (f"`{header}`" for header in site.signature_headers)
    return "\n".join(
        (
            "1. Take the body exactly as it came, before any parsing, content encodings undone;"
            " for HEAD and 304 it is empty. Its SHA-256 in lower-case hex must equal"
            f" {sha256}.",
            f"2. {version} must be `{VERSION}` and {alg} `{ALGORITHM}`. Refuse anything else, and"
            " an answer that has one of the six headers twice or not at all.",
            f"3. Find the key of the JWKS whose `kid` is {kid}. It is an OKP key (RFC 8037) with"
            " `crv` `Ed25519`; `x` is the public key, base64url. The `kid` is the key's RFC 7638"
            " thumbprint: compute it and compare. A key with `retiredAt` vouches for what was"
            " signed before that time only.",
            "4. Join these ten lines with a line feed, with none at the end, as UTF-8:"
            f" {', '.join(SIGNED_LINES)}. The SHA-256 of a request without a body is that of"
            f" zero bytes. Where a body was refused before it was read, the word `{UNREAD}` stands"
            f" for its SHA-256: take that for the statuses {_unread_statuses()} only. For example:",
        )
    )


def _unread_statuses() -> str:
    """Statuses of responses signed without a body, in words: "401, 408 and 413"."""
    *first, last = map(str, sorted(UNREAD_STATUSES))
    return f"{', '.join(first)} and {last}"


def _signed_text() -> str:
    """The ten signed lines, with placeholders for long values."""
    rest = signed_rest(
        "POST", "/api/v1/agent/swap/execute", 200, "<hex of the request body>", "<hex of the body>"
    )
    return (signed_head("<kid>", "2026-01-02T03:04:05Z") + rest).decode()


def _after_the_text(site: Site) -> str:
    *_, signed_at, signature = (f"`{header}`" for header in site.signature_headers)
    return "\n".join(
        (
            f"5. Decode {signature} (base64url without padding, 64 bytes) and verify it as Ed25519"
            " (RFC 8032) over those bytes.",
            f"6. {signed_at} is RFC 3339 in UTC. Refuse what is older than you are ready to"
            " accept.",
        )
    )


def _attestation(site: Site) -> str:
    terms = ", ".join(f"`{term}`" for term in attested_terms())
    return (
        "A deposit address may reach the user through others. `data.order.attestation`, there"
        f" while the order awaits its deposit, is a compact JWS (RFC 7515, `alg` `{JWS_ALGORITHM}`,"
        f" `typ` `{JWS_TYPE}`, the same keys) over the terms of the order: {terms}. Check it with"
        f" any JOSE library; `issuer` must be {site.url}. Then compare the terms with what you"
        " asked for yourself: a valid signature over another `toAddress` is still the wrong order."
        " Whoever made an order may have made it in a session of their own, to get your refund:"
        " pay only if `refundAddress` is yours, or `sessionSha256` is the SHA-256 of your own"
        " sessionId and `refundAddress` is null. Then ask the order's status: send nothing unless"
        " it is `awaiting_deposit`, without a deposit, and with time left."
        " `rpcsvc verify attestation` and `rpcsvc/verify.py` as a script do all of it."
    )
