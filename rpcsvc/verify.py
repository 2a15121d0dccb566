"""Checks what the service signed: a response, or the terms of an order that somebody passed on.

Needs the standard library and PyNaCl only, so that a client can copy this one file. The whole
format is written here once; signing/ signs what these functions build. It is also a script, with
the options of ``rpcsvc verify attestation``: ``python verify.py attestation TOKEN --direction ...``

All checks raise a VerificationError for whatever does not hold, and nothing else:

    VerificationError
    +-- BadInput               what the verifier itself gave can't be right
    +-- BadJwks                the key set, or the key that is asked for, is not usable
    +-- UnknownKey             the key set has no key of that kid
    +-- UnpinnedKey            another key than the one that the verifier trusts
    +-- RetiredKey             made after its key was retired
    +-- UnknownAlgorithm       not signed with Ed25519
    +-- BadSignature           the signature is not of this key over this content
    +-- MissingHeader          a header of the six is not there
    +-- MalformedHeader        a header of the six is there twice, or has the wrong form
    +-- UnknownVersion         signed by rules that this module does not know
    +-- DigestMismatch         the body is not the one that was signed
    +-- TooOld, FromTheFuture  signed outside the time that the verifier accepts
    +-- MalformedAttestation   not a compact JWS over order terms, to the letter
    +-- TermsMismatch          a real attestation, of another order than the verifier's
    +-- ForeignRefunds         the verifier's terms, but somebody else decides where refunds go
    +-- Expired                the attested time to pay is over
    +-- NotPayable             the issuer says that the order should not be paid now
    +-- Unreachable            the key set or the issuer can't be asked

Sources: spec 5.3; design part 3 "Signing"; RFC 8032 (Ed25519), RFC 8037 (OKP keys), RFC 7638
(thumbprints), RFC 7515 (JWS), RFC 8785 (canonical JSON), RFC 3339 (times).
docs/use/signing.md says it all in words.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # In its package the package's own "http" lies beside this file: the standard library's first.
    sys.path.append(sys.path.pop(0))

import argparse
import base64
import hashlib
import http.client
import ipaddress
import json
import queue
import re
import secrets
import socket
import ssl
import threading  # noqa: TID251 - it waits where no loop runs
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, cast
from urllib.parse import SplitResult, urlsplit

VERSION: Final = "1"
ALGORITHM: Final = "ed25519"
# Stands for the request's body where that was not read, with one of these statuses only.
UNREAD: Final = "unread"
UNREAD_STATUSES: Final = frozenset({401, 408, 413, 415, 503})
LABEL: Final = "service-response-signature"
JWS_ALGORITHM: Final = "EdDSA"
JWS_TYPE: Final = "service-order-attestation"
DECIMALS: Final = {"x2u": 12, "u2x": 6}
"""Decimals of what is sent, by direction: XMR or USDC."""
_REVERSE: Final = {"x2u": "u2x", "u2x": "x2u"}

DEFAULT_MAX_AGE: Final = timedelta(minutes=5)
MAX_SKEW: Final = timedelta(seconds=60)
"""How far in the future a response may be: clocks differ."""

DEFAULT_MIN_TIME: Final = timedelta(minutes=10)
"""How long an order must still await its deposit to be worth paying."""

JWKS_PATH: Final = "/.well-known/jwks.json"
STATUS_PATH: Final = "/api/v1/agent/swap/status/"
LARGEST_ANSWER: Final = 1024 * 1024
TIMEOUT_SECONDS: Final = 20
"""How long a check may take that asks for keys and for the order's status, all in all."""

LONGEST_ATTESTATION: Final = 8192
_LONGEST_SHOWN: Final = 80

_KID: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_METHOD: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET: Final = re.compile(r"[/*][^\x00-\x20\x7f]*")
_TIME: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?Z"
)
_UNITS: Final = re.compile(r"0|[1-9][0-9]{0,77}")
_AMOUNT: Final = re.compile(r"(0|[1-9][0-9]{0,39})(?:\.([0-9]{1,40}))?")
_TEXT: Final = re.compile(r"[\x21-\x7e]{1,256}")
_EVM: Final = re.compile(r"0x[0-9a-fA-F]{40}")
_MONERO: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{95}(?:[1-9A-HJ-NP-Za-km-z]{11})?")
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MAX_CHAIN_ID: Final = 2**53 - 1

Headers = Mapping[str, str] | Iterable[tuple[str, str]]


class VerificationError(Exception):
    """Something does not hold. ``code`` names the cause for programs."""

    code: ClassVar[str]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadInput(VerificationError, ValueError):
    """An input of the verifier is wrong."""

    code = "bad_input"


class BadJwks(VerificationError):
    """The key set, or the key of it that is asked for, is not usable."""

    code = "bad_jwks"


class UnknownKey(VerificationError):
    """The key set has no key of that kid."""

    code = "unknown_key"


class UnpinnedKey(VerificationError):
    """The key is another than the one that the verifier trusts."""

    code = "unpinned_key"


class RetiredKey(VerificationError):
    """The signature says that it was made after its key was retired."""

    code = "retired_key"


class UnknownAlgorithm(VerificationError):
    """The algorithm is not Ed25519."""

    code = "unknown_algorithm"


class BadSignature(VerificationError):
    """The signature is not of this key over this content."""

    code = "bad_signature"


class MissingHeader(VerificationError):
    """A header of the six is not there."""

    code = "missing_header"


class MalformedHeader(VerificationError):
    """A header of the six is there twice, or does not have its form."""

    code = "malformed_header"


class UnknownVersion(VerificationError):
    """The response is signed by rules that this module does not know."""

    code = "unknown_version"


class DigestMismatch(VerificationError):
    """The body is not the one whose digest the headers hold."""

    code = "digest_mismatch"


class TooOld(VerificationError):
    """The response was signed longer ago than the verifier accepts."""

    code = "too_old"


class FromTheFuture(VerificationError):
    """The response was signed later than the verifier's clock allows."""

    code = "from_the_future"


class MalformedAttestation(VerificationError):
    """Not a compact JWS over order terms, to the letter."""

    code = "malformed_attestation"


