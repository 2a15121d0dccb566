"""Serves the documents: GET and HEAD, ETag and 304, Cache-Control."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web

from rpcsvc.clock import Clock
from rpcsvc.http.documents.catalogue import Document, Renewal
from rpcsvc.http.gate import REQUEST_CONTEXT, Gate, RequestContext
from rpcsvc.http.messages import Handler

_DAY_MS = 86_400_000
# One entry of If-None-Match (RFC 9110, section 8.8.3): an opaque tag, maybe marked as weak.
_ENTITY_TAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')


@dataclass(frozen=True, slots=True)
class Rendering:
    """A document as it was written, with the headers that go with those very bytes."""

    body: bytes
    etag: str
    headers: dict[str, str]
    written_at: int


class DocumentCache:
    """Keeps the rendering of one document until it has to be written again."""

    def __init__(self, document: Document, clock: Clock) -> None:
        self._document = document
        self._clock = clock
        self._kept: Rendering | None = None

    def rendering(self) -> Rendering:
        """The rendering of now; written on first use."""
        now = self._clock.now_ms()
        kept = self._kept
        if kept is None or self._is_stale(kept, now):
            kept = self._kept = _render(self._document, now)
        return kept

    def _is_stale(self, kept: Rendering, now: int) -> bool:
        match self._document.renewal:
            case Renewal.NEVER:
                return False
            case Renewal.DAILY:
                return kept.written_at // _DAY_MS != now // _DAY_MS
            case Renewal.EVERY_REQUEST | Renewal.FOR_EACH_READER:
                return True


def _render(document: Document, now: int) -> Rendering:
    body = document.render(now)
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    is_shared = document.renewal is not Renewal.FOR_EACH_READER
    keeping = f"public, max-age={document.kept_seconds}" if is_shared else "no-store"
    headers = {
        "etag": etag,
        # no-transform: the signature covers these bytes and no others.
        "cache-control": f"{keeping}, no-transform",
        "x-content-type-options": "nosniff",
        **document.headers,
    }
    return Rendering(body, etag, headers, now)


class DiscoveryHttp:
    """Routes of the documents. Nothing in them depends on the request."""

    def __init__(self, gate: Gate, clock: Clock, documents: Iterable[Document]) -> None:
        self._gate = gate
        self._clock = clock
        self._documents = tuple(documents)

    @property
    def paths(self) -> frozenset[str]:
        """Every path that gives a document."""
        return frozenset(path for document in self._documents for path in document.paths)

    def routes(self) -> list[web.RouteDef]:
        """GET and HEAD of every document and alias."""
        routes = []
        for document in self._documents:
            handler = self._handler(document)
            routes += [web.get(path, handler, allow_head=True) for path in document.paths]
        return routes

    def _handler(self, document: Document) -> Handler:
        cache = DocumentCache(document, self._clock)

        async def handle(request: web.Request) -> web.StreamResponse:
            context = self._gate.admit(request)
            request[REQUEST_CONTEXT] = context
            self._gate.charge(context, "requests")
            rendering = cache.rendering()
            headers = self._headers(context, rendering)
            if is_current(request.headers.getall("if-none-match", ()), rendering.etag):
                return web.Response(status=304, headers=headers)
            headers["content-type"] = document.media_type
            return web.Response(body=rendering.body, headers=headers)

        return handle

    def _headers(self, context: RequestContext, rendering: Rendering) -> dict[str, str]:
        request_id = context.request_id or self._gate.new_request_id()
        return {**rendering.headers, **context.headers, "x-request-id": request_id}


def is_current(if_none_match: Iterable[str], etag: str) -> bool:
    """Whether the client has these bytes already (RFC 9110, section 13.1.2).

    The comparison is the weak one, as that section asks: a proxy may have marked our tag as weak.
    """
    given = ",".join(if_none_match).strip()
    return given == "*" or etag in _ENTITY_TAG.findall(given)
