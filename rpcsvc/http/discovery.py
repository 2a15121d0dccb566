"""The documents: their catalogue, and GET and HEAD with ETag, 304 and Cache-Control."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache, partial

import orjson
from aiohttp import web
from msgspec import Struct, field

from rpcsvc.clock import DAY_MS, Clock
from rpcsvc.http.connection import Handler
from rpcsvc.http.documents import agent, links, llms, wellknown
from rpcsvc.http.documents.recording import EXAMPLE_KEY, RPC_EXAMPLE_KEY, Recording
from rpcsvc.http.gate import CALLER, Gate
from rpcsvc.http.site import Site
from rpcsvc.strict_json import Json

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_KEPT_SECONDS = 300
_HOUR = 3_600

Maker = Callable[[], Json]

# An entry of If-None-Match (RFC 9110, section 8.8.3): an opaque tag, maybe marked as weak.
_ENTITY_TAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')


class Renewal(Enum):
    """The renewal of a cached document.

    ``FOR_EACH_READER``: its example makes an order, and the example's idempotency key gives access
    to the order's session. No cache may keep it.
    """

    NEVER = "never"
    DAILY = "daily"
    EVERY_REQUEST = "every request"
    FOR_EACH_READER = "for each reader"


class Document(Struct, frozen=True):
    """A document. ``render`` takes the time in milliseconds since the epoch.

    ``kept_seconds``: how long a client may use its copy without revalidating it.
    """

    path: str
    media_type: str
    render: Callable[[int], bytes]
    renewal: Renewal = Renewal.NEVER
    kept_seconds: int = _KEPT_SECONDS
    aliases: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of this document and its aliases."""
        return (self.path, *self.aliases)

    @property
    def is_shared(self) -> bool:
        """Whether a shared cache may store it."""
        return self.renewal is not Renewal.FOR_EACH_READER


class Sources(Struct, frozen=True):
    """Inputs from other modules: the API descriptions, the public keys, the recorded answers.

    Each is called when its document is first asked for; ``jwks`` every time, since keys rotate
    while the service runs. ``new_key`` makes an idempotency key for an example.
    """

    openapi: Maker
    openrpc: Maker
    jwks: Maker
    recording: Callable[[], Recording]
    new_key: Callable[[], str]


def catalogue(site: Site, sources: Sources) -> tuple[Document, ...]:
    """The documents of the site."""
    return (
        *_agent_documents(site, sources),
        *_descriptions(sources),
        *_pages(site, sources),
        *_well_known(site),
    )


def _agent_documents(site: Site, sources: Sources) -> tuple[Document, ...]:
    return (
        Document(
            links.QUICKSTART,
            JSON,
            lambda now: _json(agent.quickstart(site, now, sources.new_key())),
            Renewal.FOR_EACH_READER,
        ),
        Document(
            links.AGENT, JSON, _compact(partial(agent.agent, site)), aliases=(links.AGENT_ALIAS,)
        ),
        Document(links.AI_PLUGIN, JSON, _once(partial(agent.ai_plugin, site))),
    )  # fmt: skip


def _descriptions(sources: Sources) -> tuple[Document, ...]:
    return (
        Document(
            links.OPENAPI, JSON, _compact(sources.openapi), aliases=(links.OPENAPI_WELL_KNOWN,)
        ),
        Document(links.OPENRPC, JSON, _compact(sources.openrpc)),
        Document(
            links.JWKS, "application/jwk-set+json", _once(sources.jwks), Renewal.EVERY_REQUEST,
            kept_seconds=0,  # a revoked key goes at once, and one that signs at once is found
        ),
    )  # fmt: skip


def _pages(site: Site, sources: Sources) -> tuple[Document, ...]:
    return (
        Document(links.LLMS, TEXT, lambda _now: llms.llms_txt(site)),
        Document(
            links.LLMS_FULL,
            TEXT,
            _with_fresh_keys(lambda: llms.llms_full(site, sources.recording()), sources),
            Renewal.FOR_EACH_READER,
        ),
        Document(
            links.LOGO,
            "image/svg+xml",
            lambda _now: wellknown.logo(),
            kept_seconds=24 * _HOUR,
            headers={"content-security-policy": "default-src 'none'"},
        ),
    )


def _well_known(site: Site) -> tuple[Document, ...]:
    return (
        Document(
            links.SECURITY_TXT, TEXT, partial(wellknown.security_txt, site), Renewal.DAILY,
            kept_seconds=_HOUR,
        ),
        Document(
            links.API_CATALOG, wellknown.CATALOG_TYPE, _once(partial(wellknown.api_catalog, site)),
            headers={"link": wellknown.api_catalog_link(site)},
        ),
        Document(
            links.SERVER_CARD, wellknown.SERVER_CARD_TYPE,
            _once(partial(wellknown.server_card, site)), aliases=(links.SERVER_CARD_ALIAS,),
        ),
        Document(
            links.AI_CATALOG, wellknown.AI_CATALOG_TYPE, _once(partial(wellknown.ai_catalog, site))
        ),
        Document(links.ROBOTS, TEXT, lambda _now: wellknown.robots_txt(site), kept_seconds=_HOUR),
        Document(
            links.SITEMAP, "application/xml", lambda _now: wellknown.sitemap(site),
            kept_seconds=_HOUR,
        ),
    )  # fmt: skip


