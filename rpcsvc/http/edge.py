"""The edge: what happens to every request and response, around all routes and in this order.

    what its headers forbid is refused: another host (hosts.py), an unreadable body (messages.py)
    a preflight request is answered (cors.py), or the routes are asked
    what they raise becomes a response (messages.Refusals)
    the response says who serves it, without the versions that aiohttp would tell
    pages of other origins are let in where they may be (cors.py)
    the response is signed over its bytes and the request (sealing.py, docs/signing.md)

It is no middleware: aiohttp refuses some requests before those are asked. What does not live here:
what each of these does, and how aiohttp is made to ask (http_server.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from rpcsvc.errors import ServiceError
from rpcsvc.http.cors import Cors
from rpcsvc.http.messages import BODY, STOPPING, Handler, Refusals, unread_body
from rpcsvc.http.sealing import Sealer
from rpcsvc.signing.response_signer import ResponseSigner
from rpcsvc.verify import UNREAD_STATUSES

_SERVER: Final = "rpcsvc"


class Edge:
    """The only way to ``routes``. Without a ``signer`` nothing is signed.

    ``check`` raises a ServiceError for a request that is refused by its headers.

    A request body that is longer than ``body_bytes`` is refused wherever it was sent. ``stopping``
    is set when no more requests are taken: their responses are the last of their connections.
    """

    def __init__(
        self,
        routes: web.Application,
        refusals: Refusals,
        check: Callable[[web.Request], None],
        cors: Cors,
        signer: ResponseSigner | None,
        *,
        body_bytes: int,
    ) -> None:
        self.routes = routes
        self._refusals = refusals
        self._check = check
        self._cors = cors
        self._sealer = None if signer is None else Sealer(signer)
        self._body_bytes = body_bytes
        self.stopping = asyncio.Event()

    def around(self, routes: Handler) -> Handler:
        """What answers a request that ``routes`` may answer."""
        sealer = self._sealer

        async def answer(request: web.Request) -> web.StreamResponse:
            request[STOPPING] = self.stopping
            response = await self._answered(request, routes)
            if sealer is not None:
                response = await self._with_body(request, response)
            self._finish(request, response)
            if sealer is not None:
                await sealer.seal(request, _asked(request, response), response)
            if self.stopping.is_set():
                response.force_close()
            return response

        return answer

    async def _answered(self, request: web.Request, routes: Handler) -> web.StreamResponse:
        try:
            self._check(request)
        except ServiceError as error:
            response = self._refusals.answer(request, error)
            response.force_close()
            return response
        try:
            return self._cors.preflight(request) or await routes(request)
        except Exception as error:  # noqa: BLE001 - it is answered for, and logged
            return self._refusals.answer(request, error)

    async def _with_body(
        self, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        """The response, once the body of its request is read: it is signed for.

        One whose body can't be read is refused for that.
        """
        if BODY not in request and response.status not in UNREAD_STATUSES:
            try:
                request[BODY] = await unread_body(request, self._body_bytes)
            except ServiceError as error:
                return self._refusals.answer(request, error)
        return response

    def _finish(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers[hdrs.SERVER] = _SERVER
        if "x-request-id" not in response.headers:
            response.headers["x-request-id"] = self._refusals.request_id(request)
        self._cors.open(request, response)

    def refuse(self, request: web.Request, error: Exception) -> web.Response:
        """The response to what never came to the routes, or failed on its way back from them.

        Of a request that could not be read, ``request`` is what aiohttp has in its place: docs/
        signing.md says for which one the response is signed.
        """
        response = self._refusals.answer(request, error)
        self._finish(request, response)
        if self._sealer is not None:
            self._sealer.seal_now(request, _asked(request, response), response)
        return response


def _asked(request: web.Request, response: web.StreamResponse) -> bytes | None:
    """The request's body as it is signed for; None where it counts as unread.

    By the status alone, so that a client knows it: but for 503, which also answers to calls that
    were read.
    """
    if response.status in UNREAD_STATUSES - {HTTPStatus.SERVICE_UNAVAILABLE}:
        return None
    body: bytes | None = request.get(BODY)
    is_unread = response.status in UNREAD_STATUSES and request.body_exists
    return b"" if body is None and not is_unread else body
