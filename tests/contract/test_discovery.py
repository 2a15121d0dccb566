"""The documents over HTTP: links resolve, examples work, caching headers and pages are right."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from yarl import URL

from rpcsvc.bootstrap import Running, running
from rpcsvc.http.discovery import DiscoveryHttp, Sources, catalogue
from rpcsvc.http.documents import links, recording
from rpcsvc.http.documents.recording import EXAMPLE_KEY
from rpcsvc.http.edge import Cors, Edge, Hosts
from rpcsvc.http.gate import Gate
from rpcsvc.http.messages import Refusals
from rpcsvc.http.site import site_of
from rpcsvc.operations.dispatch import flat_dispatcher
from rpcsvc.serving import web_app
from rpcsvc.settings import load_settings
from tests.contract.serving import JSON, TOKEN, EdgeServer, Served

PUBLIC = "https://swap.example.com"
DOCUMENTS = (*links.DESCRIPTIONS, *links.ALIASES, links.LOGO)
TYPES = {
    links.QUICKSTART: "application/json",
    links.LLMS_FULL: "text/plain; charset=utf-8",
    links.LLMS: "text/plain; charset=utf-8",
    links.OPENAPI: "application/json",
    links.OPENAPI_WELL_KNOWN: "application/json",
    links.OPENRPC: "application/json",
    links.AGENT: "application/json",
    links.AGENT_ALIAS: "application/json",
    links.JWKS: "application/jwk-set+json",
    links.AI_PLUGIN: "application/json",
    links.SERVER_CARD: "application/mcp-server-card+json",
    links.SERVER_CARD_ALIAS: "application/mcp-server-card+json",
    links.AI_CATALOG: "application/ai-catalog+json",
    links.API_CATALOG: "application/linkset+json;"
    ' profile="https://www.rfc-editor.org/info/rfc9727"',
    links.SECURITY_TXT: "text/plain; charset=utf-8",
    links.RATES_XML: "application/xml",
    links.RATES_JSON: "application/json",
    links.SITEMAP: "application/xml",
    links.ROBOTS: "text/plain; charset=utf-8",
    links.LOGO: "image/svg+xml",
}
# Their examples have keys.
FOR_EACH_READER = (links.QUICKSTART, links.LLMS_FULL)
STABLE = [path for path in DOCUMENTS if path not in FOR_EACH_READER]
KEY_IN_TEXT = re.compile(r"""idempotency-key["']?:?\s+["']?([0-9a-f-]{36})""")


class StubSources:
    """Sources of the documents: OpenAPI calls are counted, keys can be replaced."""

    def __init__(self) -> None:
        self.openapi_calls = 0
        self.keys: list[str] = ["first"]

    def openapi(self) -> dict[str, Any]:
        self.openapi_calls += 1
        return {"openapi": "3.1.0"}

    def jwks(self) -> dict[str, Any]:
        return {"keys": self.keys}

    @property
    def as_sources(self) -> Sources:
        return Sources(self.openapi, dict, self.jwks, recording.load, lambda: EXAMPLE_KEY)


def discovery_of(up: Running, sources: StubSources) -> DiscoveryHttp:
    """The documents of a running service."""
    gate = Gate(up.settings, up.service.clients, up.service.random, time.monotonic)
    documents = catalogue(site_of(up.settings, up.service), sources.as_sources)
    return DiscoveryHttp(gate, up.service.clock, documents)


def documents_edge(up: Running, sources: StubSources) -> Edge:
    """The documents alone, with sources that the test controls."""
    gate = Gate(up.settings, up.service.clients, up.service.random, time.monotonic)
    discovery = discovery_of(up, sources)
    routes = web.Application()
    routes.add_routes(discovery.routes())
    return Edge(
        routes,
        Refusals(gate, up.dispatcher, flat_dispatcher(up.service), time.monotonic),
        Hosts(up.settings),
        Cors(discovery.paths, ()),
        None,
        body_bytes=65_536,
    )


@asynccontextmanager
async def visiting(
    data_dir: Path,
    *,
    environ: dict[str, str] | None = None,
    sources: StubSources | None = None,
    **flags: Any,
) -> AsyncIterator[Served]:
    """A service whose site URL differs from its listen address."""
    given = {
        "data_dir": str(data_dir),
        "rate_limit.enabled": False,
        "site_url": PUBLIC,
        "trusted_proxies": "192.0.2.1",
        **{name.replace("__", "."): value for name, value in flags.items()},
    }
    settings = load_settings(config_file=None, environ=environ or {}, flags=given).settings
    async with running(settings) as up:
        edge = web_app(up) if sources is None else documents_edge(up, sources)
        client: TestClient[Any, Any] = TestClient(EdgeServer(edge))
        await client.start_server()
        try:
            yield Served(up, client)
        finally:
            await client.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Served]:
    async with visiting(tmp_path) as served:
        yield served


