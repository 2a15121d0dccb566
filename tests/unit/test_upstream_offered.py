"""The configured chains that the upstream lists, and when its list is requested."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import cast

import pytest

from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry, load_chains
from rpcsvc.errors import Unavailable, UnsupportedChain
from rpcsvc.settlement.upstream.answers import Capabilities, UpstreamChain, UpstreamChains
from rpcsvc.settlement.upstream.calls import Upstream
from rpcsvc.settlement.upstream.client import Timing
from rpcsvc.settlement.upstream.limits import Demand, Urgency
from rpcsvc.settlement.upstream.offered import ChainWatch, NetworkCheck, OfferedChains, Pace
from rpcsvc.settlement.upstream.transport import NeverSent
from tests.unit.chain_tables import TOML
from tests.unit.virtual_time import VirtualTime

PACE = Pace()
ARBITRUM, BASE = 42161, 8453


class UpstreamStub:
    """Answers with successive lists of chains; None: no connection."""

    def __init__(self, time: VirtualTime, *answers: list[int] | None) -> None:
        self.time = time
        self.answers = deque(answers)
        self.asked: list[tuple[int, Urgency]] = []
        self.is_silent = False

    async def chains(
        self, demand: Demand | None = None, *, total_ms: int | None = None
    ) -> UpstreamChains:
        assert demand is not None
        assert (total_ms is None) is (demand.urgency is Urgency.ROUTINE)
        self.asked.append((self.time.now, demand.urgency))
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        numbers = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if numbers is None:
            raise NeverSent("no connection")
        return UpstreamChains.model_construct(chains=listed(*numbers))


class UpstreamStubWithNetwork(UpstreamStub):
    """An upstream that also reports its network."""

    where = "mainnet"

    async def capabilities(self, _demand: Demand, *, total_ms: int | None = None) -> Capabilities:
        assert total_ms is None or total_ms > 0
        return Capabilities.model_validate({"data": {"network": self.where}}, context=b"")


def watch_of(
    time: VirtualTime, stub: UpstreamStub, pace: Pace = PACE
) -> tuple[ChainWatch, OfferedChains]:
    chains, upstream = OfferedChains(configured()), cast("Upstream", stub)
    timing = Timing(time.now_ms, time.sleep_ms, lambda: 0.0)
    has_network = isinstance(stub, UpstreamStubWithNetwork)
    network = NetworkCheck(upstream, MoneroNetwork.MAINNET) if has_network else None
    return ChainWatch(upstream, chains, timing, pace, network), chains


def listed(*numbers: int, least: str = "1") -> tuple[UpstreamChain, ...]:
    return tuple(
        UpstreamChain.model_validate(
            {
                "chainId": number,
                "name": "a name",
                "nativeToken": "ETH",
                "minSwapUsd": json.loads(least),
            }
        )
        for number in numbers
    )


def configured() -> ChainRegistry:
    return load_chains(TOML)


def numbers(chains: ChainRegistry) -> set[int]:
    return {chain.chain_id for chain in chains.all()}


def test_what_is_not_on_offer_is_still_found_and_named_by_nobody() -> None:
    chains = OfferedChains(configured())
    assert chains.all() == configured().all()
    chains.offer(listed(0, ARBITRUM, 101))
    assert numbers(chains) == {ARBITRUM}
    assert chains.resolve("base").chain_id == BASE
    assert chains.by_id(BASE) is not None
    assert chains.token_contracts == configured().token_contracts
    with pytest.raises(UnsupportedChain) as caught:
        chains.resolve("bas")
    assert caught.value.allowed == ["arbitrum"]
    assert "base" not in caught.value.message


@pytest.mark.parametrize(
    ("least", "shown"), [("25", 25), ("24.01", 25), ("0", 0), ("1e308", 10**12)]
)
def test_shown_minimum_comes_from_the_upstream(least: str, shown: int) -> None:
    chains = OfferedChains(configured())
    chains.offer(listed(ARBITRUM, least=least))
    assert [chain.min_swap_usd for chain in chains.all()] == [shown]


def test_a_list_without_any_configured_chain_changes_nothing() -> None:
    chains = OfferedChains(configured())
    chains.offer(listed(BASE))
    assert chains.offer(listed(0, 101)) == ()
    assert numbers(chains) == {BASE}


async def test_the_list_is_learned_at_start_and_again_now_and_then() -> None:
    time = VirtualTime()
    stub = UpstreamStub(time, [0, ARBITRUM, BASE], [0, BASE])
    watch, chains = watch_of(time, stub)
    with pytest.raises(Unavailable):
        watch.require_known()
    assert not watch.health().ok
    await watch.start()
    watch.require_known()
    assert watch.health().ok
    assert numbers(chains) == {ARBITRUM, BASE}
    await time.pass_until(PACE.usual - 1)
    assert stub.asked == [(0, Urgency.WATCHED)]
    await time.pass_until(PACE.usual)
    assert stub.asked == [(0, Urgency.WATCHED), (PACE.usual, Urgency.ROUTINE)]
    assert numbers(chains) == {BASE}
    await watch.close()


@pytest.mark.parametrize("bad", [None, [], [0, 101]], ids=["no answer", "empty", "unknown ones"])
async def test_offered_chains_stay_when_a_refresh_fails(bad: list[int] | None) -> None:
    time = VirtualTime()
    stub = UpstreamStub(time, [ARBITRUM], bad, [BASE])
    watch, chains = watch_of(time, stub)
    await watch.start()
    await time.pass_until(PACE.usual)
    assert numbers(chains) == {ARBITRUM}
    watch.require_known()
    assert watch.health().ok
    await time.pass_until(PACE.usual + PACE.failed)
    assert [at for at, _ in stub.asked] == [0, PACE.usual, PACE.usual + PACE.failed]
    assert numbers(chains) == {BASE}
    await watch.close()


async def test_no_order_is_taken_before_the_first_chain_list() -> None:
    time = VirtualTime()
    stub = UpstreamStub(time, None, [0, 101], [ARBITRUM])
    watch, _ = watch_of(time, stub)
    await watch.start()
    with pytest.raises(Unavailable) as caught:
        watch.require_known()
    assert caught.value.retry_after == PACE.unknown // 1000
    await time.pass_until(PACE.unknown)
    health = watch.health()
    assert not health.ok
    assert "101" in (health.detail or "")
    await time.pass_until(2 * PACE.unknown)
    watch.require_known()
    assert len(stub.asked) == 3
    await watch.close()


async def test_an_upstream_that_says_nothing_holds_up_no_start() -> None:
    time = VirtualTime()
    stub = UpstreamStub(time, [ARBITRUM])
    stub.is_silent = True
    watch, _ = watch_of(time, stub, Pace(start=1))
    async with asyncio.timeout(180):
        await watch.start()
    assert not watch.health().ok
    stub.is_silent = False
    await time.pass_until(PACE.unknown)
    assert watch.health().ok
    await watch.close()


async def test_a_reason_to_ask_is_heard_before_long_and_not_at_once() -> None:
    time = VirtualTime()
    stub = UpstreamStub(time, [ARBITRUM], [BASE])
    watch, chains = watch_of(time, stub)
    await watch.start()
    for _ in range(100):
        watch.ask_soon()
        await time.pass_until(time.now + 100)
    assert len(stub.asked) == 1
    await time.pass_until(PACE.least)
    assert len(stub.asked) == 2
    assert numbers(chains) == {BASE}
    await watch.close()


@pytest.mark.parametrize("at_start", [True, False])
async def test_foreign_network_is_asked_for_until_it_is_ours(*, at_start: bool) -> None:
    time = VirtualTime()
    stub = UpstreamStubWithNetwork(time, [ARBITRUM])
    stub.where = "sandbox" if at_start else "mainnet"
    watch, _ = watch_of(time, stub)
    await watch.start()
    if not at_start:
        await watch.require_network()
        stub.where = "sandbox"
        with pytest.raises(Unavailable):
            await watch.require_network()
    for _ in range(3):
        with pytest.raises(Unavailable, match="another network"):
            watch.require_known()
        assert "settles on sandbox" in (watch.health().detail or "")
        await time.pass_until(time.now + PACE.unknown)
    assert len(stub.asked) == 4
    stub.where = "mainnet"
    await time.pass_until(time.now + PACE.unknown)
    watch.require_known()
    assert watch.health().ok
    await watch.close()
