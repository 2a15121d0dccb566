"""A proxy between a client and a service that loses requests or answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer

_HOP_BY_HOP = {"content-length", "transfer-encoding", "connection", "date", "content-encoding"}


class Passed(NamedTuple):
    """A request as it was received."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Fault = Callable[[web.Request, web.Response | None], web.Response | None]


def lost_before(_request: web.Request, answer: web.Response | None) -> web.Response | None:
    """The connection breaks before the service has the request."""
    assert answer is None
    return None


def lost_after(_request: web.Request, answer: web.Response | None) -> web.Response | None:
    """The connection breaks once the service has answered."""
    return None if answer is not None else web.Response(headers={"x-go-on": "yes"})


def bad_gateway(_request: web.Request, _answer: web.Response | None) -> web.Response:
    """A proxy in between answers instead of the service."""
    return web.Response(status=502, text="<html>")


class FaultyLine:
    """Passes requests on to a service; each fault applies to one of them, in order."""

    def __init__(self, target: str) -> None:
        self.url = ""
        self.passed: list[Passed] = []
        self.faults: list[Fault] = []
        self.loses_keys = False
        self.change: Callable[[bytes], bytes] = lambda body: body
        self.target = target

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.passed.append(Passed(request.method, request.raw_path, headers, body))
        if self.loses_keys and not self._is_call(request):
            return _broken(request)
        fault = self.faults.pop(0) if self.faults and self._is_call(request) else None
        if fault is not None:
            first = fault(request, None)
            if first is None or "x-go-on" not in first.headers:
                return _broken(request) if first is None else first
        try:
            answer = await self._answer(request, headers, body)
        except ClientError:  # the service has stopped
            return _broken(request)
        return _broken(request) if fault is not None else answer

    async def _answer(
        self, request: web.Request, headers: dict[str, str], body: bytes
    ) -> web.Response:
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, self.target + request.raw_path, data=body, headers=headers
            ) as response,
        ):
            kept = {k: v for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP}
            content = self.change(await response.read())
            return web.Response(status=response.status, headers=kept, body=content)

    def _is_call(self, request: web.Request) -> bool:
        return not request.path.startswith("/.well-known")


def _broken(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def faulty_line(target: str) -> AsyncIterator[FaultyLine]:
    """A proxy to the service at a root URL."""
    line = FaultyLine(target)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", line.handle)
    async with TestServer(app) as server:
        line.url = str(server.make_url("/"))[:-1]
        yield line
