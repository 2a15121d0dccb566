"""The blocking transport of commands and SyncSwapClient, on the standard library alone.

aiohttp takes longer to import than most commands take. What is awaited here never suspends, so
``finished`` runs it without an event loop.
"""

from __future__ import annotations

import http.client
import io
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from rpcsvc.client.calls import Calls, Retries, Trust
from rpcsvc.client.transport import (
    CONNECT_SECONDS,
    LARGEST_ANSWER,
    Endpoint,
    ServiceReply,
    ServiceRequest,
    lost,
    not_reached,
)
from rpcsvc.health_probe import connected

T = TypeVar("T")
_LONGEST_LINE: Final = 1 << 16
_PIECE: Final = 1 << 16


def finished(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call over a BlockingTransport."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    call.close()
    raise RuntimeError("it awaits something that needs an event loop: use SwapClient")


def rpc_calls(endpoint: Endpoint, token: str | None, slug: str = "service", **more: Any) -> Calls:
    """Calls for commands: to /rpc, without signature checks, and without retries by default.

    A command's caller decides whether to repeat it. ``more``: as Calls takes it.
    """
    return Calls(
        BlockingTransport(endpoint),
        over_rpc=True,
        trust=Trust(slug, is_on=False),
        token=token if endpoint.takes_token else None,
        **{"retries": Retries(attempts=1), **more},
    )


class BlockingTransport:
    """Sends requests to a service, each over a new connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.name = endpoint.name
        self._endpoint = endpoint
        self._path = urlsplit(endpoint.url).path

    async def exchange(self, sent: ServiceRequest) -> ServiceReply:
        """Send a request and read its whole answer. Raises Unreachable."""
        until = time.monotonic() + sent.seconds

        def left() -> float:
            seconds = until - time.monotonic()
            if seconds <= 0:
                raise TimeoutError(f"no whole answer in {sent.seconds:g} seconds")
            return seconds

        with self._answered(sent, left) as response, _reported(self.name, sent):
            body = response.read(LARGEST_ANSWER + 1)
            if len(body) > LARGEST_ANSWER:
                raise http.client.HTTPException(f"it answers with more than {LARGEST_ANSWER} bytes")
        headers = tuple(response.headers.items())
        return ServiceReply(response.status, headers, body, self._path + sent.target)

    @asynccontextmanager
    async def stream(self, sent: ServiceRequest) -> AsyncIterator[BlockingStream]:
        """Send a request, and read its answer as it comes. Raises Unreachable."""
        with self._answered(sent, lambda: sent.seconds) as response:
            yield BlockingStream(self.name, sent, response)

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)  # noqa: ASYNC251 - no loop is blocked: there is none

    async def close(self) -> None:
        """Do nothing: no connection is kept open."""

    @contextmanager
    def _answered(
        self, sent: ServiceRequest, left: Callable[[], float]
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, its head read. ``left`` returns the seconds that the next wait may take."""
        connection = connection_to(self._endpoint)
        try:
            self._connect(connection)
            with _reported(self.name, sent):
                connection.sock.settimeout(left())
                connection.request(
                    sent.method, self._path + sent.target, sent.body, dict(sent.headers)
                )
                received: Any = _Received(connection.sock, left)
                response = http.client.HTTPResponse(received, method=sent.method)
                response.begin()
            with response:
                yield response
        finally:
            connection.close()

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            raise not_reached(self.name, error) from error


class BlockingStream:
    """An answer that is read as it comes."""

    def __init__(self, name: str, sent: ServiceRequest, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.media_type = response.headers.get_content_type()
        self._name = name
        self._sent = sent
        self._response = response

    async def lines(self) -> AsyncIterator[bytes]:
        """Its lines. Raises Unreachable, and ValueError for one that is too long."""
        while line := self._line():
            yield line

    async def read(self, most: int) -> bytes:
        """Read at most ``most`` bytes. Raises Unreachable."""
        with _reported(self._name, self._sent):
            return self._response.read(most)

    def _line(self) -> bytes:
        with _reported(self._name, self._sent):
            line = self._response.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"a line has more than {_LONGEST_LINE} bytes")
        return line


def connection_to(endpoint: Endpoint) -> http.client.HTTPConnection:
    """An unopened connection to a service."""
    if endpoint.socket is not None:
        return _UnixConnection(endpoint.socket)
    parts = urlsplit(endpoint.url)
    host = parts.hostname or ""
    # Without a port http.client would take the last part of an IPv6 address for one.
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port or 80, timeout=CONNECT_SECONDS)
    context = ssl.create_default_context()
    port = parts.port or 443
    return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=context)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = connected(self._path, self.timeout)


class _Received:
    """Received bytes of a socket for http.client; ``left`` bounds each wait."""

    def __init__(self, sock: Any, left: Callable[[], float]) -> None:
        self._sock = sock
        self._left = left

    def makefile(self, _mode: str) -> io.BufferedReader:
        """The bytes as a file."""
        return io.BufferedReader(_Bytes(self._sock, self._left), _PIECE)


class _Bytes(io.RawIOBase):
    def __init__(self, sock: Any, left: Callable[[], float]) -> None:
        self._sock = sock
        self._left = left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._left())
        return int(self._sock.recv_into(buffer))


@contextmanager
def _reported(name: str, sent: ServiceRequest) -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise lost(name, sent, error or type(error).__name__) from error
