"""aiohttp's server with the edge around it, so that nothing is answered past the edge.

What can't be read as a request is refused by aiohttp's connections themselves: no route is asked,
and their answer is plain text that names the software. Here they ask the edge instead.
tests/contract/test_unreadable_requests.py fails when a new aiohttp does not let them any more.
What does not live here: what the edge does (edge.py), addresses and the socket (serving.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from rpcsvc.errors import InvalidRequest, ServiceError, UnsupportedMediaType
from rpcsvc.transport.edge import Edge

_LINE_BYTES: Final = 8190
_HEADERS: Final = 128

_Refuse = Callable[[web.Request, Exception], web.Response]


class EdgeRunner(web.AppRunner):
    """Runs the routes of an edge, with the edge around them. ``options`` are aiohttp's."""

    def __init__(self, edge: Edge, *, shutdown_timeout: float = 60.0, **options: Any) -> None:
        super().__init__(edge.routes, shutdown_timeout=shutdown_timeout, **options)
        self._edge = edge
        self._options = options

    async def _make_server(self) -> web.Server:
        routes = await super()._make_server()
        return _EdgeServer(routes, self._edge, **self._options)


class _EdgeServer(web.Server):
    """A server whose requests are made and answered by another one, within the edge."""

    def __init__(
        self, routes: web.Server, edge: Edge, *, handler_cancellation: bool = False, **options: Any
    ) -> None:
        super().__init__(
            edge.around(routes.request_handler),  # type: ignore[arg-type] # it makes web.Request
            request_factory=routes.request_factory,
            handler_cancellation=handler_cancellation,
        )
        self._refuse = edge.refuse
        limits = {"max_line_size": _LINE_BYTES, "max_field_size": _LINE_BYTES}
        self._options = {"max_headers": _HEADERS, **limits, **options}

    def __call__(self) -> web.RequestHandler:
        loop = asyncio.get_running_loop()
        return _Connection(self, self._refuse, loop=loop, **self._options)


class _Connection(web.RequestHandler):
    """A connection that has the edge answer what can't be read, or failed on its way out."""

    __slots__ = ("_refuse",)

    def __init__(self, server: web.Server, refuse: _Refuse, **options: Any) -> None:
        super().__init__(server, **options)
        self._refuse = refuse

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
        error = _unreadable(exc) if status == HTTPStatus.BAD_REQUEST else _fault(exc)
        response = self._refuse(cast("web.Request", request), error)
        response.force_close()
        return response


def _fault(error: BaseException | None) -> Exception:
    """What went wrong here; aiohttp does not give the exception of a handler that timed out."""
    return error if isinstance(error, Exception) else TimeoutError()


def _unreadable(error: BaseException | None) -> ServiceError:
    """What a client is told whose request could not be read; the same words for most causes."""
    if isinstance(error, ContentEncodingError):
        return UnsupportedMediaType(
            "The body's content-encoding is not read here. Send the body as it is, without that"
            " header, or with gzip or deflate."
        )
    return InvalidRequest(
        "The request can't be read as HTTP/1.1. Send a request line and headers of at most"
        f" {_LINE_BYTES} bytes each, at most {_HEADERS} headers, host, content-type and"
        " content-length once, and in path and query ASCII only: percent-encode the rest."
    )
