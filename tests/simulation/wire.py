"""Calls as bytes: through the real HTTP code of a replica, over connections in memory.

A request comes in pieces, by /rpc or the agent API. Each call has a connection of its own, from an
address of its own; a caller that hangs up gets no answer, and does not know what was done.
"""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch
from urllib.parse import urlencode

import orjson
from aiohttp import web

from rpcsvc import serving
from rpcsvc.bootstrap import Running
from rpcsvc.http.gate import RPC_TOKEN_HEADER
from rpcsvc.http.http_server import EdgeRunner
from rpcsvc.http.site import API_ROOT, RPC_PATH
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.service import Operation
from tests.simulation.loop import ACTOR

TOKEN: Final = "simulated-token-of-the-operator!"
# Of the calls, those whose caller hangs up before it has an answer.
_HANGS_UP: Final = 0.02
_MOST_PIECES: Final = 3
_BODY: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n.*?\r\n\r\n", re.IGNORECASE | re.DOTALL)
_PARAMETER: Final = re.compile(r"\{(\w+)\}")


class _Wire(asyncio.Transport):
    """The server's end of a connection, which nothing limits."""

    def __init__(self, protocol: asyncio.Protocol, address: str) -> None:
        super().__init__({"peername": (address, 50_000)})
        self.protocol = protocol
        self._is_closing = False
        self._received = bytearray()
        # None: the connection ended first.
        self.body: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        protocol.connection_made(self)
        # From Python 3.12 on aiohttp makes its task past the loop, which would have kept it.
        if (actor := ACTOR.get()) is not None:
            actor.tasks.add(getattr(protocol, "_task_handler"))  # noqa: B009 - it is not public

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._received += data
        head = _BODY.search(self._received)
        if head is not None and not self.body.done():
            body = self._received[head.end() :]
            if len(body) >= int(head[1]):
                self.body.set_result(bytes(body))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self.body.done():
                self.body.set_result(None)
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Let arrive what is on its way: it does all the same."""

    def resume_reading(self) -> None:
        """See ``pause_reading``."""


@asynccontextmanager
async def answering(up: Running) -> AsyncIterator[web.Server]:
    """Have a running service answer HTTP until the block ends."""
    now = asyncio.get_running_loop().time
    with patch.object(serving, "time", SimpleNamespace(monotonic=now)):
        edge = serving.web_app(up)
    runner = EdgeRunner(edge, now=now, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None
    try:
        yield runner.server
    finally:
        await runner.cleanup()


def is_of_rpc(key: str | None) -> bool:
    """Return whether a key is one of those that come by /rpc alone: its token's holder has a
    namespace of keys.
    """
    return key is not None and zlib.crc32(key.encode()) % 2 == 1


async def ask(
    server: web.Server,
    operation: Operation,
    params: dict[str, Any],
    key: str | None,
    chance: random.Random,
) -> bytes | None:
    """Call an operation; None when the caller hung up, or the service ended the connection."""
    by_rpc = is_of_rpc(key) if key is not None else chance.random() < 0.5
    request = (_rpc_request if by_rpc else _api_request)(operation, params, key)
    wire = _Wire(server(), f"127.{chance.randrange(256)}.{chance.randrange(256)}.2")
    try:
        for piece in _pieces(request, chance):
            wire.protocol.data_received(piece)
            await asyncio.sleep(chance.random() * 0.01)
        if chance.random() < _HANGS_UP:
            await asyncio.sleep(chance.random() * 0.1)
            return None
        body = await wire.body
    finally:
        wire.close()
    return _envelope(body) if by_rpc and body is not None else body


def _rpc_request(operation: Operation, params: dict[str, Any], key: str | None) -> bytes:
    """A JSON-RPC 2.0 call; its key is one of its params."""
    keyed = params if key is None else {**params, IDEMPOTENCY_KEY: key}
    message = {"jsonrpc": "2.0", "id": 1, "method": f"service.{operation.name}", "params": keyed}
    return _request("POST", RPC_PATH, {RPC_TOKEN_HEADER: TOKEN}, message)


def _api_request(operation: Operation, params: dict[str, Any], key: str | None) -> bytes:
    """A call of the agent API; its key is a header."""
    left = dict(params)
    path = _PARAMETER.sub(lambda found: str(left.pop(found[1])), API_ROOT + operation.path)
    headers = {} if key is None else {IDEMPOTENCY_KEY: key}
    if operation.method == "GET":
        return _request("GET", f"{path}?{urlencode(left)}" if left else path, headers)
    return _request("POST", path, headers, left)


def _request(method: str, target: str, headers: dict[str, str], body: Any = None) -> bytes:
    content = b"" if body is None else orjson.dumps(body)
    if body is not None:
        headers = {**headers, "content-type": "application/json"}
    head = {"host": "localhost:8080", "content-length": str(len(content)), **headers}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {text}" for name, text in head.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def _pieces(data: bytes, chance: random.Random) -> list[bytes]:
    cuts = sorted(chance.randrange(len(data)) for _ in range(chance.randrange(_MOST_PIECES)))
    return [data[start:end] for start, end in pairwise([0, *cuts, len(data)])]


def _envelope(body: bytes) -> bytes:
    """The answer of the operation in a JSON-RPC response, or the error in its place."""
    message = orjson.loads(body)
    if "error" in message:
        return orjson.dumps({"ok": False, "state": "refused", "error": message["error"]["data"]})
    return orjson.dumps(message["result"])
