"""Who is calling, and how often they may: client addresses, rate limiting, and its headers.

The budget is a GCRA (generic cell rate algorithm): one integer per client, the moment at which its
budget will be whole again. A client may spend a whole minute's budget at once and earns it back
evenly; no window edge lets it spend twice.

What does not live here: which surface has which budget (settings and the HTTP layer), and the
error that a refused caller gets (errors.RateLimited, worded by the HTTP layer).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
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

log = structlog.get_logger(__name__)

WINDOW_SECONDS: Final = 60
_NS_PER_SECOND: Final = 1_000_000_000
_WINDOW_NS: Final = WINDOW_SECONDS * _NS_PER_SECOND

# What proxies write into X-Forwarded-For beside a bare address: 1.2.3.4:80, [::1], [::1]:443.
_WITH_PORT: Final = re.compile(r"\[([^\]]+)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")


class Verdict(NamedTuple):
    """What the limiter says to one request. Times are whole seconds from now, rounded up.

    ``limit`` and ``remaining`` are requests; ``reset_seconds`` is when the budget is whole again;
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

    The trade: a forgotten client starts with a whole budget. One not seen for a minute loses
    nothing by it, since its budget is whole by then. To have a limited client forgotten sooner
    takes ``max_clients`` requests, each from another address (another /64, see ``client_key``)
    and all within that minute; whoever owns so many addresses has as many budgets already, so
    forgetting gives nothing that could not be had for less.
    """

    def __init__(self, per_minute: int, *, now: Callable[[], float], max_clients: int) -> None:
        if per_minute < 1 or max_clients < 1:
            raise ValueError(
                f"per_minute and max_clients must be at least 1, not {per_minute} and {max_clients}"
            )
        self._limit = per_minute
        self._now = now
        self._max_clients = max_clients
        # Time is counted in ticks of 1/per_minute ns: one request costs a whole number of them
        # (_WINDOW_NS), so that nothing is ever rounded in anyone's favour.
        self._ticks_per_second = _NS_PER_SECOND * per_minute
        self._burst = _WINDOW_NS * per_minute
        self._whole_again: OrderedDict[str, int] = OrderedDict()

    def take(self, client: str, cost: int = 1) -> Verdict:
        """Spend ``cost`` requests of ``client``'s budget, or refuse and spend nothing.

        A cost above the whole budget is refused however long the client waits.
        """
        now = int(self._now() * _NS_PER_SECOND) * self._limit
        clients = self._whole_again
        debt = max(clients.get(client, 0) - now, 0)
        spent = debt + cost * _WINDOW_NS
        missing = spent - self._burst
        if missing <= 0:
            debt = spent
        clients[client] = now + debt
        clients.move_to_end(client)
        if len(clients) > self._max_clients:
            clients.popitem(last=False)
        return Verdict(
            missing <= 0,
            self._limit,
            (self._burst - debt) // _WINDOW_NS,
            -(-debt // self._ticks_per_second),
            -(-missing // self._ticks_per_second) if missing > 0 else 0,
        )


def rate_limit_headers(policy_name: str, verdict: Verdict) -> dict[str, str]:
    """The headers that tell a client its budget, refused or not.

    They are structured fields (RFC 9651) of the IETF draft "RateLimit header fields for HTTP".
    ``policy_name`` is one of the service's own names: letters, digits and hyphens. The
    ``Retry-After`` of a refusal comes from its error, as that of any other (messages.py).
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

    Only the networks that sent most are logged, and only so many are kept.
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
            log.warning("wrong_tokens", network=name, count=count)
        self._counts.clear()


def client_address(
    peer: str, forwarded_for: str | None, trusted: Sequence[IPv4Network | IPv6Network]
) -> str:
    """The address of the client behind ``peer``, in canonical form.

    ``X-Forwarded-For`` is believed only when the peer is a ``trusted`` proxy, and only as far as
    trusted proxies wrote it: from the right, the first address that is not one of them is the
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
    """Whether a peer is one of the trusted proxies."""
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
