"""A proxy between the service and its database that cuts a connection on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

# A message of the simple query protocol: the tag, its length, the text and a NUL.
COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"


class Proxy:
    """Passes bytes on. ``cut_before``: the first message with these bytes is lost.

    ``cut_after``: it arrives, and its answer is lost. ``closed``: new connections are refused.
    ``closes``: when an answer is lost, the proxy is closed and every connection cut.
    ``delay``: how long (seconds) each message is under way.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut_before: bytes | None = None
        self.cut_after: bytes | None = None
        self.closed = False
        self.closes = False
        self.cuts = 0
        self.delay = 0.0

    def cut_all(self) -> None:
        """Cut every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            writer.transport.abort()
            return
        theirs, ours = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, ours}
        lost = asyncio.Event()
        try:
            with suppress(OSError):
                await asyncio.gather(
                    self._pass(reader, ours, lambda data: self._is_cut(data, lost)),
                    self._pass(theirs, writer, lambda _: lost.is_set()),
                )
        finally:
            self._writers -= {writer, ours}
            ours.close()
            writer.transport.abort()
            if lost.is_set() and self.closes:
                self.closed = True
                self.cut_all()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_cut: Callable[[bytes], bool],
    ) -> None:
        while data := await reader.read(65_536):
            if is_cut(data):
                raise ConnectionResetError
            await asyncio.sleep(self.delay)
            writer.write(data)
            await writer.drain()
        writer.close()

    def _is_cut(self, data: bytes, lost: asyncio.Event) -> bool:
        if self.cut_before is not None and self.cut_before in data:
            self.cut_before = None
            self.cuts += 1
            return True
        if self.cut_after is not None and self.cut_after in data:
            self.cut_after = None
            self.cuts += 1
            lost.set()
        return False


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy to the server of a URL, and the URL that goes through it."""
    parts = urlsplit(url)
    proxy = Proxy(parts.hostname or "", parts.port or 5432)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    user = f"{parts.username}@" if parts.username else ""
    try:
        yield proxy, urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{port}"))
    finally:
        proxy.cut_all()
        server.close()
        await server.wait_closed()
