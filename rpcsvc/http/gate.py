"""Admits requests by client address, token and rate limit, before any body is read.

    Gate.admit           TLS rule of proxies, client address, request id
    Gate.charge          rate limit
    Gate.identify        the client that a token names, compared in constant time
    Gate.require_token   the same at /rpc, where only loopback and the socket need none

A rate limit is a GCRA (generic cell rate algorithm): one integer per client, the moment at which
its budget is full again. A client may spend a whole minute's budget at once and earns it back
evenly; no window edge lets it spend twice.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final, NamedTuple

import structlog
from aiohttp import web
from msgspec import Struct, field
from pydantic import SecretStr

from rpcsvc import ids
from rpcsvc.domain.clients import ADDRESS, SOCKET, Client, Clients, KnownClient
from rpcsvc.errors import MisdirectedRequest, RateLimited, ServiceError, TlsRequired, Unauthorized
from rpcsvc.ids import RandomBytes, is_request_id
from rpcsvc.settings import RateLimitSettings, Settings
from rpcsvc.settings_clients import MOST_CLIENTS

log = structlog.get_logger(__name__)
WINDOW_SECONDS: Final = 60
_NS_PER_SECOND: Final = 1_000_000_000
_WINDOW_NS: Final = WINDOW_SECONDS * _NS_PER_SECOND
# Forms of an address in X-Forwarded-For, besides a bare one: 1.2.3.4:80, [::1], [::1]:443.
_WITH_PORT: Final = re.compile(r"\[([^\]]+)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")

SOCKET_CLIENT = "unix"
RPC_TOKEN_HEADER: Final = "x-agent-rpc-token"  # noqa: S105 - a header's name (spec 5), not a token
# The calls that a budget counts, where its name does not say it.
_COUNTED = {"rpc": "JSON-RPC calls", "wrong-tokens": "calls without the right token"}
# Placeholder for a TCP client that has disconnected: not a loopback or client address.
_GONE = "0.0.0.0"  # noqa: S104 - nothing is bound to it


class RateLimitDecision(NamedTuple):
    """The limiter's decision on one request. Times are whole seconds from now, rounded up.

    ``limit`` and ``remaining`` are requests; ``reset_seconds`` is when the budget is full again;
    ``retry_after`` is when the refused request would be admitted, 0 if it was not refused.
    """

    allowed: bool
    limit: int
    remaining: int
    reset_seconds: int
    retry_after: int


class RateLimiter:
    """Admits up to ``per_minute`` requests a minute for each client, in constant time.

    ``now`` gives seconds and must never step back (time.monotonic). At most ``max_clients`` are
    remembered, at well under 500 bytes each; the one not seen for longest is forgotten first,
    and a refused request counts as seen.

    A forgotten client starts with a full budget. After a minute without requests its budget is
    full anyway. To be forgotten sooner takes ``max_clients`` requests within that minute, each
    from another address (another /64, see ``client_key``): whoever has so many addresses has as
    many budgets already, and gains nothing.
    """

    def __init__(self, per_minute: int, *, now: Callable[[], float], max_clients: int) -> None:
        if per_minute < 1 or max_clients < 1:
            raise ValueError(
                f"per_minute and max_clients must be at least 1, not {per_minute} and {max_clients}"
            )
        self.per_minute = per_minute
        self._now = now
        self._max_clients = max_clients
        # Time is counted in ticks of 1/per_minute ns: one request costs a whole number of them
        # (_WINDOW_NS), so that nothing is rounded.
        self._ticks_per_second = _NS_PER_SECOND * per_minute
        self._burst = _WINDOW_NS * per_minute
        self._full_at: OrderedDict[str, int] = OrderedDict()

    def take(self, client: str, cost: int = 1) -> RateLimitDecision:
        """Spend ``cost`` requests of ``client``'s budget, or refuse and spend nothing.

        A cost above the whole budget is refused however long the client waits.
        """
        now = int(self._now() * _NS_PER_SECOND) * self.per_minute
        clients = self._full_at
        debt = max(clients.get(client, 0) - now, 0)
        spent = debt + cost * _WINDOW_NS
        missing = spent - self._burst
        if missing <= 0:
            debt = spent
        clients[client] = now + debt
        clients.move_to_end(client)
        if len(clients) > self._max_clients:
            clients.popitem(last=False)
        return RateLimitDecision(
            missing <= 0,
            self.per_minute,
            (self._burst - debt) // _WINDOW_NS,
            -(-debt // self._ticks_per_second),
            -(-missing // self._ticks_per_second) if missing > 0 else 0,
        )


def rate_limit_headers(policy_name: str, verdict: RateLimitDecision) -> dict[str, str]:
    """The headers that show a client its budget, refused or not.

    They are structured fields (RFC 9651) of the IETF draft "RateLimit header fields for HTTP".
    ``policy_name`` is one of the service's own names: letters, digits and hyphens. The
    ``Retry-After`` of a refusal comes from its error (messages.py).
    """
    return {
        "RateLimit-Policy": f'"{policy_name}";q={verdict.limit};w={WINDOW_SECONDS}',
        "RateLimit": f'"{policy_name}";r={verdict.remaining};t={verdict.reset_seconds}',
    }


def client_key(address: str) -> str:
    """The name under which ``address`` is limited: an IPv4 address, or an IPv6 /64.

    One IPv6 customer is given a /64 at least, so the addresses in it are one client. IPv4 mapped
    into IPv6 is IPv4. What is no address (the peer of a UNIX socket) is returned as it came.
    """
    return _ipv6_key(address) if ":" in address else address


@lru_cache(maxsize=4096)
def _ipv6_key(address: str) -> str:
    parsed = _parse(address)
    if not isinstance(parsed, IPv6Address):
        return address if parsed is None else str(parsed)
    return str(IPv6Network((int(parsed) >> 64 << 64, 64)))


def address_prefix(address: str) -> str:
    """The network that an address is logged as: an IPv4 /24 or an IPv6 /48."""
    parsed = _parse(address)
    if parsed is None:
        return address
    return str(ip_network((parsed, 24 if parsed.version == 4 else 48), strict=False))


class WrongTokens:
    """Counts refused tokens by network, and logs them a minute after the first: one line each.

    The networks that sent most are logged, _LOGGED of them; _KEPT are counted.
    """

    PERIOD_SECONDS = 60.0
    _KEPT: Final = 1_000
    _LOGGED: Final = 20

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, address: str) -> None:
        """Count one more. In an event loop."""
        name = address_prefix(address)
        if not self._counts:
            asyncio.get_running_loop().call_later(self.PERIOD_SECONDS, self._log)
        if name in self._counts or len(self._counts) < self._KEPT:
            self._counts[name] += 1

    def _log(self) -> None:
        for name, count in self._counts.most_common(self._LOGGED):
            log.warning("wrong_tokens_refused", network=name, count=count)
        self._counts.clear()


def client_address(
    peer: str, forwarded_for: str | None, trusted: Sequence[IPv4Network | IPv6Network]
) -> str:
    """The address of the client behind ``peer``, in canonical form.

    ``X-Forwarded-For`` is used only if the peer is a ``trusted`` proxy, and only the part that
    trusted proxies wrote: from the right, the first address that is not one of them is the
    client. An entry that is no address ends the walk at the last good one. Several header lines
    are joined by commas, in order (RFC 9110, section 5.3).
    """
    hop = _parse(peer)
    if hop is None:
        return peer
    for entry in reversed(forwarded_for.split(",")) if forwarded_for else ():
        if not any(hop in network for network in trusted):
            break
        previous = _parse_entry(entry.strip())
        if previous is None:
            break
        hop = previous
    return str(hop)


def is_trusted(peer: str, trusted: Sequence[IPv4Network | IPv6Network]) -> bool:
    """Return whether a peer is a trusted proxy."""
    address = _parse(peer)
    return address is not None and any(address in network for network in trusted)


def _parse_entry(entry: str) -> IPv4Address | IPv6Address | None:
    match = _WITH_PORT.fullmatch(entry)
    return _parse(match[1] or match[2] if match else entry)


def _parse(address: str) -> IPv4Address | IPv6Address | None:
    """``address`` without its zone, as IPv4 if it is IPv4 mapped; None if it is no address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed


