"""Session ids derived from one secret: a client that lost its state finds its orders by them.

A session is handed out only if fewer than GAP before it have no order, so a search ends at a gap.
"""

from __future__ import annotations

import hmac
import re
import secrets
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rpcsvc.client.errors import Unreachable

Json = dict[str, Any]
# Takes the params of swap.list and returns its data.
Ask = Callable[[Json], Awaitable[Json]]

GAP: Final = 20
_LABEL: Final = "rpcsvc session"
_DEFAULT_PORT: Final = re.compile(r"\A(http://[^/]+):80(?=/|\Z)|\A(https://[^/]+):443(?=/|\Z)")
_BYTES: Final = 32
# Random bytes have so few distinct values once in 10**16 times; typed and repeated ones often do.
_LEAST_DISTINCT: Final = 16
_PAGE: Final = 100
# A search gives up after these: a service may list orders endlessly.
MOST_PAGES: Final = 100_000
MOST_ORDERS: Final = 100_000


class BadSecret(ValueError):
    """The text is no secret that sessions may be derived from."""


def new_secret() -> str:
    """A new secret: 32 random bytes as 64 hex digits."""
    return secrets.token_hex(_BYTES)


def read_secret(text: str) -> bytes:
    """The bytes of a secret. Raises BadSecret, whose message does not repeat it."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise BadSecret(
            f"The secret must be {2 * _BYTES} hex digits in lower case, not {len(text)} characters"
            " of another form: a password can be guessed. Make one with: openssl rand -hex 32"
        )
    secret = bytes.fromhex(text)
    if len(set(secret)) < _LEAST_DISTINCT:
        raise BadSecret("The secret is not random. Make one with: openssl rand -hex 32")
    return secret


def session_of(secret: bytes, issuer: str, index: int) -> str:
    """The session with a number, from 0: a UUID v4 (RFC 9562) of an HMAC-SHA256.

    The issuer is part of it, so that no service learns the sessions of another one.
    """
    site = _DEFAULT_PORT.sub(r"\1\2", issuer.rstrip("/").lower())
    digest = hmac.digest(secret, f"{_LABEL}\n{site}\n{index}".encode(), "sha256")
    return str(uuid.UUID(bytes=digest[:16], version=4))


class Sessions:
    """The sessions of one secret at one service.

    ``used`` counts them up to the last one known to have an order. Several clients may share a
    secret: at worst two orders have one session.
    """

    def __init__(self, secret: str, issuer: str) -> None:
        self._secret = read_secret(secret)
        self.issuer = issuer
        self._derived: list[str] = []
        self._next = 0
        self.used = 0

    def take(self) -> str:
        """The next session; after GAP without an order, the first of these again."""
        if not self.used <= self._next < self.used + GAP:
            self._next = self.used
        self._next += 1
        return self._session(self._next - 1)

    def note_order(self, session: str, most: int = 0) -> bool:
        """Note that a session has an order; returns whether it is one of this secret.

        Searched are those that may have been handed out, and at least ``most``.
        """
        for index in range(max(self.used + GAP, most)):
            if self._session(index) == session:
                self.used = max(self.used, index + 1)
                return True
        return False

    def includes(self, session: str) -> bool:
        """Return whether a session may have been handed out."""
        return any(self._session(index) == session for index in range(self.used + GAP))

    async def search(self, ask: Ask) -> list[Json]:
        """All orders, each with its ``sessionId``; session by session until GAP have none.

        Raises Unreachable for a service that lists no orders, or more than MOST_ORDERS.
        """
        found: list[Json] = []
        cursor: Json = {}
        index, used = 0, 0
        for _ in range(MOST_PAGES):
            session = self._session(index)
            listed, after = _page(await ask({"sessionId": session, "limit": _PAGE, **cursor}))
            found += [{**order, "sessionId": session} for order in listed]
            if len(found) > MOST_ORDERS:
                raise Unreachable(f"The service lists more than {MOST_ORDERS} orders of a secret.")
            used = index + 1 if listed else used
            cursor = {} if after is None else {"after": after}
            if after is None:
                index += 1
            if index >= used + GAP:
                self.used = used  # fewer than before, if the service lost orders
                return found
        raise Unreachable(f"The service has sent {MOST_PAGES} pages of orders, and sends more.")

    def _session(self, index: int) -> str:
        while len(self._derived) <= index:
            self._derived.append(session_of(self._secret, self.issuer, len(self._derived)))
        return self._derived[index]


def _page(data: Json) -> tuple[list[Json], str | None]:
    match data:
        case {"orders": list(orders), "nextAfter": None | str() as after}:
            if len(orders) > _PAGE:
                raise Unreachable(f"The service lists {len(orders)} orders a page, not {_PAGE}.")
            if all(isinstance(order, dict) for order in orders):
                return orders, after
    raise Unreachable("The service answers swap.list without a list of orders.")
