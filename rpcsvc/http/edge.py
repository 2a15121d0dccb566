"""The edge: wraps all routes, and handles every request and response in this order.

    check the headers: refuse another host (DNS rebinding) and an unreadable body
    answer a CORS preflight, or call the handler
    turn an exception into a response (messages.Refusals)
    replace the server header, which would name versions; forbid guesses of the media type
    add CORS headers to the agent API, the BFF and the documents; never to /rpc
    sign the response over its bytes and the request (docs/use/signing.md), unless it is a stream

It is not a middleware, since aiohttp refuses some requests before it calls middlewares.
Source: the Fetch standard, section 3.2 (CORS protocol).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, hdrs, web
from msgspec import Struct

from rpcsvc.errors import InvalidRequest, MisdirectedRequest, ServiceError
from rpcsvc.http.connection import Handler
from rpcsvc.http.event_stream import EventStream
from rpcsvc.http.gate import is_on_socket, require_no_proxy
from rpcsvc.http.messages import BODY, Refusals, require_framing, unread_body
from rpcsvc.http.site import API_ROOT, BFF_ROOT
from rpcsvc.settings import Settings
from rpcsvc.signing import ResponseSigner
from rpcsvc.urls import is_loopback
from rpcsvc.verify import UNREAD_STATUSES

_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")
_SHOWN: Final = 100

_METHODS: Final = "GET, HEAD, POST"
_REQUEST_HEADERS: Final = (
    "content-type, idempotency-key, if-none-match, last-event-id, payment-authorization,"
    " payment-signature, x-api-key, x-request-id"
)
_RESPONSE_HEADERS: Final = (
    "etag", "idempotent-replayed", "link", "payment-receipt", "payment-required",
    "payment-response", "ratelimit", "ratelimit-policy", "retry-after", "www-authenticate",
    "x-request-id",
)  # fmt: skip
_PREFLIGHT_SECONDS: Final = 86_400
_ALLOW_ORIGIN: Final = "access-control-allow-origin"
_OPEN_ROOTS: Final = (API_ROOT + "/", BFF_ROOT + "/")
# Scheme and host of a target in absolute-form (RFC 9112, section 3.2.2).
_ROOT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_SERVER: Final = "rpcsvc"


class Hosts:
    """The accepted host names: those of the site, loopback, and ``allowed_hosts``.

    If evil.example resolves to 127.0.0.1, a browser takes the service for that page's own origin
    (DNS rebinding). Only the Host header shows the difference.
    """

    def __init__(self, settings: Settings) -> None:
        site = urlsplit(settings.effective_site_url).hostname
        onion = urlsplit(settings.onion_url).hostname
        names = (site, onion, settings.host, *settings.allowed_hosts)
        self._names = frozenset(_bare(name) for name in names if name)

    def require(self, request: web.Request) -> None:
        """Raise MisdirectedRequest for a name that is not served, by the Host header.

        HTTP/1.0 may omit the header: no browser uses it. Raises InvalidRequest if HTTP/1.1 does
        (RFC 9112, section 3.2).
        """
        given = request.headers.get("host")
        if given is None:
            if request.version >= HttpVersion11:
                raise InvalidRequest("The header host is missing. HTTP/1.1 needs one.")
            return
        name = _name_of(given)
        if name not in self._names and not is_loopback(name):
            raise MisdirectedRequest(
                f"Nothing is served here for the host {given[:_SHOWN]!r}. Use the address under"
                " which the service is published. Its operator adds names to allowed_hosts.",
                details={"received": given[:_SHOWN]},
            )


@lru_cache(maxsize=64)
def _name_of(host: str) -> str:
    """A Host header without its port. Cached: callers repeat few names."""
    match = _HOST.fullmatch(host)
    return _bare(match[1]) if match else host


def _bare(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


_PREFLIGHT: Final = {
    "access-control-allow-methods": _METHODS,
    "access-control-allow-headers": _REQUEST_HEADERS,
    "access-control-max-age": str(_PREFLIGHT_SECONDS),
}


class Cors:
    """Opens the agent API, the BFF and ``documents``, the paths outside them that pages may read.

    These are public and use no cookies: with ``*`` a page reads only what its server could fetch.
    /rpc stays closed: it admits loopback callers without a token, and a page in the operator's
    browser is one.

    With ``origins`` only pages of these and of loopback origins are allowed; None allows all.
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
        """The answer to an allowed preflight request; None for any other request."""
        if request.method != "OPTIONS" or not _is_preflight(request):
            return None
        origin = self._let_in(request)
        if origin is None:
            return None
        return web.Response(status=204, headers={**_PREFLIGHT, _ALLOW_ORIGIN: origin})

    def open(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the CORS headers that let the asking page read the response."""
        if not self._is_open(request):
            return
        if self._origins is not None:
            response.headers.add("vary", "origin")
        origin = self._let_in(request)
        if origin is not None:
            response.headers.update({**self._answer, _ALLOW_ORIGIN: origin})

    def _let_in(self, request: web.Request) -> str | None:
        """The origin to allow for this request: ``*``, its own, or None."""
        if not self._is_open(request):
            return None
        if self._origins is None:
            return "*"
        origin = request.headers.get("origin", "").lower()
        return origin if origin in self._origins or is_loopback_origin(origin) else None

    def _is_open(self, request: web.Request) -> bool:
        path = request.path
        return path.startswith(_OPEN_ROOTS) or path in self._open_paths


def is_loopback_origin(origin: str) -> bool:
    """Return whether an Origin header, ASCII by RFC 6454 (section 6.2), names a loopback host."""
    try:
        return origin.isascii() and is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return False


def _is_preflight(request: web.Request) -> bool:
    headers = request.headers
    return "origin" in headers and "access-control-request-method" in headers


class _Waiting(Struct, frozen=True):
    request: web.Request
    asked: bytes | None
    response: web.StreamResponse
    signed: asyncio.Future[None]


class BatchSigner:
    """Signs responses: together all that are ready in one iteration of the event loop.

    A signature reads 30 kB of tables, which evicts other data from the L1 cache. Made one after
    another, 16 signatures cost a quarter less (``make bench``, swap.status signed).
    """

    def __init__(self, signer: ResponseSigner) -> None:
        self._signer = signer
        self._waiting: list[_Waiting] = []

    async def sign(
        self, request: web.Request, asked: bytes | None, response: web.StreamResponse
    ) -> None:
        """Sign ``response`` over its bytes and the request with the body ``asked``, None if unread.

        Raises TypeError for a streamed response.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._sign_all)
        waiting = _Waiting(request, asked, response, loop.create_future())
        self._waiting.append(waiting)
        await waiting.signed

    def _sign_all(self) -> None:
        batch, self._waiting = self._waiting, []
        for waiting in batch:
            if waiting.signed.done():
                continue  # the caller has disconnected
            try:
                self.sign_now(waiting.request, waiting.asked, waiting.response)
            except Exception as error:  # noqa: BLE001 - raised where the response is awaited
                waiting.signed.set_exception(error)
            else:
                waiting.signed.set_result(None)

    def sign_now(
        self, request: web.Request, asked: bytes | None, response: web.StreamResponse
    ) -> None:
        """Sign one response by itself, where nothing can be awaited. Raises as sign does."""
        headers = self._signer.headers(
            request.method, _target(request), response.status, asked, _sent(request, response)
        )
        response.headers.update(headers)


