"""An HTTP connection: aiohttp's handler of it, and the turns in which its bytes are read.

The only module that uses private attributes of aiohttp's connection. Each use gives its reason, and
tests/unit/test_connection.py names the attributes that a new aiohttp no longer has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias, cast

from aiohttp import web
from typing_extensions import override

from rpcsvc.errors import InvalidRequest

# How long work may begin without a new turn. What has begun is not interrupted.
TURN_SECONDS: Final = 0.05
# Most pieces of work that are tried in one turn: each that finds no time left costs a few us.
_MOST_TRIED: Final = 128
LINE_BYTES: Final = 8190
HEADERS: Final = 128
# How much of an unread body is still received, and for how long: a client that is still sending
# can read its answer only if the connection is not reset at once.
_LINGER_BYTES: Final = 1024 * 1024
LINGER_SECONDS: Final = 1.0

# Set on a request that only waits: its handler is cancelled when its caller hangs up.
ENDS_WITH_CALLER: Final = web.RequestKey("ends_with_caller", bool)

_Turn: TypeAlias = asyncio.Future[None]
_Queue: TypeAlias = deque[Callable[[], None]] | list[Callable[[], None]]


class Turns:
    """Admits work for TURN_SECONDS; the rest waits for later turns, and begins in its order.

    asyncio runs all that is ready before it looks at timers and sockets again: two hundred requests
    of 5 ms that arrive together would hold it for a second. ``now`` gives monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ends_at: float | None = None  # None until work begins
        self._waiting: deque[Callable[[], None]] = deque()
        self._untimely: list[Callable[[], None]] = []  # had their turn, but no time was left
        self._count = 0  # of all that waits
        self._is_called = False

    def has_room(self) -> bool:
        """Return whether work may begin now."""
        return not self._count and self._has_time()

    def wait(self, work: Callable[[], None]) -> bool:
        """Call ``work`` in a later turn, after what waits already. In an event loop.

        Return whether it is the first that waits: it is called before any socket is read.
        """
        self._count += 1
        self._waiting.append(partial(self._do, work))
        self._call()
        return self._count == 1

    async def take(self) -> None:
        """Return when there is room: at once, or in a later turn."""
        if self.has_room():
            return
        self._count += 1
        try:
            await self._turn(self._waiting)
            while not self._has_time():
                await self._turn(self._untimely)
        finally:
            self._count -= 1

    def _has_time(self) -> bool:
        now = self._now()
        if self._ends_at is None:
            self._ends_at = now + TURN_SECONDS
        return now < self._ends_at

    def _turn(self, queue: _Queue) -> _Turn:
        turn: _Turn = asyncio.get_running_loop().create_future()
        queue.append(partial(_wake, turn))
        self._call()
        return turn

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_called, self._ends_at = False, None
        self._waiting.extendleft(reversed(self._untimely))
        self._untimely.clear()
        try:
            for _ in range(min(len(self._waiting), _MOST_TRIED)):
                self._waiting.popleft()()
                if self._ends_at is not None and self._now() >= self._ends_at:
                    break
        finally:
            if self._waiting:
                self._call()

    def _do(self, work: Callable[[], None]) -> None:
        self._count -= 1
        self._has_time()  # which begins with this work, if it has not
        work()


def _wake(turn: _Turn) -> None:
    if not turn.done():
        turn.set_result(None)


Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse: TypeAlias = Callable[[web.Request, Exception], web.Response]