class TermsMismatch(VerificationError):
    """The signature holds, but over another order. ``fields`` names the terms that differ."""

    code = "terms_mismatch"

    def __init__(self, message: str, differing: tuple[str, ...]) -> None:
        super().__init__(message)
        self.fields = differing


class ForeignRefunds(VerificationError):
    """The terms match, but somebody else controls the refunds.

    ``terms`` are those that were attested; nothing of them is wrong but that.
    """

    code = "foreign_refunds"

    def __init__(self, message: str, terms: OrderTerms) -> None:
        super().__init__(message)
        self.terms = terms


class Expired(VerificationError):
    """The attestation is genuine, and its time to pay is over."""

    code = "expired"


class NotPayable(VerificationError):
    """The issuer says that the order should not be paid now."""

    code = "not_payable"


class Unreachable(VerificationError):
    """The key set or the issuer can't be asked."""

    code = "unreachable"


# --- the signed response ---------------------------------------------------------------------


def signature_headers(slug: str = "service") -> tuple[str, str, str, str, str, str]:
    """The names of the six headers of a signed response (spec 5.3), in the spec's order."""
    return (
        f"x-{slug}-signing-version",
        f"x-{slug}-signing-alg",
        f"x-{slug}-signing-kid",
        f"x-{slug}-content-sha256",
        f"x-{slug}-signed-at",
        f"x-{slug}-signature",
    )


def signed_head(kid: str, signed_at: str) -> bytes:
    """The first five signed lines: what responses of the same second have in common."""
    return f"{LABEL}\n{VERSION}\n{ALGORITHM}\n{kid}\n{signed_at}\n".encode()


