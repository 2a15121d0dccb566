"""Networks of the USDC adapter are independent: a fault on one affects no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import cycle
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain.chains import load_chains
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.settings_onchain import OnchainSettings, chains_toml
from rpcsvc.settlement.onchain.evm.adapter import (
    EvmAdapter,
    EvmNetworkAdapter,
    EvmNode,
    Ledgers,
    LookPace,
)
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.gas import OpeningLedger
from rpcsvc.settlement.onchain.evm.keys import HdKeys
from rpcsvc.settlement.onchain.evm.node_types import Block
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.upkeep import EvmUpkeep
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.sandbox import ManualClock
from tests.unit.evm_chain import NETWORK, Chain
from tests.unit.evm_payments import payment

KEYS = HdKeys("legal winner thank year wave sausage worth useful legal winner thank yellow")


@pytest.fixture
async def adapter(tmp_path: Path) -> AsyncIterator[EvmAdapter]:
    database = await SqliteDatabase.open(tmp_path)
    ledgers = Ledgers(
        EvmDepositLedger(database),
        EvmPaymentLedger(database),
        UnrecordedLedger(database),
        OpeningLedger(database),
    )
    nodes = [
        EvmNode(replace(NETWORK, name=name), Chain(), 2_000_000_000)
        for name in ("arbitrum", "base")
    ]
    chains, settings = load_chains(chains_toml(None)), OnchainSettings()
    yield EvmAdapter(nodes, chains, KEYS, ledgers, ManualClock(), settings, PauseSwitch(tmp_path))
    await database.close()


async def keep_up(adapter: EvmAdapter) -> None:
    """Look after each network once."""
    for name in adapter.networks:
        await adapter.upkeep[name]()


async def test_upkeep_fault_names_its_own_network_only(
    adapter: EvmAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_up, broken = list[str](), {"arbitrum"}

    async def maintain(upkeep: EvmUpkeep, _top: object) -> None:
        name = upkeep._network.name
        kept_up.append(name)
        if name in broken:
            raise KeyError(name)
        raise Unavailable("not now")  # skip the rest of the maintenance

    async def looked(network: EvmNetworkAdapter) -> Block | None:
        return await network.client.block()

    monkeypatch.setattr(EvmUpkeep, "maintain", maintain)
    monkeypatch.setattr("rpcsvc.settlement.onchain.evm.adapter.EvmNetworkAdapter.poll", looked)
    await keep_up(adapter)
    assert kept_up == ["arbitrum", "base"]
    reported = Health.of(await adapter.conditions()).detail or ""
    assert "the upkeep of arbitrum has failed (KeyError)" in reported
    assert "upkeep of base" not in reported
    broken.clear()
    await keep_up(adapter)
    assert "the upkeep of" not in (Health.of(await adapter.conditions()).detail or "")


async def hangs_on_arbitrum(network: EvmNetworkAdapter) -> None:
    if network.network.name == "arbitrum":
        await asyncio.Event().wait()


async def test_replica_looks_soon_at_a_node_that_fails_and_else_rarely(
    adapter: EvmAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waits with it for no node that hangs."""
    problems, pauses = iter(("down", None, "down")), list[float]()

    async def look(network: EvmNetworkAdapter) -> None:
        await hangs_on_arbitrum(network)
        network.connection.problem = next(problems)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            looking.cancel()
        await asyncio.sleep(0)

    monkeypatch.setattr(EvmNetworkAdapter, "look", look)
    looking = asyncio.create_task(adapter.look(pause))
    await asyncio.wait([looking], timeout=5)
    assert pauses == [5, 20, 5]


class Looks:
    """Counts the looks at a network, of which nothing asks the node; the clock is moved by hand."""

    def __init__(self, network: EvmNetworkAdapter, patched: pytest.MonkeyPatch) -> None:
        assert isinstance(network._clock, ManualClock)
        self.network, self.clock = network, network._clock
        self.is_awaiting, self.are_sweeps_due, self.height = False, False, 100
        self._began = self.clock.now
        self._seen = list[int]()
        network.connection.problem = network.deposits.problem = None
        network.deposits.is_quiet, network.deposits.complete_until = True, self.clock.now
        for owner, name in (
            (network.deposits, "observe"),
            (network, "poll"),
            (network.upkeep, "maintain"),
            (network.sweeps, "maintain"),
        ):
            patched.setattr(owner, name, self._note if name in ("observe", "poll") else _nothing)
        patched.setattr(network._deposit_ledger, "is_awaiting", self._awaits)
        patched.setattr(network.sweeps, "are_due", self._due)
        patched.setattr(network.connection, "height", lambda: self.height)

    async def _note(self) -> Block:
        self._seen.append(self.clock.now - self._began)
        block = await self.network.client.block()
        assert block is not None
        return block

    async def _awaits(self, *_: object) -> bool:
        return self.is_awaiting

    async def _due(self) -> bool:
        return self.are_sweeps_due

    async def within(self, look: Callable[[], Awaitable[object]], ms: int, step: int) -> list[int]:
        """Return when (ms) the network was looked at, asked to every ``step`` ms."""
        self._began, self._seen = self.clock.now, []
        while self.clock.now < self._began + ms:
            await look()
            self.clock.now += step
        return self._seen


async def _nothing(*_: object) -> None:
    pass


