"""Integrators: third parties that bring orders over the BFF with an API key, and their fee.

Only the SHA-256 of a key is configured; a key of 128 random bits or more needs no slower hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from msgspec import Struct

MOST_BPS = 1_000

_FORM = re.compile(
    r"(?P<id>[a-z][a-z0-9-]{0,31}):(?P<whole>[0-9]{1,2})(?:\.(?P<part>[0-9]{1,2}))?"
    r":(?P<hash>[0-9a-f]{64})",
    re.ASCII,
)
_ALLOWED = (
    '"<id>:<percent>:<SHA-256 of the key in hex>", such as "acme:0.5:9f86...", with an id of a-z,'
    " 0-9 and -, and a percent of 0 to 10 with at most two decimals"
)
# Namespaces of idempotency keys that belong to others.
_TAKEN = frozenset({"public", "rpc"})


class Integrator(Struct, frozen=True):
    """``fee_bps`` in 1/10,000 of the output; ``key_hash`` is the SHA-256 of the API key."""

    id: str
    fee_bps: int
    key_hash: bytes

    def __str__(self) -> str:
        whole, part = divmod(self.fee_bps, 100)
        return f"{self.id}:{whole}.{part:02}:{self.key_hash.hex()}"


def parse_integrator(text: str) -> Integrator:
    """An integrator as the settings write it. Raises ValueError saying what is allowed."""
    match = _FORM.fullmatch(text)
    if match is None or match["id"] in _TAKEN:
        raise ValueError(_ALLOWED)
    bps = int(match["whole"]) * 100 + int((match["part"] or "").ljust(2, "0"))
    if bps > MOST_BPS:
        raise ValueError(_ALLOWED)
    return Integrator(match["id"], bps, bytes.fromhex(match["hash"]))


def parse_integrators(texts: Iterable[str]) -> tuple[Integrator, ...]:
    """Return all integrators. Raises ValueError when two have the same id or key."""
    found = tuple(parse_integrator(text) for text in texts)
    if len({i.id for i in found}) < len(found) or len({i.key_hash for i in found}) < len(found):
        raise ValueError(f"each id and each key once; {_ALLOWED}")
    return found


def key_hash(key: str) -> bytes:
    """The SHA-256 of a key, which is configured in its place."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Integrators:
    """Finds an integrator by key."""

    def __init__(self, integrators: Iterable[Integrator]) -> None:
        self._integrators = tuple(integrators)

    def find(self, key: str) -> Integrator | None:
        """The integrator with that key. All hashes are compared, so timing reveals nothing."""
        given = key_hash(key)
        matches = [i for i in self._integrators if hmac.compare_digest(given, i.key_hash)]
        return matches[0] if matches else None
