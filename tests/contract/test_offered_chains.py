"""With an upstream, every transport offers the configured chains that the upstream lists."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.settlement.upstream.engine import UpstreamEngine
from rpcsvc.settlement.upstream.limits import Urgency
from tests.contract import upstream_server as does
from tests.contract.bff import ORDER, TO_USDC, USDC, call, check, post
from tests.contract.relaying import service
from tests.contract.serving import EVM, Served, serving
from tests.contract.v1_api import V1Api, v1_api

CHAINS_TOML = Path(__file__).parents[2] / "config" / "chains.toml"
BASE_USDC = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
STAGENET = stagenet_subaddress(bytes(range(64)))
OPTIMISM_USDC = "0x0b2C639c533813f4Aa9D7837CAf62653d097Ff85"
SWAP = {"direction": "x2u", "amount": "0.8", "to": EVM}
ON_OPTIMISM = {"toChainId": 10, "toToken": OPTIMISM_USDC}


@asynccontextmanager
async def of_v1(tmp_path: Path) -> AsyncIterator[Served]:
    async with v1_api() as api, service(api.server.url, tmp_path / "sidecar") as served:
        yield served


@asynccontextmanager
async def of_bff(tmp_path: Path) -> AsyncIterator[Served]:
    """A sidecar of a service that has two of the chains."""
    tables = CHAINS_TOML.read_text().split("[chains.")
    kept = [t for t in tables[1:] if t.startswith(("arbitrum]", "base]"))]
    file = tmp_path / "chains.toml"
    file.write_text("".join(f"[chains.{table}" for table in kept))
    async with (
        serving(tmp_path / "central", chains_file=str(file)) as central,
        service(central.url, tmp_path / "sidecar", "bff") as served,
    ):
        yield served


@pytest.fixture(params=[of_v1, of_bff], ids=["v1", "bff"])
async def sidecar(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    async with request.param(tmp_path) as served:
        yield served


async def rpc(served: Served, method: str, **params: Any) -> dict[str, Any]:
    return dict((await served.rpc(method, params)).body["result"])


async def refresh(served: Served) -> None:
    """Refresh the list of chains now, as the service does periodically."""
    engine = served.up.engine
    assert isinstance(engine, UpstreamEngine)
    await engine.watch.ask(Urgency.ROUTINE)


async def test_offered_chains_are_configured_and_listed_upstream(sidecar: Served) -> None:
    reported = (await rpc(sidecar, "capabilities"))["data"]["chains"]
    assert [chain["name"] for chain in reported] == ["arbitrum", "base"]
    answer = await call(sidecar, "GET", "/chains")
    for chain in answer.body["chains"]:
        check("Chain", chain)
    assert [chain["chainId"] for chain in answer.body["chains"]] == [0, 42161, 8453]


@pytest.mark.parametrize("method", ["swap.plan", "swap.quote", "swap.create", "swap.execute"])
async def test_unlisted_chain_is_refused_with_the_listed_ones(sidecar: Served, method: str) -> None:
    given = {**SWAP, "chain": "optimism"}
    if method == "swap.quote":
        del given["to"]
    answer = await rpc(sidecar, method, **given)
    assert answer["error"]["code"] == "unsupported_chain"
    [problem] = answer["validationErrors"]
    assert (problem["field"], problem["received"]) == ("chain", "optimism")
    assert problem["allowed"] == ["arbitrum", "base"]
    assert sidecar.count("relays") == 0


async def test_an_unknown_chain_is_refused_with_those_on_offer(sidecar: Served) -> None:
    answer = await rpc(sidecar, "swap.quote", direction="x2u", amount="0.8", chain="optimist")
    [problem] = answer["validationErrors"]
    assert problem["allowed"] == ["arbitrum", "base"]
    assert "optimism" not in problem["message"]


@pytest.mark.parametrize("path", ["/quote", "/orders"])
@pytest.mark.parametrize("back", [False, True], ids=["x2u", "u2x"])
async def test_bff_refuses_a_chain_off_offer_by_field_and_number(
    sidecar: Served, path: str, back: bool
) -> None:
    body: dict[str, Any] = {**(TO_USDC if path == "/quote" else ORDER), **ON_OPTIMISM}
    if back:
        turned = {"fromChainId": 10, "fromToken": OPTIMISM_USDC, "toChainId": 0, "toToken": "XMR"}
        body = {**body, **turned, "fromAmount": "150000000"}
        if "toAddress" in body:
            body["toAddress"] = STAGENET
    answer = await post(sidecar, path, body)
    assert (answer.status, answer.body["error"]["code"]) == (400, "unsupported_chain")
    [problem] = answer.body["error"]["details"]["problems"]
    assert problem["field"] == ("fromChainId" if back else "toChainId")
    assert (problem["received"], problem["allowed"]) == (10, [42161, 8453])
    assert sidecar.count("relays") == 0


async def test_token_that_is_not_swapped_is_refused_with_the_right_one(sidecar: Served) -> None:
    tether = "0xFd086bC7CD5C481DCC9C85ebE478A1C0b69FCbb9"
    answer = await post(sidecar, "/quote", {**TO_USDC, "toToken": tether})
    assert answer.body["error"]["code"] == "unsupported_token"
    assert answer.body["error"]["details"]["allowed"] == [USDC]


async def test_a_chain_on_offer_is_swapped(sidecar: Served) -> None:
    assert (await rpc(sidecar, "swap.create", **SWAP, chain="base"))["ok"]
    body = {**ORDER, "toChainId": 8453, "toToken": BASE_USDC}
    assert (await post(sidecar, "/orders", body)).status == 200


async def test_the_minimum_of_a_chain_is_the_upstreams(tmp_path: Path) -> None:
    async with of_v1(tmp_path) as served:
        reported = (await rpc(served, "capabilities"))["data"]["chains"]
        assert {chain["minSwapUsd"] for chain in reported} == {13}
        chains = (await call(served, "GET", "/chains")).body["chains"]
        assert {chain["minSwapUsd"] for chain in chains} == {13}


async def test_changed_list_is_followed_and_existing_orders_stay(tmp_path: Path) -> None:
    async with v1_api() as api, service(api.server.url, tmp_path) as served:
        keyed = {**SWAP, "chain": "base", "idempotency-key": "mine-0123456789a"}
        made = await rpc(served, "swap.create", **keyed)
        assert made["ok"]
        del api.chains[8453]
        await refresh(served)
        again = await rpc(served, "swap.create", **keyed)
        assert again["data"] == made["data"], "the retry of a key gets its first answer"
        order_id = made["data"]["order"]["orderId"]
        assert (await rpc(served, "swap.status", orderId=order_id))["ok"]
        other = await rpc(served, "swap.create", **SWAP, chain="base")
        assert other["validationErrors"][0]["allowed"] == ["arbitrum"]
        api.chains[8453] = "base"
        await refresh(served)
        assert (await rpc(served, "swap.create", **SWAP, chain="base"))["ok"]


async def test_offered_chains_stay_when_a_refresh_fails(tmp_path: Path) -> None:
    async with v1_api() as api, service(api.server.url, tmp_path) as served:
        api.server.script.append(does.answer({"error": "no"}, status=404))
        await refresh(served)
        assert (await rpc(served, "swap.create", **SWAP, chain="base"))["ok"]
        assert (await served.client.get("/readyz")).status == 200


async def test_nothing_is_offered_or_ordered_before_the_list_is_known(
    tmp_path: Path,
) -> None:
    async with v1_api() as api:
        api.server.script.append(does.answer({"error": "no"}, status=404))
        async with service(api.server.url, tmp_path) as served:
            assert (await served.client.get("/readyz")).status == 503
            health = await (await served.client.get("/health")).json()
            assert "chains are not known" in health["checks"]["engine"]["detail"]
            answer = await served.client.get("/bff/v1/chains")
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            refused = await rpc(served, "swap.create", **SWAP, chain="arbitrum")
            assert refused["error"]["code"] == "unavailable"
            assert api.sent("POST", "/v1/") == 0
            assert (await rpc(served, "capabilities"))["ok"]
            await refresh(served)
            assert (await served.client.get("/readyz")).status == 200
            assert (await rpc(served, "swap.create", **SWAP, chain="arbitrum"))["ok"]


async def refuses(api: V1Api, served: Served, text: str) -> dict[str, Any]:
    """The answer to a caller when the upstream refuses a quote with a text."""
    api.server.script.append(does.answer({"error": text}, status=400))
    return await rpc(served, "swap.quote", direction="x2u", amount="0.8", chain="base")


async def test_chain_refused_by_the_upstream_is_refused_with_allowed(
    tmp_path: Path,
) -> None:
    async with v1_api() as api, service(api.server.url, tmp_path) as served:
        [problem] = (await refuses(api, served, "chain not supported"))["validationErrors"]
        assert (problem["code"], problem["allowed"]) == ("unsupported_chain", ["arbitrum"])
        api.server.script.append(does.answer({"error": "chain not supported"}, status=400))
        over_bff = await post(served, "/quote", TO_USDC)
        assert over_bff.body["error"]["details"]["allowed"] == [8453]
        # One refusal does not disable a chain for other calls.
        assert (await rpc(served, "swap.create", **SWAP, chain="base"))["ok"]


async def test_upstream_tokens_that_are_not_swapped_are_not_offered(
    tmp_path: Path,
) -> None:
    details = {
        "field": "toToken",
        "received": BASE_USDC,
        "allowed": ["0xfde4C96c8593536E31F229EA8f37b2ADa2699bb2", BASE_USDC.lower(), "DOGE"],
    }
    refusal = {"error": {"code": "unsupported_token", "message": "Not now.", "details": details}}
    async with v1_api() as api, service(api.server.url, tmp_path, "bff") as served:
        api.server.script.append(does.answer(refusal, status=400))
        body = {**TO_USDC, "toChainId": 8453, "toToken": BASE_USDC}
        answer = await post(served, "/quote", body)
        assert answer.body["error"]["code"] == "unsupported_token"
        assert answer.body["error"]["details"]["allowed"] == [BASE_USDC.lower()]
