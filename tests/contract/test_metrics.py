"""GET /metrics: access, and that its values are right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from rpcsvc.clock import steady_ms
from rpcsvc.domain.reservations import Holdings, Reserved
from rpcsvc.http.metrics import FAMILIES, Histogram
from rpcsvc.http.scrape import PaidFees
from rpcsvc.orders.ports.venue import Rate
from rpcsvc.orders.ports.wallets import NetworkState, NonceGap
from rpcsvc.orders.settlement import LastAudit, Readings
from rpcsvc.serving import web_app
from rpcsvc.store.leases import Lease
from rpcsvc.store.operator_books import OperatorBooks
from tests.contract.checkout import Ordered, until_paid_out
from tests.contract.following import until_status, until_waiting
from tests.contract.serving import BACK, SWAP, TOKEN, EdgeServer, Served, serving

BEARER = {"authorization": f"Bearer {TOKEN}"}
# Metrics that have no source in the sandbox.
ONCHAIN_ONLY = {
    "rpcsvc_authorization_gas_ratio",
    "rpcsvc_audit_differences",
    "rpcsvc_audit_age_seconds",
    "rpcsvc_rate_spread_ratio",
}
UNKNOWN = NetworkState()
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scraped(served: Served, **headers: str) -> Series:
    response = await served.client.get("/metrics", headers=headers)
    assert response.status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(await response.text())
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series.get((name, frozenset(labels.items())), 0.0)


async def completed(served: Served) -> dict[str, Any]:
    """The answer that created an order, once it is paid out."""
    made: dict[str, Any] = (await served.rpc("swap.create", SWAP)).body["result"]["data"]
    await finish(served, made["order"]["orderId"])
    return made


async def finish(served: Served, order_id: str) -> None:
    await served.post("/sandbox/fund", {"orderId": order_id})
    await until_status(served, order_id, state="completed")


async def test_metrics_count_a_whole_swap(served: Served) -> None:
    await completed(served)
    series = await scraped(served)
    quoted = {name: text for name, text in SWAP.items() if name != "to"}
    quote = (await served.rpc("swap.quote", quoted)).body["result"]["data"]["quote"]
    spread = float(quote["fees"]["spread"])
    assert spread > 0
    assert value(series, "rpcsvc_spread_earned_total", asset="USDC") == spread
    created = {"operation": "swap.create", "transport": "rpc", "outcome": "ok"}
    assert value(series, "rpcsvc_calls_total", **created) == 1
    assert value(series, "rpcsvc_call_seconds_count", operation="swap.create") == 1
    assert value(series, "rpcsvc_orders_reached_total", status="completed") == 1
    for outcome in ("seen", "confirmed"):
        assert value(series, "rpcsvc_deposits_total", network="monero", outcome=outcome) == 1
    paid = {"kind": "payout", "network": "arbitrum", "outcome": "settled"}
    assert value(series, "rpcsvc_transfers_total", **paid) == 1
    assert value(series, "rpcsvc_deposit_to_payout_seconds_count", network="arbitrum") == 1
    assert value(series, "rpcsvc_commit_seconds_count") > 3
    assert value(series, "rpcsvc_commit_writes_sum") >= value(series, "rpcsvc_commit_writes_count")
    assert value(series, "rpcsvc_check_ok", check="store") == 1


async def test_metrics_count_the_gas_that_orders_bear(served: Served) -> None:
    paying = {**BACK, "funding": "x402"}
    made = (await served.rpc("swap.create", paying)).body["result"]["data"]
    await finish(served, made["order"]["orderId"])
    fee = float(made["quote"]["fees"]["funding"])
    assert value(await scraped(served), "rpcsvc_funding_fees_earned_total", asset="XMR") == fee > 0


async def test_metrics_count_failures_by_code_and_status(served: Served) -> None:
    asked = {"direction": "x2u", "chain": "nowhere", "amount": "0.8"}
    assert (await served.post("/agent/swap/quote", asked)).status == 400
    series = await scraped(served)
    refused = {"operation": "swap.quote", "transport": "http", "outcome": "unsupported_chain"}
    assert value(series, "rpcsvc_calls_total", **refused) == 1
    assert value(series, "rpcsvc_responses_total", status="400") == 1


async def test_metrics_show_open_orders_and_their_age(served: Served) -> None:
    for _ in range(2):
        await served.rpc("swap.create", SWAP)
    series = await scraped(served)
    assert value(series, "rpcsvc_orders_open", status="awaiting_deposit") == 2
    labels = frozenset({("status", "awaiting_deposit")})
    assert 0 <= series["rpcsvc_orders_open_oldest_seconds", labels] < 60


async def test_metrics_show_a_failing_check_and_a_missing_rate(served: Served) -> None:
    assert value(await scraped(served), "rpcsvc_rate_usdc_per_xmr") > 0
    await served.post("/sandbox/fault", {"fault": "rates_down"})
    series = await scraped(served)
    assert series["rpcsvc_check_ok", frozenset({("check", "rates")})] == 0
    assert ("rpcsvc_rate_usdc_per_xmr", frozenset()) not in series


async def test_metrics_show_waits_by_kind_and_the_lease(served: Served) -> None:
    order_id = (await served.post("/agent/swap/execute", SWAP)).body["data"]["order"]["orderId"]
    path = f"/agent/swap/events/{order_id}"
    once = asyncio.create_task(served.http("GET", path, params={"after": 1, "waitSec": 20}))
    stream = await served.client.get(
        f"/api/v1{path}", params={"after": 1}, headers={"accept": "text/event-stream"}
    )
    await until_waiting(served.up.service.waits, 2)
    series = await scraped(served)
    assert [value(series, "rpcsvc_waits", kind=kind) for kind in ("call", "stream")] == [1, 1]
    assert value(series, "rpcsvc_lease_held") == 1
    stream.close()
    served.up.lease.lose()
    assert value(await scraped(served), "rpcsvc_lease_held") == 0
    served.up.service.waits.end()
    await once


async def test_metrics_show_readings_of_real_wallets(served: Served) -> None:
    """The metrics of the engine onchain, and a lease that ends."""
    monero = NetworkState(2_500, 12, node_height=900, scanned_height=897)
    states = {"monero": monero, "base": UNKNOWN}
    states["arbitrum"] = NetworkState(
        1_000, sweeps={"sent": 2, "done": 1}, nonces=NonceGap(-3, 0, 1)
    )
    held = {"monero": Holdings(3 * 10**12, 10**12, 0), "arbitrum": Holdings(7, 0, 0)}
    readings = Readings(
        networks=frozenset(held),
        holdings=held.__getitem__,
        states=lambda: states,
        rate_spread_bps=lambda: 150,
    )
    lease = Lease("settler", 1, ends_at=9_000, now_ms=lambda: 1_000)
    up = replace(served.up, readings=readings, lease=lease)
    client: TestClient[Any, Any]
    async with TestClient(EdgeServer(web_app(up))) as client:
        series = await scraped(Served(up, client))
    assert value(series, "rpcsvc_block_age_seconds", network="monero") == 2.5
    assert value(series, "rpcsvc_block_age_seconds", network="arbitrum") == 1
    assert ("rpcsvc_block_age_seconds", frozenset({("network", "base")})) not in series
    heights = {family: value(series, family, network="monero")
               for family in ("rpcsvc_node_height", "rpcsvc_scanned_height")}  # fmt: skip
    assert heights == {"rpcsvc_node_height": 900, "rpcsvc_scanned_height": 897}
    assert ("rpcsvc_scanned_height", frozenset({("network", "base")})) not in series
    assert value(series, "rpcsvc_wallet_outputs", network="monero") == 12
    assert ("rpcsvc_wallet_outputs", frozenset({("network", "arbitrum")})) not in series
    assert value(series, "rpcsvc_wallet_amount", network="monero", part="free") == 3
    assert value(series, "rpcsvc_wallet_amount", network="arbitrum", part="free") == 7e-6
    assert value(series, "rpcsvc_nonce_gap", network="arbitrum") == -3
    unexplained = {kind: value(series, "rpcsvc_nonces_unexplained", network="arbitrum", kind=kind)
                   for kind in ("unrecorded", "missing")}  # fmt: skip
    assert unexplained == {"unrecorded": 0, "missing": 1}
    assert ("rpcsvc_nonce_gap", frozenset({("network", "monero")})) not in series
    sweeps = {how: value(series, "rpcsvc_sweeps_total", network="arbitrum", outcome=how)
              for how in ("sent", "done", "void")}  # fmt: skip
    assert sweeps == {"sent": 2, "done": 1, "void": 0}
    assert value(series, "rpcsvc_rate_spread_ratio") == 0.015
    assert value(series, "rpcsvc_lease_left_seconds") == 8
    assert value(series, "rpcsvc_lease_token") == 1
    assert value(series, "rpcsvc_lease_held") == 1


async def test_metrics_show_lag_rate_age_and_the_pause(served: Served) -> None:
    now = served.up.service.clock.now_ms()
    readings = Readings(scan_lags=lambda: {"base": 90_000},
                        rate=lambda: Rate(164_500_000, now - 30_000, "test"),
                        paused=lambda: "by hand")  # fmt: skip
    up = replace(served.up, readings=readings)
    client: TestClient[Any, Any]
    async with TestClient(EdgeServer(web_app(up))) as client:
        series = await scraped(Served(up, client))
    assert value(series, "rpcsvc_scan_lag_seconds", network="base") == 90
    assert 30 <= value(series, "rpcsvc_rate_age_seconds") < 90
    assert value(series, "rpcsvc_rate_usdc_per_xmr") == 164.5
    assert value(series, "rpcsvc_payouts_paused") == 1


async def test_metrics_show_reserved_and_owed_amounts(tmp_path: Path) -> None:
    """The reservation is a stand-in: wallets of the sandbox have no limit."""

    async def reserved(_network: str) -> Reserved:
        return Reserved(2_250_000, {}, 1)

    readings = Readings(networks=frozenset({"arbitrum"}), reserved=reserved)
    async with serving(tmp_path, sandbox__usdc_block_ms=3_600_000) as served:
        placed = (await served.rpc("swap.create", SWAP)).body["result"]["data"]["order"]
        await served.post("/sandbox/fund", {"orderId": placed["orderId"]})
        await until_paid_out(served, Ordered(placed["orderId"], ""))
        up = replace(served.up, readings=readings)
        client: TestClient[Any, Any]
        async with TestClient(EdgeServer(web_app(up))) as client:
            series = await scraped(Served(up, client))
    due = {"network": "arbitrum", "kind": "payout"}
    owed = int(placed["expectedOutput"]) / 10**6
    assert value(series, "rpcsvc_transfers_due_amount", **due) == owed
    assert value(series, "rpcsvc_wallet_amount", network="arbitrum", part="reserved") == 2.25


async def test_metrics_show_fees_and_withdrawals_of_the_books(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fees(_books: object, _since: int, _before: int = 0) -> dict[str, int]:
        return {"monero": 2 * 10**9, "base": 3 * 10**15}

    async def over(_books: object) -> dict[tuple[str, str], int]:
        return {("monero", "settled"): 4}

    monkeypatch.setattr(OperatorBooks, "network_fees", fees)
    monkeypatch.setattr(OperatorBooks, "withdrawals_over", over)
    series = await scraped(served)
    for family in ("rpcsvc_network_fees_total", "rpcsvc_network_fees_day"):
        assert value(series, family, network="monero") == 0.002
        assert value(series, family, network="base") == 0.003
    over_now = {"network": "monero", "outcome": "settled"}
    assert value(series, "rpcsvc_withdrawals_total", **over_now) == 4


async def test_metrics_show_the_last_audit_and_gas_for_authorizations(served: Served) -> None:
    async def shown(audit: LastAudit | None) -> Series:
        readings = Readings(last_audit=lambda: audit, authorization_gas=lambda: 0.25)
        up = replace(served.up, readings=readings)
        client: TestClient[Any, Any]
        async with TestClient(EdgeServer(web_app(up))) as client:
            return await scraped(Served(up, client))

    differences, age = (("rpcsvc_audit_differences", frozenset[tuple[str, str]]()),
                        ("rpcsvc_audit_age_seconds", frozenset[tuple[str, str]]()))  # fmt: skip
    series = await shown(None)
    assert not {differences, age} & series.keys()
    assert value(series, "rpcsvc_authorization_gas_ratio") == 0.25
    series = await shown(LastAudit(steady_ms() - 90_000, None))
    assert differences not in series, "none has ended yet"
    assert 90 <= series[age] < 150
    series = await shown(LastAudit(steady_ms() - 30_000, 2))
    assert series[differences] == 2
    assert 30 <= series[age] < 90


async def test_paid_fees_add_up_since_the_start_and_never_fall() -> None:
    paid: dict[int, int] = {-1: 100, 5: 7}  # before the start, and after it

    class Books:
        async def network_fees(self, since: int, before: int = 10**12) -> dict[str, int]:
            found = sum(units for at, units in paid.items() if since <= at < before)
            return {"base": found} if found else {}

    fees = PaidFees(cast("Any", Books()), 0)
    assert await fees.total(10) == {"base": 7}
    paid[20] = 3
    day = 86_400_000
    assert await fees.total(day + 10) == {"base": 10}
    paid[day] = 5
    assert await fees.total(3 * day) == {"base": 15}
    paid[3 * day] = 1
    assert await fees.total(3 * day + 1) == {"base": 16}
    del paid[3 * day]  # a reorganisation
    assert await fees.total(3 * day + 2) == {"base": 16}, "what was counted stays"


async def test_metrics_have_bounded_labels_and_no_secrets(served: Served) -> None:
    data = await completed(served)
    response = await served.client.get("/metrics")
    text = await response.text()
    order, address = data["order"]["orderId"], data["fundingInstructions"]["depositAddress"]
    for secret in (order, data["sessionId"], SWAP["to"], address):
        assert secret not in text
    first = await scraped(served)
    for path in ("/api/v1/nowhere/a", "/api/v1/nowhere/b", "/nowhere"):
        await served.client.get(path)
    await completed(served)
    grown = {name for name, _ in (await scraped(served)).keys() - first.keys()}
    assert grown <= {"rpcsvc_calls_total", "rpcsvc_responses_total"}


async def test_every_family_is_served_and_described(served: Served) -> None:
    await completed(served)
    response = await served.client.get("/metrics")
    found = {
        family.name: (family.type, family.documentation)
        for family in text_string_to_metric_families(await response.text())
    }
    described = {name: (family.kind, family.help) for name, family in FAMILIES.items()}
    assert found == {name: described[name] for name in described.keys() - ONCHAIN_ONLY}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"x-agent-rpc-token": "wrong"}, 401),
        (BEARER, 200),
        ({"x-agent-rpc-token": TOKEN}, 200),
    ],
)
async def test_metrics_need_the_token_where_one_is_set(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        response = await served.client.get("/metrics", headers=headers)
        assert response.status == status
        assert ("rpcsvc_info" in await response.text()) is (status == 200)


METRICS_TOKEN = "a-token-for-metrics-alone"
ADMITTED = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.9"}


@pytest.mark.parametrize("name", ["authorization", "x-agent-rpc-token"])
@pytest.mark.parametrize("rpc_token", [TOKEN, None])
async def test_metrics_token_opens_metrics_and_nothing_else(
    tmp_path: Path, name: str, rpc_token: str | None
) -> None:
    environ = {
        "RPCSVC_TELEMETRY__METRICS_TOKEN": f"another-token-for-metrics,{METRICS_TOKEN}",
        "RPCSVC_TRUSTED_PROXIES": "127.0.0.0/8",
        **({} if rpc_token is None else {"AGENT_RPC_TOKEN": rpc_token}),
    }
    given = METRICS_TOKEN if name != "authorization" else f"Bearer {METRICS_TOKEN}"
    headers = {**ADMITTED, name: given}
    async with serving(tmp_path, environ) as served:
        assert (await served.client.get("/metrics", headers=headers)).status == 200
        wrong = {**ADMITTED, name: given[:-1]}
        assert (await served.client.get("/metrics", headers=wrong)).status == 401
        called = {"jsonrpc": "2.0", "id": 1, "method": "service.capabilities"}
        for path in ("/rpc", "/mcp"):
            answer = await served.client.post(path, json=called, headers=headers)
            assert answer.status == 401, path
        without = await (await served.client.get("/health", headers=ADMITTED)).json()
        assert (await (await served.client.get("/health", headers=headers)).json())["checks"] == (
            without["checks"]
        )


async def test_metrics_are_not_served_to_other_machines(served: Served) -> None:
    forwarded = await served.client.get("/metrics", headers={"x-forwarded-for": "203.0.113.9"})
    assert forwarded.status == 401


def test_histogram_puts_a_value_on_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for each in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(each)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 12.0
