"""Payouts of many orders that are due at once: the order layer and the EVM adapter on one chain."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, cast

from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.domain import events as ev
from rpcsvc.domain.chains import load_chains
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import USDC as USDC_ASSET
from rpcsvc.domain.order import DepositKey
from rpcsvc.ids import system_random
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.inventory import WalletInventory
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.processor import OrderProcessor, Quarantine
from rpcsvc.orders.scheduler.effects import EffectRunner
from rpcsvc.settings_onchain import OnchainSettings, chains_toml
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.engine import Caps, OnchainEngine, PayoutGuard, SignedPayments
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter, EvmNetworkAdapter, EvmNode, Ledgers
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.gas import OpeningLedger
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.journal.files import FOLDER
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal, marks_of
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.changes import StatusView
from rpcsvc.store.leases import SETTLER, Lease
from rpcsvc.store.orders import OrderStore
from tests.regtest.daemon_proxy import DaemonProxy
from tests.regtest.evm_payer import COIN_PRICE, KEYS, NETWORK, OTHERS, EvmPayer
from tests.sandbox import ManualClock
from tests.unit.orders import NOW, XMR_UNIT, terms

_FIRST_PAYEE = 100
_STATES = "SELECT state, count(*) AS n FROM transfers GROUP BY state"
_CAP = 10**15


class Handed(NamedTuple):
    """Seconds, exchanges and calls until the payouts were in the node's pool."""

    seconds: float
    exchanges: int
    calls: Counter[str]


class SettledEngine(OnchainEngine):
    """An engine with all deposits confirmed: only their payouts are of interest."""

    @override
    async def confirmations(self, key: DepositKey) -> int:
        return 10


class DuePayouts:
    """Orders whose payouts are due. The node is behind ``proxy``, and mines when it is told to."""

    def __init__(
        self, own: EvmPayer, proxy: DaemonProxy, adapter: EvmAdapter, engine: OnchainEngine
    ) -> None:
        self.own = own
        self.proxy = proxy
        self.network: EvmNetworkAdapter = adapter.networks[NETWORK]
        self.engine = engine
        self.store = OrderStore(own.database, lambda: "key")
        self.clock = ManualClock(NOW)
        view = StatusView(b"{}", None)
        self.processor = OrderProcessor(self.store, self.clock, lambda _order: view)
        lease = Lease(SETTLER, 1)
        limits = cast("Any", None)  # of orders before a deposit: there are none
        inventory = WalletInventory(engine.holdings, self.store, limits, self.clock, b"")
        self.payouts = Payouts(
            self.store, engine, inventory, self.processor, self.clock, Quarantine(),
            ScanProgress((), self.clock), lease,
        )  # fmt: skip
        self.effects = EffectRunner(
            self.store, self.processor, self.payouts, cast("Any", None), self.clock, poll_ms=1000
        )
        self._sent: list[list[str]] = []
        self.payees: dict[str, str] = {}
        self.owed: dict[str, int] = {}

    async def due(self, count: int, *payees: str, xmr: int = XMR_UNIT // 200) -> None:
        """Make orders with planned payouts for ``xmr`` piconero, the first to ``payees``."""
        for number in range(count):
            await self._due(payees[number] if number < len(payees) else None, xmr)

    async def _due(self, payee: str | None, xmr: int) -> None:
        number = len(self.payees)
        name, to = f"ord_{number:04}", payee or OTHERS.address(_FIRST_PAYEE + number)
        self.payees[name] = to
        order = open_order(
            replace(
                terms(), order_id=name, session_id=name, deposit_address=f"from {name}",
                to_address=to, deposit_amount=xmr, min_deposit=1, refund_fee=1,
            )
        )  # fmt: skip
        await self.processor.open(order, None, None)
        key = DepositKey("monero", f"tx {name}", 0)
        seen = ev.DepositSeen(key, order.terms.deposit_amount, None, NOW)
        await self.processor.apply(name, seen)
        paid = await self.processor.apply(name, ev.DepositConfirmed(key))
        self.owed[name] = paid.transfers[0].units

    async def beat(self) -> None:
        """Start what is due, a second later."""
        self.clock.now += 1000
        await self.effects.start_due()

    async def states(self) -> Counter[str]:
        """The number of payouts in each state."""
        rows = await self.own.database.fetch(_STATES)
        return Counter({row["state"]: row["n"] for row in rows})

    async def in_pool(self) -> int:
        """The number of transactions in the node's pool."""
        said = await self.own.token.client.rpc.read("txpool_status", [])
        return int(said["pending"], 16) + int(said["queued"], 16)

    async def hand_over(self, count: int) -> Handed:
        """Carry out what is due until ``count`` transactions are in the node's pool."""
        before, began = len(self._sent), time.perf_counter()
        async with asyncio.timeout(120):
            while await self.in_pool() < count:
                await self.beat()
                await asyncio.sleep(0.02)
        took, sent = time.perf_counter() - began, self._sent[before:]
        await self.effects.drain()
        return Handed(took, len(sent), Counter(name for names in sent for name in names))

    async def paid(self) -> dict[str, int]:
        """USDC units of each payee, by order."""
        return {name: await self.own.token.balance(to) for name, to in self.payees.items()}

    async def settle(self) -> None:
        """Mine, and look, until no payout is under way."""
        async with asyncio.timeout(120):
            while set(await self.states()) - {"settled", "failed", "cancelled"}:
                await self.own.controls.mine(self.own.network.settled_after)
                self.clock.now += 60_000
                await self.effects.start_due()
                await self.effects.drain()

    async def counted(self, body: bytes) -> None:
        """Note the methods of an exchange with the node."""
        asked = json.loads(body)
        calls = asked if isinstance(asked, list) else [asked]
        self._sent.append([call["method"] for call in calls])


@asynccontextmanager
async def due_payouts(own: EvmPayer, delay: float = 0.0) -> AsyncIterator[DuePayouts]:
    """Payouts over the database of ``own``, with a journal; ``delay``: seconds to the node."""
    async with AsyncExitStack() as opened:
        proxy = await opened.enter_async_context(DaemonProxy(own.anvil.url).open(32))
        proxy.delay = delay
        journal = PaymentJournal(JournalOptions(own.data_dir / FOLDER), own.clock, system_random)
        opened.push_async_callback(journal.close)
        await journal.open(next(iter(await marks_of(own.database)), None))
        ledgers = Ledgers(
            EvmDepositLedger(own.database, journal),
            EvmPaymentLedger(own.database, journal),
            UnrecordedLedger(own.database),
            OpeningLedger(own.database),
        )
        node = EvmNode(own.network, EvmClient(DaemonEndpoint("node", proxy.url)), COIN_PRICE)
        chains = load_chains(chains_toml(None))
        adapter = EvmAdapter(
            [node], chains, KEYS, ledgers, own.clock, OnchainSettings(), own.switch
        )
        adapter.open()
        opened.push_async_callback(adapter.close)
        guard = PayoutGuard(
            own.switch, {USDC_ASSET: Caps(_CAP, _CAP)}, SignedPayments(own.database), own.clock
        )
        engine = SettledEngine(
            [adapter], guard, floors={USDC_ASSET: 0}, poll_ms=1000, journal=journal
        )
        made = DuePayouts(own, proxy, adapter, engine)
        proxy.stand_in = made.counted
        await own.controls.automine(enabled=False)
        try:
            yield made
        finally:
            await made.effects.stop()