def signed_rest(
    method: str, target: str, status: int, request_sha256: str, content_sha256: str
) -> bytes:
    """The other five signed lines: request method, target and body, status, response body.

    A byte of the target that is not UTF-8 stands in ``target`` as a surrogate (PEP 383).
    """
    lines = f"{method}\n{target}\n{status}\n{request_sha256}\n{content_sha256}"
    return lines.encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request as *you* sent it, and the response that came. Raises BadInput.

    ``method``, ``target`` (path and query as sent, such as ``/rpc``) and ``request_body`` are your
    own: take none of them from the response. ``body`` is what came, unparsed, content encodings
    undone; empty for HEAD and 304. The names of ``headers`` may be in any case.
    """

    method: str
    target: str
    request_body: bytes
    status: int
    headers: Headers
    body: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not _METHOD.fullmatch(self.method):
            raise BadInput(
                f"method must be the request's HTTP method, such as POST, not {_show(self.method)}."
            )
        if not _is_target(self.target):
            raise BadInput(
                "target must be the path and query as they were sent, such as"
                f" /api/v1/agent/swap/status/ord_...?verify=0x..., not {_show(self.target)}."
            )
        if type(self.status) is not int or not 100 <= self.status <= 599:
            raise BadInput(
                f"status must be the response's status code, such as 200, not {_show(self.status)}."
            )
        if not isinstance(self.request_body, bytes) or not isinstance(self.body, bytes):
            raise BadInput("request_body and body must be bytes, exactly as sent and as received.")

    def signed_text(self, kid: str, signed_at: str, *, unread: bool = False) -> bytes:
        """The bytes that must have been signed for this exchange: the ten lines of design part 3.

        ``unread``: for a request whose body the service did not read.
        """
        request, content = (hashlib.sha256(b).hexdigest() for b in (self.request_body, self.body))
        asked = UNREAD if unread else request
        rest = signed_rest(self.method, self.target, self.status, asked, content)
        return signed_head(kid, signed_at) + rest


def _is_target(target: object) -> bool:
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        return False
    try:
        target.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class VerifiedResponse:
    """A response whose signature is valid."""

    kid: str
    signed_at: datetime
    key_retired_at: datetime | None


def verify_response(
    exchange: Exchange,
    jwks: Mapping[str, Any],
    *,
    slug: str = "service",
    now: datetime | None = None,
    max_age: timedelta = DEFAULT_MAX_AGE,
    pinned_kid: str | None = None,
) -> VerifiedResponse:
    """Check that the service gave this response to this request (design part 3 "Signing").

    With ``now`` (a datetime with its time zone) a response older than ``max_age``, or more than
    MAX_SKEW in the future, is refused; without it, age is not looked at. ``pinned_kid``: accept
    this key only. ``slug``: the word in the headers' names.

    Raises VerificationError, one subclass for each cause.
    """
    if not isinstance(exchange, Exchange):
        raise BadInput("exchange must be an Exchange, made of your request and its response.")
    _check_moment(now, max_age)
    names = signature_headers(slug)
    version, alg, kid, content_sha256, signed_at, signature = _six(exchange.headers, names)
    _check_format(version, alg)
    key = _find_key(jwks, _form(_KID, kid, names[2]), pinned_kid)
    _check_digest(exchange.body, _form(_SHA256, content_sha256, names[3]))
    made = _header_time(signed_at, names[4])
    texts = [exchange.signed_text(kid, signed_at)]
    if exchange.status in UNREAD_STATUSES:
        texts.append(exchange.signed_text(kid, signed_at, unread=True))
    _check_signature(key, texts, _header_signature(signature, names[5]))
    key.vouches_for(made)
    if now is not None:
        _check_age(made, now, max_age)
    return VerifiedResponse(kid, made, key.retired_at)


def _six(headers: Headers, names: tuple[str, ...]) -> tuple[str, ...]:
    """The values of the six headers, in the order of ``names``."""
    found: dict[str, str] = {}
    for name, value in _pairs(headers):
        lower = name.lower() if isinstance(name, str) else ""
        if lower not in names:
            continue
        if lower in found:
            raise MalformedHeader(
                f"{lower} is there twice. Each header is sent once; trust neither."
            )
        if not isinstance(value, str):
            raise MalformedHeader(f"{lower} must be text, not {type(value).__name__}.")
        found[lower] = value
    for name in names:
        if name not in found:
            raise MissingHeader(
                f"The response has no header {name}, so it is not signed, or something on the way"
                " dropped it. If the service has another name than the usual one, give its slug."
            )
    return tuple(found[name] for name in names)


def _pairs(headers: object) -> list[tuple[Any, Any]]:
    items = headers.items() if isinstance(headers, Mapping) else headers
    try:
        return [(name, value) for name, value in cast("Iterable[tuple[Any, Any]]", items)]
    except (TypeError, ValueError):
        raise BadInput("headers must be a mapping of names to values, or pairs of them.") from None


def _check_format(version: str, alg: str) -> None:
    if version != VERSION:
        raise UnknownVersion(
            f"The response is signed by version {_show(version)}; this module knows {VERSION}."
            " Use a newer one."
        )
    if alg != ALGORITHM:
        raise UnknownAlgorithm(
            f"The response names algorithm {_show(alg)}; only {ALGORITHM} is known."
        )


def _form(form: re.Pattern[str], value: str, name: str) -> str:
    if not form.fullmatch(value):
        raise MalformedHeader(f"{name} does not have its form: {_show(value)}.")
    return value


def _header_time(value: str, name: str) -> datetime:
    moment = parse_time(value)
    if moment is None:
        raise MalformedHeader(
            f"{name} must be a time in UTC such as 2026-01-02T03:04:05Z, not {_show(value)}."
        )
    return moment


def _header_signature(value: str, name: str) -> bytes:
    signature = unb64url(value)
    if signature is None or len(signature) != 64:
        raise MalformedHeader(
            f"{name} must be 64 bytes in base64url without padding, not {_show(value)}."
        )
    return signature


def _check_digest(body: bytes, content_sha256: str) -> None:
    actual = hashlib.sha256(body).hexdigest()
    if actual != content_sha256:
        raise DigestMismatch(
            f"The body ({len(body)} bytes) has SHA-256 {actual}, but {content_sha256} was signed."
            " Take the body as it came, before any parsing or reformatting; if you did, it was"
            " changed on the way."
        )


def _check_age(made: datetime, now: datetime, max_age: timedelta) -> None:
    if now - made > max_age:
        raise TooOld(
            f"The response was signed at {made.isoformat()}, more than {max_age} before"
            f" {now.isoformat()}. It may be an old answer sent again; ask once more."
        )
    if made - now > MAX_SKEW:
        raise FromTheFuture(
            f"The response was signed at {made.isoformat()}, more than {MAX_SKEW} after"
            f" {now.isoformat()}. Set your clock, or do not trust the service's."
        )


# --- keys ------------------------------------------------------------------------------------


def thumbprint(x: str) -> str:
    """The RFC 7638 thumbprint of an Ed25519 key (RFC 8037, appendix A.3), base64url.

    ``x`` is the public key in base64url without padding, as a JWK has it.
    """
    canonical = f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'
    return b64url(hashlib.sha256(canonical.encode()).digest())


@dataclass(frozen=True, slots=True)
class _Key:
    kid: str
    public: bytes
    retired_at: datetime | None

    def vouches_for(self, made: datetime) -> None:
        """A retired key vouches for what was made before only."""
        if self.retired_at is not None and made > self.retired_at:
            raise RetiredKey(
                f"It says that it was made at {made.isoformat()}, but its key {self.kid} was"
                f" retired at {self.retired_at.isoformat()}. Nobody should have that key any more:"
                " do not trust it."
            )


def _find_key(jwks: object, kid: str, pinned_kid: str | None) -> _Key:
    if pinned_kid is not None and kid != pinned_kid:
        raise UnpinnedKey(
            f"It is signed with key {_show(kid)}, but you trust {_show(pinned_kid)} only. If the"
            " service has a new key, learn its kid from the operator, not from the response."
        )
    keys = jwks.get("keys") if isinstance(jwks, Mapping) else None
    if not isinstance(keys, list):
        raise BadJwks('The key set must be a JWKS: a JSON object with a list "keys".')
    found = [key for key in keys if isinstance(key, Mapping) and key.get("kid") == kid]
    if not found:
        raise UnknownKey(
            f"The key set has no key {_show(kid)}. If the set is not fresh, fetch it again:"
            " the service may have a new key. Otherwise the service did not sign this."
        )
    if len(found) > 1:
        raise BadJwks(f"The key set has {len(found)} keys of the kid {_show(kid)}; trust none.")
    return _read_key(found[0], kid)


_KEY_MEMBERS: Final[Mapping[str, tuple[object, ...]]] = {
    "kty": ("OKP",),
    "crv": ("Ed25519",),
    "use": (None, "sig"),
    "key_ops": (None, ["verify"], ["sign", "verify"], ["verify", "sign"]),
    "alg": (None, "EdDSA", "Ed25519"),
    "d": (None,),
}


def _read_key(key: Mapping[str, Any], kid: str) -> _Key:
    for name, allowed in _KEY_MEMBERS.items():
        if not any(key.get(name) == value for value in allowed):
            shown = "a private key" if name == "d" else _show(key.get(name))
            raise BadJwks(
                f"The key {kid} has {shown} as {name}; it must be a public Ed25519 key for"
                " signatures (RFC 8037)."
            )
    x = key.get("x")
    public = unb64url(x) if isinstance(x, str) else None
    if public is None or len(public) != 32:
        raise BadJwks(f"The x of key {kid} must be 32 bytes in base64url without padding.")
    if thumbprint(b64url(public)) != kid:
        raise BadJwks(f"The kid {kid} is not its key's RFC 7638 thumbprint; do not trust the set.")
    return _Key(kid, public, _retired_at(key, kid))


def _retired_at(key: Mapping[str, Any], kid: str) -> datetime | None:
    if "retiredAt" not in key:
        return None
    moment = parse_time(key["retiredAt"])
    if moment is None:
        raise BadJwks(
            f"The retiredAt of key {kid} must be a time in UTC such as 2026-01-02T03:04:05Z, not"
            f" {_show(key['retiredAt'])}."
        )
    return moment


def _check_signature(key: _Key, texts: list[bytes], signature: bytes) -> None:
    """Raise BadSignature unless the signature is over one of ``texts``."""
    # Loaded here: the command line knows this module's options, and mostly does something else.
    from nacl.bindings import crypto_sign_open  # noqa: PLC0415 - as said
    from nacl.exceptions import BadSignatureError  # noqa: PLC0415 - as said

    for text in texts:
        try:
            crypto_sign_open(signature + text, key.public)
        except BadSignatureError:
            continue
        return
    raise BadSignature(
        f"The signature is not of key {key.kid} over this content. Something that is signed"
        " differs from what you gave; for a response: method, target (path and query),"
        " request body, status, or one of the headers."
    )


# --- the attestation of an order -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTerms:
    """The terms of an order as the service attests them. Raises BadInput for impossible ones.

    Amounts are integers of atomic units: ``deposit_amount`` of what is sent (XMR 10**-12, USDC
    10**-6), ``expected_output`` and ``min_received`` of what is paid out. ``chain_id`` and
    ``token`` (contract address) are the USDC side, whichever way the order swaps. Times are RFC
    3339 in UTC. ``network`` is ``sandbox`` for simulated money. ``issuer`` is the service's site
    address. ``refund_control`` says who decides where refunds go: ``address``, all of them go to
    ``refund_address``; ``session``, the holder of the session whose id (lower case) has the SHA-256
    ``session_sha256``. ``price_locked_until`` is when the price lock ends at the latest.
    ``receive_amount`` is what ``deposit_amount`` pays exactly, if the order was made for that.
    These two are None, and then no terms of the attestation, where there are none.
    """

    order_id: str
    direction: str
    chain_id: int
    token: str
    deposit_address: str
    deposit_amount: int
    to_address: str
    expected_output: int
    min_received: int
    expires_at: str
    issued_at: str
    network: str
    issuer: str
    refund_control: str
    refund_address: str | None
    session_sha256: str
    price_locked_until: str | None = None
    receive_amount: int | None = None

    def __post_init__(self) -> None:
        for name, value in self._members():
            if not _ALLOWED[name](value):
                raise BadInput(f"{_WIRE[name]} can't be {_show(value)}.")
        if (self.refund_control == BY_ADDRESS) != (self.refund_address is not None):
            raise BadInput("refundControl is address if there is a refundAddress, else session.")
        if self.receive_amount not in (None, self.min_received):
            raise BadInput("receiveAmount is minReceived where there is one.")

    def _members(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def as_json(self) -> dict[str, str | int | None]:
        """The terms under their names on the wire; amounts are strings of atomic units."""
        return {
            _WIRE[name]: str(value) if name in _AMOUNTS else value
            for name, value in self._members()
            if value is not None or name not in _OPTIONAL
        }

    def canonical(self) -> bytes:
        """The terms as RFC 8785 writes them: what an attestation's payload is, byte for byte."""
        return _canonical(self.as_json())

    @classmethod
    def from_json(cls, value: object) -> OrderTerms:
        """The terms that ``as_json`` gave. Raises BadInput for anything else."""
        optional = {_WIRE[name] for name in _OPTIONAL}
        if not isinstance(value, dict) or {*value, *optional} != set(_WIRE.values()):
            raise BadInput(f"must have exactly the terms {', '.join(_WIRE.values())}.")
        members: dict[str, Any] = {name: value.get(wire) for name, wire in _WIRE.items()}
        for name in _AMOUNTS:
            if _WIRE[name] in value:
                members[name] = _units(members[name], _WIRE[name])
        return cls(**members)