# Headers that proxies add to a request; any of them will do.
_FORWARDED = frozenset({
    "forwarded", "via", "x-forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port",
    "x-forwarded-proto", "x-forwarded-server", "x-client-ip", "x-real-ip", "true-client-ip",
    "cf-connecting-ip",
})  # fmt: skip


class Caller(Struct):
    """An admitted request, while it is answered.

    ``address`` is SOCKET_CLIENT on the UNIX socket. ``given_id`` is the caller's own request id, a
    generated one if that is malformed, None if it sent none. ``given`` are the headers that came,
    ``headers`` those that go onto the response. ``known``: the client that its token names.

    Each call of a JSON-RPC batch has its own request id; ``calls`` counts them. ``error`` is the
    last one that a JSON-RPC answer reports.
    """

    address: str
    given_id: str | None
    new_request_id: Callable[[], str]
    given: Mapping[str, str] = {}
    headers: dict[str, str] = field(default_factory=dict)
    known: KnownClient | None = None
    calls: int = 0
    error: ServiceError | None = None
    _made_id: str | None = None
    _last_id: str | None = None

    @property
    def budget(self) -> str | None:
        """The budget to charge: a client's, the socket's, or (None) the client address's."""
        if self.known is not None:
            return self.known.account
        return SOCKET_CLIENT if self.address == SOCKET_CLIENT else None

    @property
    def namespace(self) -> str:
        """The namespace of the caller's idempotency keys."""
        return "public" if self.known is None else self.known.namespace

    @property
    def client(self) -> Client:
        """The client whose unfunded orders count, unless an integrator's key names another."""
        if self.known is not None:
            return self.known.client
        if self.address == SOCKET_CLIENT:
            return SOCKET
        return Client(ADDRESS, client_key(self.address))

    @property
    def is_local(self) -> bool:
        """True for the UNIX socket and loopback."""
        return self.address == SOCKET_CLIENT or ipaddress.ip_address(self.address).is_loopback

    @property
    def request_id(self) -> str:
        """The request id of the whole exchange, for the response header."""
        return self.given_id or self._last_id or self._own_id()

    @property
    def batch_request_id(self) -> str:
        """The request id of a batch, whose calls have request ids of their own."""
        return self.given_id or self.new_request_id()

    def request_id_for(self, hint: str | None) -> str:
        """The header's request id, else the JSON-RPC id if it is a valid one, else a new one."""
        if self.given_id is not None:
            return self.given_id
        self._last_id = hint if is_request_id(hint) else self._own_id()
        return self._last_id

    def _own_id(self) -> str:
        if self._made_id is None:
            self._made_id = self.new_request_id()
        return self._made_id


