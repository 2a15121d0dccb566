"""CORS: pages of any origin may call the agent API and read the documents; never /rpc.

The agent API is public and knows no cookies, so that ``*`` gives a page nothing that it could not
have from its own server. /rpc is let in by a token or by its place on this machine: a page in the
operator's browser has that place, so it must never be let through.
Source: the Fetch standard, section 3.2 (CORS protocol).
What does not live here: who may call (gate.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from aiohttp import web

from rpcsvc.transport.http import Handler
from rpcsvc.transport.site import API_ROOT

_METHODS: Final = "GET, HEAD, POST"
_REQUEST_HEADERS: Final = "content-type, idempotency-key, if-none-match, x-request-id"
_RESPONSE_HEADERS: Final = (
    "etag", "idempotent-replayed", "link", "ratelimit", "ratelimit-policy", "retry-after",
    "x-request-id",
)  # fmt: skip
_PREFLIGHT_SECONDS: Final = 86_400
_AGENT_API: Final = API_ROOT + "/"


def cors(documents: Iterable[str], signature_headers: Iterable[str]) -> Any:
    """The middleware; it goes around whatever turns errors into responses.

    ``documents`` are the paths outside the agent API that any page may read.
    """
    open_paths = frozenset(documents)
    exposed = ", ".join((*_RESPONSE_HEADERS, *signature_headers))
    answer = {
        "access-control-allow-origin": "*",
        "access-control-expose-headers": exposed,
    }
    preflight = {
        "access-control-allow-origin": "*",
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": _REQUEST_HEADERS,
        "access-control-max-age": str(_PREFLIGHT_SECONDS),
    }

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        if not path.startswith(_AGENT_API) and path not in open_paths:
            return await handler(request)
        if request.method == "OPTIONS" and _is_preflight(request):
            return web.Response(status=204, headers=preflight)
        response = await handler(request)
        response.headers.update(answer)
        return response

    return middleware


def _is_preflight(request: web.Request) -> bool:
    headers = request.headers
    return "origin" in headers and "access-control-request-method" in headers