@pytest.fixture
def looks(adapter: EvmAdapter, monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(adapter.networks["arbitrum"], monkeypatch)


async def test_quiet_network_is_scanned_rarely_until_an_order_comes(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks.network, "_scan_pace", LookPace(looks.clock, 0.25, 1_000))
    observe = looks.network.observe
    assert await looks.within(observe, 41_000, 200) == [0, 20_000, 40_000]
    looks.is_awaiting = True
    assert len(await looks.within(observe, 3_000, 200)) == 3
    looks.network.deposits.complete_until = None
    assert len(await looks.within(observe, 3_000, 200)) == 3, "it goes on with what it lacks"


async def test_network_is_scanned_until_the_time_of_its_orders_is_over(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, began = looks.network, looks.clock.now

    async def awaits(_network: str, now: int) -> bool:
        return now <= began + 3_500

    async def observe() -> None:
        await looks._note()
        network.deposits.complete_until = looks.clock.now

    monkeypatch.setattr(network, "_scan_pace", LookPace(looks.clock, 0.25, 1_000))
    monkeypatch.setattr(network._deposit_ledger, "is_awaiting", awaits)
    monkeypatch.setattr(network.deposits, "observe", observe)
    scans = await looks.within(network.observe, 30_000, 200)
    assert scans == [*range(0, 5_000, 1_000), 24_000], "a deadline waits for no sleep"


async def test_deposit_on_a_fast_chain_is_looked_at_each_time(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks.network, "_scan_pace", LookPace(looks.clock, 0.25, 1_000))
    looks.network.deposits.is_quiet = False
    assert len(await looks.within(looks.network.observe, 3_000, 200)) == 15


async def test_block_that_a_deposit_waits_for_is_seen_in_the_next_pass(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, clock, began = looks.network, looks.clock, looks.clock.now
    monkeypatch.setattr(network, "_scan_pace", LookPace(clock, 2.0, 1_000))
    monkeypatch.setattr(network.connection, "height", lambda: (clock.now - began) // 2_000)
    network.deposits.is_quiet = False
    clock.now += 1_300
    first = dict[int, int]()
    for at in await looks.within(network.observe, 60_000, 350):  # a node that is far away
        first.setdefault((at + 1_300) // 2_000, (at + 1_300) % 2_000)
    assert len(first) == 31
    assert max(list(first.values())[5:]) < 350


async def test_block_of_a_node_that_lags_is_no_new_one(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights = cycle((100, 99))
    monkeypatch.setattr(looks.network, "_scan_pace", LookPace(looks.clock, 2.0, 1_000))
    monkeypatch.setattr(looks.network.connection, "height", lambda: next(heights))
    looks.is_awaiting = True
    scans = await looks.within(looks.network.observe, 6_000, 200)
    assert scans == [0, *range(1_800, 3_000, 200), *range(3_800, 6_000, 1_000)]


async def test_slow_chain_is_scanned_as_its_next_block_is_expected(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = LookPace(looks.clock, 12.0, 1_000)
    monkeypatch.setattr(looks.network, "_scan_pace", slow)
    looks.is_awaiting = True
    assert await looks.within(looks.network.observe, 12_000, 200) == [
        *range(0, 12_000 * 9 // 10, 2_000), *range(10_800, 12_000, 200)
    ]  # fmt: skip
    assert await looks.within(looks.network.observe, 3_000, 200) == [
        *range(0, 1_000, 200), *range(1_800, 3_000, 1_000)
    ], "a late block is looked for less often"  # fmt: skip
    looks.height += 1
    await looks.network.observe()
    assert await looks.within(looks.network.observe, 3_000, 200) == [800, 2_800]


async def test_upkeep_rests_while_no_payment_is_out(looks: Looks) -> None:
    maintain = looks.network.maintain
    assert await looks.within(maintain, 61_000, 1_000) == [0, 60_000]
    looks.is_awaiting = True
    assert await looks.within(maintain, 41_000, 1_000) == [19_000, 39_000]
    looks.is_awaiting = False
    looks.are_sweeps_due = True
    looks.clock.now += 12_000
    assert len(await looks.within(maintain, 5_000, 1_000)) == 5


async def test_upkeep_of_a_network_in_trouble_does_not_rest(looks: Looks) -> None:
    looks.network.connection.problem = "the node of arbitrum is down"
    assert len(await looks.within(looks.network.maintain, 3_000, 1_000)) == 3
    looks.network.connection.problem = None
    looks.network.upkeep._await_again(payment("tr_1", 0))
    assert len(await looks.within(looks.network.maintain, 3_000, 1_000)) == 3


def test_network_is_down_while_its_own_node_is(adapter: EvmAdapter) -> None:
    def up() -> dict[str, bool]:
        return {name: network.state().is_up for name, network in adapter.networks.items()}

    assert up() == {"arbitrum": False, "base": False}, "not started"
    arbitrum, base = (adapter.networks[name] for name in ("arbitrum", "base"))
    arbitrum.connection.problem = base.connection.problem = None
    arbitrum.deposits.problem = base.deposits.problem = None
    assert up() == {"arbitrum": True, "base": True}
    base.connection.problem = "the node of base gives no answer"
    assert up() == {"arbitrum": True, "base": False}
    base.connection.problem, base.connection.paused = None, True
    assert up() == {"arbitrum": True, "base": False}