async def get(served: Served, path: str, **headers: str) -> aiohttp.ClientResponse:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await served.client.get(path, headers=names)
    await response.read()
    return response


async def quickstart(served: Served) -> Any:
    return await (await get(served, links.QUICKSTART)).json()


def local(url: str) -> str:
    """The path and query of one of the site's own addresses."""
    parts = urlsplit(url)
    assert f"{parts.scheme}://{parts.netloc}" == PUBLIC, url
    return parts.path + (f"?{parts.query}" if parts.query else "")


async def resolve(served: Served, urls: Iterable[str]) -> None:
    """Require that every address answers GET with 200 and a body."""
    for url in urls:
        response = await get(served, local(url))
        assert response.status == 200, url
        assert await response.read(), url


# Links


async def test_every_link_of_the_quickstart_resolves(site: Served) -> None:
    answer = await quickstart(site)
    assert len(answer["links"]) == 15
    await resolve(site, answer["links"].values())
    await resolve(site, answer["propagation"]["discoveryOrder"])
    await resolve(site, [answer["propagation"]["preferredCitationUrl"]])


async def test_every_endpoint_of_the_quickstart_is_there(site: Served) -> None:
    for path in (await quickstart(site))["quickstart"]["endpoints"].values():
        answers = [
            (await site.client.request(method, path, json=body)).status
            for method, body in (("GET", None), ("POST", {}))
        ]
        assert min(answers) < 405, path


@pytest.mark.parametrize("path", [links.LLMS, links.LLMS_FULL])
async def test_every_link_of_the_llms_documents_resolves(site: Served, path: str) -> None:
    text = await (await get(site, path)).text()
    found = re.findall(r"\]\((https?://[^)]+)\)", text)
    assert len(found) >= len(links.DESCRIPTIONS) - 1
    await resolve(site, found)


async def test_links_of_agent_json_and_plugin_manifest_resolve(site: Served) -> None:
    agent = await (await get(site, links.AGENT)).json()
    await resolve(site, [*agent["links"].values(), agent["url"], agent["signing"]["jwks"]])
    await resolve(site, [agent["signing"]["procedure"]])
    manifest = await (await get(site, links.AI_PLUGIN)).json()
    await resolve(site, [manifest["logo_url"], manifest["legal_info_url"], manifest["api"]["url"]])


async def test_every_link_of_the_home_page_resolves(site: Served) -> None:
    text = await (await get(site, "/")).text()
    for path in re.findall(r'href="(/[^"]*)"', text):
        assert (await get(site, path)).status == 200, path


async def test_the_sitemap_is_xml_and_lists_documents_that_are_there(site: Served) -> None:
    tree = ElementTree.fromstring(await (await get(site, links.SITEMAP)).read())
    space = "{http://www.sitemaps.org/schemas/sitemap/0.9}"
    assert tree.tag == f"{space}urlset"
    found = [loc.text or "" for loc in tree.iter(f"{space}loc")]
    assert len(found) == len(set(found))
    wanted = {links.HOME, *DOCUMENTS} - {*links.ALIASES, links.SITEMAP, links.ROBOTS, links.LOGO}
    assert {local(url) for url in found} == wanted
    await resolve(site, found)


async def test_robots_may_read_the_documents_and_not_the_calls(site: Served) -> None:
    text = await (await get(site, links.ROBOTS)).text()
    rules = [line.partition(": ")[::2] for line in text.splitlines() if line]
    assert rules[0] == ("User-agent", "*")
    assert rules[-1] == ("Sitemap", f"{PUBLIC}/sitemap.xml")

    def may_read(path: str) -> bool:
        # RFC 9309: the longest rule that matches wins.
        matching = [(len(p), kind) for kind, p in rules[1:-1] if path.startswith(p)]
        return not matching or max(matching)[1] == "Allow"

    assert all(may_read(path) for path in DOCUMENTS)
    for path in ("/rpc", "/api/v1/agent/swap/status/ord_1", "/api/v1/agent/swap/execute"):
        assert not may_read(path), path


