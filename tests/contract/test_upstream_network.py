"""A sidecar makes no order at an upstream that settles on another network than its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.settlement.upstream.engine import UpstreamEngine
from rpcsvc.settlement.upstream.limits import Urgency
from tests.contract import upstream_server as does
from tests.contract.bff import ORDER, post
from tests.contract.relaying import Cutting, service, states
from tests.contract.serving import EVM, MONERO, Served, serving
from tests.contract.upstream_server import UpstreamServer
from tests.e2e.processes import until

STAGENET = stagenet_subaddress(bytes(range(64)))
SWAPS = [
    {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM},
    # A sandbox accepts addresses of every network: only its reported network shows the difference.
    {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": MONERO},
]


class Renamed(Cutting):
    """A service that reports another network; None: it reports none."""

    network: str | None = "sandbox"

    async def handle(self, server: UpstreamServer, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/capabilities"):
            return await super().handle(server, request)
        if self.network is None:
            return web.json_response(
                {"error": {"code": "unknown_method", "message": "no"}}, status=404
            )
        return web.json_response({"data": {"network": self.network}})


@asynccontextmanager
async def in_front_of(
    central: Served, tmp_path: Path, **settings: str
) -> AsyncIterator[tuple[Served, Renamed]]:
    """A sidecar on stagenet, and the proxy to its upstream."""
    async with does.running() as server:
        between = Renamed(server, central.url)
        async with service(server.url, tmp_path / "sidecar", "bff", **settings) as sidecar:
            yield sidecar, between


async def poll(served: Served) -> tuple[int, str]:
    """The status of /readyz, and the engine's detail in /health."""
    ready = await served.client.get("/readyz")
    health = await (await served.client.get("/health")).json()
    return ready.status, health["checks"]["engine"].get("detail", "")


def engine_of(served: Served) -> UpstreamEngine:
    engine = served.up.engine
    assert isinstance(engine, UpstreamEngine)
    return engine


async def ask(served: Served) -> None:
    """Refresh chains and network now, as the service does periodically."""
    await engine_of(served).watch.ask(Urgency.ROUTINE)


async def create(served: Served, swap: dict[str, str] = SWAPS[0]) -> dict[str, Any]:
    return dict((await served.rpc("swap.create", swap)).body["result"])


async def test_real_money_sidecar_makes_no_order_at_a_sandbox(
    central: Served, tmp_path: Path
) -> None:
    environ = {"RPCSVC_ENGINE": "upstream", "RPCSVC_UPSTREAM__URL": central.url}
    async with serving(tmp_path / "sidecar", environ) as sidecar:
        up = sidecar.up
        assert up.settings.network == up.service.views.network == "mainnet"
        status, detail = await poll(sidecar)
        assert status == 503
        assert detail == (
            "The upstream settles on sandbox, and upstream.monero_network is mainnet: no order is"
            " made. Set upstream.url to a service on mainnet, or upstream.monero_network to"
            " stagenet, and restart."
        )
        for swap in SWAPS:
            assert (await create(sidecar, swap))["error"]["code"] == "unavailable"
            priced = {name: swap[name] for name in ("direction", "chain", "amount")}
            quoted = (await sidecar.rpc("swap.quote", priced)).body["result"]
            assert "another network" in quoted["error"]["message"]
        assert (await post(sidecar, "/orders", ORDER)).status == 503
        assert (await post(sidecar, "/bridge/deposit", {"toAddress": EVM})).status == 503
        assert (states(sidecar), central.count("orders")) == ([], 0)


async def test_upstream_that_changes_its_network_gets_no_more_orders(
    central: Served, tmp_path: Path
) -> None:
    async with in_front_of(central, tmp_path) as (sidecar, between):
        assert (await create(sidecar))["ok"]
        between.network = "mainnet"
        refused = await create(sidecar)
        assert refused["error"]["code"] == "unavailable"
        assert central.count("orders") == 1
        assert states(sidecar) == ["created", "refused"]
        assert (await poll(sidecar))[1].startswith("The upstream settles on mainnet")
        between.network = "sandbox"
        await ask(sidecar)
        assert (await poll(sidecar))[0] == 200
        assert (await create(sidecar))["ok"]


async def test_without_the_upstreams_network_no_order_is_made(
    central: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Renamed, "network", None)
    async with in_front_of(central, tmp_path) as (sidecar, between):
        status, detail = await poll(sidecar)
        assert (status, detail.split(":")[0]) == (503, "The upstream's network is not known")
        assert (await create(sidecar))["error"]["code"] == "unavailable"
        assert central.count("orders") == 0
        between.network = "sandbox"
        await ask(sidecar)
        assert (await create(sidecar))["ok"]
        between.network = None
        refused = await create(sidecar)
        assert "does not report its network now" in refused["error"]["message"]
        assert central.count("orders") == 1


@pytest.mark.slow  # waits until the breaker lets a call try again
async def test_upstream_that_comes_up_later_is_retried_and_gets_orders(
    tmp_path: Path,
) -> None:
    port = does.unused_port()
    async with service(f"http://127.0.0.1:{port}", tmp_path / "sidecar", "bff") as sidecar:
        assert (await poll(sidecar))[0] == 503
        assert (await create(sidecar))["error"]["code"] == "unavailable"
        async with serving(tmp_path / "central", port=port) as central:
            assert central.count("orders") == 0

            async def made() -> bool:
                await ask(sidecar)
                return bool((await create(sidecar))["ok"])

            await until(made)
            assert ((await poll(sidecar))[0], central.count("orders")) == (200, 1)


async def test_network_is_requested_without_the_api_key(central: Served, tmp_path: Path) -> None:
    async with in_front_of(central, tmp_path, API_KEY="nobodys-key") as (sidecar, between):
        calls = {s.target: s.headers.get("x-api-key") for s in between.server.seen}
        assert calls == {
            "/bff/v1/chains": "nobodys-key",
            "/api/v1/agent/capabilities": None,
        }
        await engine_of(sidecar).watch.require_network()
        assert "API key" in (await poll(sidecar))[1]


async def test_a_key_in_doubt_is_not_sent_again_to_another_network(
    central: Served, tmp_path: Path
) -> None:
    async with in_front_of(central, tmp_path) as (sidecar, between):
        swap = {**SWAPS[0], "idempotency-key": "mine-0123456789a"}
        between.lose_calls = True
        assert (await create(sidecar, swap))["error"]["code"] == "unavailable"
        assert states(sidecar) == ["reconciling"]
        between.lose_calls, between.network = False, "mainnet"
        assert (await create(sidecar, swap))["error"]["code"] == "unavailable"
        assert (states(sidecar), central.count("orders")) == (["reconciling"], 0)
        between.network = "sandbox"
        await ask(sidecar)
        assert (await create(sidecar, swap))["ok"]
        assert (states(sidecar), central.count("orders")) == (["created"], 1)