# Where an admitted request keeps its caller.
CALLER = web.RequestKey("caller", Caller)


def is_on_socket(request: web.Request) -> bool:
    """Return whether a request came over the UNIX socket, by the socket's own family.

    A missing peer address does not show it: a TCP client that disconnected has none either.
    """
    transport = request.transport
    if transport is None or isinstance(transport.get_extra_info("peername"), tuple):
        return False  # host and port: a peer of a UNIX socket has neither
    connection = transport.get_extra_info("socket")
    return connection is not None and connection.family == socket.AF_UNIX


def require_no_proxy(request: web.Request) -> None:
    """Raise MisdirectedRequest for what a proxy passes on to the UNIX socket, which trusts all."""
    if _was_forwarded(request):
        raise MisdirectedRequest(
            "A proxy passes this on to the UNIX socket, which is for processes of this machine"
            " alone. Its operator has to point the proxy at the TCP port."
        )


def _was_forwarded(request: web.Request) -> bool:
    """Return whether a proxy forwarded the request; its loopback peer is then not the caller."""
    return not _FORWARDED.isdisjoint(map(str.lower, request.headers))


def _came_over_tls(request: web.Request) -> bool:
    """Return whether every X-Forwarded-Proto is https: the client may have sent the first."""
    lines = ",".join(request.headers.getall("x-forwarded-proto", ()))
    return all(protocol.strip().lower() == "https" for protocol in lines.split(","))


