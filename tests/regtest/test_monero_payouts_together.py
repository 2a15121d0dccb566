"""Many payouts of XMR that are due at once, on real daemons, with orders: what each batch asks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final, cast
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import XMR as XMR_ASSET
from rpcsvc.domain.order import DepositKey
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.inventory import WalletInventory
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.ports.wallets import Verdict
from rpcsvc.orders.processor import OrderProcessor, Quarantine
from rpcsvc.orders.scheduler.effects import EffectRunner
from rpcsvc.settlement.onchain.engine import Caps, PayoutGuard, SignedPayments
from rpcsvc.settlement.onchain.monero.payments import MoneroPayments
from rpcsvc.settlement.onchain.monero.records import MoneroPayment
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.changes import StatusView
from rpcsvc.store.leases import SETTLER, Lease
from rpcsvc.store.orders import OrderStore
from tests.regtest.daemons import Miner
from tests.regtest.due_payouts import SettledEngine
from tests.regtest.payees import Payee
from tests.regtest.treasury import XMR, Treasury
from tests.unit.orders import NOW, terms

pytestmark = pytest.mark.slow  # the quick tests must stay quick

ACCOUNTS = 2
# Of as many as fit into one transaction.
BATCH: Final = 15
MANY: Final = 100
_CAP: Final = 10**15
_STATES: Final = "SELECT state, count(*) AS n FROM transfers GROUP BY state"


class DuePayouts:
    """Orders whose payouts of XMR are due, by the wallet of ``own``. ``made``: orders before."""

    def __init__(self, own: Treasury, made: int) -> None:
        self.own = own
        own.clock.now = NOW
        store = self.store = OrderStore(own.database, lambda: "key")
        guard = PayoutGuard(
            PauseSwitch(own.data_dir), {XMR_ASSET: Caps(_CAP, _CAP)}, SignedPayments(own.database),
            own.clock,
        )  # fmt: skip
        engine = SettledEngine([own.adapter], guard, floors={XMR_ASSET: 0}, poll_ms=1000)
        view = StatusView(b"{}", None)
        self.processor = OrderProcessor(store, own.clock, lambda _order: view)
        limits = cast("Any", None)  # of orders before a deposit: there are none
        inventory = WalletInventory(engine.holdings, store, limits, own.clock, b"")
        payouts = Payouts(
            store, engine, inventory, self.processor, own.clock, Quarantine(),
            ScanProgress((), own.clock), Lease(SETTLER, 1),
        )  # fmt: skip
        self.effects = EffectRunner(
            store, self.processor, payouts, cast("Any", None), own.clock, poll_ms=1000
        )
        self.made = made

    async def due(self, *payees: str) -> None:
        """Make an order with a planned payout to each address."""
        for to in payees:
            self.made += 1
            name = f"ord_{self.made:04}"
            order = open_order(
                replace(
                    terms(Direction.USDC_TO_XMR), order_id=name, session_id=name,
                    deposit_address=f"from {name}", to_address=to, deposit_amount=1_000_000,
                    min_deposit=1, refund_fee=1,
                )
            )  # fmt: skip
            await self.processor.open(order, None, None)
            key = DepositKey("arbitrum", f"tx {name}", 0)
            await self.processor.apply(name, ev.DepositSeen(key, 1_000_000, "sender", NOW))
            await self.processor.apply(name, ev.DepositConfirmed(key))

    async def beat(self) -> None:
        """Run what is due, a second later."""
        self.own.clock.now += 1000
        await self.effects.start_due()
        await self.effects.drain()

    async def carry_on(self, state: str, count: int) -> None:
        """Run what is due until ``count`` payouts are in a state."""
        async with asyncio.timeout(120):
            while (await self.states())[state] < count:
                await self.beat()

    async def states(self) -> Counter[str]:
        """The number of payouts in each state."""
        rows = await self.own.database.fetch(_STATES)
        return Counter({row["state"]: row["n"] for row in rows})


async def each_by_itself(self: MoneroPayments, payment: MoneroPayment) -> Verdict:
    """Look up as before: for each transfer of a batch."""
    return await self._presence.verdict(payment)


# As it was: nothing is remembered from one transfer to the next.
BEFORE: Final[Mapping[str, Any]] = {
    "_verdict_of_batch": each_by_itself,
    "_check_destination": MoneroPayments._require_foreign,
}


async def test_batch_of_payouts_is_asked_about_once(
    own: Treasury, payee: Payee, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wallet has two outputs: the first batch goes as before, and the third one waits."""
    calls, counts = own.count_calls(), list[int]()
    payees = [item.address for item in await payee.wallet.create_addresses(3 * BATCH)]
    await own.adapter.maintain()
    for number in range(2):
        due = DuePayouts(own, number * BATCH)  # which knows nothing of those before
        await due.due(*payees[number * BATCH : (number + 1) * BATCH])
        calls.clear()
        with nullcontext() if number else patch.multiple(MoneroPayments, **BEFORE):
            await due.carry_on("published", (number + 1) * BATCH)
        counts.append(len(calls))
    waiting = DuePayouts(own, 2 * BATCH)
    await waiting.due(*payees[2 * BATCH :])
    await waiting.beat()
    for number in range(2):
        calls.clear()
        with nullcontext() if number else patch.multiple(MoneroPayments, **BEFORE):
            await waiting.beat()
        counts.append(len(calls))
    with capsys.disabled():
        print(
            f"\n{BATCH} payouts in a transaction: {counts[1]} calls, before {counts[0]};"
            f" {BATCH} that wait for unlocked money: {counts[3]} calls, before {counts[2]}"
        )
    assert await waiting.states() == {"published": 2 * BATCH, "planned": BATCH}
    assert counts[1] < counts[0] - BATCH
    assert counts[3] < counts[2] // 2


async def test_hundred_due_payouts_are_soon_in_the_pool(
    own: Treasury, payee: Payee, miner: Miner, capsys: pytest.CaptureFixture[str]
) -> None:
    address = await own.wallet.primary_address()
    await miner.fund(address, *[XMR] * 8)
    await own.adapter.maintain()
    payees = [
        item.address for _ in range(2) for item in await payee.wallet.create_addresses(MANY // 2)
    ]
    due = DuePayouts(own, 0)
    await due.due(*payees)
    calls, began = own.count_calls(), time.perf_counter()
    await due.carry_on("published", MANY)
    took, paid = time.perf_counter() - began, await own.live_payments()
    with capsys.disabled():
        print(
            f"\n{MANY} payouts in {len(paid)} transactions: {took:.1f} s,"
            f" {len(calls)} calls: {dict(Counter(calls))}"
        )
    assert sum(len(item.payees) for item in paid) == MANY