class HttpConnection(web.RequestHandler):
    """A connection whose unreadable requests and failed responses ``refuse`` answers.

    What it receives is read in its turn of ``turns``. Once a request is answered, at most
    _LINGER_BYTES of its unread body are received. ``stopping`` is set when the service stops.
    ``note_answer`` is called with each answer.
    """

    __slots__ = (
        "_answered", "_handled", "_has_asked", "_is_held", "_linger_bytes", "_refuse",
        "note_answer", "stopping", "turns",
    )  # fmt: skip

    def __init__(
        self,
        server: web.Server,
        refuse: Refuse,
        turns: Turns,
        stopping: asyncio.Event,
        **options: Any,
    ) -> None:
        super().__init__(server, lingering_time=LINGER_SECONDS, **options)
        self._refuse = refuse
        self.turns = turns
        self.stopping = stopping
        self.note_answer: Callable[[], None] = _note_nothing
        self._has_asked = False
        self._is_held = False
        self._linger_bytes: int | None = None
        self._handled: web.BaseRequest | None = None
        self._answered: web.BaseRequest | None = None

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        """The client disconnected: cancel a handler that only waits, let any other one finish."""
        request = self._handled or self._answered
        super().connection_lost(exc)
        if request is not None and ENDS_WITH_CALLER in request:
            request.task.cancel()

    def is_idle(self) -> bool:
        """Return whether no request is being read or answered; part of a head counts as idle."""
        # Private: aiohttp tells nobody that a whole head arrived and waits for its handler, and a
        # connection that is closed then loses a request.
        return self._waiter is not None and not self._messages and not self._is_held

    def has_asked(self) -> bool:
        """Return whether a request has begun to be handled, or was refused as unreadable."""
        return self._has_asked

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request of this connection by its handler, in a turn that has room."""
        self._has_asked, self._handled = True, request
        try:
            if not self.turns.has_room():
                await self.turns.take()
            response = await handler(request)
        finally:
            self._handled = None
        self.note_answer()
        return response

    @override
    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, and limit what is still received of its request's body."""
        self._has_asked = True  # also of a request that was unreadable
        self._linger_bytes = None if request.content.is_eof() else _LINGER_BYTES
        self._answered = request
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answered = None

    @override
    def close(self) -> None:
        """Take no further request; the body of the current one may still arrive.

        The edge closes the connection after its response when the service stops.
        """
        if not self._is_arriving():
            super().close()

    def _is_arriving(self) -> bool:
        """Return whether the body of the request that is handled is incomplete."""
        return self._handled is not None and not self._handled.content.is_eof()

    @override
    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client, in a turn that has room; until then no more are read."""
        # aiohttp passes nothing to have the rest of what it received parsed.
        if not data or self.transport is None or self.turns.has_room():
            self._receive(data)
        else:
            self._is_held = True
            if not self.turns.wait(partial(self._receive_held, data)):
                self.transport.pause_reading()

    def _receive_held(self, data: bytes) -> None:
        self._is_held = False
        if self.transport is None:
            return  # the client disconnected
        # Private: the handler of a request may have paused reading itself meanwhile, and only
        # aiohttp's own flow control knows it.
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
        # Private: once it shuts down, aiohttp drops all received bytes, the rest of a body that it
        # still waits for included. The flag is lowered while such bytes are received.
        ending, self._force_close = self._force_close, self._force_close and not self._is_arriving()
        super().data_received(data)
        self._force_close = ending or self._force_close

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to a request that aiohttp refuses; it closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of a response is sent already: none can follow it")
        error = _unreadable() if status == HTTPStatus.BAD_REQUEST else _fault(exc)
        response = self._refuse(cast("web.Request", request), error)
        response.force_close()
        return response


def connection_of(request: web.BaseRequest) -> HttpConnection:
    """Return the connection that a request came over."""
    return cast("HttpConnection", request.protocol)


def _note_nothing() -> None:
    """Note nothing."""


def _fault(error: BaseException | None) -> Exception:
    """The exception behind a 5xx; aiohttp does not give that of a handler that timed out."""
    return error if isinstance(error, Exception) else TimeoutError()


def _unreadable() -> InvalidRequest:
    """The answer to an unreadable request, in the same words for all causes."""
    return InvalidRequest(
        "The request can't be read as HTTP/1.1. Send a request line and headers of at most"
        f" {LINE_BYTES} bytes each, at most {HEADERS} headers, host, content-type and"
        " content-length once, and in path and query ASCII only: percent-encode the rest."
    )
