"""The asyncio transport, on aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import (
    BaseConnector,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
    UnixConnector,
)
from yarl import URL

from rpcsvc.client.transport import (
    CONNECT_SECONDS,
    LARGEST_ANSWER,
    Endpoint,
    ServiceReply,
    ServiceRequest,
    lost,
    not_reached,
)
from rpcsvc.http_client import HttpRequest, NoReply, NotReached, exchange, system_trust


class AioTransport:
    """Sends requests over pooled connections. Create it in a running event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.name = endpoint.name
        self._root = endpoint.url
        connector: BaseConnector
        connector = UnixConnector(str(endpoint.socket)) if endpoint.socket else TCPConnector()
        self._session = ClientSession(connector=connector, cookie_jar=DummyCookieJar())

    async def exchange(self, sent: ServiceRequest) -> ServiceReply:
        """Send a request and read its whole answer. Raises Unreachable."""
        url = self._root + sent.target
        request = HttpRequest(
            sent.method,
            url,
            sent.seconds,
            LARGEST_ANSWER,
            sent.body,
            sent.headers,
            CONNECT_SECONDS,
        )
        try:
            reply = await exchange(self._session, request)
        except NotReached as error:
            raise not_reached(self.name, error.cause) from error
        except NoReply as error:
            raise lost(self.name, sent, error) from error
        return ServiceReply(
            reply.status, tuple(reply.headers.items()), reply.body, URL(url).raw_path_qs
        )

    @asynccontextmanager
    async def stream(self, sent: ServiceRequest) -> AsyncIterator[AioStream]:
        """Send a request, and read its answer as it comes. Raises Unreachable."""
        with _reported(self.name, sent):
            response = await self._session.request(
                sent.method,
                self._root + sent.target,
                data=sent.body,
                headers=sent.headers,
                timeout=ClientTimeout(
                    total=None, sock_connect=CONNECT_SECONDS, sock_read=sent.seconds
                ),
                allow_redirects=False,
                ssl=system_trust(self._root),
            )
        async with response:
            yield AioStream(self.name, sent, response)

    async def sleep(self, seconds: float) -> None:
        """Sleep without blocking the event loop."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


class AioStream:
    """An answer that is read as it comes."""

    def __init__(self, name: str, sent: ServiceRequest, response: ClientResponse) -> None:
        self.status = response.status
        # aiohttp's property takes quadratic time for some headers (python/cpython#136063).
        given = response.headers.get("content-type", "")
        self.media_type = given.partition(";")[0].strip().lower()
        self._name = name
        self._sent = sent
        self._content = response.content

    async def lines(self) -> AsyncIterator[bytes]:
        """Its lines. Raises Unreachable, and ValueError for one that is too long."""
        while line := await self._line():
            yield line

    async def read(self, most: int) -> bytes:
        """Read at most ``most`` bytes. Raises Unreachable."""
        with _reported(self._name, self._sent):
            return await self._content.read(most)

    async def _line(self) -> bytes:
        with _reported(self._name, self._sent):
            return await self._content.readline()


@contextmanager
def _reported(name: str, sent: ServiceRequest) -> Iterator[None]:
    try:
        yield
    except (ClientError, OSError) as error:
        raise lost(name, sent, repr(error)) from error
