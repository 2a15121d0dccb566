"""A ring of signing keys as a value, and as the JSON that is kept.

What does not live here: files (key_files.py), when a key is made or retired (key_ring.py).
Source: RFC 8037 (Ed25519 in JWK), RFC 7638 (key ids).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from nacl.bindings import crypto_sign_seed_keypair

from rpcsvc.verify import b64url, parse_time, thumbprint, unb64url

SEED_BYTES: Final = 32
_FORMAT: Final = 1

Json = dict[str, Any]


class SigningKeyError(Exception):
    """The keys can't be used as they are; the message says what the operator has to do."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The key that signs. ``x`` is the public key, base64url; ``secret`` libsodium's 64 bytes."""

    kid: str
    x: str
    secret: bytes = field(repr=False)
    created_at: str


@dataclass(frozen=True, slots=True)
class RetiredKey:
    """A key that signed before. Only its public part is left."""

    kid: str
    x: str
    created_at: str
    retired_at: str


@dataclass(frozen=True, slots=True)
class Keys:
    """A ring: the key that signs, and those that did, the latest first."""

    current: SigningKey
    retired: tuple[RetiredKey, ...] = ()


def signing_key(seed: bytes, created_at: str) -> SigningKey:
    """The key of a seed of 32 bytes. Raises ValueError for another length."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    public, secret = crypto_sign_seed_keypair(seed)
    x = b64url(public)
    return SigningKey(thumbprint(x), x, secret, created_at)


def jwk(key: SigningKey | RetiredKey) -> Json:
    """The public part as a JWK (RFC 8037)."""
    return {
        "kty": "OKP",
        "crv": "Ed25519",
        "x": key.x,
        "kid": key.kid,
        "use": "sig",
        "alg": "EdDSA",
    }


def encode(keys: Keys) -> bytes:
    """The ring as it is kept, private part included."""
    current, retired = keys.current, keys.retired
    seed = b64url(current.secret[:SEED_BYTES])
    rows: list[Json] = [{"x": current.x, "d": seed, "createdAt": current.created_at}]
    rows += [{"x": k.x, "createdAt": k.created_at, "retiredAt": k.retired_at} for k in retired]
    return json.dumps({"format": _FORMAT, "keys": rows}, indent=2).encode() + b"\n"


def decode(raw: bytes) -> Keys:
    """The ring that ``encode`` wrote.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError for anything else.
    """
    value = json.loads(raw)
    if value["format"] != _FORMAT:
        raise ValueError(f"format {value['format']!r}, not {_FORMAT}")
    first, *others = value["keys"]
    current = signing_key(_bytes32(first["d"]), _moment(first["createdAt"]))
    if current.x != first["x"]:
        raise ValueError("the current key's two halves do not belong together")
    return Keys(current, tuple(_retired_key(row) for row in others))


def _retired_key(row: Json) -> RetiredKey:
    x = b64url(_bytes32(row["x"]))
    return RetiredKey(thumbprint(x), x, _moment(row["createdAt"]), _moment(row["retiredAt"]))


def _bytes32(text: str) -> bytes:
    data = unb64url(text)
    if data is None or len(data) != SEED_BYTES:
        raise ValueError("a key is not 32 bytes in base64url")
    return data


def _moment(text: str) -> str:
    if parse_time(text) is None:
        raise ValueError("a time is not RFC 3339")
    return text