def _with_fresh_keys(make: Callable[[], bytes], sources: Sources) -> Callable[[int], bytes]:
    """A page rendered once, whose idempotency keys are replaced for each request."""
    page = lru_cache(maxsize=1)(make)

    def render(_now: int) -> bytes:
        text = page()
        for key in (EXAMPLE_KEY, RPC_EXAMPLE_KEY):
            text = text.replace(key.encode(), sources.new_key().encode())
        return text

    return render


def _once(make: Maker) -> Callable[[int], bytes]:
    """A JSON document that does not depend on the time."""
    return lambda _now: _json(make())


def _compact(make: Maker) -> Callable[[int], bytes]:
    """A JSON document without indentation, which would double the size of schemas."""
    return lambda _now: orjson.dumps(make(), option=orjson.OPT_APPEND_NEWLINE)


def _json(value: Json) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


class Rendering(Struct, frozen=True):
    """The bytes of a rendered document, with the headers computed from them."""

    body: bytes
    etag: str
    headers: dict[str, str]
    written_at: int


class DocumentCache:
    """Caches the rendering of one document until it is due again."""

    def __init__(self, document: Document, clock: Clock) -> None:
        self.document = document
        self._clock = clock
        self._kept: Rendering | None = None

    def replace(self, document: Document) -> None:
        """Serve another document of the same path from now on."""
        self.document, self._kept = document, None

    def rendering(self) -> Rendering:
        """The current rendering; rendered on first use."""
        now = self._clock.now_ms()
        kept = self._kept
        if kept is None or self._is_stale(kept, now):
            kept = self._kept = _render(self.document, now)
        return kept

    def _is_stale(self, kept: Rendering, now: int) -> bool:
        match self.document.renewal:
            case Renewal.NEVER:
                return False
            case Renewal.DAILY:
                return kept.written_at // DAY_MS != now // DAY_MS
            case Renewal.EVERY_REQUEST | Renewal.FOR_EACH_READER:
                return True


def _render(document: Document, now: int) -> Rendering:
    body = document.render(now)
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    keeping = f"public, max-age={document.kept_seconds}" if document.is_shared else "no-store"
    headers = {
        "etag": etag,
        # no-transform: the signature covers exactly these bytes.
        "cache-control": f"{keeping}, no-transform",
        **document.headers,
    }
    return Rendering(body, etag, headers, now)


class DiscoveryHttp:
    """Routes of the documents. Nothing in them depends on the request."""

    def __init__(self, gate: Gate, clock: Clock, documents: Iterable[Document]) -> None:
        self._gate = gate
        self.caches = tuple(DocumentCache(document, clock) for document in documents)

    def renew(self, documents: Iterable[Document]) -> None:
        """Serve these documents in place of those before: what they tell has changed."""
        for cache, document in zip(self.caches, documents, strict=True):
            cache.replace(document)

    def body(self, path: str) -> bytes:
        """Return the document of a path as it is served. Raises KeyError."""
        return {each.document.path: each for each in self.caches}[path].rendering().body

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all documents, aliases included."""
        return frozenset(path for cache in self.caches for path in cache.document.paths)

    def routes(self) -> list[web.RouteDef]:
        """GET and HEAD of every document and alias."""
        routes = []
        for cache in self.caches:
            handler = self._handler(cache)
            paths = cache.document.paths
            routes += [web.get(path, handler, allow_head=True) for path in paths]
        return routes

    def _handler(self, cache: DocumentCache) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[CALLER] = caller = self._gate.admit(request)
            self._gate.charge(caller, "requests")
            rendering = cache.rendering()
            headers = {
                **rendering.headers,
                **caller.headers,
                "x-request-id": caller.request_id,
            }
            if is_current(request.headers.getall("if-none-match", ()), rendering.etag):
                return web.Response(status=304, headers=headers)
            headers["content-type"] = cache.document.media_type
            return web.Response(body=rendering.body, headers=headers)

        return handle


def is_current(if_none_match: Iterable[str], etag: str) -> bool:
    """Return whether If-None-Match names this rendering (RFC 9110, section 13.1.2).

    The comparison is weak, as that section requires: a proxy may have marked our tag as weak.
    """
    given = ",".join(if_none_match).strip()
    return given == "*" or etag in _ENTITY_TAG.findall(given)
