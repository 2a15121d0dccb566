"""Databases behind a payment journal."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.onchain.evm import records as evm
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.journal.files import FOLDER
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal
from rpcsvc.settlement.onchain.journal_replay import ReplayResult, open_journal
from rpcsvc.settlement.onchain.monero import records as monero
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase
from rpcsvc.store.orders import OrderStore
from tests.sandbox import ManualClock
from tests.unit.orders import NOW, key, terms

HOT = "0x" + "ab" * 20
WALLET = monero.WalletRecord("mainnet", "4primary", 0)


class JournaledBooks:
    """A database with its journal, both open."""

    def __init__(self, data_dir: Path, database: SqliteDatabase, journal: PaymentJournal) -> None:
        self.data_dir = data_dir
        self.db = database
        self.journal = journal
        self.monero = MoneroLedger(database, journal)
        self.evm = EvmPaymentLedger(database, journal)
        self.addresses = EvmDepositLedger(database, journal)
        self.store = OrderStore(database, lambda: "")
        self.clock = ManualClock()
        self.clock.now = NOW
        self.processor = OrderProcessor(self.store, self.clock, lambda _order: None)
        self.adopted = ReplayResult()

    async def ordered(self, direction: Direction) -> Order:
        order = open_order(terms(direction))
        await self.processor.open(order, None, None)
        return order

    async def funded(self, order: Order) -> Order:
        amount = order.terms.deposit_amount
        await self.processor.apply(order.order_id, ev.DepositSeen(key(1), amount, "sender", NOW))
        return await self.processor.apply(order.order_id, ev.DepositConfirmed(key(1)))

    def copy(self, to: Path) -> Path:
        with (
            closing(sqlite3.connect(self.data_dir / DATABASE_NAME)) as source,
            closing(sqlite3.connect(to)) as target,
        ):
            source.backup(target)
        return to


@asynccontextmanager
async def opened(data_dir: Path) -> AsyncIterator[JournaledBooks]:
    database = await SqliteDatabase.open(data_dir)
    options = JournalOptions(data_dir / FOLDER)
    journal = PaymentJournal(options, ManualClock(), lambda n: b"\x0a" * n)
    books = JournaledBooks(data_dir, database, journal)
    try:
        books.adopted = await open_journal(journal, database, books.clock, PauseSwitch(data_dir))
        yield books
    finally:
        await journal.close()
        await database.close()


def put_back(data_dir: Path, copy: Path) -> None:
    for suffix in ("-wal", "-shm"):
        (data_dir / (DATABASE_NAME + suffix)).unlink(missing_ok=True)
    shutil.copyfile(copy, data_dir / DATABASE_NAME)


def xmr_payment(order: Order, txid: str, *others: monero.Payee) -> monero.MoneroPayment:
    planned = order.transfers[0]
    mine = monero.Payee(planned.transfer_id, planned.address, planned.units)
    batch = (mine, *others) if others else ()
    return monero.MoneroPayment(
        f"batch_{txid}" if batch else planned.transfer_id, monero.MoneroPurpose.TRANSFER,
        planned.address, planned.units + sum(item.units for item in others), 5, txid, "02ff",
        "metadata", "key", (f"image-{txid}",), NOW, batch=batch,
    )  # fmt: skip


def evm_payment(
    name: str, units: int, to: str, nonce: int, **more: evm.EvmPurpose
) -> evm.EvmPayment:
    purpose = more.get("purpose", evm.EvmPurpose.TRANSFER)
    order = evm.EvmPaymentOrder(name, purpose, to, units, HOT, b"\x01", 60_000)
    attempt = evm.Attempt(f"0x{nonce:064x}", "02", 100, 1, NOW)
    return evm.EvmPayment("arbitrum", HOT, nonce, order, (attempt,), NOW)
