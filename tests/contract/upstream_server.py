"""An upstream on a real socket that misbehaves on command.

Each call that arrives is recorded in ``seen`` and then handled by the next behaviour of ``script``,
or by ``otherwise`` after the end of the script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from tests.e2e.processes import free_port


@dataclass(frozen=True)
class SeenCall:
    """One call as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Behaviour = Callable[["UpstreamServer", web.Request], Awaitable[web.StreamResponse]]


class UpstreamServer:
    """Listens on 127.0.0.1 between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.seen: list[SeenCall] = []
        self.script: deque[Behaviour] = deque()
        self.otherwise: Behaviour = answer({})
        self.arrived = asyncio.Event()
        self.stopping = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(SeenCall(request.method, request.path_qs, headers, body))
        self.arrived.set()
        behaviour = self.script.popleft() if self.script else self.otherwise
        return await behaviour(self, request)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[UpstreamServer]:
    server = UpstreamServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


# --- behaviours ------------------------------------------------------------------------------


def answer(
    value: Any = None,
    *,
    status: int = 200,
    raw: bytes | None = None,
    content_type: str = "application/json",
    headers: dict[str, str] | None = None,
) -> Behaviour:
    """Answer normally: ``value`` as JSON, or the bytes of ``raw``."""

    async def behave(_server: UpstreamServer, _request: web.Request) -> web.StreamResponse:
        body = json.dumps(value).encode() if raw is None else raw
        fields = CIMultiDict(headers or {})
        fields["Content-Type"] = content_type
        return web.Response(status=status, body=body, headers=fields)

    return behave


def hang() -> Behaviour:
    """Accept the call and never answer."""

    async def behave(server: UpstreamServer, _request: web.Request) -> web.StreamResponse:
        await server.stopping.wait()
        return web.Response()

    return behave


def slow_headers() -> Behaviour:
    """Send the header's bytes one by one, so slowly that it never ends."""
    return _drip(b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 1000)


def slow_body() -> Behaviour:
    """Send the header at once, and the body's bytes so slowly that it never ends."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n\r\n"
    return _drip(b" " * 9000, at_once=head)


def _drip(data: bytes, *, at_once: bytes = b"") -> Behaviour:
    async def behave(server: UpstreamServer, request: web.Request) -> web.StreamResponse:
        transport = _transport(request)
        transport.write(at_once)
        for byte in data:
            if transport.is_closing() or server.stopping.is_set():
                break
            transport.write(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.stopping.wait(), 0.01)
        transport.abort()
        return web.Response()

    return behave


def reset() -> Behaviour:
    """Accept the call, then reset the connection without a byte of an answer."""
    return _say(b"", with_reset=True)


def cut_in_body(value: Any, *, with_reset: bool = False) -> Behaviour:
    """Declare the full length of the body and send half of it."""
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    return _say(head + body[: len(body) // 2], with_reset=with_reset)


def cut_in_chunk() -> Behaviour:
    """Cut a chunked answer off in the middle of a chunk."""
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return _say(head + b'ff\r\n{"a":')


def not_http() -> Behaviour:
    """Answer with bytes that are not HTTP."""
    return _say(b"\x16\x03\x01 this is not HTTP\r\n\r\n")


def _say(data: bytes, *, with_reset: bool = False) -> Behaviour:
    async def behave(_server: UpstreamServer, request: web.Request) -> web.StreamResponse:
        transport = _transport(request)
        if with_reset:
            _reset_on_close(transport)
        transport.write(data)
        transport.close()
        return web.Response()

    return behave


def huge(size: int, *, declared: bool) -> Behaviour:
    """Send a JSON string of ``size`` bytes, with its length declared or in chunks."""

    async def behave(_server: UpstreamServer, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if declared:
            response.content_length = size
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await response.write(b'"')
            for _ in range(0, size, 65_536):
                await response.write(b"x" * 65_536)
        return response

    return behave


def _transport(request: web.Request) -> asyncio.Transport:
    transport = request.transport
    assert isinstance(transport, asyncio.Transport)
    return transport


def _reset_on_close(transport: asyncio.Transport) -> None:
    sock: socket.socket = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def unused_port() -> int:
    """A port of 127.0.0.1 on which no process listens."""
    return free_port()


@contextlib.contextmanager
def full_port() -> Iterator[int]:
    """A port whose accept queue is full, so that connecting never ends."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port: int = listener.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port
