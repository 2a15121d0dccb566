"""The documents: complete, generated, well-formed, and safe with any brand."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from rpcsvc import verify
from rpcsvc.bootstrap import running
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import load_chains
from rpcsvc.domain.order import AGENT_STATE_OF, AgentState, OnDeadline
from rpcsvc.errors import ServiceError
from rpcsvc.http import rates
from rpcsvc.http.discovery import Document, DocumentCache, Renewal, Sources, catalogue, is_current
from rpcsvc.http.documents import advice, agent, links, llms, wellknown
from rpcsvc.http.documents import recording as recordings
from rpcsvc.http.documents.links import escape_markdown, mail_domain, table
from rpcsvc.http.documents.signatures import SIGNED_LINES
from rpcsvc.http.openrpc import openrpc_document
from rpcsvc.http.site import Site, site_of
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.operations.service import Service, ViewContext
from rpcsvc.operations.swap import DEPOSIT_POLICY
from rpcsvc.operations.table import AGENT_OPERATIONS, OPERATIONS
from rpcsvc.orders.ports.venue import FaultKind, VenueProfile
from rpcsvc.orders.ports.wallets import NetworkNames
from rpcsvc.settings import load_settings
from tests.sandbox import ManualClock
from tools import recorder

ROOT = Path(__file__).parent.parent.parent
KEY = "00000000-0000-4000-8000-000000000000"
NOW = ManualClock().now
DAY_MS = 86_400_000
CHAINS = load_chains((ROOT / "config" / "chains.toml").read_text(encoding="utf-8"))


def site_with(*, sandbox: bool = True, tokens: str = "", **flags: Any) -> Site:
    """The site of these settings."""
    environ = {"AGENT_RPC_TOKEN": tokens} if tokens else {}
    given = {name.replace("__", "."): value for name, value in flags.items()}
    settings = load_settings(config_file=None, environ=environ, flags=given).settings
    profile = VenueProfile(
        engine="sandbox" if sandbox else "onchain",
        network="sandbox" if sandbox else "mainnet",
        chains=CHAINS,
        monero_networks=frozenset(MoneroNetwork),
        names=lambda _asset, _chain: NetworkNames("monero", 0, None),
        is_simulated=sandbox,
    )
    service = SimpleNamespace(
        operations=OPERATIONS if sandbox else AGENT_OPERATIONS,
        venue=SimpleNamespace(price_lock=settings.orders.effective_price_lock_seconds * 1000),
        views=ViewContext(profile, "https://swap.example"),
        chains=CHAINS,
        monero_networks=profile.monero_networks,
    )
    return site_of(settings, cast("Service", service))


@pytest.fixture
def site() -> Site:
    """A site with an address and a brand of its own."""
    return site_with(
        site_url="https://swap.example.com",
        brand__slug="acme",
        brand__name="Acme Swaps",
        brand__motto="Both ways",
        contact="mailto:security@example.com",
    )


def full(site: Site) -> str:
    return llms.llms_full(site, recordings.load()).decode()


def every_text(site: Site) -> dict[str, str]:
    """Each document that the site generates, as text."""
    sources = Sources(dict, dict, dict, recordings.load, lambda: KEY)
    return {d.path: d.render(NOW).decode() for d in catalogue(site, sources)}


# Quickstart


def test_the_quickstart_has_every_field_of_the_spec(site: Site) -> None:
    answer = agent.quickstart(site, NOW, KEY)
    assert list(answer) == [
        "ok", "operation", "brand", "trust", "links", "quickstart", "examples", "generatedAt",
        "propagation",
    ]  # fmt: skip
    assert answer["brand"] == {
        "name": "Acme Swaps", "motto": "Both ways", "domain": "swap.example.com"
    }  # fmt: skip
    assert answer["trust"] == {
        "publicApi": True,
        "perUserApiKeyRequired": False,
        "tlsRequired": True,
        "nonCustodialFlow": True,
        "idempotencyHeader": "idempotency-key",
    }
    assert list(answer["links"]) == [
        "website", "docs", "health", "capabilities", "openapi", "openapiWellKnown", "llms",
        "llmsFull", "jwks", "aiPlugin", "securityTxt", "agentDiscovery", "agentDiscoveryAlias",
        "robotsTxt", "sitemap",
    ]  # fmt: skip
    assert set(answer["propagation"]) == {
        "preferredCitationText", "preferredCitationUrl", "citationSnippets", "signatureHeaders",
        "discoveryOrder",
    }  # fmt: skip
    assert set(answer["propagation"]["citationSnippets"]) == {"plain", "markdown"}
    assert len(answer["propagation"]["signatureHeaders"]) == 6
    assert answer["generatedAt"] == "2025-11-20T22:33:20.000Z"


def test_the_quickstart_names_the_paths_of_spec_4_1(site: Site) -> None:
    assert links.endpoints(site) == {
        "quickstart": "/api/v1/agent/quickstart",
        "capabilities": "/api/v1/agent/capabilities",
        "plan": "/api/v1/agent/swap/plan",
        "quote": "/api/v1/agent/swap/quote",
        "create": "/api/v1/agent/swap/create",
        "execute": "/api/v1/agent/swap/execute",
        "status": "/api/v1/agent/swap/status/{orderId}",
        "cancel": "/api/v1/agent/swap/cancel/{orderId}",
        "events": "/api/v1/agent/swap/events/{orderId}",
        "list": "/api/v1/agent/swap/list",
        "check": "/api/v1/agent/swap/check/{orderId}",
        "fund": "/api/v1/agent/swap/fund/{orderId}",
        "refundAddress": "/api/v1/agent/swap/refund-address/{orderId}",
        "webhookDeliveries": "/api/v1/agent/swap/webhook-deliveries/{orderId}",
        "support": "/api/v1/agent/support/tickets",
        "ticket": "/api/v1/agent/support/tickets/{ticketId}",
    }


def test_flow_names_plan_quote_create_and_status_in_order(site: Site) -> None:
    text = " ".join(agent.flow(site))
    paths = links.endpoints(site)
    places = [text.index(paths[name]) for name in ("plan", "quote", "create", "execute", "status")]
    assert places == sorted(places)
    assert "idempotency-key" in text


def test_example_keeps_to_the_limits_and_chains_configured(site: Site) -> None:
    small = agent.example_swap(replace(site, max_swap_usd=60))
    assert small["amount"] == "60"
    dear = replace(CHAINS.all()[1], name="far", chain_id=5, min_swap_usd=400)
    dearer = replace(dear, name="farther", chain_id=6, min_swap_usd=900)
    elsewhere = agent.example_swap(replace(site, chains=(dearer, dear)))
    assert (elsewhere["chain"], elsewhere["amount"]) == ("far", "400")


# agent.json and the plugin manifest


def test_agent_json_leads_to_the_description_of_every_operation(site: Site) -> None:
    described = agent.agent(site)
    openrpc = openrpc_document(site)
    assert described["envelope"] == f"{site.url}/openrpc.json#/components/schemas/Envelope"
    assert "Envelope" in openrpc["components"]["schemas"]
    rows = {row["name"]: row for row in described["operations"]}
    assert list(rows) == [operation.name for operation in OPERATIONS]
    for operation in OPERATIONS:
        row = rows[operation.name]
        document, _, at = row["description"].partition("#/methods/")
        assert document == f"{site.url}/openrpc.json"
        assert openrpc["methods"][int(at)]["name"] == row["jsonrpc"]
        assert row["jsonrpc"] == f"acme.{operation.name}"
        assert row["cli"] == operation.command


def test_agent_json_says_whether_json_rpc_needs_a_token() -> None:
    without = agent.agent(site_with())["auth"]["jsonrpc"]
    assert (without["required"], without["header"]) == (False, "x-agent-rpc-token")
    secret = "correct-horse-battery-staple"
    described = agent.agent(site_with(tokens=secret))
    assert described["auth"]["jsonrpc"]["required"] is True
    assert secret not in json.dumps(described)


def test_agent_json_gives_the_limits_of_the_settings() -> None:
    site = site_with(
        limits__body_bytes=2048, limits__batch=7, limits__depth=9,
        rate_limit__orders_per_minute=3, orders__max_swap_usd=777,
    )  # fmt: skip
    known = agent.agent(site)["limits"]
    assert (known["bodyBytes"], known["batchCalls"], known["jsonDepth"]) == (2048, 7, 9)
    assert (known["rateLimits"][0]["budget"], known["rateLimits"][0]["limit"]) == ("orders", 3)
    assert known["maxSwapUsd"] == 777
    assert known["minSwapUsd"]["ethereum"] == 50
    assert agent.limits(site_with(rate_limit__enabled=False))["rateLimits"] == []


def test_rate_limits_name_the_calls_and_callers_that_count() -> None:
    rows = {row["budget"]: row for row in agent.limits(site_with())["rateLimits"]}
    assert {name: row["per"] for name, row in rows.items()} == dict.fromkeys(rows, "client address")
    assert "BFF" in rows["orders"]["for"]
    assert "health" in rows["requests"]["for"]
    with_token = agent.limits(site_with(tokens="correct-horse-battery-staple"))["rateLimits"]
    assert {row["budget"]: row["per"] for row in with_token}["rpc"] == "token"


def test_agent_json_is_no_card_of_another_protocol(site: Site) -> None:
    described = agent.agent(site)
    assert not {"skills", "protocolVersion", "capabilities", "tools"} & set(described)


def test_sandbox_operations_are_described_only_in_the_sandbox() -> None:
    real = site_with(sandbox=False, site_url="https://swap.example.com")
    names = [row["name"] for row in agent.agent(real)["operations"]]
    assert not [name for name in names if name.startswith("sandbox.")]
    text = full(real)
    assert "## Sandbox" not in text
    assert "This installation settles in a sandbox" not in text


def test_plugin_manifest_keeps_to_field_lengths_and_characters() -> None:
    manifest = agent.ai_plugin(
        site_with(brand__name="N" * 64, brand__motto="m" * 200, brand__slug="a-b-c")
    )
    assert len(manifest["name_for_human"]) <= 20
    assert re.fullmatch(r"[A-Za-z0-9_]{1,50}", manifest["name_for_model"])
    assert len(manifest["description_for_human"]) <= 100
    assert len(manifest["description_for_model"]) <= 8000
    assert manifest["api"]["url"].endswith("/openapi.json")
    assert set(manifest) == {
        "schema_version", "name_for_human", "name_for_model", "description_for_human",
        "description_for_model", "auth", "api", "logo_url", "contact_email", "legal_info_url",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("contact", "email"),
    [
        ("mailto:ops@example.com?subject=hi", "ops@example.com"),
        ("https://example.com/contact", "support@swap.example.com"),
        (None, "support@swap.example.com"),
    ],
)
def test_the_plugin_manifest_has_a_mailbox_whatever_the_contact(
    contact: str | None, email: str
) -> None:
    flags: dict[str, Any] = {"contact": contact} if contact else {}
    manifest = agent.ai_plugin(site_with(site_url="https://swap.example.com", **flags))
    assert manifest["contact_email"] == email


# security.txt


def parse_security_txt(text: bytes) -> dict[str, list[str]]:
    """The fields of a security.txt, by the grammar of RFC 9116, section 4; strict."""
    lines = text.decode("utf-8").split("\r\n")
    assert lines.pop() == "", "the last line must end"
    fields: dict[str, list[str]] = {}
    for line in lines:
        name, separator, value = line.partition(": ")
        assert separator, line
        assert re.fullmatch(r"[!-9;-~]+", name), line
        fields.setdefault(name.lower(), []).append(value)
    for uri in fields.get("contact", []) + fields.get("canonical", []):
        parts = urlsplit(uri)
        assert re.fullmatch(r"[!-~]+", uri), uri
        assert parts.scheme in ("https", "mailto", "tel"), uri
    assert len(fields["contact"]) >= 1
    assert len(fields["expires"]) == 1
    assert len(fields.get("preferred-languages", [])) <= 1
    datetime.strptime(fields["expires"][0], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    return fields


def expires_ms(fields: dict[str, list[str]]) -> int:
    return int(datetime.fromisoformat(fields["expires"][0]).timestamp() * 1000)


@pytest.mark.parametrize(
    ("flags", "contact", "canonical"),
    [
        (
            {"site_url": "https://a.example", "contact": "mailto:ops@a.example"},
            "mailto:ops@a.example",
            ["https://a.example/.well-known/security.txt"],
        ),
        (
            {"site_url": "https://a.example"},
            "https://a.example/",
            ["https://a.example/.well-known/security.txt"],
        ),
        ({}, "mailto:security@%5B127.0.0.1%5D", None),
        ({"host": "::1"}, "mailto:security@%5BIPv6%3A%3A%3A1%5D", None),
        ({"host": "localhost"}, "mailto:security@localhost", None),
    ],
)
def test_security_txt_follows_its_grammar_and_has_a_contact(
    flags: dict[str, Any], contact: str, canonical: list[str] | None
) -> None:
    fields = parse_security_txt(wellknown.security_txt(site_with(**flags), NOW))
    assert fields["contact"] == [contact]
    assert fields.get("canonical") == canonical


def test_security_txt_expires_within_a_year_and_changes_daily(site: Site) -> None:
    morning = NOW // DAY_MS * DAY_MS
    texts = [wellknown.security_txt(site, at) for at in (morning, morning + DAY_MS - 1)]
    assert texts[0] == texts[1]
    tomorrow = wellknown.security_txt(site, morning + DAY_MS)
    assert tomorrow != texts[0]
    left = expires_ms(parse_security_txt(texts[0])) - NOW
    assert 90 * DAY_MS < left < 365 * DAY_MS


# Markdown


@pytest.mark.parametrize("sandbox", [True, False])
def test_the_llms_documents_have_one_title(sandbox: bool) -> None:
    site = site_with(sandbox=sandbox)
    for text in (llms.llms_txt(site).decode(), full(site)):
        assert text.startswith("# rpcsvc\n\n> ")
        outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
        assert not re.findall(r"^=+$", outside, re.MULTILINE)
        assert text.count("```") % 2 == 0


def test_llms_full_covers_states_errors_policies_and_operations(site: Site) -> None:
    text = full(site)
    rows = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    assert {state.value for state in AgentState} <= rows
    assert {status.value for status in AGENT_STATE_OF} <= rows
    assert {deadline.value for deadline in OnDeadline} <= rows
    assert {row.case for row in DEPOSIT_POLICY} <= rows
    assert {kind.value for kind in FaultKind} <= rows
    assert {error.code for error in advice.error_classes()} <= rows
    for operation in OPERATIONS:
        assert f"`acme.{operation.name}`" in text
        assert f"`rpcsvc {operation.command}`" in text
    for header in site.signature_headers:
        assert f"`{header}`" in text


def test_every_error_has_one_row(site: Site) -> None:
    def classes(parent: type[ServiceError]) -> list[type[ServiceError]]:
        return [c for sub in parent.__subclasses__() for c in (sub, *classes(sub))]

    codes = {c.code for c in classes(ServiceError) if hasattr(c, "code")}
    assert codes == {error.code for error in advice.error_classes()} == set(advice.ERROR)
    errors = full(site).partition("## Errors")[2].partition("## Funding")[0]
    lines = [line for line in errors.splitlines() if line.startswith("| `")]
    assert len(lines) == len(set(lines)) >= len(codes)


def test_llms_full_says_who_shares_idempotency_keys() -> None:
    shared = "JSON-RPC and the command line share those of HTTPS."
    apart = "the same key over HTTPS and with a token makes two orders"
    free, by_token = (full(site_with(tokens=t)) for t in ("", "correct-horse-battery-staple"))
    assert (shared in free, apart in free) == (True, False)
    assert (shared in by_token, apart in by_token) == (False, True)


def test_documents_show_the_token_only_where_it_is_needed() -> None:
    assert "x-agent-rpc-token: <" in full(site_with(tokens="correct-horse-battery-staple"))
    assert "x-agent-rpc-token: <" not in full(site_with())


def test_the_words_of_a_brand_stay_words() -> None:
    site = site_with(brand__name='<b>](x) "&" | `#`', brand__motto="*a* [b](javascript:c) <script>")
    snippet = agent.propagation(site)["citationSnippets"]["markdown"]
    assert snippet.count("](") == 1 + snippet.count("\\](")
    assert escape_markdown("a*b|[c]") == "a\\*b\\|\\[c\\]"
    assert llms.llms_txt(site).decode().startswith('# \\<b\\>\\](x) "&" \\| \\`\\#\\`\n')


def test_table_escapes_a_bar_in_a_cell() -> None:
    assert table(("a",), [("x|y",)]) == "| a |\n|---|\n| x\\|y |"


def test_a_mailbox_at_an_address_is_in_brackets() -> None:
    assert mail_domain("127.0.0.1") == "[127.0.0.1]"
    assert mail_domain("::1") == "[IPv6:::1]"
    assert mail_domain("1a.example") == "1a.example"


# The recording


async def test_the_recording_is_what_the_sandbox_answers_today(tmp_path: Path) -> None:
    settings = load_settings(
        config_file=None, environ={}, flags={"data_dir": str(tmp_path)}
    ).settings
    clock = recorder.StageClock()
    async with running(settings, clock=clock, random=recorder.StageRandom()) as up:
        local = LocalService(up.dispatcher, up.service.venue, up.worker)
        played = recorder.dumps(await recorder.record(local, clock))
    kept = Path(recordings.__file__).with_name(recordings.FILE).read_text(encoding="utf-8")
    assert played == kept, "run make generate"


def test_recording_has_the_steps_that_it_is_shown_for() -> None:
    states = {name: e.answer["state"] for name, e in recordings.load().items()}
    for name, state in states.items():
        if name.startswith("status-"):
            assert name == f"status-{state}"
    assert states["plan-nothing-known"] == "needs_input"
    assert states["plan-no-destination"] == "needs_destination"
    assert states["plan-ready"] == "ready"
    refused = {
        name: exchange.answer["error"]["code"]
        for name, exchange in recordings.load().items()
        if name.startswith("error-")
    }
    assert refused == {
        "error-conflict": "idempotency_conflict",
        "error-amount": "amount_below_minimum",
        "error-destination": "invalid_destination",
    }
    ends = {n: recordings.load()[n].answer["data"] for n in states}
    assert ends["status-completed"]["outcome"] == "completed"
    assert ends["unfunded-end"]["outcome"] == "expired"
    assert ends["refund-asked"]["actionRequired"] == "refund_address"
    assert ends["refund-terminal_failure"]["outcome"] == "refunded"


# The catalogue and the document cache


def test_every_document_is_described_or_is_part_of_the_home_page(site: Site) -> None:
    documents = catalogue(site, Sources(dict, dict, dict, recordings.load, lambda: KEY))
    paths = [path for document in documents for path in document.paths]
    assert len(paths) == len(set(paths))
    described = {*links.DESCRIPTIONS, *links.ALIASES, links.LOGO}
    assert {*paths, *rates.PATHS} == described  # the rates have routes of their own


def test_another_address_and_slug_show_everywhere(site: Site) -> None:
    texts = every_text(site)
    assert len(texts) > 10
    for path, text in texts.items():
        assert "127.0.0.1" not in text, path
        assert "x-service-" not in text, path
        assert not re.search(r"[\"`]service\.", text), path


def test_nothing_names_a_file_of_the_machine(site: Site) -> None:
    texts = every_text(site)
    assert len(texts) > 10
    for path, text in texts.items():
        assert not re.search(r"/(?:home|tmp|var/lib|root|work)/", text), path


def counted(renewal: Renewal) -> tuple[DocumentCache, ManualClock, list[int]]:
    times: list[int] = []

    def render(now: int) -> bytes:
        times.append(now)
        return str(now).encode()

    clock = ManualClock()
    return DocumentCache(Document("/x", "text/plain", render, renewal), clock), clock, times


def test_a_document_is_written_once_and_only_when_asked_for() -> None:
    cache, clock, times = counted(Renewal.NEVER)
    assert times == []
    first = cache.rendering()
    clock.now += 400 * DAY_MS
    assert cache.rendering() is first
    assert times == [ManualClock().now]


def test_daily_document_is_rendered_again_at_midnight() -> None:
    cache, clock, times = counted(Renewal.DAILY)
    clock.now = clock.now // DAY_MS * DAY_MS
    cache.rendering()
    clock.now += DAY_MS - 1
    cache.rendering()
    assert len(times) == 1
    clock.now += 1
    cache.rendering()
    assert len(times) == 2


def test_a_document_that_could_not_be_written_is_tried_again() -> None:
    ready: list[bytes] = []

    def render(_now: int) -> bytes:
        if not ready:
            raise ValueError("not yet")
        return ready[0]

    cache = DocumentCache(Document("/x", "text/plain", render), ManualClock())
    with pytest.raises(ValueError, match="not yet"):
        cache.rendering()
    ready.append(b"good")
    assert cache.rendering().body == b"good"


@pytest.mark.parametrize(
    ("given", "current"),
    [
        ([], False),
        ([""], False),
        (['"abc"'], True),
        (['W/"abc"'], True),
        (["*"], True),
        ([' "x", W/"y" ,"abc"'], True),
        (['"x"', '"abc"'], True),
        (['"ab"'], False),
        (["abc"], False),
        (['"a,b", "c"'], False),
        (['w/"abcd"'], False),
    ],
)
def test_if_none_match_is_read_as_a_list(given: list[str], current: bool) -> None:
    assert is_current(given, '"abc"') is current


# Signatures


def test_the_signature_check_is_written_from_the_reference(site: Site) -> None:
    text = full(site).partition("## Checking signatures")[2]
    lines = re.findall(r"```\n(.*?)\n```", text, re.DOTALL)[0].split("\n")
    assert len(lines) == len(SIGNED_LINES) == 10
    assert lines[:3] == [verify.LABEL, verify.VERSION, verify.ALGORITHM]
    assert lines[5:8] == ["POST", "/api/v1/agent/swap/execute", "200"]
    assert "`unread` stands for its SHA-256" in text
    assert "for the statuses 401, 408, 413, 415 and 503 only" in text
    for term in ("orderId", "depositAddress", "toAddress", "minReceived", "issuer"):
        assert f"`{term}`" in text
    assert "https://swap.example.com/.well-known/jwks.json" in text
