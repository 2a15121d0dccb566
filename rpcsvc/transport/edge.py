"""The edge: what happens to every request and response, in one middleware and in this order.

    a preflight request is answered (cors.py), or the handler is asked
    what it raises becomes a response (http.Refusals)
    the response says who serves it, without the versions that aiohttp would tell
    pages of other origins are let in where they may be (cors.py)
    the response is signed over its bytes and the request (sealing.py, docs/signing.md)

What does not live here: what each of these does.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import hdrs, web

from rpcsvc.signing.response_signer import ResponseSigner
from rpcsvc.transport.cors import Cors
from rpcsvc.transport.http import BODY, Handler, Refusals, unread_body
from rpcsvc.transport.sealing import Sealer

_SERVER: Final = "rpcsvc"


def edge(refusals: Refusals, cors: Cors, signer: ResponseSigner | None, *, body_bytes: int) -> Any:
    """The only middleware. Without a ``signer`` nothing is signed.

    A request body that is longer than ``body_bytes``, or breaks off, is signed for as if it had
    been empty: it is not read.
    """

    sealer = None if signer is None else Sealer(signer)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = cors.preflight(request) or await handler(request)
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

    return middleware
