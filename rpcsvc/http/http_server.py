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
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.log import server_logger
from msgspec import Struct

from rpcsvc.domain.reservations import ADDRESS, Client
from rpcsvc.errors import InvalidRequest
from rpcsvc.http.edge import Edge
from rpcsvc.http.gate import client_key, is_trusted
from rpcsvc.http.messages import ENDS_WITH_CALLER, TURNS, Handler
from rpcsvc.http.turns import Turns
from rpcsvc.logs import Occasional
from rpcsvc.settings_sources import Network

log = structlog.get_logger(__name__)

# Descriptors kept free of TCP clients: 128 for connections that are closing, 128 for the UNIX
# socket, the database and the nodes.
RESERVED_DESCRIPTORS: Final = 256
_MOST_DESCRIPTORS: Final = 65_536
_FEWEST_CONNECTIONS: Final = 16
# After so many refusals in a row, accepting yields to the event loop.
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
        """Whether no request is being read or answered; part of a head counts as idle."""
        ...

    def has_asked(self) -> bool:
        """Whether the head of a request was received."""
        ...


class _Open(Struct, eq=False):
    """One accepted connection. ``unread_since`` is when its client stopped reading."""

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
        """Whether one more connection fits, after closing an idle one if necessary."""
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


_LINE_BYTES: Final = 8190
_HEADERS: Final = 128
# How much of an unread body is still received, and for how long: a client that is still sending
# can read its answer only if the connection is not reset at once.
_LINGER_BYTES: Final = 1024 * 1024
_LINGER_SECONDS: Final = 1.0

_Refuse = Callable[[web.Request, Exception], web.Response]


class _BadRequests(logging.Filter):
    """Leaves out what aiohttp logs of requests and bodies that are not HTTP.

    It quotes the request as it came, headers with tokens included. The edge answers it, and logs
    the refusal.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether aiohttp's own record is logged."""
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
        turns = Turns(now)
        handler = edge.around(routes.request_handler)
        super().__init__(
            _in_turns(handler, turns),  # type: ignore[arg-type] # it makes web.Request
            request_factory=routes.request_factory,
            handler_cancellation=handler_cancellation,
        )
        self._refuse = edge.refuse
        self._turns = turns
        self._counted_by = connections
        self._options = {
            "max_headers": _HEADERS,
            "max_line_size": _LINE_BYTES,
            "max_field_size": _LINE_BYTES,
            "lingering_time": _LINGER_SECONDS,
            # Encoded bodies are refused (edge.py): unpacking one costs a thousand times its size.
            "auto_decompress": False,
            **options,
        }

    def __call__(self) -> web.RequestHandler:
        loop = asyncio.get_running_loop()
        return _Connection(
            self, self._refuse, self._turns, self._counted_by, loop=loop, **self._options
        )


def _in_turns(handler: Handler, turns: Turns) -> Handler:
    """The handler, called for each request in a turn of the loop that has room."""

    async def handle(request: web.Request) -> web.StreamResponse:
        request[TURNS] = turns
        await turns.take()
        return await handler(request)

    return handle


class _Connection(web.RequestHandler):
    """A connection whose unreadable requests and failed responses the edge answers.

    What it receives is read in its turn of ``turns``. Once a request is answered, at most
    _LINGER_BYTES of its unread body are received.
    """

    __slots__ = (
        "_answered", "_connections", "_descriptor", "_is_held", "_linger_bytes", "_refuse",
        "_turns",
    )  # fmt: skip

    def __init__(
        self,
        server: web.Server,
        refuse: _Refuse,
        turns: Turns,
        connections: Connections | None,
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self._refuse = refuse
        self._turns = turns
        self._is_held = False
        self._connections = connections
        self._descriptor: int | None = None
        self._linger_bytes: int | None = None
        self._answered: web.BaseRequest | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open, and its TLS handshake over."""
        super().connection_made(transport)
        if self._connections is not None:
            self._descriptor = self._connections.attach(self, cast("asyncio.Transport", transport))

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client disconnected: cancel a handler that only waits, let any other one finish."""
        request, handler = self._current_request or self._answered, self._task_handler
        super().connection_lost(exc)
        if handler is not None and request is not None and ENDS_WITH_CALLER in request:
            handler.cancel()

    def is_idle(self) -> bool:
        """Whether no request is being read or answered; part of a head counts as idle."""
        return self._waiter is not None and not self._messages and not self._is_held

    def has_asked(self) -> bool:
        """Whether the head of a request was received."""
        return self._request_count > 0

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, and limit what is still received of its request's body."""
        if self._connections is not None and self._descriptor is not None:
            self._connections.touch(self._descriptor)
        self._linger_bytes = None if request.content.is_eof() else _LINGER_BYTES
        self._answered = request
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answered = None

    def close(self) -> None:
        """Take no further request; the body of the current one may still arrive.

        The edge closes the connection after its response when the service stops.
        """
        if not self._is_arriving():
            super().close()

    def _is_arriving(self) -> bool:
        """Whether the body of the current request is incomplete."""
        request = self._current_request
        return request is not None and not request.content.is_eof()

    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client, in a turn that has room; until then no more are read."""
        # aiohttp passes nothing to have the rest of what it received parsed.
        if not data or self.transport is None or self._turns.has_room():
            self._receive(data)
        else:
            self._is_held = True
            self.transport.pause_reading()
            self._turns.wait(partial(self._receive_held, data))

    def _receive_held(self, data: bytes) -> None:
        self._is_held = False
        if self.transport is None:
            return  # the client disconnected
        if not self._reading_paused:
            self.transport.resume_reading()
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Receive bytes from the client; close after _LINGER_BYTES of an unread body."""
        if self._linger_bytes is not None:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.force_close()
                return
        # Once it shuts down, aiohttp drops all received bytes, the rest of a body included.
        ending, self._force_close = self._force_close, self._force_close and not self._is_arriving()
        super().data_received(data)
        self._force_close = ending or self._force_close

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's own words, which name its parts
    ) -> web.StreamResponse:
        """The response to a request that aiohttp refuses; it closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of a response is sent already: none can follow it")
        error = _unreadable() if status == HTTPStatus.BAD_REQUEST else _fault(exc)
        response = self._refuse(cast("web.Request", request), error)
        response.force_close()
        return response


def _fault(error: BaseException | None) -> Exception:
    """The exception behind a 5xx; aiohttp does not give that of a handler that timed out."""
    return error if isinstance(error, Exception) else TimeoutError()


def _unreadable() -> InvalidRequest:
    """The answer to an unreadable request, in the same words for all causes."""
    return InvalidRequest(
        "The request can't be read as HTTP/1.1. Send a request line and headers of at most"
        f" {_LINE_BYTES} bytes each, at most {_HEADERS} headers, host, content-type and"
        " content-length once, and in path and query ASCII only: percent-encode the rest."
    )