BY_ADDRESS: Final = "address"
BY_SESSION: Final = "session"


def session_sha256(session_id: str) -> str:
    """The SHA-256 of a session id in lower case, hex, as an attestation has it."""
    return hashlib.sha256(session_id.lower().encode()).hexdigest()


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.title() for word in tail)


_WIRE: Final = {field.name: _camel(field.name) for field in fields(OrderTerms)}
_AMOUNTS: Final = ("deposit_amount", "expected_output", "min_received", "receive_amount")
_OPTIONAL: Final = ("price_locked_until", "receive_amount")


def _units(text: object, name: str) -> int:
    if not isinstance(text, str) or not _UNITS.fullmatch(text):
        raise BadInput(f"{name} must be a string of atomic units, not {_show(text)}.")
    return int(text)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and _TEXT.fullmatch(value) is not None


def _is_units(value: object) -> bool:
    return type(value) is int and 0 <= value < 10**78


def _is_chain_id(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MAX_CHAIN_ID


_ALLOWED: Final = dict.fromkeys(_WIRE, _is_text) | {
    "direction": lambda value: isinstance(value, str) and value in DECIMALS,
    "chain_id": _is_chain_id,
    "deposit_amount": _is_units,
    "expected_output": _is_units,
    "min_received": _is_units,
    "receive_amount": lambda value: value is None or _is_units(value),
    "expires_at": lambda value: parse_time(value) is not None,
    "issued_at": lambda value: parse_time(value) is not None,
    "price_locked_until": lambda value: value is None or parse_time(value) is not None,
    "issuer": lambda value: _is_text(value) and not value.endswith("/"),
    "refund_control": lambda value: isinstance(value, str) and value in (BY_ADDRESS, BY_SESSION),
    "refund_address": lambda value: value is None or _is_text(value),
    "session_sha256": lambda value: isinstance(value, str) and _SHA256.fullmatch(value) is not None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The order as the verifier knows it from its own inputs. Take nothing of it from the token.

    ``amount`` is what was ordered, as a decimal string ("0.8"): XMR for ``x2u``, USDC for ``u2x``.
    ``receive_amount``, in its place or beside it, is what must arrive exactly, in the other asset;
    ``max_deposit`` is then the most that may have to be sent for it.
    ``chain_id`` is the USDC chain's number; ``to`` is where the payout must go; ``issuer`` the
    service's site address. ``refund_to`` is the refund address that the order must have been made
    with, ``session`` the id of the session that it must have been made in: without one of them
    nothing is verified, as a refund would go to whoever made the order. What else is known may be
    given: ``deposit_address`` is the one that the money is about to be sent to; ``min_received`` is
    the least that the payout may bring, as a decimal string: whoever made the order may have chosen
    its time and its fee. Raises BadInput.
    """

    direction: str
    chain_id: int
    amount: str | None = None
    to: str
    issuer: str
    refund_to: str | None = None
    session: str | None = None
    min_received: str | None = None
    receive_amount: str | None = None
    max_deposit: str | None = None
    deposit_address: str | None = None
    token: str | None = None
    order_id: str | None = None
    network: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.direction, str) or self.direction not in DECIMALS:
            raise BadInput(f"direction must be x2u or u2x, not {_show(self.direction)}.")
        if not _is_chain_id(self.chain_id):
            raise BadInput(
                f"chain_id must be the USDC chain's number, such as 42161, not"
                f" {_show(self.chain_id)}."
            )
        self._check_addresses()
        if not _is_text(self.issuer):
            raise BadInput(
                "issuer must be the service's site address, such as https://swap.example, not"
                f" {_show(self.issuer)}."
            )
        if self.session is not None and not (
            isinstance(self.session, str) and _UUID.fullmatch(self.session)
        ):
            raise BadInput("session must be the sessionId of the order, a UUID.")
        for name in ("token", "order_id", "network"):
            if getattr(self, name) is not None and not _is_text(getattr(self, name)):
                raise BadInput(f"{name} can't be {_show(getattr(self, name))}.")
        if self.amount is None and self.receive_amount is None:
            raise BadInput(
                "amount is missing: say what is sent, or in receive_amount what arrives."
            )
        _ = self.deposit_units, self.least_units, self.receive_units, self.most_units

    def _check_addresses(self) -> None:
        evm, monero = (_EVM, "an EVM address"), (_MONERO, "a Monero address")
        to, deposit = (evm, monero) if self.direction == "x2u" else (monero, evm)
        # A refund goes back on the network of the deposit.
        rows = (
            ("to", self.to, to),
            ("deposit_address", self.deposit_address, deposit),
            ("refund_to", self.refund_to, deposit),
        )
        for name, value, (form, words) in rows:
            if value is None and name != "to":
                continue
            if not isinstance(value, str) or not form.fullmatch(value):
                raise BadInput(
                    f"{name} must be {words} when direction is {self.direction}, not"
                    f" {_show(value)}."
                )

    @property
    def deposit_units(self) -> int | None:
        """``amount`` in atomic units of what is sent."""
        return self._units("amount", self.amount, self.direction)

    @property
    def most_units(self) -> int | None:
        """``max_deposit`` in atomic units of what is sent."""
        return self._units("max_deposit", self.max_deposit, self.direction)

    @property
    def least_units(self) -> int:
        """``min_received`` in atomic units of what is paid out; 0 without one."""
        return self._units("min_received", self.min_received, _REVERSE[self.direction]) or 0

    @property
    def receive_units(self) -> int | None:
        """``receive_amount`` in atomic units of what is paid out."""
        return self._units("receive_amount", self.receive_amount, _REVERSE[self.direction])

    @staticmethod
    def _units(name: str, amount: str | None, sent_in: str) -> int | None:
        """An amount, of the asset that is sent in a direction, in atomic units."""
        return None if amount is None else _read_amount(name, amount, DECIMALS[sent_in])

    def terms(self) -> dict[str, str | int]:
        """The terms that follow from this, under their names on the wire."""
        known: dict[str, str | int | None] = {
            "direction": self.direction,
            "chainId": self.chain_id,
            "depositAmount": None if self.amount is None else str(self.deposit_units),
            "receiveAmount": None if self.receive_amount is None else str(self.receive_units),
            "toAddress": self.to,
            "issuer": self.issuer.rstrip("/"),
            "refundAddress": self.refund_to,
            "sessionSha256": None if self.session is None else session_sha256(self.session),
            "depositAddress": self.deposit_address,
            "token": self.token,
            "orderId": self.order_id,
            "network": self.network,
        }
        return {name: value for name, value in known.items() if value is not None}


def _read_amount(name: str, text: object, decimals: int) -> int:
    match = _AMOUNT.fullmatch(text) if isinstance(text, str) else None
    fraction = (match[2] or "") if match else ""
    units = int(match[1] + fraction.ljust(decimals, "0")) if match else 0
    if units == 0 or len(fraction) > decimals:
        raise BadInput(
            f"{name} must be a decimal string above 0 such as '0.8', with at most {decimals}"
            f" decimals, not {_show(text)}."
        )
    return units


@dataclass(frozen=True, slots=True)
class Attestation:
    """The contents of a genuine attestation.

    ``expired`` is None when no ``now`` was given; if True, send nothing to the address any more.
    """

    terms: OrderTerms
    kid: str
    key_retired_at: datetime | None
    expired: bool | None


def attestation_input(kid: str, terms: bytes) -> bytes:
    """The bytes signed for canonical terms: the JWS signing input (RFC 7515, section 5.1)."""
    return f"{_jws_header_part(kid)}.{b64url(terms)}".encode()


@lru_cache(maxsize=4)
def _jws_header_part(kid: str) -> str:
    return b64url(_jws_header(kid))


def verify_attestation(
    token: str,
    jwks: Mapping[str, Any],
    expected: Expected,
    *,
    now: datetime | None = None,
    pinned_kid: str | None = None,
) -> Attestation:
    """Check that the service attested an order of exactly these ``expected`` terms.

    ``token`` is ``data.order.attestation``, a compact JWS. A swapped address, amount, chain,
    direction or destination is caught, because it is compared with the verifier's own inputs; EVM
    addresses compare without case, Monero ones exactly. ForeignRefunds is raised where somebody
    else decides where refunds go. ``now`` (a datetime with its time zone) only fills ``expired``.
    ``pinned_kid``: accept this key only. What became of the order since, ``verify_payable`` tells.

    Raises VerificationError, one subclass for each cause.
    """
    if not isinstance(expected, Expected):
        raise BadInput("expected must be an Expected, made of what you ordered yourself.")
    _check_moment(now)
    header, payload, signature = _parts(token)
    kid = _jws_kid(header)
    key = _find_key(jwks, kid, pinned_kid)
    _check_signature(key, [token.rpartition(".")[0].encode()], signature)
    terms = _read_terms(payload)
    key.vouches_for(_known_time(terms.issued_at))
    _compare(expected, terms)
    _require_own_refunds(expected, terms)
    expired = None if now is None else now >= _known_time(terms.expires_at)
    return Attestation(terms, kid, key.retired_at, expired)


def _parts(token: object) -> tuple[bytes, bytes, bytes]:
    if not isinstance(token, str) or len(token) > LONGEST_ATTESTATION:
        _malformed(f"it must be a string of at most {LONGEST_ATTESTATION} characters")
    parts = [unb64url(part) for part in token.split(".")]
    if len(parts) != 3:
        _malformed(f"it has {len(parts)} parts between dots, not three")
    header, payload, signature = parts
    if header is None or payload is None or signature is None:
        _malformed("a part of it is not base64url without padding, to the letter")
    if len(signature) != 64:
        _malformed(f"its signature has {len(signature)} bytes, not 64")
    return header, payload, signature


def _jws_header(kid: str) -> bytes:
    return _canonical({"alg": JWS_ALGORITHM, "kid": kid, "typ": JWS_TYPE})


def _jws_kid(raw: bytes) -> str:
    header = _json(raw, "header")
    if not isinstance(header, dict):
        _malformed("its header is not a JSON object")
    if header.get("alg") != JWS_ALGORITHM:
        raise UnknownAlgorithm(
            f"The attestation names algorithm {_show(header.get('alg'))}; only {JWS_ALGORITHM}"
            " (Ed25519) is accepted."
        )
    if header.get("typ") != JWS_TYPE:
        _malformed(f"its typ is {_show(header.get('typ'))}, not {JWS_TYPE}: it is something else")
    kid = header.get("kid")
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        _malformed(f"its kid is not a key's RFC 7638 thumbprint: {_show(kid)}")
    if raw != _jws_header(kid):
        _malformed("its header must have alg, kid and typ, nothing else, as RFC 8785 writes them")
    return kid


def _read_terms(raw: bytes) -> OrderTerms:
    value = _json(raw, "payload")
    try:
        terms = OrderTerms.from_json(value)
    except BadInput as error:
        _malformed(f"its payload is not an order's terms: {error.message.rstrip('.')}")
    if raw != terms.canonical():
        _malformed("its payload is not written as RFC 8785 has it")
    return terms


def _compare(expected: Expected, terms: OrderTerms) -> None:
    actual = terms.as_json()
    wrong = {
        name: f"{name} is {_show(actual.get(name))}, not {_show(value)}"
        for name, value in expected.terms().items()
        if _folded(actual.get(name)) != _folded(value)
    }
    most = expected.most_units
    if most is not None and terms.deposit_amount > most:
        wrong["depositAmount"] = f"depositAmount is {terms.deposit_amount}, more than {most}"
    if terms.min_received < expected.least_units:
        wrong["minReceived"] = (
            f"minReceived is {terms.min_received}, less than {expected.least_units}"
        )
    if wrong:
        raise TermsMismatch(
            "The service signed this, but for another order than yours:"
            f" {'; '.join(wrong.values())}. Send nothing to its deposit address.",
            tuple(wrong),
        )


def _require_own_refunds(expected: Expected, terms: OrderTerms) -> None:
    """Raise ForeignRefunds unless the verifier has named what decides over refunds."""
    if terms.refund_control == BY_ADDRESS:
        if expected.refund_to is None:
            raise ForeignRefunds(
                "The attestation is genuine, but refunds of this order go to"
                f" {terms.refund_address}, and you have not said that this address is yours. If"
                " it is, say so (--refund-to). If not, send nothing: make an order of your own.",
                terms,
            )
    elif expected.session is None:
        raise ForeignRefunds(
            "The attestation is genuine, but this order has no refund address: whoever holds its"
            " session decides where a refund of your money goes. If the session is yours, give"
            " its id (--session). If not, send nothing: make an order with a refund address.",
            terms,
        )


def _folded(value: object) -> object:
    """EVM addresses without case (EIP-55 is a checksum only); the rest as it is."""
    return value.lower() if isinstance(value, str) and _EVM.fullmatch(value) else value


def _malformed(reason: str) -> NoReturn:
    raise MalformedAttestation(
        f"This is not an attestation: {reason}. Take data.order.attestation of the answer whole."
    )


# --- what became of the order ----------------------------------------------------------------


def verify_payable(
    terms: OrderTerms,
    exchange: Exchange,
    jwks: Mapping[str, Any],
    *,
    now: datetime,
    request_id: str,
    min_time: timedelta = DEFAULT_MIN_TIME,
    slug: str = "service",
    pinned_kid: str | None = None,
) -> timedelta:
    """The time that is left to pay the order of ``terms``, by its issuer's answer.

    ``exchange`` is your ``GET /api/v1/agent/swap/status/{orderId}`` with the fresh ``request_id``
    as its ``x-request-id``, and the signed answer. Raises NotPayable when the order awaits no
    deposit, has one already, or ends in less than ``min_time``; other VerificationErrors when the
    answer is not the issuer's to this request.
    """
    verify_response(exchange, jwks, slug=slug, now=now, pinned_kid=pinned_kid)
    answer = _answered(exchange.body)
    if answer.get("requestId") != request_id:
        raise TooOld("The answer is not to this request: its requestId is another one.")
    if exchange.status != 200:
        _not_payable(f"the issuer answers HTTP {exchange.status} {_show(_error_code(answer))}")
    data = _member(answer, "data")
    order = _member(data, "order")
    for name, attested in (
        ("orderId", terms.order_id),
        ("depositAddress", terms.deposit_address),
        ("refundAddress", terms.refund_address),
    ):
        if order.get(name) != attested:
            _not_payable(f"its {name} is {_show(order.get(name))} at the issuer")
    if order.get("status") != "awaiting_deposit":
        _not_payable(f"it is {_show(order.get('status'))}, not awaiting_deposit")
    if data.get("deposits") != [] or order.get("depositTxHash") is not None:
        _not_payable("somebody has paid something to it already")
    left = _known_time(terms.expires_at) - now
    if left < min_time:
        minutes = max(0, int(left.total_seconds()) // 60)
        _not_payable(f"it awaits its deposit for {minutes} more minutes only")
    return left


def _answered(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _member(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _error_code(answer: Mapping[str, Any]) -> object:
    return _member(answer, "error").get("code")


def _not_payable(reason: str) -> NoReturn:
    raise NotPayable(
        f"The attestation is genuine, but don't pay this order: {reason}. Make one of your own."
    )


# --- asking the issuer -----------------------------------------------------------------------


def load_jwks(source: str, seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """The key set in a file or at an address, which may take ``seconds``.

    Raises BadInput, Unreachable, BadJwks.
    """
    if source.lower().startswith(("http://", "https://")):
        raw = _fetched_keys(source, seconds)
    else:
        try:
            raw = Path(source).read_bytes()
        except OSError as error:
            raise BadInput(f"{source} can't be read: {error.strerror or error}.") from error
    try:
        value = json.loads(raw, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise BadJwks(f"{source} is not a JWKS: {error}.") from error
    if not isinstance(value, dict):
        raise BadJwks(f"{source} is not a JWKS: it must be a JSON object.")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _fetched_keys(url: str, seconds: float) -> bytes:
    status, _, raw = _get(url, {}, f"No key set at {url}", seconds)
    if status != 200:
        raise Unreachable(f"No key set at {url}: it answers with HTTP status {status}.")
    if len(raw) > LARGEST_ANSWER:
        raise Unreachable(f"What is at {url} is no key set: it has over {LARGEST_ANSWER} bytes.")
    return raw


def ask_status(
    issuer: str, order_id: str, request_id: str, seconds: float = TIMEOUT_SECONDS
) -> Exchange:
    """The issuer's signed answer about an order, which may take ``seconds``.

    Raises BadInput and Unreachable.
    ``issuer`` is the address that the verifier knows, never one that came with the token.
    """
    url = f"{issuer.rstrip('/')}{STATUS_PATH}{order_id}"
    trouble = f"The order's status can't be asked at {url}"
    status, headers, body = _get(url, {"x-request-id": request_id}, trouble, seconds)
    if len(body) > LARGEST_ANSWER:
        raise Unreachable(f"{trouble}: the answer has over {LARGEST_ANSWER} bytes.")
    return Exchange(
        method="GET",
        target=_target(urlsplit(url)),
        request_body=b"",
        status=status,
        headers=headers,
        body=body,
    )


_Reply = tuple[int, list[tuple[str, str]], bytes]


def _get(url: str, headers: Mapping[str, str], trouble: str, seconds: float) -> _Reply:
    """Return what is at ``url``. Redirects are not followed: they would lead to somebody else.

    A thread asks, because neither a look-up of names nor an answer that comes byte by byte ends by
    the timeout of a socket.
    """
    connection, target = _connection_to(url, max(seconds, 0.001))
    replies: queue.SimpleQueue[_Reply | Exception] = queue.SimpleQueue()
    sockets: list[socket.socket] = []

    def ask() -> None:
        try:
            connection.connect()
            sockets.append(connection.sock)
            connection.request("GET", target, headers={"accept": "application/json", **headers})
            with connection.getresponse() as response:
                raw = response.read(LARGEST_ANSWER + 1)
                replies.put((response.status, response.getheaders(), raw))
        except Exception as error:  # noqa: BLE001 - raised below
            replies.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        reply = replies.get(timeout=max(seconds, 0))
    except queue.Empty:
        reply = TimeoutError("no whole answer came in time")
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # has the thread end
    connection.close()
    if isinstance(reply, OSError | http.client.HTTPException | UnicodeError):
        raise Unreachable(f"{trouble}: {reply or type(reply).__name__}.") from reply
    if isinstance(reply, Exception):
        raise reply
    return reply


def _connection_to(url: str, seconds: float) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(url)
        target = _target(parts)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            context = ssl.create_default_context()
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=seconds, context=context
            )
        else:
            _require_this_machine(host)
            made = http.client.HTTPConnection(host, port, timeout=seconds)
    except (ValueError, http.client.InvalidURL) as error:
        raise BadInput(f"{url!r} can't be fetched: {error}.") from error
    return made, target


def _target(parts: SplitResult) -> str:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not parts.hostname or parts.username is not None or parts.fragment:
        raise ValueError("it must have a host, and no user name or #")
    if not re.fullmatch(r"[\x21-\x7e]+", target):
        raise ValueError("its path must be percent-encoded")
    return target


def _require_this_machine(host: str) -> None:
    try:
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise ValueError(
            "over plain HTTP it could be anybody's, except from this machine; use https://"
        )


# --- the command -----------------------------------------------------------------------------

VERIFIED, NOT_VERIFIED, WRONG_USE, NOT_REACHED = 0, 1, 2, 3
"""Exit statuses."""

_OPTIONS: Final = (
    ("--direction", "x2u|u2x", "which way you swap", True),
    ("--chain-id", "N", "number of the USDC chain", True),
    ("--amount", "AMOUNT", "what you send, such as 0.8, as ordered", False),
    ("--to", "ADDRESS", "where the payout must go", True),
    ("--issuer", "URL", "the service's site, such as https://swap.example", True),
    ("--refund-to", "ADDRESS", "your address, which the order must refund to", False),
    ("--session", "ID", "your sessionId, if the order has no refund address", False),
    ("--min-received", "AMOUNT", "the least that the payout may bring, such as 128.5", False),
    ("--receive-amount", "AMOUNT", "what must arrive exactly, if that was ordered", False),
    ("--max-deposit", "AMOUNT", "the most that you send for it", False),
    ("--min-time", "SECONDS", "how long it must still await the deposit; 600 if left out", False),
    ("--jwks", "FILE|URL", f"the public keys; the issuer's {JWKS_PATH} if left out", False),
    ("--deposit-address", "ADDRESS", "where you are about to send the money", False),
    ("--token", "ADDRESS", "the USDC contract", False),
    ("--order-id", "ID", "the order", False),
    ("--network", "NETWORK", "the network; sandbox is simulated money", False),
    ("--kid", "KID", "trust this key only; write --kid=KID, as one may begin with a dash", False),
    ("--slug", "WORD", "the word in x-service-signature, if it is another one", False),
)


def add_attestation_options(parser: argparse.ArgumentParser, text: Any = "store") -> None:
    """Give a parser the inputs of ``check_attestation``; ``text``: the argparse action of texts."""
    shown = "data.order.attestation, or - for stdin"
    parser.add_argument("attestation", action=text, metavar="ATTESTATION|-", help=shown)
    for flag, metavar, help_text, required in _OPTIONS:
        kind = integer_text if flag in ("--chain-id", "--min-time") else str
        parser.add_argument(
            flag, action=text, metavar=metavar, help=help_text, required=required, type=kind
        )
    offline = "don't ask the issuer what became of the order; fetch no more than its keys"
    parser.add_argument("--offline", action="store_true", help=offline)
    expired = "check an order whose time to pay is over; its status is not asked then"
    parser.add_argument("--allow-expired", action="store_true", help=expired)


def integer_text(text: str) -> int:
    """A number of an option. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,12}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a whole number such as 60, not {text!r}")
    return int(text)


def check_attestation(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit status and answer for these options. Raises BadInput when they can't be right."""
    text = sys.stdin.read() if options.attestation == "-" else options.attestation
    expected = Expected(
        direction=options.direction,
        chain_id=options.chain_id,
        amount=options.amount,
        to=options.to,
        issuer=options.issuer,
        refund_to=options.refund_to,
        session=options.session,
        min_received=options.min_received,
        receive_amount=options.receive_amount,
        max_deposit=options.max_deposit,
        deposit_address=options.deposit_address,
        token=options.token,
        order_id=options.order_id,
        network=options.network,
    )
    described: dict[str, Any] = {}
    try:
        _check(text.strip(), expected, options, described)
    except BadInput:
        raise
    except VerificationError as error:
        status = NOT_REACHED if isinstance(error, Unreachable) else NOT_VERIFIED
        failure = {"verified": False, "kind": "attestation", "error": described_error(error)}
        return status, failure | described
    return VERIFIED, {"verified": True, "kind": "attestation", **described}


def _check(
    token: str, expected: Expected, options: argparse.Namespace, described: dict[str, Any]
) -> None:
    """Fill ``described`` with what is found. Raises VerificationError where something is wrong."""
    now, end = datetime.now(UTC), time.monotonic() + TIMEOUT_SECONDS
    jwks = load_jwks(options.jwks or options.issuer.rstrip("/") + JWKS_PATH, TIMEOUT_SECONDS)
    try:
        found = verify_attestation(token, jwks, expected, now=now, pinned_kid=options.kid)
    except ForeignRefunds as error:
        described["terms"] = error.terms.as_json()
        raise
    described |= {
        "kid": found.kid,
        "keyRetiredAt": rfc3339(found.key_retired_at),
        "expired": found.expired,
        "terms": found.terms.as_json(),
    }
    if found.expired and not options.allow_expired:
        raise Expired(
            "The attestation is genuine, but its order was to be paid before"
            f" {found.terms.expires_at}. Send nothing any more; ask for a new order. To check an"
            " old one, add --allow-expired."
        )
    if options.offline or found.expired:
        described["status"] = "not asked: somebody may have paid to it, or ended it, meanwhile"
        return
    request_id = f"verify-{secrets.token_hex(16)}"
    least = DEFAULT_MIN_TIME
    if options.min_time is not None:
        least = timedelta(seconds=options.min_time)
    left = verify_payable(
        found.terms,
        ask_status(options.issuer, found.terms.order_id, request_id, end - time.monotonic()),
        jwks,
        now=now,
        request_id=request_id,
        min_time=least,
        slug=options.slug or "service",
        pinned_kid=options.kid,
    )
    described["status"] = "awaiting_deposit"
    described["secondsLeft"] = int(left.total_seconds())


def described_error(error: VerificationError) -> dict[str, Any]:
    """A failed check for programs."""
    described: dict[str, Any] = {"code": error.code, "message": error.message}
    if isinstance(error, TermsMismatch):
        described["fields"] = list(error.fields)
    if isinstance(error, ForeignRefunds):
        described["refundControl"] = error.terms.refund_control
        described["refundAddress"] = error.terms.refund_address
    return described


def rfc3339(moment: datetime | None) -> str | None:
    """A moment in UTC as text."""
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def main() -> int:
    """Run this module as a script; one JSON object on stdout. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Check what a service signed.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    text = "check order terms that were passed on, against what you ordered yourself"
    attestation = commands.add_parser(
        "attestation", help=text, description=text, allow_abbrev=False
    )
    add_attestation_options(attestation)
    options = parser.parse_args()
    try:
        status, answer = check_attestation(options)
    except BadInput as error:
        status = WRONG_USE
        answer = {"verified": False, "kind": "attestation", "error": described_error(error)}
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return status


# --- encodings -------------------------------------------------------------------------------


def b64url(data: bytes) -> str:
    """Base64url without padding (RFC 7515, section 2)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unb64url(text: str) -> bytes | None:
    """The bytes that ``b64url`` turns into ``text``; None if there are none."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    return data if b64url(data) == text else None


def _canonical(value: Mapping[str, str | int | None]) -> bytes:
    """RFC 8785, for what occurs here: printable ASCII, integers of at most 53 bits, null."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _json(raw: bytes, what: str) -> object:
    """A part of a token. Names that are there twice show when it is written again and compared."""
    try:
        return cast("object", json.loads(raw.decode()))
    except (ValueError, RecursionError) as error:
        _malformed(f"its {what} is not plain JSON ({error})")


def parse_time(text: object) -> datetime | None:
    """The moment that an RFC 3339 text in UTC (``Z``) names; None if it names none."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    micros = int((match[7] or "").ljust(6, "0")[:6])
    try:
        return datetime(year, month, day, hour, minute, second, micros, tzinfo=UTC)
    except ValueError:
        return None


def _known_time(text: str) -> datetime:
    return cast("datetime", parse_time(text))  # OrderTerms holds nothing else


def _check_moment(now: object, max_age: object = DEFAULT_MAX_AGE) -> None:
    if now is not None and (not isinstance(now, datetime) or now.utcoffset() is None):
        raise BadInput("now must be a datetime with its time zone, such as datetime.now(UTC).")
    if not isinstance(max_age, timedelta):
        raise BadInput("max_age must be a timedelta, such as timedelta(minutes=5).")


def _show(value: object) -> str:
    """A value for a message: never long, whatever it is."""
    if isinstance(value, str):
        shown = repr(value[:_LONGEST_SHOWN])
        return shown if len(value) <= _LONGEST_SHOWN else f"{shown}..."
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int) and value.bit_length() <= 256:
        return repr(value)
    return f"a value of type {type(value).__name__}"


if __name__ == "__main__":
    sys.exit(main())
