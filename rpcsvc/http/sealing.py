"""Signing responses a handful at a time: those that are ready in one turn of the event loop.

A signature reads 30 kB of tables, which drives everything else out of the processor's first
cache. Made one after another instead of each between two handlers, 16 signatures cost a quarter
less (measured with ``make bench``, row swap.status signed).
What does not live here: keys, the signed bytes and the six headers (signing/, verify.py).
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, NamedTuple

from aiohttp import web

from rpcsvc.signing.response_signer import ResponseSigner

# Scheme and host of a target in absolute-form (RFC 9112, section 3.2.2).
_ROOT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


class _Waiting(NamedTuple):
    request: web.Request
    asked: bytes | None
    response: web.StreamResponse
    sealed: asyncio.Future[None]


class Sealer:
    """Puts the signature headers on responses. One for a server, in one event loop."""

    def __init__(self, signer: ResponseSigner) -> None:
        self._signer = signer
        self._waiting: list[_Waiting] = []

    async def seal(
        self, request: web.Request, asked: bytes | None, response: web.StreamResponse
    ) -> None:
        """Sign ``response`` over its bytes and the request with the body ``asked``, None if unread.

        Raises TypeError for a response that is not sent whole.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._seal_all)
        waiting = _Waiting(request, asked, response, loop.create_future())
        self._waiting.append(waiting)
        await waiting.sealed

    def _seal_all(self) -> None:
        batch, self._waiting = self._waiting, []
        for waiting in batch:
            if waiting.sealed.done():
                continue  # whoever asked has gone
            try:
                self.seal_now(waiting.request, waiting.asked, waiting.response)
            except Exception as error:  # noqa: BLE001 - it belongs to the one who waits
                waiting.sealed.set_exception(error)
            else:
                waiting.sealed.set_result(None)

    def seal_now(
        self, request: web.Request, asked: bytes | None, response: web.StreamResponse
    ) -> None:
        """Sign one response by itself, where nothing can be awaited. Raises as seal does."""
        headers = self._signer.headers(
            request.method, _target(request), response.status, asked, _sent(request, response)
        )
        response.headers.update(headers)


def _target(request: web.Request) -> str:
    """Path and query as they came, without the scheme and host that proxies may write before."""
    root = _ROOT.match(request.raw_path)
    if root is None:
        return request.raw_path
    target = request.raw_path[root.end() :]
    return target if target.startswith("/") else f"/{target}"


def _sent(request: web.Request, response: web.StreamResponse) -> bytes:
    """The bytes that follow the headers. Every handler of this service returns them whole."""
    if request.method == "HEAD" or response.status in (204, 304):
        return b""
    body = response.body if isinstance(response, web.Response) else None
    if isinstance(body, bytes):
        return body
    raise TypeError(f"a {type(response).__name__} can't be signed")
