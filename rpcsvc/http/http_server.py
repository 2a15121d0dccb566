"""Runs aiohttp's server within the edge, and limits its open TCP connections.

Connections are counted where they are accepted, before TLS. Requests that aiohttp can't read are
answered by the edge; tests/contract/test_unreadable_requests.py fails if a new aiohttp prevents it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.log import server_logger
from msgspec import Struct
from typing_extensions import override

from rpcsvc.domain.clients import ADDRESS, Client
from rpcsvc.http.connection import HEADERS, LINE_BYTES, HttpConnection, Turns, connection_of
from rpcsvc.http.edge import Edge
from rpcsvc.http.gate import client_key, is_trusted
from rpcsvc.logs import Occasional
from rpcsvc.settings_sources import Network

log = structlog.get_logger(__name__)

# Descriptors kept free of TCP clients: 128 for connections that are closing, 128 for the UNIX
# socket, the database and the nodes.
RESERVED_DESCRIPTORS: Final = 256
_MOST_DESCRIPTORS: Final = 65_536
_FEWEST_CONNECTIONS: Final = 16
# Refusals in a row after which accepting yields to the event loop.
_REFUSALS_AT_ONCE: Final = 128
HANDSHAKE_SECONDS: Final = 10.0
# From accepting a connection to the end of the head of its first request.
FIRST_HEAD_SECONDS: Final = 20.0
# How long a client may leave bytes of a response unread.
UNREAD_SECONDS: Final = 60.0
SWEEP_SECONDS: Final = 2.0
_LOG_SECONDS: Final = 60.0
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(Protocol):
    """The state of an HTTP connection that its limits depend on."""

    def is_idle(self) -> bool:
        """Return whether no request is being read or answered; part of a head counts as idle."""
        ...

    def has_asked(self) -> bool:
        """Return whether the head of a request was received."""
        ...


class _Open(Struct, eq=False):
    """An accepted connection. ``unread_since`` is when its client stopped reading."""

    socket: socket.socket
    holders: tuple[str, ...]
    accepted_at: float
    connection: Connection | None = None
    transport: asyncio.Transport | None = None
    unread_since: float | None = None
    is_ending: bool = False


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files up to the hard limit; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class Connections:
    """The open TCP connections of a server.

    At most ``most`` in all: a further one replaces the one that has been idle for longest. At
    most ``most_per_client`` of an address, or of an IPv6 /64, and half of all of an IPv6 /48, which
    may be one customer's. Proxies are not limited by address, since they carry many clients.
    ``now`` gives monotonic seconds.
    """

    def __init__(
        self,
        *,
        most: int,
        most_per_client: int,
        descriptors: int,
        proxies: Sequence[Network],
        now: Callable[[], float],
    ) -> None:
        self.most = max(_FEWEST_CONNECTIONS, min(most, descriptors - RESERVED_DESCRIPTORS))
        self._most_per_client = most_per_client
        self._proxies = proxies
        self._now = now
        # By descriptor; the one that was used last is at the end.
        self._open: dict[int, _Open] = {}
        self._of_holder: Counter[str] = Counter()
        self._ending = 0
        self._refused = 0
        self._logged_at = now()
        if self.most < most:
            log.warning("connections_limited", connections=self.most, descriptors=descriptors)

    def __len__(self) -> int:
        return len(self._open)

    def listen(self, family: int, address: Any) -> Listener:
        """A listening socket whose connections are counted here. Raises OSError."""
        listener = Listener(self, family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        return listener

    def admit(self, accepted: socket.socket, peer: str) -> socket.socket | None:
        """The accepted connection, counted from now on; None when it was refused and closed."""
        shares = self._shares(peer)
        has_share = all(self._of_holder[name] < most for name, most in shares.items())
        if not has_share or not self._make_room():
            self._refused += 1
            accepted.close()
            return None
        counted = _Counted(self, accepted)
        self._open[counted.fileno()] = _Open(counted, tuple(shares), self._now())
        self._of_holder.update(shares.keys())
        return counted

    def attach(self, connection: Connection, transport: asyncio.Transport) -> int | None:
        """Register the HTTP protocol of a connection; None for one that is not counted here."""
        descriptor: int = transport.get_extra_info("socket").fileno()
        known = self._open.get(descriptor)
        if known is None:
            return None
        known.connection, known.transport = connection, transport
        return descriptor

    def touch(self, descriptor: int) -> None:
        """Record that a connection was used."""
        known = self._open.pop(descriptor, None)
        if known is not None:
            self._open[descriptor] = known

    def forget(self, descriptor: int) -> None:
        """Stop counting a closed connection."""
        known = self._open.pop(descriptor, None)
        if known is None:
            return
        self._ending -= known.is_ending
        for name in known.holders:
            self._of_holder[name] -= 1
            if not self._of_holder[name]:
                del self._of_holder[name]

    async def watch(self) -> None:
        """End connections that send or read nothing, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """End connections that send or read nothing, and log how many were refused."""
        now = self._now()
        for known in list(self._open.values()):
            if not known.is_ending and self._is_overdue(known, now):
                self._end(known)
        if self._refused and now - self._logged_at >= _LOG_SECONDS:
            log.warning("connections_refused", count=self._refused, open=len(self._open))
            self._refused, self._logged_at = 0, now

    def _is_overdue(self, known: _Open, now: float) -> bool:
        if known.connection is None or known.transport is None:
            return now - known.accepted_at >= HANDSHAKE_SECONDS
        if known.transport.get_write_buffer_size() == 0:
            known.unread_since = None
        elif known.unread_since is None:
            known.unread_since = now
        elif now - known.unread_since >= UNREAD_SECONDS:
            return True
        return now - known.accepted_at >= FIRST_HEAD_SECONDS and not known.connection.has_asked()

    def _shares(self, peer: str) -> dict[str, int]:
        """The most connections of each address or network that a peer's are counted for."""
        if is_trusted(peer, self._proxies):
            return {}
        name = client_key(peer)
        return {Client(ADDRESS, name).customer.name: self.most // 2, name: self._most_per_client}

    def _make_room(self) -> bool:
        """Return whether one more connection fits, after closing an idle one if necessary."""
        if len(self._open) - self._ending < self.most:
            return True
        if self._ending >= _REFUSALS_AT_ONCE:
            return False
        for known in self._open.values():
            if not known.is_ending and known.connection is not None and known.connection.is_idle():
                self._end(known)
                return True
        return False

    def _end(self, known: _Open) -> None:
        known.is_ending = True
        self._ending += 1
        if known.transport is not None:
            known.transport.abort()
        else:  # in its TLS handshake: asyncio sees the end and closes it
            known.socket.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """A listening socket that accepts only the connections that are admitted."""

    def __init__(self, connections: Connections, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._connections = connections

    def accept(self) -> tuple[socket.socket, Any]:
        """The next admitted connection. Raises BlockingIOError when there is none."""
        for _ in range(_REFUSALS_AT_ONCE):
            accepted, address = super().accept()
            admitted = self._connections.admit(accepted, address[0])
            if admitted is not None:
                return admitted, address
        raise BlockingIOError


class _Counted(socket.socket):
    """An accepted connection that is counted until it is closed."""

    def __init__(self, connections: Connections, accepted: socket.socket) -> None:
        family, kind, protocol = accepted.family, accepted.type, accepted.proto
        super().__init__(family, kind, protocol, fileno=accepted.detach())
        self._connections = connections

    def close(self) -> None:
        """Close it, and stop counting it."""
        if self.fileno() >= 0:
            self._connections.forget(self.fileno())
        super().close()


class AcceptFailures:
    """An exception handler of the event loop: failures to accept are logged once a minute.

    asyncio reports each of them with a traceback, 128 in a row.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._failures = Occasional(now)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the event loop."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context):
            loop.default_exception_handler(context)
            return
        if count := self._failures.note("accept"):
            log.error("accept_failed", reason=error.strerror, count=count)


class _BadRequests(logging.Filter):
    """Leaves out what aiohttp logs of requests and bodies that are not HTTP.

    It quotes the request as it came, headers with tokens included. The edge answers it, and logs
    the refusal.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether aiohttp's own record is logged."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_BAD_REQUESTS: Final = _BadRequests()


class EdgeRunner(web.AppRunner):
    """Runs the routes of an edge within that edge. ``options`` are aiohttp's.

    ``connections`` counts those that its listeners accept.
    """

    def __init__(
        self,
        edge: Edge,
        *,
        connections: Connections | None = None,
        now: Callable[[], float] = time.monotonic,
        shutdown_timeout: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(edge.routes, shutdown_timeout=shutdown_timeout, **options)
        server_logger.addFilter(_BAD_REQUESTS)
        self._edge = edge
        self._connections = connections
        self._now = now
        self._options = options

    async def shutdown(self) -> None:
        """Signal the stop of the service to requests whose bodies are still arriving."""
        self._edge.stopping.set()
        await super().shutdown()

    async def _make_server(self) -> web.Server:
        routes = await super()._make_server()
        return _EdgeServer(routes, self._edge, self._connections, self._now, **self._options)


class _EdgeServer(web.Server):
    """Wraps the server ``routes`` in the edge, and uses its requests and handler."""

    def __init__(
        self,
        routes: web.Server,
        edge: Edge,
        connections: Connections | None,
        now: Callable[[], float],
        *,
        handler_cancellation: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            self._handle,  # type: ignore[arg-type] # it makes web.Request
            request_factory=routes.request_factory,
            handler_cancellation=handler_cancellation,
        )
        self._handler = edge.around(routes.request_handler)
        self._make = partial(HttpConnection, self, edge.refuse, Turns(now), edge.stopping)
        self._counted_by = connections
        self._options = {
            "max_headers": HEADERS,
            "max_line_size": LINE_BYTES,
            "max_field_size": LINE_BYTES,
            # Encoded bodies are refused (edge.py): unpacking one costs a thousand times its size.
            "auto_decompress": False,
            **options,
        }

    def __call__(self) -> web.RequestHandler:
        return self._make(loop=asyncio.get_running_loop(), **self._options)

    @override
    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count a connection that is open, its TLS handshake over."""
        super().connection_made(handler, transport)
        if self._counted_by is not None:
            connection = cast("HttpConnection", handler)
            descriptor = self._counted_by.attach(connection, transport)
            if descriptor is not None:
                connection.note_answer = partial(self._counted_by.touch, descriptor)

    def _handle(self, request: web.Request) -> Awaitable[web.StreamResponse]:
        return connection_of(request).handle(request, self._handler)