async def test_the_api_catalog_is_a_linkset_whose_targets_are_there(site: Served) -> None:
    response = await get(site, links.API_CATALOG)
    contexts = (json.loads(await response.read()))["linkset"]
    assert [local(context["anchor"]) for context in contexts] == [
        links.API_CATALOG, "/api/v1", "/rpc", "/mcp",
    ]  # fmt: skip
    assert [local(item["href"]) for item in contexts[0]["item"]] == [
        "/api/v1", "/rpc", "/mcp",
    ]  # fmt: skip
    for context in contexts[1:]:
        for relation in ("service-desc", "service-doc", "service-meta", "status"):
            target = context[relation][0]
            answer = await get(site, local(target["href"]))
            assert answer.status == 200
            assert answer.content_type == target["type"]


async def test_head_of_the_api_catalog_has_its_links(site: Served) -> None:
    response = await site.client.head(links.API_CATALOG)
    assert f'<{PUBLIC}/.well-known/api-catalog>; rel="api-catalog"' in response.headers["link"]
    assert f'<{PUBLIC}/api/v1>; rel="item"' in response.headers["link"]


# Examples


async def send(served: Served, example: dict[str, Any]) -> Any:
    """Send an example of the quickstart unchanged."""
    response = await served.client.request(
        example["method"],
        example["path"],
        data=json.dumps(example["body"]),
        headers=example.get("headers", JSON),
    )
    return await response.json()


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"orders__max_swap_usd": 60},
        {"sandbox__usdc_per_xmr": "0.9"},
        {"sandbox__usdc_per_xmr": "99999"},
    ],
)
async def test_the_examples_work_as_they_stand_at_any_rate_and_limit(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    async with visiting(tmp_path, **flags) as served:
        examples = (await quickstart(served))["examples"]
        assert (await send(served, examples["plan"]))["state"] == "ready"
        executed = await send(served, examples["execute"])
        assert (executed["ok"], executed["state"]) == (True, "waiting_for_funding")
        again = await send(served, examples["execute"])
        assert again["data"]["order"] == executed["data"]["order"]
        assert served.count("orders") == 1


async def quickstart_example(served: Served) -> dict[str, Any]:
    return dict((await quickstart(served))["examples"]["execute"])


async def llms_full_example(served: Served) -> dict[str, Any]:
    text = await (await get(served, links.LLMS_FULL)).text()
    block = next(block for block in http_blocks(text) if block[1].endswith("/swap/execute"))
    method, path, headers, body = block
    return {"method": method, "path": path, "headers": headers, "body": json.loads(body)}


@pytest.mark.parametrize("example", [quickstart_example, llms_full_example])
async def test_example_makes_a_payable_order_on_another_day_too(
    tmp_path: Path, example: Callable[[Served], Awaitable[dict[str, Any]]]
) -> None:
    async with visiting(tmp_path) as served:
        first = await send(served, await example(served))
        await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 86_400})
        later = await send(served, await example(served))
        assert later["state"] == "waiting_for_funding"
        order_id = later["data"]["order"]["orderId"]
        assert order_id != first["data"]["order"]["orderId"]
        status = await served.http("GET", f"/agent/swap/status/{order_id}")
        assert status.body["state"] == "waiting_for_funding"


async def test_the_examples_work_with_other_chains(tmp_path: Path) -> None:
    given = (Path(__file__).parent.parent.parent / "config" / "chains.toml").read_text()
    ethereum = re.search(r"\[chains\.ethereum\].*?(?=\n\[)", given, re.DOTALL)
    assert ethereum is not None
    chains = tmp_path / "chains.toml"
    chains.write_text(ethereum[0].replace("min_swap_usd = 50", "min_swap_usd = 400"))
    async with visiting(tmp_path / "data", chains_file=str(chains)) as served:
        examples = (await quickstart(served))["examples"]
        assert (await send(served, examples["plan"]))["state"] == "ready"
        assert (await send(served, examples["execute"]))["state"] == "waiting_for_funding"


def http_blocks(text: str) -> list[tuple[str, str, dict[str, str], str]]:
    """The requests of llms-full.txt: method, target, headers, body."""
    found = []
    for block in re.findall(r"```http\n(.*?)\n```", text, re.DOTALL):
        head, _, body = block.partition("\n\n")
        first, *lines = head.split("\n")
        method, target, _version = first.split(" ")
        headers = dict(line.split(": ", 1) for line in lines)
        found.append((method, target, headers, body))
    return found


