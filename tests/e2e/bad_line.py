"""A proxy between two services that cuts, slows, resets and garbles connections.

Each connection carries one call and has at most one fault, drawn from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MISHAPS = ("refused", "cut_before", "cut_in_answer", "reset_in_answer", "slow", "garbage")
CHUNK = 65_536


class BadLine:
    """Listens on ``port`` and passes calls on to ``target``; a share of ``rate`` is faulty."""

    def __init__(self, target: int, seed: int, rate: float) -> None:
        self.target = target
        self.rate = rate
        self.met: Counter[str] = Counter()
        self.port = 0
        self._random = random.Random(seed)
        self._calls: set[asyncio.Task[None]] = set()

    def take(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Serve a connection in a task of its own; ``hang_up`` ends those that are left."""
        call = asyncio.create_task(self.carry(near, back))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def hang_up(self) -> None:
        """End every connection: none may outlive the loop."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    async def carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Serve one connection from its first byte to its end."""
        bad = self._random.random() < self.rate
        mishap = self._random.choice(MISHAPS) if bad else "none"
        self.met[mishap] += 1
        try:
            # A caller that is killed or gives up leaves half a request.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._carry(near, back, mishap)
        finally:
            back.close()

    async def _carry(
        self, near: asyncio.StreamReader, back: asyncio.StreamWriter, mishap: str
    ) -> None:
        if mishap == "refused":
            return
        request = await _request(near)
        if mishap == "cut_before":
            return
        answer = await self._asked(request)
        match mishap:
            case "cut_in_answer":
                back.write(answer[: len(answer) // 2])
            case "reset_in_answer":
                back.write(answer[: len(answer) // 2])
                sock: socket.socket = back.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case "garbage":
                back.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{{{")
            case "slow":
                for start in range(0, len(answer), 200):
                    back.write(answer[start : start + 200])
                    await back.drain()
                    await asyncio.sleep(0.01)
            case _:
                back.write(answer)
        with contextlib.suppress(ConnectionError):
            await back.drain()

    async def _asked(self, request: bytes) -> bytes:
        """The target's response, up to the end of the connection."""
        far, there = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            there.write(request)
            answer = b""
            while chunk := await far.read(CHUNK):
                answer += chunk
            return answer
        finally:
            there.close()


async def _request(near: asyncio.StreamReader) -> bytes:
    """Read a complete HTTP request with its declared body."""
    head = await near.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return head + await near.readexactly(length)


@asynccontextmanager
async def bad_line(target: int, *, seed: int, rate: float) -> AsyncIterator[BadLine]:
    """A proxy to ``target``, a port of this machine, for the duration of the block."""
    line = BadLine(target, seed, rate)
    server = await asyncio.start_server(line.take, "127.0.0.1", 0)
    line.port = server.sockets[0].getsockname()[1]
    try:
        async with server:
            yield line
    finally:
        await line.hang_up()
