"""CORS: pages of any origin may call the agent API and the BFF and read the documents; never /rpc.

The agent API is public and knows no cookies, so that ``*`` gives a page nothing that it could not
have from its own server. /rpc is let in by a token or by its place on this machine: a page in the
operator's browser has that place, so it must never be let through.
Source: the Fetch standard, section 3.2 (CORS protocol).
What does not live here: who may call (gate.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiohttp import web

from rpcsvc.transport.site import API_ROOT, BFF_ROOT

_METHODS: Final = "GET, HEAD, POST"
_REQUEST_HEADERS: Final = "content-type, idempotency-key, if-none-match, x-api-key, x-request-id"
_RESPONSE_HEADERS: Final = (
    "etag", "idempotent-replayed", "link", "ratelimit", "ratelimit-policy", "retry-after",
    "www-authenticate", "x-request-id",
)  # fmt: skip
_PREFLIGHT_SECONDS: Final = 86_400
_OPEN_ROOTS: Final = (API_ROOT + "/", BFF_ROOT + "/")
_PREFLIGHT: Final = {
    "access-control-allow-origin": "*",
    "access-control-allow-methods": _METHODS,
    "access-control-allow-headers": _REQUEST_HEADERS,
    "access-control-max-age": str(_PREFLIGHT_SECONDS),
}


class Cors:
    """Opens the agent API and ``documents``, the paths outside it that any page may read."""

    def __init__(self, documents: Iterable[str], signature_headers: Iterable[str]) -> None:
        self._open_paths = frozenset(documents)
        self._answer = {
            "access-control-allow-origin": "*",
            "access-control-expose-headers": ", ".join((*_RESPONSE_HEADERS, *signature_headers)),
        }

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight request; None for any other."""
        if request.method != "OPTIONS" or not _is_preflight(request) or not self._is_open(request):
            return None
        return web.Response(status=204, headers=_PREFLIGHT)

    def open(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page that asked read the response, whatever it says."""
        if self._is_open(request):
            response.headers.update(self._answer)

    def _is_open(self, request: web.Request) -> bool:
        path = request.path
        return path.startswith(_OPEN_ROOTS) or path in self._open_paths


def _is_preflight(request: web.Request) -> bool:
    headers = request.headers
    return "origin" in headers and "access-control-request-method" in headers
