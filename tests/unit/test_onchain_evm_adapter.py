"""Networks of the USDC adapter are independent: a fault on one affects no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain.chains import load_chains
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.settings_onchain import OnchainSettings, chains_toml
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter, EvmNetworkAdapter, EvmNode, Ledgers
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
    await adapter.maintain()
    assert sorted(kept_up) == ["arbitrum", "base"]
    reported = Health.of(await adapter.conditions()).detail or ""
    assert "the upkeep of arbitrum has failed (KeyError)" in reported
    assert "upkeep of base" not in reported
    broken.clear()
    await adapter.maintain()
    assert "the upkeep of" not in (Health.of(await adapter.conditions()).detail or "")


async def test_network_is_looked_at_rarely_while_nothing_is_under_way(
    adapter: EvmAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = adapter.networks["arbitrum"]
    clock, awaiting, rounds = network._clock, False, list[int]()
    assert isinstance(clock, ManualClock)
    began = clock.now

    async def is_awaiting(*_: object) -> bool:
        return awaiting

    async def note(*_: object) -> None:
        rounds.append((clock.now - began) // 1000)

    monkeypatch.setattr(EvmDepositLedger, "is_awaiting", is_awaiting)
    monkeypatch.setattr(EvmNetworkAdapter, "poll", note)
    monkeypatch.setattr(network.deposits, "observe", note)
    for looked, work in ((network.maintain, "upkeep"), (network.observe, "scan")):
        rounds.clear()
        clock.now = began
        for second in range(13):
            network.connection.problem, network.deposits.is_quiet = None, True
            awaiting = second == 7
            await looked()
            clock.now += 1000
        assert rounds == [0, 5, 7, 12], work
    rounds.clear()
    network.connection.problem = "the node of arbitrum is down"
    await network.maintain()
    assert len(rounds) == 1, "a node that failed is tried each time"
    network.connection.problem = None
    network.upkeep._await_again(payment("tr_1", 0))
    await network.maintain()
    assert len(rounds) == 2, "a settled payment is in no block"


def test_network_is_down_while_its_own_node_is(
    adapter: EvmAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_addresses_that_can_not_be_made_keep_no_payment_waiting(
    adapter: EvmAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_up = list[str]()

    async def maintain(network: EvmNetworkAdapter) -> None:
        kept_up.append(network.network.name)

    async def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("rpcsvc.settlement.onchain.evm.adapter.EvmNetworkAdapter.poll", broken)
    monkeypatch.setattr(
        "rpcsvc.settlement.onchain.evm.adapter.EvmNetworkAdapter.maintain", maintain
    )
    monkeypatch.setattr(adapter._addresses, "refill", broken)
    with pytest.raises(KeyError):
        await adapter.maintain()
    assert sorted(kept_up) == ["arbitrum", "base"]
