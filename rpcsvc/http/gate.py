"""The gate: who asks, over what, and whether they may. Nothing of a body is read here.

    Gate.admit     TLS rule of proxies, client address, request id, rate limit
    Gate.require_token   the RPC token, compared in constant time

What does not live here: the counting (limits.py), the answers (operation_routes.py, rpc_http.py).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

from aiohttp import web

from rpcsvc import ids
from rpcsvc.errors import RateLimited, TlsRequired, Unauthorized
from rpcsvc.http.limits import (
    RateLimiter,
    WrongTokens,
    client_address,
    client_key,
    rate_limit_headers,
)
from rpcsvc.ids import RandomBytes
from rpcsvc.operations.service import SOCKET
from rpcsvc.orders.unfunded import ADDRESS, Client
from rpcsvc.settings import Settings

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SOCKET_CLIENT = "unix"
_TOKEN_HEADER = "x-agent-rpc-token"  # noqa: S105 - its name, not a token
# What a budget counts, where its name is not the word for it.
_COUNTED = {"rpc": "JSON-RPC calls", "wrong-tokens": "calls without the right token"}
# Stands for a TCP client that has hung up already; no address of this machine, and nobody's.
_GONE = "0.0.0.0"  # noqa: S104 - nothing is bound to it
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-real-ip")


@dataclass(slots=True)
class Visitor:
    """A request that was let in. ``address`` is SOCKET_CLIENT on the UNIX socket.

    ``request_id`` is the caller's own, a generated one if that was not good, and None if it gave
    none. ``headers`` go onto the response.
    """

    address: str
    request_id: str | None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def client(self) -> Client:
        """Whose unfunded orders are counted, where no token or key names another."""
        if self.address == SOCKET_CLIENT:
            return SOCKET
        return Client(ADDRESS, client_key(self.address))

    @property
    def is_local(self) -> bool:
        """True for the UNIX socket and loopback."""
        return self.address == SOCKET_CLIENT or ipaddress.ip_address(self.address).is_loopback


# Where a request keeps its visitor once it was let in.
VISITOR = web.RequestKey("visitor", Visitor)


def is_request_id(text: str | None) -> TypeGuard[str]:
    """Whether a caller's text may stand as a request id."""
    return text is not None and _REQUEST_ID.fullmatch(text) is not None


def is_on_socket(request: web.Request) -> bool:
    """Whether a request came over the UNIX socket, by the socket's own family.

    A missing peer address proves nothing: a TCP client that has hung up has none any more.
    """
    transport = request.transport
    if transport is None or isinstance(transport.get_extra_info("peername"), tuple):
        return False  # host and port: no peer of a UNIX socket is called that
    connection = transport.get_extra_info("socket")
    return connection is not None and connection.family == socket.AF_UNIX


def _was_forwarded(request: web.Request) -> bool:
    """Whether a proxy passed the request on, so that loopback is the proxy's place and not its own.

    Holds for proxies that are not configured, or that don't say whom they speak for.
    """
    return any(name in request.headers for name in _FORWARDED)


def _came_over_tls(request: web.Request) -> bool:
    """Whether proxies say so, each of them: one that adds a line may follow the client's own."""
    lines = ",".join(request.headers.getall("x-forwarded-proto", ()))
    return all(protocol.strip().lower() == "https" for protocol in lines.split(","))


def given_request_id(request: web.Request) -> str | None:
    """The caller's own request id, if it gave a good one."""
    given = request.headers.get("x-request-id")
    return given if is_request_id(given) else None


class Gate:
    """Lets requests in."""

    def __init__(
        self, settings: Settings, random: RandomBytes, monotonic: Callable[[], float]
    ) -> None:
        limit = settings.rate_limit
        self._random = random
        self._trusted = settings.trusted_proxies
        self._tokens = tuple(
            token.get_secret_value().encode() for token in settings.agent_rpc_tokens
        )
        self._wrong_tokens = WrongTokens()
        self._limiters = (
            {
                name: RateLimiter(per_minute, now=monotonic, max_clients=limit.max_clients)
                for name, per_minute in (
                    ("orders", limit.orders_per_minute),
                    ("requests", limit.requests_per_minute),
                    ("rpc", limit.rpc_requests_per_minute),
                    ("wrong-tokens", limit.wrong_tokens_per_minute),
                )
            }
            if limit.enabled
            else {}
        )

    def admit(self, request: web.Request) -> Visitor:
        """Who asks. Raises TlsRequired."""
        return Visitor(self._address(request), self._request_id(request))

    def _request_id(self, request: web.Request) -> str | None:
        given = request.headers.get("x-request-id")
        return given if given is None or is_request_id(given) else self.new_request_id()

    def new_request_id(self) -> str:
        """A generated request id."""
        return ids.request_id(self._random)

    def charge(self, visitor: Visitor, budget: str, client: str | None = None) -> None:
        """Take one from a budget and note it in the headers. Raises RateLimited."""
        limiter = self._limiters.get(budget)
        if limiter is None:
            return
        verdict = limiter.take(client or client_key(visitor.address))
        visitor.headers.update(rate_limit_headers(budget, verdict))
        if not verdict.allowed:
            raise RateLimited(
                f"More than {verdict.limit} {_COUNTED.get(budget, budget)} a minute. Come back in"
                f" {verdict.retry_after} s.",
                details={"limit": verdict.limit, "windowSeconds": 60},
                retry_after=verdict.retry_after,
            )

    def require_token(self, request: web.Request, visitor: Visitor) -> bool:
        """True when a token let the request in, False when its place did. Raises Unauthorized."""
        if visitor.address == SOCKET_CLIENT:
            return False  # the socket's file mode is the gate
        if not self._tokens:
            if visitor.is_local and not _was_forwarded(request):
                return False
            raise Unauthorized(
                "No AGENT_RPC_TOKEN is set, so /rpc answers on loopback and the UNIX socket only.",
                header=_TOKEN_HEADER,
            )
        given = request.headers.get(_TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        # Every token is compared, so that the time tells nothing about which one came close.
        matches = [hmac.compare_digest(given, token) for token in self._tokens]
        if not any(matches):
            raise Unauthorized(
                f"Send the server's AGENT_RPC_TOKEN as header {_TOKEN_HEADER}.",
                header=_TOKEN_HEADER,
            )
        return True

    def note_wrong_token(self, visitor: Visitor) -> None:
        """Count a refused token, and charge its sender. Raises RateLimited.

        A right token is let in from any address: it can't be guessed, and somebody who guesses at
        the same address must not lock out its owner.
        """
        self._wrong_tokens.note(visitor.address)
        self.charge(visitor, "wrong-tokens")

    def is_insider(self, request: web.Request, visitor: Visitor) -> bool:
        """Whether the caller might call /rpc: by a token, the socket, or its place."""
        try:
            self.require_token(request, visitor)
        except Unauthorized:
            return False
        return True

    def _address(self, request: web.Request) -> str:
        if is_on_socket(request):
            return SOCKET_CLIENT
        peer = request.remote or _GONE
        return self._behind_proxies(request, peer) if self._trusted else peer

    def _behind_proxies(self, request: web.Request, peer: str) -> str:
        forwarded = ",".join(request.headers.getall("x-forwarded-for", ()))
        address = client_address(peer, forwarded or None, self._trusted)
        peer_ip = ipaddress.ip_address(peer)
        by_proxy = any(peer_ip in network for network in self._trusted)
        if request.secure or (by_proxy and _came_over_tls(request)):
            return address
        if peer_ip.is_loopback and not by_proxy:
            return address
        raise TlsRequired("This service is reached over HTTPS only.")
