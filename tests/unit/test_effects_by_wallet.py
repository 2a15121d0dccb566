"""Effects of several wallets: one that hangs delays no other, and stopping is quick.

The engine is a fake that hangs for one network; the orders are real ones, kept in a dict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import AsyncMock

from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositKey, Order, Transfer
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.inventory import SimulatedInventory
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.orders.processor import Quarantine
from rpcsvc.orders.scheduler.effects import MAX_AT_ONCE, EffectRunner
from rpcsvc.store.leases import SETTLER, Lease
from tests.sandbox import ManualClock
from tests.unit.orders import NOW, key, terms

XMR, USDC = Direction.USDC_TO_XMR, Direction.XMR_TO_USDC


class FakeWallets:
    """A store of orders in payout, and an engine that signs nothing and hangs for XMR."""

    def __init__(self) -> None:
        self.orders: dict[str, Order] = {}
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.answers = asyncio.Event()
        self.broken: set[str] = set()
        self.at_once: dict[str, int] = {}
        self.looked_up: list[str] = []
        self.hangs: set[str] = set()

    def on_effects(self, _schedule: Any) -> None:
        pass

    async def order(self, order_id: str) -> Order:
        if order_id in self.broken:
            raise ValueError("a row that can't be read")
        return self.orders[order_id]

    async def confirmations(self, _key: DepositKey) -> int:
        return 10

    def is_paused(self) -> bool:
        return False

    def signed_together(self, _network: str) -> int:
        return 1

    def carried_at_once(self, network: str) -> int:
        return self.at_once.get(network, 1)

    async def prepare(
        self, transfer: Transfer, _companions: Sequence[Transfer], *_others: object
    ) -> None:
        name = transfer.transfer_id.partition("/")[0]
        self.asked.append(name)
        if transfer.network == "monero":
            await self.answers.wait()
        self.answered.append(name)
        raise Unavailable("not now")

    async def look_up(self, transfer: Transfer) -> Verdict:
        name = transfer.transfer_id.partition("/")[0]
        self.looked_up.append(name)
        if name in self.hangs:
            await self.answers.wait()
        return Verdict(Outcome.PENDING)


class RunnerDriver:
    """Runs effects on fake wallets."""

    def __init__(self, stop_seconds: float = 0.01) -> None:
        self.fake, clock = FakeWallets(), ManualClock()
        clock.now = NOW
        anything = cast("Any", self.fake)
        payouts = Payouts(
            anything, anything, SimulatedInventory(), anything, clock, Quarantine(),
            ScanProgress((), clock), Lease(SETTLER, 1),
        )  # fmt: skip
        self.effects = EffectRunner(
            anything,
            anything,
            payouts,
            anything,
            clock,
            poll_ms=1000,
            stop_seconds=stop_seconds,
            payable=AsyncMock(return_value=None),
        )

    def due(self, name: str, direction: Direction, *, too_much: int = 0) -> None:
        order = open_order(replace(terms(direction), order_id=name))
        amount = order.terms.max_deposit + too_much if too_much else order.terms.deposit_amount
        order = transition(order, ev.DepositSeen(key(1), amount, "sender", NOW), NOW).order
        order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
        self.fake.orders[name] = order
        self.effects.schedule(name, [AdvanceTransfer(order.transfers[0].transfer_id)])

    def sign(self, name: str) -> None:
        """Have the order's transfer signed and published by now."""
        order = self.fake.orders[name]
        transfer_id = order.transfers[0].transfer_id
        order = transition(order, ev.TransferPrepared(transfer_id, "tx", "raw"), NOW).order
        published = transition(order, ev.TransferPublished(transfer_id), NOW).order
        self.fake.orders[name] = published

    async def beat(self) -> int:
        """Start the due effects, and let them run as far as they can."""
        started = await self.effects.start_due()
        for _ in range(20):
            await asyncio.sleep(0)
        return started


