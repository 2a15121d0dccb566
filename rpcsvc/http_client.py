"""One bounded HTTP exchange and the taxonomy of its failures, for daemons, tickers and upstreams.

Each failure says what it proves about a request that may move money:

    NoReply
    +-- NotReached       no connection was made: the request was not sent
    +-- ReplyLost        it may have been acted on, or may be yet
        +-- ReplyTimedOut    no whole answer within the limit
        +-- ReplyTooLarge    the answer has more bytes than allowed

Nothing is repeated and no redirect is followed: callers decide about both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from ssl import SSLContext, create_default_context
from typing import Final

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    InvalidURL,
)
from msgspec import Struct
from yarl import URL

_CHUNK: Final = 1 << 16


class NoReply(Exception):
    """No whole answer came. ``cause`` is what the connection raised; it may name addresses."""

    def __init__(self, problem: str, cause: BaseException | None = None) -> None:
        super().__init__(problem)
        self.cause = cause if cause is not None else self


class NotReached(NoReply):
    """No connection was made: the request was not sent."""


class ReplyLost(NoReply):
    """The request went out, or part of it, and no whole answer came back."""


class ReplyTimedOut(ReplyLost):
    """No whole answer came within the limit."""


class ReplyTooLarge(ReplyLost):
    """The answer has more bytes than allowed; ``body`` holds those that were read."""

    def __init__(self, most_bytes: int, body: bytes) -> None:
        super().__init__(f"the answer has over {most_bytes} bytes")
        self.body = body


class HttpRequest(Struct, frozen=True):
    """A request. ``seconds`` bounds the whole exchange, ``connect_seconds`` the connection."""

    method: str
    url: str
    seconds: float
    most_bytes: int
    body: bytes | None = None
    headers: Mapping[str, str] | None = None
    connect_seconds: float | None = None


class HttpReply(Struct, frozen=True):
    """A whole answer, unjudged."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def system_trust(url: str) -> SSLContext | bool:
    """The ``ssl`` argument of an aiohttp request that trusts the system's certificates.

    They are read before the first request over TLS; aiohttp's own context lacks them
    (importing.py).
    """
    return _system_certificates() if url[:6].lower() == "https:" else True


@cache
def _system_certificates() -> SSLContext:
    context = create_default_context()
    context.set_alpn_protocols(("http/1.1",))  # as aiohttp's own
    return context


async def exchange(
    session: ClientSession,
    request: HttpRequest,
    look_at_head: Callable[[ClientResponse], None] = lambda _response: None,
) -> HttpReply:
    """Send a request and read its whole answer. Raises NoReply.

    ``look_at_head`` may raise for an answer whose body is not worth reading.
    """
    try:
        async with (
            asyncio.timeout(request.seconds),
            session.request(
                request.method,
                URL(request.url, encoded=False),
                data=request.body,
                headers=request.headers,
                timeout=ClientTimeout(total=None, connect=request.connect_seconds),
                allow_redirects=False,
                ssl=system_trust(request.url),
            ) as response,
        ):
            look_at_head(response)
            body = await _bounded(response, request.most_bytes)
            return HttpReply(response.status, response.headers, body)
    except (ClientConnectorError, ConnectionTimeoutError, InvalidURL) as error:
        raise NotReached("no connection was made", error) from error
    except TimeoutError as error:
        raise ReplyTimedOut(f"no whole answer in {request.seconds:g} seconds", error) from error
    except (ClientError, OSError) as error:
        raise ReplyLost("the connection was lost", error) from error


async def _bounded(response: ClientResponse, most_bytes: int) -> bytes:
    """The body; one that is announced or found to be larger is not read to its end."""
    body = bytearray()
    if (response.content_length or 0) <= most_bytes:
        async for chunk in response.content.iter_chunked(_CHUNK):
            body += chunk
            if len(body) > most_bytes:
                break
        else:
            return bytes(body)
    response.close()
    raise ReplyTooLarge(most_bytes, bytes(body))