def _target(request: web.Request) -> str:
    """Path and query as received, without a scheme and host that a proxy may prepend."""
    root = _ROOT.match(request.raw_path)
    if root is None:
        return request.raw_path
    target = request.raw_path[root.end() :]
    return target if target.startswith("/") else f"/{target}"


def _sent(request: web.Request, response: web.StreamResponse) -> bytes:
    """The bytes that follow the headers. Raises TypeError for a streamed response."""
    if request.method == "HEAD" or response.status in (204, 304):
        return b""
    body = (response.body or b"") if isinstance(response, web.Response) else None
    if isinstance(body, bytes):
        return body
    raise TypeError(f"a {type(response).__name__} can't be signed")


class Edge:
    """Wraps ``routes``. Without a ``signer`` nothing is signed.

    ``hosts`` are the names that requests over TCP may ask for; the UNIX socket answers to any.
    ``direct`` has the handlers of the busiest methods and targets, which are called without
    routing. ``observe`` is called with the status of each response.

    A request body longer than ``body_bytes`` is refused on every path. Once ``stopping`` is set,
    each response is the last of its connection.
    """

    def __init__(
        self,
        routes: web.Application,
        refusals: Refusals,
        hosts: Hosts,
        cors: Cors,
        signer: ResponseSigner | None,
        *,
        body_bytes: int,
        observe: Callable[[int], None] = lambda _status: None,
        direct: Mapping[tuple[str, str], Handler] = MappingProxyType({}),
    ) -> None:
        self.routes = routes
        self._refusals = refusals
        self._hosts = hosts
        self._cors = cors
        self._batch_signer = None if signer is None else BatchSigner(signer)
        self._body_bytes = body_bytes
        self._observe = observe
        self._direct = direct
        self.stopping = asyncio.Event()

    def around(self, routes: Handler) -> Handler:
        """``routes`` as a handler, wrapped in the steps of the edge."""
        batch_signer = self._batch_signer

        async def answer(request: web.Request) -> web.StreamResponse:
            response = await self._answered(request, routes)
            if batch_signer is not None and BODY not in request:
                response = await self._with_body(request, response)
            self._finish(request, response)
            if batch_signer is not None and not isinstance(response, EventStream):
                await batch_signer.sign(request, _asked(request, response), response)
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
        handler = self._direct.get((request.method, request.raw_path), routes)
        if hdrs.EXPECT in request.headers:
            handler = routes  # routing sends the 100 that the client waits for
        try:
            return self._cors.preflight(request) or await handler(request)
        except Exception as error:  # noqa: BLE001 - answered and logged
            return self._refusals.answer(request, error)

    def _check(self, request: web.Request) -> None:
        """Raise a ServiceError for a request that is refused by its headers alone."""
        if is_on_socket(request):
            require_no_proxy(request)
        else:
            self._hosts.require(request)
        require_framing(request)

    async def _with_body(
        self, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        """The response, once the body of its request is read: it is signed for.

        One whose body can't be read is refused for that.
        """
        if response.status not in UNREAD_STATUSES:
            try:
                request[BODY] = await unread_body(request, self._body_bytes)
            except ServiceError as error:
                return self._refusals.answer(request, error)
        return response

    def _finish(self, request: web.Request, response: web.StreamResponse) -> None:
        self._observe(response.status)
        headers = response.headers
        headers[hdrs.SERVER] = _SERVER
        headers["x-content-type-options"] = "nosniff"
        if "x-request-id" not in headers:
            headers["x-request-id"] = self._refusals.request_id(request)
        self._cors.open(request, response)

    def refuse(self, request: web.Request, error: Exception) -> web.Response:
        """The response to a request that reached no route, or whose response failed.

        Of a request that could not be read, ``request`` is what aiohttp has in its place:
        docs/use/signing.md says for which one the response is signed.
        """
        response = self._refusals.answer(request, error)
        self._finish(request, response)
        if self._batch_signer is not None:
            self._batch_signer.sign_now(request, _asked(request, response), response)
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
