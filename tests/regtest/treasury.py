"""The XMR adapter on a wallet of the test's own, which can be stopped, killed and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from rpcsvc.domain.money import XMR as XMR_ASSET
from rpcsvc.domain.order import Transfer, TransferKind, TransferState
from rpcsvc.orders.ports.wallets import DepositSighting, PreparedTransfer
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError
from rpcsvc.settlement.onchain.monero.adapter import MoneroAdapter
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.records import (
    MoneroOptions,
    MoneroPayment,
    MoneroPaymentState,
)
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Destination, PreparedPayment, WalletCode
from rpcsvc.settlement.onchain.thresholds import Threshold
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import monero_options
from tests.recording import record_calls, sign
from tests.regtest.daemons import WALLET_NAME, WALLET_PASSWORD, Miner, WalletRpc
from tests.sandbox import ManualClock

XMR = 10**12
OPTIONS = monero_options(
    nettype="fakechain",
    wallet_file=WALLET_NAME,
    wallet_password=WALLET_PASSWORD,
    thresholds=(Threshold(0, 3), Threshold(5 * XMR, 6)),
    settled_after=3,
    failed_after=5,
    tracked_blocks=8,
    pool_target=24,
    pool_low=16,
    reserve=6,
    outputs_target=0,
)


@dataclass
class Treasury:
    """A running XMR adapter. ``wallet`` is the test's own client of the same wallet daemon."""

    rpc: WalletRpc
    data_dir: Path
    options: MoneroOptions
    clock: ManualClock
    adapter: MoneroAdapter
    ledger: MoneroLedger
    database: SqliteDatabase
    node: MonerodClient
    adapter_wallet: WalletClient
    wallet: WalletClient
    is_open: bool = True
    transfers: int = field(default=0)

    def use(self, options: MoneroOptions) -> None:
        """Set the options of the next start."""
        self.options = options

    async def reconcile(self) -> list[DepositSighting]:
        """One pass, committed; the deposits found."""
        sightings = list((await self.adapter.observe()).sightings)
        await self.adapter.acknowledge(sightings)
        return sightings

    def transfer(self, address: str, units: int = XMR // 10) -> Transfer:
        """A planned payout."""
        self.transfers += 1
        name = f"tr_{self.transfers}"
        kind, fee = TransferKind.PAYOUT, self.adapter.fee()
        return Transfer(name, kind, "monero", XMR_ASSET, address, units, fee)

    async def sign(self, transfer: Transfer, *companions: Transfer) -> PreparedTransfer:
        """The recorded payment of the transfer; signs it if there is none."""
        return await sign(self.adapter.payments, transfer, *companions)

    async def prepared(self, transfer: Transfer) -> Transfer:
        """The transfer as the order layer has it once it is prepared."""
        signed = await self.sign(transfer)
        return replace(transfer, state=TransferState.PREPARED, txid=signed.txid, raw=signed.raw)

    async def live_payments(self) -> list[MoneroPayment]:
        states = (
            MoneroPaymentState.PREPARED,
            MoneroPaymentState.RELAYING,
            MoneroPaymentState.PUBLISHED,
        )
        return await self.ledger.payments_in(*states)

    def count_calls(self) -> list[str]:
        """The methods that the adapter calls from now on."""
        calls: list[str] = []
        for rpc in (self.node.rpc, self.adapter_wallet.rpc):
            record_calls(rpc, calls)
        return calls

    async def end(self, *, in_order: bool = True) -> None:
        """Stop as a service does, or as if killed, without giving addresses back."""
        if not self.is_open:
            return
        self.is_open = False
        if in_order:
            await self.adapter.close()
        else:
            await self.node.rpc.close()
            await self.adapter_wallet.rpc.close()
        await self.database.close()
        await self.wallet.rpc.close()

    @asynccontextmanager
    async def again(
        self, *, in_order: bool = True, before: Callable[[], Awaitable[object]] | None = None
    ) -> AsyncIterator[Treasury]:
        """End this one, and start another on its database."""
        await self.end(in_order=in_order)
        if before is not None:
            await before()
        async with treasury(
            self.rpc, self.data_dir, self.options, self.clock, self.wallet.account
        ) as later:
            later.transfers = self.transfers
            yield later


@asynccontextmanager
async def treasury(
    rpc: WalletRpc,
    data_dir: Path,
    options: MoneroOptions = OPTIONS,
    clock: ManualClock | None = None,
    account: int = 0,
    monerod: DaemonEndpoint | None = None,
) -> AsyncIterator[Treasury]:
    """Run an adapter. ``monerod``: the address that it has for the node of its wallet."""
    database = await SqliteDatabase.open(data_dir)
    ledger, hands = MoneroLedger(database), clock or ManualClock(1_800_000_000_000)
    node = MonerodClient(monerod or rpc._monerod.endpoint)
    wallet = WalletClient(rpc.endpoint, account=account)
    tests_own = WalletClient(rpc.endpoint, account=account)
    tests_own.rpc.open()
    adapter = MoneroAdapter(node, wallet, ledger, hands, options)
    await adapter.start()
    made = Treasury(
        rpc, data_dir, options, hands, adapter, ledger, database, node, wallet, tests_own
    )
    try:
        yield made
    finally:
        await made.end()


async def add_account(rpc: WalletRpc) -> tuple[int, str]:
    """Another account of the wallet, and its address. Opening a wallet takes seconds."""
    async with WalletClient(rpc.endpoint) as wallet:
        try:
            wallet.account = await wallet.create_account()
        except NodeError as error:
            if error.code != WalletCode.NOT_OPEN:
                raise
            await wallet.open(WALLET_NAME, WALLET_PASSWORD)
            wallet.account = await wallet.create_account()
        await wallet.store()
        return wallet.account, await wallet.primary_address()


async def signed_to(wallet: WalletClient, to: Mapping[str, int]) -> PreparedPayment:
    """A signed, unpublished payment."""
    await wallet.refresh()
    return await wallet.prepare([Destination(*item) for item in to.items()])


@asynccontextmanager
async def bank_of(miner: Miner) -> AsyncIterator[WalletClient]:
    """The wallet that mining rewards are paid to."""
    async with WalletClient(miner.bank.endpoint) as bank:
        yield bank


@asynccontextmanager
async def payer_of(miner: Miner, units: int) -> AsyncIterator[WalletClient]:
    """A wallet with one output, which every payment of it spends."""
    async with bank_of(miner) as bank:
        bank.account = await bank.create_account()
        await miner.fund(await bank.primary_address(), units)
        yield bank


async def kill_wallet(rpc: WalletRpc) -> None:
    """Kill the wallet daemon and start it with no wallet open: the adapter opens its own."""
    await asyncio.to_thread(rpc.kill)
    await asyncio.to_thread(rpc.start)
