"""SIGHUP: which settings a running service takes again, and what follows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import test_utils

from rpcsvc.errors import SettingsError
from rpcsvc.serving import reload_settings, web_app
from rpcsvc.settings import KEYS, RELOADED, changed_keys, load_settings, reloaded
from tests.contract.by_clients import DESK, client
from tests.contract.serving import SWAP, EdgeServer, Served, serving
from tests.contract.sidecar import beside
from tests.logs import logs_of

PRICED = {name: SWAP[name] for name in ("direction", "chain", "amount")}
# A setting of each kind that a reload takes, and its value afterwards.
CHANGED: dict[str, Any] = {
    "clients": {"desk": client(DESK)},
    "rate_limit.orders_per_minute": 7,
    "rate_limit.requests_per_minute": 77,
    "rate_limit.rpc_requests_per_minute": 777,
    "rate_limit.wrong_tokens_per_minute": 7,
    "orders.spread_bps": 250,
    "orders.max_swap_usd": 1_000,
    "orders.bridge_min_usd": 20,
    "orders.unfunded_share": 49,
    "orders.unfunded_address_total_share": 39,
    "orders.unfunded_address_share": 9,
    "orders.unfunded_address_orders": 1,
    "orders.unfunded_token_share": 29,
    "orders.unfunded_token_orders": 99,
    "orders.address_orders_a_day": 999,
    "orders.address_authorizations_a_day": 99,
    "upstream.reservable_usd": 1_000,
}


def reload(served: Served, **flags: Any) -> list[str]:
    """Reload with these settings; return the keys that the log says need a restart."""
    given = {name.replace("__", "."): value for name, value in flags.items()}
    found = load_settings(config_file=None, environ={}, flags=given).settings
    with logs_of("rpcsvc.serving") as logs:
        reload_settings(served.up.held, served.up.settings, lambda: found)
    return [each["key"] for each in logs if each["event"] == "setting_needs_restart"]


async def quoted(served: Served, **changes: Any) -> Any:
    answer = await served.post("/agent/swap/quote", {**PRICED, **changes})
    return answer.body["data"]["quote"] if answer.body["ok"] else answer.body["error"]


async def document(served: Served, path: str) -> tuple[str, str]:
    """The text of a document, and its ETag."""
    response = await served.client.get(path)
    return await response.text(), response.headers["etag"]


def test_every_reloaded_key_is_merged_and_no_other() -> None:
    started = load_settings(config_file=None, environ={}, flags={}).settings
    others = {"port": 1, "orders.min_received_bps": 9_000, "orders.deposit_window_seconds": 60}
    tokens = {"AGENT_RPC_TOKEN": "a-token-that-is-long-enough-0123456789"}
    found = load_settings(config_file=None, environ=tokens, flags={**CHANGED, **others}).settings
    assert set(KEYS) >= RELOADED == {"agent_rpc_token", *CHANGED}
    assert set(changed_keys(started, reloaded(started, found))) == RELOADED
    assert not RELOADED.intersection(changed_keys(reloaded(started, found), found))


@pytest.mark.parametrize("key", ["AGENT_RPC_TOKEN", "clients"])
def test_reload_refuses_a_token_that_still_opens_metrics(key: str) -> None:
    moved = {"telemetry.metrics_token": [DESK]}
    started = load_settings(config_file=None, environ={}, flags=moved).settings
    tokens = {key: DESK} if key != "clients" else {}
    flags = {"clients": {"desk": client(DESK)}} if key == "clients" else {}
    found = load_settings(config_file=None, environ=tokens, flags=flags).settings
    with pytest.raises(SettingsError, match=r"restart.*it opens /metrics alone"):
        reloaded(started, found)


def test_reload_refuses_a_spread_while_upstream_names_prices() -> None:
    upstream = {"engine": "upstream", "upstream.url": "https://swaps.example"}
    started = load_settings(config_file=None, environ={}, flags=upstream).settings
    flags = {"clients": {"desk": {**client(DESK), "spread_bps": 10}}}
    found = load_settings(config_file=None, environ={}, flags=flags).settings
    with pytest.raises(SettingsError, match="names its own prices"):
        reloaded(started, found)


async def test_reload_takes_the_spread_for_new_orders_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        made = (await served.post("/agent/swap/create", SWAP)).body["data"]["order"]
        before = await quoted(served)
        assert reload(served, orders__spread_bps=250).count("orders.spread_bps") == 0
        after = await quoted(served)
        assert float(after["expectedOutput"]) < float(before["expectedOutput"])
        kept = (await served.http("GET", f"/agent/swap/status/{made['orderId']}")).body["data"]
        assert kept["order"]["expectedOutput"] == made["expectedOutput"]


async def test_reload_takes_the_largest_swap_for_every_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        large = {"amount": "50"}
        assert "expectedOutput" in await quoted(served, **large)
        agent, etag = await document(served, "/.well-known/agent.json")
        assert '"maxSwapUsd":50000' in agent
        assert reload(served, orders__max_swap_usd=1_000).count("orders.max_swap_usd") == 0
        refused = await quoted(served, **large)
        assert refused["code"] == "amount_above_maximum"
        capabilities = (await served.http("GET", "/agent/capabilities")).body["data"]
        most = {each["direction"]: each["maximum"] for each in capabilities["limits"]}
        assert float(most["u2x"]) == 1_000
        agent, other = await document(served, "/.well-known/agent.json")
        assert '"maxSwapUsd":1000,' in agent
        assert other != etag
        assert "worth 1000 USD" in (await document(served, "/llms-full.txt"))[0]


async def test_documents_follow_a_reload_of_the_first_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        paths = ("/.well-known/agent.json", "/openrpc.json", "/llms-full.txt")
        before = [await document(served, path) for path in paths]
        discovered = (await served.rpc_discover()).body["result"]
        reload(served, clients={"desk": client(DESK)})
        after = [await document(served, path) for path in paths]
        assert all(one[1] != other[1] for one, other in zip(before, after, strict=True))
        agent = (await (await served.client.get(paths[0])).json())["auth"]["jsonrpc"]
        assert agent["required"]
        named = {"x_agent_rpc_token": DESK}
        assert (await served.rpc_discover()).status == 401
        assert (await served.rpc_discover(**named)).body["result"] != discovered
        reload(served)
        assert [(await document(served, path))[0] for path in paths[:2]] == [
            text for text, _ in before[:2]
        ]


async def test_reload_takes_rate_limits_and_says_them(tmp_path: Path) -> None:
    async with serving(tmp_path, rate_limit__enabled=True) as served:
        first = await served.post("/agent/swap/create", SWAP)
        assert first.headers["ratelimit-policy"] == '"orders";q=30;w=60'
        reload(served, rate_limit__enabled=True, rate_limit__orders_per_minute=1)
        made = [await served.post("/agent/swap/create", SWAP) for _ in range(2)]
        assert [each.status for each in made] == [200, 429]
        assert made[1].headers["ratelimit-policy"] == '"orders";q=1;w=60'
        agent = await (await served.client.get("/.well-known/agent.json")).json()
        limits = {each["budget"]: each["limit"] for each in agent["limits"]["rateLimits"]}
        assert limits == {"orders": 1, "requests": 300, "rpc": 6_000}
        # A reload that leaves a limit as it is gives nobody a new budget.
        reload(served, rate_limit__enabled=True, rate_limit__orders_per_minute=1)
        assert (await served.post("/agent/swap/create", SWAP)).status == 429


@pytest.mark.parametrize(
    "cap",
    ["orders__unfunded_address_orders", "orders__address_orders_a_day", "upstream__reservable_usd"],
)
async def test_reload_takes_caps_of_unfunded_orders(tmp_path: Path, cap: str) -> None:
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar") as sidecar,
    ):
        assert (await sidecar.post("/agent/swap/create", SWAP)).status == 200
        reload(sidecar, **{cap: 1})
        refused = await sidecar.post("/agent/swap/create", SWAP)
        assert refused.body["error"]["code"] == "rate_limited"
        reload(sidecar)
        assert (await sidecar.post("/agent/swap/create", SWAP)).status == 200


@pytest.mark.parametrize("key", ["orders.min_received_bps", "rate_limit.enabled", "limits.batch"])
async def test_reload_names_a_setting_that_waits_for_a_restart(tmp_path: Path, key: str) -> None:
    values = {"orders.min_received_bps": 5_000, "rate_limit.enabled": True, "limits.batch": 1}
    async with serving(tmp_path) as served:
        before = await quoted(served)
        assert key in reload(served, **{key.replace(".", "__"): values[key]})
        after = await quoted(served)
        assert after["minReceived"] == before["minReceived"]
        assert "ratelimit-policy" not in (await served.post("/agent/swap/quote", PRICED)).headers


async def test_wrong_scope_in_a_reload_leaves_caps_as_they_are(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        wrong = {"desk": client(DESK, "swap.qoute")}
        reload(served, clients=wrong, orders__max_swap_usd=1_000)
        assert "expectedOutput" in await quoted(served, amount="50")
        agent, _ = await document(served, "/.well-known/agent.json")
        assert '"maxSwapUsd":50000' in agent


async def test_replica_that_takes_over_has_what_was_reloaded(tmp_path: Path) -> None:
    """A standby that is reloaded makes its surfaces again when it gets the lease."""
    async with serving(tmp_path, rate_limit__enabled=True) as served:
        reload(served, rate_limit__requests_per_minute=77, orders__max_swap_usd=1_000)
        taken_over = test_utils.TestClient[Any, Any](EdgeServer(web_app(served.up), None))
        await taken_over.start_server()
        try:
            response = await taken_over.get("/.well-known/agent.json")
            assert response.headers["ratelimit-policy"] == '"requests";q=77;w=60'
            assert (await response.json())["limits"]["maxSwapUsd"] == 1_000
        finally:
            await taken_over.close()
