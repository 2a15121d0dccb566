"""The catalogue of documents: path, media type, cache lifetime, and how each is rendered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial

import orjson

from rpcsvc.http.documents import agent, links, llms, wellknown
from rpcsvc.http.documents.recording import EXAMPLE_KEY, RPC_EXAMPLE_KEY, Recording
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_KEPT_SECONDS = 300
_HOUR = 3_600

Maker = Callable[[], Json]


class Renewal(Enum):
    """When a document that was written once has to be written again.

    ``FOR_EACH_READER``: its example makes an order, and whoever has the example's idempotency key
    has the order's session. No cache may keep it.
    """

    NEVER = "never"
    DAILY = "daily"
    EVERY_REQUEST = "every request"
    FOR_EACH_READER = "for each reader"


@dataclass(frozen=True, slots=True)
class Document:
    """One document. ``render`` takes the time in milliseconds since the epoch.

    ``kept_seconds`` is for how long a client may use its copy without asking.
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
        """Every path that gives this document."""
        return (self.path, *self.aliases)


@dataclass(frozen=True, slots=True)
class Sources:
    """What others make: the API descriptions, the public keys, the recorded answers.

    Each is called when its document is first asked for; ``jwks`` every time, since keys rotate
    while the service runs. ``new_key`` makes an idempotency key for an example.
    """

    openapi: Maker
    openrpc: Maker
    jwks: Maker
    recording: Callable[[], Recording]
    new_key: Callable[[], str]


def catalogue(site: Site, sources: Sources) -> tuple[Document, ...]:
    """Every document of the site."""
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
            kept_seconds=0,  # asked for because of a new key, a cache must not give the old set
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
            links.HOME,
            "text/html; charset=utf-8",
            lambda _now: wellknown.home(site),
            headers={"content-security-policy": "default-src 'none'; img-src 'self'"},
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
        Document(links.ROBOTS, TEXT, lambda _now: wellknown.robots_txt(site), kept_seconds=_HOUR),
        Document(
            links.SITEMAP, "application/xml", lambda _now: wellknown.sitemap(site),
            kept_seconds=_HOUR,
        ),
    )  # fmt: skip


def _with_fresh_keys(make: Callable[[], bytes], sources: Sources) -> Callable[[int], bytes]:
    """A page that is written once, with new idempotency keys for each reader."""
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
    """The same for documents full of schemas, which indentation would double in size."""
    return lambda _now: orjson.dumps(make(), option=orjson.OPT_APPEND_NEWLINE)


def _json(value: Json) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
