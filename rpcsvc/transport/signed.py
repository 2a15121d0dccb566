"""The middleware that signs every response over the request that it answers (docs/signing.md).

What does not live here: keys, the signed bytes and the six headers (signing.py, verify.py).
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rpcsvc.signing import ResponseSigner
from rpcsvc.transport.http import Handler, body_of


def sign_all(signer: ResponseSigner, *, body_bytes: int) -> Any:
    """The outermost middleware: what it returns is what is sent.

    Of a request whose body is longer than ``body_bytes``, or breaks off, the signature covers
    that there was one no more than if it had been empty.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        asked = await body_of(request, body_bytes)
        headers = signer.headers(
            request.method, request.raw_path, response.status, asked, _sent(request, response)
        )
        response.headers.update(headers)
        return response

    return middleware


def _sent(request: web.Request, response: web.StreamResponse) -> bytes:
    """The bytes that follow the headers. Every handler of this service returns them whole."""
    if request.method == "HEAD" or response.status in (204, 304):
        return b""
    body = response.body if isinstance(response, web.Response) else None
    if isinstance(body, bytes):
        return body
    raise TypeError(f"a {type(response).__name__} can't be signed")