async def test_requests_in_llms_full_get_the_state_shown_below_them(
    site: Served,
) -> None:
    text = await (await get(site, links.LLMS_FULL)).text()
    known = recording.load()
    sent = 0
    for method, target, headers, body in http_blocks(text):
        if "ord_" in target + body or target == "/rpc":
            continue  # about a recorded order, or /rpc
        del headers["host"]
        response = await site.client.request(method, target, data=body, headers=headers)
        answer = await response.json()
        expected = known[headers["x-request-id"]].answer
        assert answer["state"] == expected["state"], target
        assert answer["requestId"] == headers["x-request-id"]
        sent += 1
    assert sent >= 7


async def test_the_json_rpc_request_in_llms_full_works(tmp_path: Path) -> None:
    async with visiting(tmp_path, environ={"AGENT_RPC_TOKEN": TOKEN}, brand__slug="acme") as served:
        text = await (await get(served, links.LLMS_FULL)).text()
        blocks = [block for block in http_blocks(text) if block[1] == "/rpc"]
        assert len(blocks) == 1
        _, target, headers, body = blocks[0]
        assert headers.pop("x-agent-rpc-token").startswith("<")
        del headers["host"]
        headers["x-agent-rpc-token"] = TOKEN
        response = await served.client.post(target, data=body, headers=headers)
        assert (await response.json())["result"]["state"] == "waiting_for_funding"


# Host and brand


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-host": "evil.example", "x-forwarded-proto": "http"},
        {"forwarded": "host=evil.example;proto=http"},
    ],
)
async def test_a_hostile_forwarded_host_changes_nothing(
    site: Served, headers: dict[str, str]
) -> None:
    for path in STABLE:
        plain = await get(site, path)
        hostile = await site.client.get(path, headers=headers)
        assert await hostile.read() == await plain.read()
        assert hostile.headers["etag"] == plain.headers["etag"]
        assert "evil" not in str(hostile.headers)


async def test_an_absolute_target_changes_nothing(site: Served) -> None:
    """``GET http://host/... HTTP/1.1``, as clients send it to a proxy."""
    host, port = site.client.server.host, site.client.server.port
    async with aiohttp.ClientSession() as session:
        answer = await session.get(
            "http://swap.example.com/llms.txt", proxy=f"http://{host}:{port}", max_redirects=0
        )
        assert await answer.read() == await (await get(site, links.LLMS)).read()


# Caching


@pytest.mark.parametrize("path", DOCUMENTS)
async def test_each_document_has_its_type_its_tag_and_its_lifetime(site: Served, path: str) -> None:
    response = await get(site, path)
    assert response.headers["content-type"] == TYPES[path]
    assert re.fullmatch('"[0-9a-f]{32}"', response.headers["etag"])
    # A client that refetches the keys because of an unknown one must not get a cached old set.
    lifetime = "0" if path == links.JWKS else "[1-9][0-9]*"
    kept = "no-store" if path in FOR_EACH_READER else f"public, max-age={lifetime}"
    assert re.fullmatch(f"{kept}, no-transform", response.headers["cache-control"])
    assert response.headers["x-content-type-options"] == "nosniff"


def kept_as(path: str, headers: Mapping[str, str]) -> str:
    """How long caches may keep an answer; without the seconds where they are those left."""
    said = headers["cache-control"]
    is_listing = path in (links.RATES_XML, links.RATES_JSON)
    return re.sub(r"=\d+", "=", said) if is_listing else said


@pytest.mark.parametrize("path", STABLE)
async def test_head_gives_the_headers_of_get_without_a_body(site: Served, path: str) -> None:
    plain = await get(site, path, x_request_id="mine")
    head = await site.client.head(path, headers={"x-request-id": "mine"})
    assert await head.read() == b""
    # A signature covers the bytes of the body: none for HEAD.
    moving = (
        "date", "x-service-signed-at", "x-service-signature", "x-service-content-sha256",
    )  # fmt: skip
    ours, theirs = (
        {name.lower(): value for name, value in answer.headers.items()} for answer in (head, plain)
    )
    for headers in (ours, theirs):
        for name in moving:
            headers.pop(name, None)
        headers["cache-control"] = kept_as(path, headers)
    assert ours == theirs
    assert int(ours["content-length"]) == len(await plain.read())