def given_request_id(request: web.Request) -> str | None:
    """The caller's own request id, None if it is missing or malformed."""
    given = request.headers.get("x-request-id")
    return given if is_request_id(given) else None


def _given_token(request: web.Request) -> str | None:
    """The token of a request, in the header of /rpc or as a bearer token; None without one."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    by_bearer = bearer.strip() if scheme.lower() == "bearer" else None
    return request.headers.get(RPC_TOKEN_HEADER) or by_bearer


def _encoded(tokens: Sequence[SecretStr]) -> tuple[bytes, ...]:
    return tuple(token.get_secret_value().encode() for token in tokens)


def _is_one_of(tokens: Sequence[bytes], text: str) -> bool:
    given = text.encode("utf-8", "surrogateescape")
    # Compare every token, so that timing does not reveal which one came close.
    matches = [hmac.compare_digest(given, token) for token in tokens]
    return any(matches)


def _require_of_house(known: KnownClient | None) -> None:
    """Raise Unauthorized for a client with a table of the settings."""
    if known is not None and not known.is_default:
        raise Unauthorized(
            "A client's token opens no metrics. Send a metrics_token of the server, or its"
            " AGENT_RPC_TOKEN.",
            header=RPC_TOKEN_HEADER,
        )


def _take(limiter: RateLimiter, caller: Caller, budget: str) -> None:
    """Take one request of a budget, and set its headers. Raises RateLimited."""
    verdict = limiter.take(caller.budget or client_key(caller.address))
    caller.headers.update(rate_limit_headers(budget, verdict))
    if not verdict.allowed:
        raise RateLimited(
            f"More than {verdict.limit} {_COUNTED.get(budget, budget)} a minute. Come back in"
            f" {verdict.retry_after} s.",
            details={"limit": verdict.limit, "windowSeconds": 60},
            retry_after=verdict.retry_after,
        )


class Gate:
    """Admits requests by address, token and budget."""

    def __init__(
        self,
        settings: Settings,
        clients: Clients,
        random: RandomBytes,
        monotonic: Callable[[], float],
    ) -> None:
        self._random = random
        self._monotonic = monotonic
        self._trusted = settings.trusted_proxies
        self._clients = clients
        self._metrics_tokens = _encoded(settings.telemetry.metrics_token)
        self._wrong_tokens = WrongTokens()
        self._limiters: dict[str, RateLimiter] = {}
        self.follow(settings.rate_limit)
        # Of clients with a limit of their own, by that limit: one that is set again starts full.
        self._client_orders: dict[int, RateLimiter] = {}

    def follow(self, limit: RateLimitSettings) -> None:
        """Replace the limits. A budget whose limit has changed starts full."""
        if not limit.enabled:
            return
        for name, per_minute in (
            ("orders", limit.orders_per_minute),
            ("requests", limit.requests_per_minute),
            ("rpc", limit.rpc_requests_per_minute),
            ("wrong-tokens", limit.wrong_tokens_per_minute),
        ):
            kept = self._limiters.get(name)
            if kept is None or kept.per_minute != per_minute:
                self._limiters[name] = RateLimiter(
                    per_minute, now=self._monotonic, max_clients=limit.max_clients
                )

    def admit(self, request: web.Request) -> Caller:
        """The caller of a request. Raises TlsRequired."""
        given_id = self._request_id(request)
        return Caller(self._address(request), given_id, self.new_request_id, request.headers)

    def unknown(self, request: web.Request) -> Caller:
        """The caller of a request that is not admitted."""
        return Caller("", given_request_id(request), self.new_request_id)

    def _request_id(self, request: web.Request) -> str | None:
        given = request.headers.get("x-request-id")
        return given if given is None or is_request_id(given) else self.new_request_id()

    def new_request_id(self) -> str:
        """A generated request id."""
        return ids.request_id(self._random)

    def charge(self, caller: Caller, budget: str) -> None:
        """Charge one request to a budget, and set its headers. Raises RateLimited."""
        limiter = self._limiters.get(budget)
        if limiter is None:
            return
        _take(limiter, caller, budget)

    def charge_order(self, caller: Caller) -> None:
        """Charge one call that may make an order to the client's own budget of orders.

        Each call of a batch is one. Raises RateLimited.
        """
        known = caller.known
        if known is None or known.orders_per_minute is None:
            return
        per_minute = known.orders_per_minute
        limiter = self._client_orders.get(per_minute)
        if limiter is None:
            limiter = RateLimiter(per_minute, now=self._monotonic, max_clients=MOST_CLIENTS)
            self._client_orders[per_minute] = limiter
        _take(limiter, caller, "orders")

    @property
    def has_tokens(self) -> bool:
        """Whether any token names a client."""
        return self._clients.has_tokens

    def identify(self, request: web.Request, caller: Caller) -> None:
        """Read the client off the token, if one came. Raises Unauthorized and RateLimited.

        A wrong token is refused where none is needed, too: its owner would go on without limits, in
        the namespace of keys that all callers share.
        """
        try:
            caller.known = self.optional_token(request)
        except Unauthorized:
            self.note_wrong_token(caller)
            raise

    def require_token(self, request: web.Request, caller: Caller) -> KnownClient | None:
        """The client whose token admits the request, None if its origin does.

        Raises Unauthorized.
        """
        if caller.address == SOCKET_CLIENT:
            return None  # the socket's file mode controls access
        if not self._clients.has_tokens:
            if caller.is_local and not _was_forwarded(request):
                return None
            raise Unauthorized(
                "No AGENT_RPC_TOKEN is set, so /rpc answers on loopback and the UNIX socket only.",
                header=RPC_TOKEN_HEADER,
            )
        known = self._clients.find(request.headers.get(RPC_TOKEN_HEADER, ""))
        if known is None:
            raise Unauthorized(
                "Send the server's AGENT_RPC_TOKEN, or the token of a client, as header"
                f" {RPC_TOKEN_HEADER}.",
                header=RPC_TOKEN_HEADER,
            )
        return known

    def optional_token(self, request: web.Request) -> KnownClient | None:
        """The client that the token of a request names, None without one. Raises Unauthorized.

        It may be in the header of /rpc or a bearer token (RFC 6750, section 2.1).
        """
        given = _given_token(request)
        if given is None:
            return None
        known = self._clients.find(given)
        if known is None:
            raise Unauthorized(
                "This token is neither the server's AGENT_RPC_TOKEN nor a client's. Send one of"
                " these, or none: without a token the limits of the public surface hold.",
                header=RPC_TOKEN_HEADER,
            )
        return known

    def require_scraper(self, request: web.Request, caller: Caller) -> None:
        """Raise Unauthorized unless a token, of metrics or /rpc, or its origin admits a scraper.

        Prometheus sends its token as a bearer token. Clients with a table of the settings see no
        metrics: these tell what the wallets hold.
        """
        if _is_one_of(self._metrics_tokens, _given_token(request) or ""):
            return
        try:
            _require_of_house(self.optional_token(request) or self.require_token(request, caller))
        except Unauthorized:
            self.note_wrong_token(caller)
            raise

    def note_wrong_token(self, caller: Caller) -> None:
        """Count a refused token, and charge its sender. Raises RateLimited.

        A valid token is admitted from any address: wrong guesses from the same address must not
        lock out its owner.
        """
        self._wrong_tokens.note(caller.address)
        self.charge(caller, "wrong-tokens")

    def is_insider(self, request: web.Request, caller: Caller) -> bool:
        """Return whether the caller is of the house: by the AGENT_RPC_TOKEN, over the socket, or
        from loopback where /rpc needs no token.

        Raises RateLimited after too many wrong tokens.
        """
        try:
            known = self.require_token(request, caller)
        except Unauthorized:
            if RPC_TOKEN_HEADER in request.headers:
                self.note_wrong_token(caller)
            return False
        return known is None or known.is_default

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
