"""Both adapters as one engine: who is asked, what is let out, what health says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import Transfer
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.health import Health
from rpcsvc.orders.ports.wallets import (
    Holdings,
    Outcome,
    PreparedTransfer,
    Record,
    Verdict,
)
from rpcsvc.settlement.onchain.engine import OnchainEngine
from rpcsvc.settlement.onchain.guard import PauseSwitch, PayoutGuard
from tests.recording import Recorder
from tests.sandbox import ManualClock
from tests.unit.adapters import CAPS, FLOORS, FakeAdapter, transfer
from tests.unit.payout_guard import Signed


class Stand:
    """An engine of two fake adapters."""

    def __init__(
        self, data_dir: Path, outcome: Outcome = Outcome.PENDING, signed: Signed | None = None
    ) -> None:
        self.xmr = FakeAdapter(XMR, "monero", Verdict(outcome))
        self.usdc = FakeAdapter(USDC, "arbitrum", Verdict(outcome))
        self.switch = PauseSwitch(data_dir)
        guard = PayoutGuard(self.switch, CAPS, signed or Signed(), ManualClock())
        adapters = cast("Any", (self.xmr, self.usdc))
        self.engine = OnchainEngine(adapters, guard, floors=FLOORS, poll_ms=10)


def test_the_payouts_fee_is_of_its_asset_and_the_refunds_of_the_deposits(tmp_path: Path) -> None:
    engine = Stand(tmp_path).engine
    fees = engine.fees(XMR, USDC, "arbitrum")
    assert (fees.payout, fees.refund) == (len("arbitrum"), 1)
    back = engine.fees(USDC, XMR, "arbitrum")
    assert (back.payout, back.refund) == (1, len("arbitrum"))


async def test_each_side_is_told_of_its_own_deposits(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    await stand.engine.acknowledge((await stand.engine.observe()).sightings)
    assert [s.key.network for s in stand.xmr.acknowledged] == ["monero"]
    assert [s.key.network for s in stand.usdc.acknowledged] == ["arbitrum"]


def breaks(error: Exception) -> Any:
    """A fault of the service itself, in any call."""

    async def broken(*_: object) -> Any:
        raise error

    return broken


async def test_a_fault_on_one_side_leaves_the_deposits_of_the_other(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.usdc.observe = breaks(KeyError("a bug"))  # type: ignore[method-assign]
    for _ in range(2):
        seen = (await stand.engine.observe()).sightings
        assert [item.key.network for item in seen] == ["monero"]
        await stand.engine.acknowledge(seen)
    assert len(stand.xmr.acknowledged) == 2
    assert (await stand.engine.health()).detail == "USDC: a look for deposits has failed (KeyError)"
    with pytest.raises(Unavailable, match="USDC"):
        stand.engine.require_ready()


async def test_a_side_that_does_not_acknowledge_keeps_the_other_from_nothing(
    tmp_path: Path,
) -> None:
    stand = Stand(tmp_path)
    stand.xmr.acknowledge = breaks(KeyError("a bug"))  # type: ignore[method-assign]
    seen = (await stand.engine.observe()).sightings
    with pytest.raises(KeyError):
        await stand.engine.acknowledge(seen)
    assert [item.key.network for item in stand.usdc.acknowledged] == ["arbitrum"]


async def test_upkeep_that_fails_is_in_health_until_it_is_done(tmp_path: Path) -> None:
    stand, rounds = Stand(tmp_path), list[str | None]()

    async def done() -> None:
        return None

    async def pause(_seconds: float) -> None:
        rounds.append((await stand.engine.health()).detail)
        if len(rounds) == 2:
            stand.usdc.maintain = done
        if len(rounds) == 6:
            task.cancel()
        await asyncio.sleep(0)

    stand.xmr.maintain = done
    stand.usdc.maintain = breaks(KeyError("a bug"))
    task = asyncio.create_task(stand.engine.run(pause))
    await asyncio.wait([task])
    assert "USDC: the upkeep has failed (KeyError)" in rounds
    assert rounds[-1] is None


async def test_a_swap_needs_both_sides(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.engine.require_ready()
    stand.xmr.well = Health(False, "the wallet is locked")
    with pytest.raises(Unavailable):
        stand.engine.require_ready()
    assert (await stand.engine.health()).detail == "XMR: the wallet is locked"


async def test_a_wallet_below_its_floor_is_said_in_whole_units(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    assert (await stand.engine.health()).ok
    stand.xmr.held = 49
    assert "0.000000000049, below the floor of 0.00000000005" in str(
        (await stand.engine.health()).detail
    )


def test_below_its_floor_a_wallet_promises_nothing_more(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    assert stand.engine.holdings("monero") == Holdings(60, 0, 0)
    stand.xmr.held = 49
    with pytest.raises(Unavailable, match="short of XMR"):
        stand.engine.holdings("monero")
    assert stand.engine.holdings("arbitrum") is not None


async def test_what_can_wait_is_told_without_alarm(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.usdc.to_see_to = ["a deposit address is on the blacklist"]
    assert await stand.engine.health() == Health(True, "a deposit address is on the blacklist")


async def test_while_payouts_are_paused_nothing_is_signed_or_published(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.switch.pause("look into it")
    with pytest.raises(Unavailable, match="paused"):
        await stand.engine.prepare(transfer(), [], Recorder())
    assert await stand.engine.publish(transfer()) == Verdict(Outcome.ABSENT, "payouts are paused")
    assert stand.usdc.asked == []
    with pytest.raises(Unavailable, match="paused"):
        stand.engine.require_ready()
    assert (await stand.engine.health()).detail == "payouts: paused: look into it"
    # What is published already is followed to its end.
    assert (await stand.engine.look_up(transfer())).outcome is Outcome.PENDING


async def test_wallets_that_sign_side_by_side_stay_within_the_cap_per_day(tmp_path: Path) -> None:
    """The first is signed and not in the books yet, and the second is of another network."""
    stand = Stand(tmp_path, signed=Signed(sent=994))
    under_way, go_on = asyncio.Event(), asyncio.Event()

    async def prepare(item: Transfer, _companions: Sequence[Transfer], record: Record) -> None:
        if not under_way.is_set():
            under_way.set()
            await go_on.wait()
        await record(PreparedTransfer(item.transfer_id, "raw", (item.transfer_id,)))

    stand.usdc.prepare, record = prepare, Recorder()
    first = asyncio.create_task(stand.engine.prepare(transfer(), [], record))
    await under_way.wait()
    with pytest.raises(Unavailable, match="cap per day"):
        await stand.engine.prepare(replace(transfer(), transfer_id="u"), [], record)
    go_on.set()
    await first
    await stand.engine.prepare(transfer(), [], record)
    assert [item.txid for item in record.signed] == ["t", "t"]


async def test_prepare_tells_of_a_payment_that_the_journal_brought_back(tmp_path: Path) -> None:
    """It is out: no pause and no cap can hold it, and it is not signed a second time."""
    stand, record = Stand(tmp_path), Recorder()
    stand.switch.pause("look into it")
    stand.usdc.known = PreparedTransfer("tx", "raw", ("t",))
    await stand.engine.prepare(replace(transfer(), units=101), [], record)
    assert record.signed == [stand.usdc.known]


async def test_a_settled_transfer_comes_with_what_proves_it_and_no_other(tmp_path: Path) -> None:
    settled = await Stand(tmp_path, Outcome.SETTLED).engine.look_up(transfer("monero"))
    assert orjson.loads(settled.receipt or "") == {"txid": "mined"}
    stand = Stand(tmp_path)
    assert (await stand.engine.look_up(transfer("monero"))).receipt is None
    assert stand.xmr.asked == ["look_up t"]


async def test_a_network_that_has_no_node_any_more_is_waited_for(tmp_path: Path) -> None:
    engine = Stand(tmp_path).engine
    with pytest.raises(Unavailable, match=r"polygon.*onchain\.nodes"):
        engine.holdings("polygon")
    with pytest.raises(Unavailable, match=r"polygon.*onchain\.nodes"):
        await engine.publish(transfer("polygon"))