async def test_a_wallet_that_hangs_keeps_no_other_waiting() -> None:
    driver = RunnerDriver()
    for number in range(MAX_AT_ONCE + 16):
        driver.due(f"xmr_{number}", XMR)
    driver.due("usdc", USDC)

    assert [await driver.beat(), await driver.beat()] == [MAX_AT_ONCE, 17]

    assert driver.fake.asked == ["xmr_0", "usdc"]
    await driver.effects.stop()


async def test_look_up_that_hangs_keeps_no_other_waiting() -> None:
    """Signed transfers need no writer; as many are looked up at once as the engine allows."""
    driver = RunnerDriver()
    driver.fake.at_once = {"monero": 2}
    for number in range(4):
        driver.due(f"xmr_{number}", XMR)
        driver.sign(f"xmr_{number}")
    driver.fake.hangs = {"xmr_0"}
    await driver.beat()
    assert driver.fake.looked_up == ["xmr_0", "xmr_1", "xmr_2", "xmr_3"]
    driver.fake.hangs = {"xmr_0", "xmr_1", "xmr_2", "xmr_3"}
    await driver.effects.stop()


async def test_queued_effect_starts_without_another_tick() -> None:
    driver = RunnerDriver()
    for number in range(3):
        driver.due(f"xmr_{number}", XMR)
    await driver.beat()
    assert driver.fake.asked == ["xmr_0"]
    assert not driver.effects.wake_transfer("xmr_1/payout/1"), "it is next"
    driver.fake.answers.set()
    await driver.effects.drain()
    assert driver.fake.asked == ["xmr_0", "xmr_1", "xmr_2"]


async def test_payouts_alternate_with_any_number_of_waiting_refunds() -> None:
    driver = RunnerDriver()
    for number in range(4):
        driver.due(f"refund_{number}", XMR, too_much=1)  # refunds of USDC
    for number in range(2):
        driver.due(f"payout_{number}", USDC)
    await driver.beat()
    await driver.effects.drain()
    assert driver.fake.asked == [
        "payout_0", "refund_0", "payout_1", "refund_1", "refund_2", "refund_3",
    ]  # fmt: skip


async def test_five_hundred_due_wait_for_no_others_trouble() -> None:
    """A wallet hangs, orders can't be read, nothing can be signed: all others have their turns."""
    driver = RunnerDriver()
    for number in range(100):
        driver.due(f"hangs_{number}", XMR)
        driver.due(f"broken_{number}", USDC)
        driver.fake.broken.add(f"broken_{number}")
        driver.due(f"refund_{number}", XMR, too_much=1)  # of USDC
        driver.due(f"payout_{number}", USDC)
        driver.due(f"later_{number}", USDC)
    started = [await driver.beat() for _ in range(100)]
    assert sum(started) == 500
    assert started[:4] == [MAX_AT_ONCE, MAX_AT_ONCE, MAX_AT_ONCE, 500 - 3 * MAX_AT_ONCE]
    others = [f"{kind}_{n}" for n in range(100) for kind in ("refund", "payout", "later")]
    assert sorted(driver.fake.asked) == sorted(["hangs_0", *others])
    await driver.effects.stop()


async def test_stop_starts_nothing_and_waits_for_no_hanging_wallet() -> None:
    driver = RunnerDriver()
    for number in range(3):
        driver.due(f"xmr_{number}", XMR)
    await driver.beat()

    async with asyncio.timeout(60):
        await driver.effects.stop()

    assert driver.fake.asked == ["xmr_0"]
    driver.due("usdc", USDC)
    assert await driver.beat() == 0
    await driver.effects.drain()


async def test_stop_lets_running_effects_end() -> None:
    driver = RunnerDriver(stop_seconds=60)
    driver.due("xmr", XMR)
    await driver.beat()
    stopping = asyncio.create_task(driver.effects.stop())
    await asyncio.sleep(0)
    driver.fake.answers.set()
    await stopping
    assert driver.fake.answered == ["xmr"]


async def test_an_order_that_can_not_be_read_keeps_no_other_waiting() -> None:
    driver = RunnerDriver()
    driver.due("broken", USDC)
    driver.due("usdc", USDC)
    driver.fake.broken.add("broken")
    assert await driver.beat() == 2
    assert driver.fake.asked == ["usdc"]
