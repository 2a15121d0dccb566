"""aiohttp's server inside the edge, so that the edge also answers unreadable requests.

What can't be read as a request is refused by aiohttp's connections themselves: no route is asked,
and their answer is plain text that names the software. Here they ask the edge instead.
tests/contract/test_unreadable_requests.py fails when a new aiohttp does not let them any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import web

from rpcsvc.errors import InvalidRequest
from rpcsvc.http.connections import Connections
from rpcsvc.http.edge import Edge

_LINE_BYTES: Final = 8190
_HEADERS: Final = 128
# How much of a body that nobody read is still taken, and for how long: a client that goes on
# sending reads its answer only if the connection is not reset at once.
_LINGER_BYTES: Final = 1024 * 1024
_LINGER_SECONDS: Final = 1.0

_Refuse = Callable[[web.Request, Exception], web.Response]


class EdgeRunner(web.AppRunner):
    """Runs the routes of an edge, with the edge around them. ``options`` are aiohttp's.

    ``connections`` knows those that are accepted by its listeners.
    """

    def __init__(
        self,
        edge: Edge,
        *,
        connections: Connections | None = None,
        shutdown_timeout: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(edge.routes, shutdown_timeout=shutdown_timeout, **options)
        self._edge = edge
        self._connections = connections
        self._options = options

    async def shutdown(self) -> None:
        """Let bodies that are still on their way hear that the service stops."""
        self._edge.stopping.set()
        await super().shutdown()

    async def _make_server(self) -> web.Server:
        routes = await super()._make_server()
        return _EdgeServer(routes, self._edge, self._connections, **self._options)


class _EdgeServer(web.Server):
    """A server whose requests are made and answered by another one, within the edge."""

    def __init__(
        self,
        routes: web.Server,
        edge: Edge,
        connections: Connections | None,
        *,
        handler_cancellation: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            edge.around(routes.request_handler),  # type: ignore[arg-type] # it makes web.Request
            request_factory=routes.request_factory,
            handler_cancellation=handler_cancellation,
        )
        self._refuse = edge.refuse
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
        return _Connection(self, self._refuse, self._counted_by, loop=loop, **self._options)


class _Connection(web.RequestHandler):
    """A connection that has the edge answer what can't be read, or failed on its way out.

    Of a body that is still unread when its request is answered, it takes _LINGER_BYTES more.
    """

    __slots__ = ("_connections", "_descriptor", "_linger_bytes", "_refuse")

    def __init__(
        self,
        server: web.Server,
        refuse: _Refuse,
        connections: Connections | None,
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self._refuse = refuse
        self._connections = connections
        self._descriptor: int | None = None
        self._linger_bytes: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open, and its TLS handshake over."""
        super().connection_made(transport)
        if self._connections is not None:
            self._descriptor = self._connections.attach(self, cast("asyncio.Transport", transport))

    def is_idle(self) -> bool:
        """Whether no request is being read or answered; part of a head counts as idle."""
        return self._waiter is not None and not self._messages

    def has_asked(self) -> bool:
        """Whether the head of a request came."""
        return self._request_count > 0

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; from then on the rest of its request's body counts as unread."""
        if self._connections is not None and self._descriptor is not None:
            self._connections.touch(self._descriptor)
        self._linger_bytes = None if request.content.is_eof() else _LINGER_BYTES
        return await super().finish_response(request, resp, start_time)

    def close(self) -> None:
        """Take no further request; the body of the one at hand may still arrive.

        Its response is the last one, for the edge says so when the service stops.
        """
        if not self._is_arriving():
            super().close()

    def _is_arriving(self) -> bool:
        """Whether the body of a request that is being handled is not whole yet."""
        request = self._current_request
        return request is not None and not request.content.is_eof()

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client, of an unread body only so many."""
        if self._linger_bytes is not None:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.force_close()
                return
        # aiohttp drops all that comes once it shuts down, the rest of a body included.
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
        """The response to what aiohttp refuses; it is the last one of the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of a response is sent already: none can follow it")
        error = _unreadable() if status == HTTPStatus.BAD_REQUEST else _fault(exc)
        response = self._refuse(cast("web.Request", request), error)
        response.force_close()
        return response


def _fault(error: BaseException | None) -> Exception:
    """What went wrong here; aiohttp does not give the exception of a handler that timed out."""
    return error if isinstance(error, Exception) else TimeoutError()


def _unreadable() -> InvalidRequest:
    """The answer to an unreadable request, in the same words for all causes."""
    return InvalidRequest(
        "The request can't be read as HTTP/1.1. Send a request line and headers of at most"
        f" {_LINE_BYTES} bytes each, at most {_HEADERS} headers, host, content-type and"
        " content-length once, and in path and query ASCII only: percent-encode the rest."
    )
