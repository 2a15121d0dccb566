"""CORS: pages of any origin may call the agent API and the BFF and read the documents; never /rpc.

The agent API is public and knows no cookies, so that ``*`` gives a page nothing that it could not
have from its own server. A service that only this machine reaches lets in pages of loopback origins
and the configured ones: any other page in a browser here is a stranger's. /rpc is let in by a token
or by its place on this machine: a page in the operator's browser has that place, so it must never
be let through.
Source: the Fetch standard, section 3.2 (CORS protocol).
What does not live here: who may call (gate.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from rpcsvc.http.hosts import is_loopback_name
from rpcsvc.http.site import API_ROOT, BFF_ROOT

_METHODS: Final = "GET, HEAD, POST"
_REQUEST_HEADERS: Final = "content-type, idempotency-key, if-none-match, x-api-key, x-request-id"
_RESPONSE_HEADERS: Final = (
    "etag", "idempotent-replayed", "link", "ratelimit", "ratelimit-policy", "retry-after",
    "www-authenticate", "x-request-id",
)  # fmt: skip
_PREFLIGHT_SECONDS: Final = 86_400
_ALLOW_ORIGIN: Final = "access-control-allow-origin"
_OPEN_ROOTS: Final = (API_ROOT + "/", BFF_ROOT + "/")
_PREFLIGHT: Final = {
    "access-control-allow-methods": _METHODS,
    "access-control-allow-headers": _REQUEST_HEADERS,
    "access-control-max-age": str(_PREFLIGHT_SECONDS),
}


class Cors:
    """Opens the agent API and ``documents``, the paths outside it that any page may read.

    With ``origins`` only pages of these and of loopback origins are let in; None lets in all.
    """

    def __init__(
        self,
        documents: Iterable[str],
        signature_headers: Iterable[str],
        origins: Iterable[str] | None = None,
    ) -> None:
        self._open_paths = frozenset(documents)
        self._origins = None if origins is None else frozenset(origins)
        exposed = ", ".join((*_RESPONSE_HEADERS, *signature_headers))
        self._answer = {"access-control-expose-headers": exposed}

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight request that is let in; None for any other."""
        if request.method != "OPTIONS" or not _is_preflight(request):
            return None
        origin = self._let_in(request)
        if origin is None:
            return None
        return web.Response(status=204, headers={**_PREFLIGHT, _ALLOW_ORIGIN: origin})

    def open(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page that asked read the response, whatever it says."""
        if not self._is_open(request):
            return
        if self._origins is not None:
            response.headers.add("vary", "origin")
        origin = self._let_in(request)
        if origin is not None:
            response.headers.update({**self._answer, _ALLOW_ORIGIN: origin})

    def _let_in(self, request: web.Request) -> str | None:
        """Which origin is let in for this request: ``*``, its own, or None."""
        if not self._is_open(request):
            return None
        if self._origins is None:
            return "*"
        origin = request.headers.get("origin", "").lower()
        return origin if origin in self._origins or _is_loopback(origin) else None

    def _is_open(self, request: web.Request) -> bool:
        path = request.path
        return path.startswith(_OPEN_ROOTS) or path in self._open_paths


def _is_loopback(origin: str) -> bool:
    try:
        return is_loopback_name(urlsplit(origin).hostname or "")
    except ValueError:
        return False


def _is_preflight(request: web.Request) -> bool:
    headers = request.headers
    return "origin" in headers and "access-control-request-method" in headers