@pytest.mark.parametrize("path", STABLE)
async def test_a_client_that_has_the_document_gets_304(site: Served, path: str) -> None:
    first = await get(site, path)
    tag = first.headers["etag"]
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await get(site, path, if_none_match=given)
        assert again.status == 304
        assert await again.read() == b""
        assert again.headers["etag"] == tag
        assert kept_as(path, again.headers) == kept_as(path, first.headers)
        assert "content-type" not in again.headers
    assert (await get(site, path, if_none_match='"other"')).status == 200
    head = await site.client.head(path, headers={"if-none-match": tag})
    assert head.status == 304


async def test_documents_are_written_when_first_asked_for_and_kept(tmp_path: Path) -> None:
    sources = StubSources()
    async with visiting(tmp_path, sources=sources) as served:
        assert sources.openapi_calls == 0
        for path in (links.OPENAPI, links.OPENAPI, links.OPENAPI_WELL_KNOWN):
            assert (await get(served, path)).status == 200
        assert sources.openapi_calls == 1


async def test_a_rotated_key_is_in_the_jwks_at_once(tmp_path: Path) -> None:
    sources = StubSources()
    async with visiting(tmp_path, sources=sources) as served:
        before = await get(served, links.JWKS)
        assert (await get(served, links.JWKS)).headers["etag"] == before.headers["etag"]
        sources.keys = ["second", "first"]
        after = await get(served, links.JWKS, if_none_match=before.headers["etag"])
        assert after.status == 200
        assert json.loads(await after.read()) == {"keys": ["second", "first"]}
        assert "max-age=0" in after.headers["cache-control"], "no cache may keep a revoked key"


async def test_the_request_id_is_echoed_or_made(site: Served) -> None:
    given = await get(site, links.LLMS, x_request_id="mine")
    assert given.headers["x-request-id"] == "mine"
    made = await get(site, links.LLMS, x_request_id="not good!")
    assert made.headers["x-request-id"].startswith("req_")


async def test_documents_are_paid_for_like_other_requests(tmp_path: Path) -> None:
    async with visiting(
        tmp_path, rate_limit__enabled=True, rate_limit__requests_per_minute=2
    ) as served:
        answers = [await get(served, links.LLMS) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[0].headers["ratelimit-policy"] == '"requests";q=2;w=60'
        assert (await answers[2].json())["error"]["code"] == "rate_limited"
        assert int(answers[2].headers["retry-after"]) > 0
        assert answers[2].headers["access-control-allow-origin"] == "*"


async def test_a_document_is_not_written_to(site: Served) -> None:
    for method in ("POST", "PUT", "DELETE"):
        response = await site.client.request(method, links.LLMS)
        assert response.status == 405
        assert set(response.headers["allow"].replace(" ", "").split(",")) == {"GET", "HEAD"}


async def test_document_error_reveals_no_cause(tmp_path: Path) -> None:
    sources = StubSources()

    def broken() -> dict[str, Any]:
        raise ValueError("a secret in /etc")

    sources.openapi = broken  # type: ignore[method-assign] # a maker that fails
    async with visiting(tmp_path, sources=sources) as served:
        response = await get(served, links.OPENAPI)
        assert response.status == 500
        assert "secret" not in await response.text()
        assert (await response.json())["error"]["code"] == "internal_error"


@pytest.mark.parametrize("token", ["", TOKEN])
async def test_no_two_readers_are_given_the_same_example_key(tmp_path: Path, token: str) -> None:
    """The idempotency key of an example gives access to the session of its order."""
    environ = {"AGENT_RPC_TOKEN": token} if token else {}
    count = 0
    async with visiting(tmp_path, environ=environ) as site:
        for path in DOCUMENTS:
            texts = [await (await get(site, path)).text() for _ in range(2)]
            first, second = (set(KEY_IN_TEXT.findall(text)) for text in texts)
            assert not first & second, path
            assert all(uuid.UUID(key).version == 4 for key in first | second)
            assert bool(first) is (path in FOR_EACH_READER), path
            assert recording.EXAMPLE_KEY not in texts[0]
            count += len(first)
    # With a token the examples of JSON-RPC and of the command line have other keys than HTTPS.
    assert count == (3 if token else 2)


# CORS

PREFLIGHT = {
    "origin": "https://page.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type,idempotency-key",
}


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, "/api/v1/agent/swap/execute", "/api/v1/health", "/api/v1/nothing"]
)
async def test_cors_admits_any_origin_to_the_agent_api_and_documents(
    site: Served, path: str
) -> None:
    asked = await site.client.options(path, headers=PREFLIGHT)
    assert asked.status == 204
    assert await asked.read() == b""
    assert asked.headers["access-control-allow-origin"] == "*"
    assert {"GET", "HEAD", "POST"} == set(asked.headers["access-control-allow-methods"].split(", "))
    allowed = set(asked.headers["access-control-allow-headers"].split(", "))
    assert allowed == {
        "content-type", "idempotency-key", "if-none-match", "last-event-id",
        "payment-authorization", "payment-signature",
        "x-api-key", "x-request-id",
    }  # fmt: skip
    assert "access-control-allow-credentials" not in asked.headers
    answer = await get(site, path, origin="https://page.example")
    assert answer.headers["access-control-allow-origin"] == "*"
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    assert {
        "x-service-signature", "x-service-signing-kid", "x-request-id", "idempotent-replayed",
        "retry-after", "ratelimit", "ratelimit-policy", "etag", "payment-required",
        "payment-response", "payment-receipt", "www-authenticate",
    } <= exposed  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://[::1]:8443", True),
        ("https://app.example.com", True),
        ("https://app.example.com.evil.com", False),
        ("http://app.example.com", False),
        ("http://localhost.evil.com", False),
        ("https://page.example", False),
        ("null", False),
        ("http://[", False),
    ],
)
@pytest.mark.parametrize("path", [links.LLMS, "/api/v1/health"])
async def test_local_service_lets_in_local_and_configured_pages(
    tmp_path: Path, path: str, origin: str, is_let_in: bool
) -> None:
    async with visiting(
        tmp_path, trusted_proxies="", allowed_origins="https://app.example.com"
    ) as site:
        asked = await site.client.options(path, headers={**PREFLIGHT, "origin": origin})
        answer = await get(site, path, origin=origin)
    assert asked.status == (204 if is_let_in else 405)
    for response in (asked, answer):
        given = response.headers.get("access-control-allow-origin")
        assert given == (origin if is_let_in else None)
        assert response.headers["vary"] == "origin"


