"""The edge: what happens to every request and response, around all routes and in this order.

    what its headers forbid is refused: another host (hosts.py), a body that can't be read (http.py)
    a preflight request is answered (cors.py), or the routes are asked
    what they raise becomes a response (http.Refusals)
    the response says who serves it, without the versions that aiohttp would tell
    pages of other origins are let in where they may be (cors.py)
    the response is signed over its bytes and the request (sealing.py, docs/signing.md)

It is no middleware: aiohttp refuses some requests before those are asked. What does not live here:
what each of these does, and how aiohttp is made to ask (http_server.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import hdrs, web

from rpcsvc.errors import ServiceError
from rpcsvc.signing.response_signer import ResponseSigner
from rpcsvc.transport.cors import Cors
from rpcsvc.transport.http import BODY, Handler, Refusals, unread_body
from rpcsvc.transport.sealing import Sealer

_SERVER: Final = "rpcsvc"


class Edge:
    """The only way to ``routes``. Without a ``signer`` nothing is signed.

    ``check`` raises a ServiceError for a request that is refused by its headers.

    A request body that is longer than ``body_bytes``, or breaks off, is signed for as if it had
    been empty: it is not read.
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

    def around(self, routes: Handler) -> Handler:
        """What answers a request that ``routes`` may answer."""
        refusals, cors, sealer = self._refusals, self._cors, self._sealer
        check = self._check
        body_bytes = self._body_bytes

        def refused(request: web.Request) -> web.Response | None:
            try:
                check(request)
            except ServiceError as error:
                response = refusals.answer(request, error)
                response.force_close()
                return response
            return None

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                response = refused(request) or cors.preflight(request) or await routes(request)
            except Exception as error:  # noqa: BLE001 - it is answered for, and logged
                response = refusals.answer(request, error)
            response.headers[hdrs.SERVER] = _SERVER
            cors.open(request, response)
            if sealer is not None:
                asked = request.get(BODY)
                if asked is None:
                    asked = await unread_body(request, body_bytes)
                await sealer.seal(request, asked, response)
            return response

        return answer

    def refuse(self, request: web.Request, error: Exception) -> web.Response:
        """The response to what never came to the routes, or failed on its way back from them.

        Of a request that could not be read, ``request`` is what aiohttp has in its place: docs/
        signing.md says for which one the response is signed.
        """
        response = self._refusals.answer(request, error)
        response.headers[hdrs.SERVER] = _SERVER
        self._cors.open(request, response)
        if self._sealer is not None:
            self._sealer.seal_now(request, request.get(BODY, b""), response)
        return response
