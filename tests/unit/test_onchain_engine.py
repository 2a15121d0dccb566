"""Both adapters as one engine: routing, the payout guard, health."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import orjson
import pytest
from msgspec.structs import replace

from rpcsvc.domain.money import USDC, XMR, Money
from rpcsvc.domain.order import Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health, faults, notes
from rpcsvc.orders.ports.wallets import (
    LacksFunds,
    NetworkState,
    Observation,
    Outcome,
    PreparedTransfer,
    Record,
    Verdict,
)
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.engine import OnchainEngine, PayoutGuard
from rpcsvc.settlement.onchain.evm.adapter import OnchainAuthorizations
from rpcsvc.settlement.onchain.monero.adapter import MoneroAdapter
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.pause import PauseSwitch
from tests.chain_options import monero_options
from tests.recording import Recorder
from tests.sandbox import ManualClock
from tests.unit.adapters import CAPS, FLOORS, FakeAdapter, transfer
from tests.unit.payout_guard import SignedBooks


class Rig:
    """An engine of two fake adapters."""

    def __init__(
        self, data_dir: Path, outcome: Outcome = Outcome.PENDING, signed: SignedBooks | None = None
    ) -> None:
        self.xmr = FakeAdapter(XMR, "monero", Verdict(outcome))
        self.usdc = FakeAdapter(USDC, "arbitrum", Verdict(outcome))
        self.switch = PauseSwitch(data_dir)
        guard = PayoutGuard(self.switch, CAPS, signed or SignedBooks(), ManualClock())
        adapters = cast("Any", (self.xmr, self.usdc))
        self.engine = OnchainEngine(adapters, guard, floors=FLOORS, poll_ms=10)


def unstarted() -> MoneroAdapter:
    """An XMR adapter that has asked nobody."""
    here = DaemonEndpoint("node", "http://127.0.0.1:1", serial=True)
    node, wallet, ledger = MonerodClient(here), WalletClient(here), cast("Any", None)
    return MoneroAdapter(node, wallet, ledger, ManualClock(), monero_options())


@pytest.mark.parametrize(("units", "blocks"), [(1, 10), (50 * 10**12, 20)])
def test_swap_time_has_the_confirmations_of_its_amount(units: int, blocks: int) -> None:
    monero = unstarted()
    arbitrum = FakeAdapter(USDC, "arbitrum", Verdict(Outcome.PENDING))
    adapters = cast("Any", (monero, arbitrum))
    engine = OnchainEngine(adapters, cast("Any", None), floors=FLOORS, poll_ms=10)
    wanted = blocks * 120 + len("arbitrum")
    assert engine.estimated_seconds(Money(units, XMR), "arbitrum") == wanted


def test_states_are_those_of_all_networks(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.usdc.held = 7
    found = rig.engine.states()
    assert found == {"monero": NetworkState(60), "arbitrum": NetworkState(7)}


async def test_network_whose_deposits_are_not_seen_is_down(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.usdc.observe = breaks(KeyError("a bug"))  # type: ignore[method-assign]
    await rig.engine.observe()
    up = {name: state.is_up for name, state in rig.engine.states().items()}
    assert up == {"monero": True, "arbitrum": False}


@pytest.mark.parametrize("wrong", ["problem", "lag"])
def test_monero_is_down_while_its_node_or_wallet_is(wrong: str) -> None:
    monero = unstarted()
    monero.connection.problem = None
    assert monero.state().is_up
    setattr(monero.connection, wrong, "the node gives no answer")
    assert not monero.state().is_up


async def test_monero_shows_its_first_fault_and_all_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monero = unstarted()
    unpaid = AsyncMock(return_value=faults("a payment is overdue"))
    monkeypatch.setattr(monero.payments, "conditions", unpaid)
    monero._inventory._postponed = "a split waits"
    monero._recovery._refused = "the node does not relay"
    shown = notes("the node does not relay", "a split waits")
    assert await monero.conditions() == [*faults("not started"), *shown]
    monero.connection.problem = None
    assert await monero.conditions() == [*faults("no deposit address is left"), *shown]


async def test_news_of_one_asset_wait_for_no_other_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, may_end = Rig(tmp_path), asyncio.Event()
    found = await rig.xmr.observe()

    async def slow() -> Observation:
        await may_end.wait()
        return found

    monkeypatch.setattr(rig.xmr, "observe", slow)
    for _ in range(2):
        seen = (await rig.engine.observe()).sightings
        assert [item.key.network for item in seen] == ["arbitrum"]
        await rig.engine.acknowledge(seen)
    assert rig.xmr.acknowledged == []
    may_end.set()
    monkeypatch.setattr(rig.usdc, "observe", AsyncMock(return_value=Observation()))
    seen = (await rig.engine.observe()).sightings
    await rig.engine.acknowledge(seen)
    assert [item.key.network for item in rig.xmr.acknowledged] == ["monero"]


async def test_scan_that_hangs_keeps_the_other_asset_from_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, looked = Rig(tmp_path), list[str]()

    async def hangs() -> Observation:
        await asyncio.Event().wait()
        return Observation()

    async def nothing() -> Observation:
        looked.append("monero")
        return Observation()

    monkeypatch.setattr(rig.usdc, "observe", hangs)
    monkeypatch.setattr(rig.xmr, "observe", nothing)
    async with asyncio.timeout(1.5):  # a scan may take 2 seconds
        for _ in range(3):
            await rig.engine.observe()
    assert looked == ["monero"] * 3


class TwoNetworks:
    """An engine with USDC on two networks, which are those of two fake adapters."""

    def __init__(self, data_dir: Path) -> None:
        self.rig = rig = Rig(data_dir)
        self.base = FakeAdapter(USDC, "base", Verdict(Outcome.PENDING))
        rig.usdc.networks["base"] = self.base
        adapters = cast("Any", (rig.xmr, rig.usdc))
        self.engine = OnchainEngine(adapters, rig.engine._guard, floors=FLOORS, poll_ms=10)


async def test_network_that_hangs_delays_no_other_of_its_asset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = TwoNetworks(tmp_path)
    monkeypatch.setattr(both.base, "observe", asyncio.Event().wait)
    for _ in range(2):
        seen = (await both.engine.observe()).sightings
        assert {item.key.network for item in seen} == {"monero", "arbitrum"}
        await both.engine.acknowledge(seen)
    assert [item.key.network for item in both.rig.usdc.acknowledged] == ["arbitrum"] * 2
    assert both.base.acknowledged == []


async def test_network_whose_scan_fails_takes_no_orders_and_others_do(tmp_path: Path) -> None:
    both = TwoNetworks(tmp_path)
    both.base.observe = breaks(KeyError("a bug"))  # type: ignore[method-assign]
    await both.engine.observe()
    both.engine.require_ready()
    assert (both.engine.fee("arbitrum"), both.engine.fee("monero")) == (len("arbitrum"), 1)
    with pytest.raises(Unavailable, match="USDC on base can't be settled"):
        both.engine.fee("base")


async def test_network_that_is_not_seen_takes_no_signed_payment(tmp_path: Path) -> None:
    """One that is on record goes on."""
    both, called = TwoNetworks(tmp_path), list[tuple[str, str]]()
    both.base.observe = breaks(KeyError("a bug"))  # type: ignore[method-assign]
    await both.engine.observe()

    class Usdc:
        def usable(self, _network: str) -> Any:
            async def note(call: str, record: Any) -> None:
                called.append((call, record.key.network))

            calls = {call: partial(note, call) for call in ("require_usable", "carry_out")}
            return SimpleNamespace(
                connection=SimpleNamespace(watched=nullcontext),
                authorizations=SimpleNamespace(**calls),
            )

    wallets = OnchainAuthorizations(both.engine, cast("Any", Usdc()))
    base, arbitrum = (
        cast("Any", SimpleNamespace(key=SimpleNamespace(network=name)))
        for name in ("base", "arbitrum")
    )
    with pytest.raises(Unavailable, match="USDC on base can't be settled"):
        await wallets.require_usable(base)
    await wallets.require_usable(arbitrum)
    await wallets.carry_out(base)
    assert called == [("require_usable", "arbitrum"), ("carry_out", "base")]


async def test_upkeep_that_hangs_delays_no_other(tmp_path: Path) -> None:
    both, rounds = TwoNetworks(tmp_path), list[str]()
    rig = both.rig

    async def maintain() -> None:
        rounds.append("")
        if len(rounds) == 3:
            task.cancel()
        await asyncio.sleep(0)

    rig.usdc.upkeep = {"arbitrum": maintain, "base": asyncio.Event().wait}
    rig.xmr.upkeep = {}
    task = asyncio.create_task(both.engine.run(asyncio.sleep))
    await asyncio.wait([task])
    assert len(rounds) == 3


async def test_each_side_acknowledges_its_own_deposits(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.engine.acknowledge((await rig.engine.observe()).sightings)
    assert [s.key.network for s in rig.xmr.acknowledged] == ["monero"]
    assert [s.key.network for s in rig.usdc.acknowledged] == ["arbitrum"]


def breaks(error: Exception) -> Any:
    """A function that always raises, like a bug."""

    async def broken(*_: object) -> Any:
        raise error

    return broken


async def test_a_fault_on_one_side_leaves_the_deposits_of_the_other(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.usdc.observe = breaks(KeyError("a bug"))  # type: ignore[method-assign]
    for _ in range(2):
        seen = (await rig.engine.observe()).sightings
        assert [item.key.network for item in seen] == ["monero"]
        await rig.engine.acknowledge(seen)
    assert len(rig.xmr.acknowledged) == 2
    detail = (await rig.engine.health()).detail or ""
    assert "arbitrum: the deposit scan has failed (KeyError)" in detail
    with pytest.raises(Unavailable, match="USDC"):
        rig.engine.require_ready()


async def test_failing_acknowledgement_blocks_no_other_adapter(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    rig.xmr.acknowledge = breaks(KeyError("a bug"))  # type: ignore[method-assign]
    seen = (await rig.engine.observe()).sightings
    with pytest.raises(KeyError):
        await rig.engine.acknowledge(seen)
    assert [item.key.network for item in rig.usdc.acknowledged] == ["arbitrum"]


async def test_upkeep_that_fails_is_in_health_until_it_is_done(tmp_path: Path) -> None:
    rig, rounds = Rig(tmp_path), list[str | None]()

    async def done() -> None:
        return None

    async def pause(_seconds: float) -> None:
        rounds.append((await rig.engine.health()).detail)
        if len(rounds) == 2:
            rig.usdc.maintain = done
        if len(rounds) == 6:
            task.cancel()
        await asyncio.sleep(0)

    rig.xmr.maintain = done
    rig.usdc.maintain = breaks(KeyError("a bug"))
    task = asyncio.create_task(rig.engine.run(pause))
    await asyncio.wait([task])
    assert any("USDC: the upkeep has failed (KeyError)" in (found or "") for found in rounds)
    assert rounds[-1] is None


async def test_upkeep_waits_while_the_lease_has_no_time(tmp_path: Path) -> None:
    """Upkeep signs, too: it splits outputs and sweeps deposits."""
    rig, done = Rig(tmp_path), list[int]()
    rounds = count()

    async def pause(_seconds: float) -> None:
        if next(rounds) == 5:
            task.cancel()
        await asyncio.sleep(0)

    async def maintain() -> None:
        done.append(1)

    rig.xmr.maintain = rig.usdc.maintain = maintain
    rig.engine._has_time = lambda: False
    task = asyncio.create_task(rig.engine.run(pause))
    await asyncio.wait([task])
    assert done == []


async def test_a_swap_needs_both_sides(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.engine.require_ready()
    rig.xmr.found = faults("the wallet is locked")
    with pytest.raises(Unavailable):
        rig.engine.require_ready()
    assert (await rig.engine.health()).detail == "XMR: the wallet is locked"


async def test_health_names_the_asset_of_faults_and_ends_with_notes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.xmr.found = [*notes("a split waits"), *faults("the wallet is locked")]
    rig.usdc.found = faults("base is down", "gas is too dear")
    assert (await rig.engine.health()).detail == (
        "XMR: the wallet is locked; USDC: base is down; gas is too dear; a split waits"
    )


async def test_a_wallet_below_its_floor_is_said_in_whole_units(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert (await rig.engine.health()).ok
    rig.xmr.held = 49
    assert "0.000000000049, below the floor of 0.00000000005" in str(
        (await rig.engine.health()).detail
    )


def test_wallet_below_its_floor_takes_no_more_reservations(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.engine.holdings("monero") == Holdings(60, 0, 0)
    rig.xmr.held = 49
    with pytest.raises(Unavailable, match="short of XMR"):
        rig.engine.holdings("monero")
    assert rig.engine.holdings("arbitrum") is not None


async def test_low_urgency_is_shown_without_alarm(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.usdc.found = notes("a deposit address is on the blacklist")
    assert await rig.engine.health() == Health(True, "a deposit address is on the blacklist")


async def test_while_payouts_are_paused_nothing_is_signed_or_published(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.switch.pause("look into it")
    with pytest.raises(Unavailable, match="paused"):
        await rig.engine.prepare(transfer(), [], Recorder(), {})
    assert await rig.engine.publish(transfer()) == Verdict(Outcome.ABSENT, "payouts are paused")
    assert rig.usdc.asked == []
    with pytest.raises(Unavailable, match="paused"):
        rig.engine.require_ready()
    assert (await rig.engine.health()).detail == "payouts: paused: look into it"
    # Published payments are followed to their end.
    assert (await rig.engine.look_up(transfer())).outcome is Outcome.PENDING


async def test_transfer_that_lacks_funds_is_in_health_if_that_lasts(tmp_path: Path) -> None:
    rig, clock = Rig(tmp_path), ManualClock()
    rig.engine._guard._clock = clock

    async def lacking(item: Transfer, *_others: object) -> list[Transfer]:
        raise LacksFunds(item, 800)

    async def signed(*_others: object) -> list[Transfer]:
        return []

    rig.usdc.prepare = lacking
    for _ in range(2):
        assert (await rig.engine.health()).ok
        with pytest.raises(LacksFunds):
            await rig.engine.prepare(transfer(), [], Recorder(), {})
        clock.now += 30_000
    health = await rig.engine.health()
    assert health.detail is not None
    assert "t waits: the wallet on arbitrum lacks 0.0008 USDC" in health.detail
    rig.usdc.prepare = signed
    await rig.engine.prepare(transfer(), [], Recorder(), {})
    assert (await rig.engine.health()).ok


async def test_lack_stays_in_health_while_the_transfer_is_tried_again(tmp_path: Path) -> None:
    rig, clock, seen = Rig(tmp_path), ManualClock(), list[bool]()
    rig.engine._guard._clock = clock

    async def failing(item: Transfer, *_others: object) -> list[Transfer]:
        seen.append((await rig.engine.health()).ok)
        raise LacksFunds(item, 800) if len(seen) < 3 else Unavailable("The node lags.")

    rig.usdc.prepare = failing
    for _ in range(4):
        with pytest.raises(Unavailable):
            await rig.engine.prepare(transfer(), [], Recorder(), {})
        clock.now += 60_000
    assert seen == [True, False, False, False]


async def test_wallets_that_sign_in_parallel_keep_the_daily_cap(tmp_path: Path) -> None:
    """The first is signed and not in the books yet; the second is on another network."""
    rig = Rig(tmp_path, signed=SignedBooks(sent=994))
    under_way, go_on = asyncio.Event(), asyncio.Event()

    async def prepare(
        item: Transfer, _companions: Sequence[Transfer], record: Record, _leaves: object
    ) -> list[Transfer]:
        if not under_way.is_set():
            under_way.set()
            await go_on.wait()
        await record([PreparedTransfer(item.transfer_id, (item.transfer_id,))], None)
        return []

    rig.usdc.prepare, record = prepare, Recorder()
    first = asyncio.create_task(rig.engine.prepare(transfer(), [], record, {}))
    await under_way.wait()
    with pytest.raises(Unavailable, match="cap per day"):
        await rig.engine.prepare(replace(transfer(), transfer_id="u"), [], record, {})
    go_on.set()
    await first
    await rig.engine.prepare(transfer(), [], record, {})
    assert [item.txid for item in record.signed] == ["t", "t"]


async def test_transfers_of_a_network_without_a_node_are_tried(tmp_path: Path) -> None:
    """The schedule asks before each transfer: a failure there would hold up all others."""
    rig = Rig(tmp_path)
    assert rig.engine.carried_at_once("nowhere") == 1
    with pytest.raises(Unavailable, match="No node serves nowhere"):
        await rig.engine.prepare(replace(transfer(), network="nowhere"), [], Recorder(), {})


async def test_prepare_reports_a_payment_restored_from_the_journal(tmp_path: Path) -> None:
    """A signed payment meets no pause or cap, and is not signed a second time."""
    rig, record = Rig(tmp_path), Recorder()
    rig.switch.pause("look into it")
    rig.usdc.known = PreparedTransfer("tx", ("t",))
    await rig.engine.prepare(replace(transfer(), units=101), [], record, {})
    assert record.signed == [rig.usdc.known]


class ConflictingBooks(SignedBooks):
    """Books with a payment that the order of each transfer has otherwise."""

    async def unmatched(self, transfer: Transfer) -> str | None:
        return f"aa paid 7 units for {transfer.transfer_id}"


async def test_payment_with_other_terms_holds_its_transfer_in_health(tmp_path: Path) -> None:
    rig = Rig(tmp_path, signed=ConflictingBooks())
    rig.xmr.recorded = breaks(LookupError("another amount"))  # type: ignore[method-assign]
    record = AsyncMock()
    with pytest.raises(Unavailable, match="aa paid 7 units"):
        await rig.engine.prepare(transfer("monero"), (), record, {})
    record.assert_not_awaited()
    assert "aa paid 7 units" in ((await rig.engine.health()).detail or "")


async def test_settled_transfer_comes_with_its_own_receipt(tmp_path: Path) -> None:
    settled = await Rig(tmp_path, Outcome.SETTLED).engine.look_up(transfer("monero"))
    assert orjson.loads(settled.receipt or "") == {"txid": "mined"}
    rig = Rig(tmp_path)
    assert (await rig.engine.look_up(transfer("monero"))).receipt is None
    assert rig.xmr.asked == ["look_up t"]


async def test_a_network_that_has_no_node_any_more_is_waited_for(tmp_path: Path) -> None:
    engine = Rig(tmp_path).engine
    with pytest.raises(Unavailable, match=r"polygon.*onchain\.nodes"):
        engine.holdings("polygon")
    with pytest.raises(Unavailable, match=r"polygon.*onchain\.nodes"):
        await engine.publish(transfer("polygon"))