async def test_cors_lets_pages_read_errors_and_304_of_open_paths(site: Served) -> None:
    refused = await site.client.post("/api/v1/agent/swap/quote", json={})
    assert refused.status == 400
    assert refused.headers["access-control-allow-origin"] == "*"
    current = await get(site, links.LLMS, if_none_match="*")
    assert current.status == 304
    assert current.headers["access-control-allow-origin"] == "*"


def cors_headers(response: aiohttp.ClientResponse) -> list[str]:
    return [name for name in response.headers if name.lower().startswith("access-control-")]


@pytest.mark.parametrize(
    "path", ["/rpc", "/%72pc", "/rpc/", "/api/v1/../../rpc", "/api/v1/%2e%2e/%2e%2e/rpc", "//rpc"]
)
async def test_no_page_may_call_rpc_however_its_path_is_written(site: Served, path: str) -> None:
    url = URL(f"{site.url}{path}", encoded=True)
    message = {"jsonrpc": "2.0", "id": "1", "method": "service.capabilities"}
    for method in ("OPTIONS", "POST", "GET"):
        body = message if method == "POST" else None
        response = await site.client.session.request(method, url, headers=PREFLIGHT, json=body)
        reached_rpc = "jsonrpc" in await response.text()
        assert not (reached_rpc and cors_headers(response)), method
        if url.path == "/rpc":
            assert not cors_headers(response), method
            assert method != "OPTIONS" or response.status == 405


async def test_errors_of_rpc_are_not_readable_for_a_page(tmp_path: Path) -> None:
    async with visiting(tmp_path, environ={"AGENT_RPC_TOKEN": TOKEN}) as served:
        refused = await served.client.post("/rpc", json={}, headers=PREFLIGHT)
        assert refused.status == 401
        broken = await served.client.post(
            "/rpc", data=b"{", headers={**PREFLIGHT, **JSON, "x-agent-rpc-token": TOKEN}
        )
        assert not cors_headers(refused)
        assert not cors_headers(broken)


async def test_health_of_the_process_is_not_for_pages(site: Served) -> None:
    assert not cors_headers(await get(site, "/health", origin="https://page.example"))


async def test_a_plain_options_request_is_no_preflight(site: Served) -> None:
    response = await site.client.options("/api/v1/agent/swap/plan")
    assert response.status == 405
