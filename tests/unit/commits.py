"""Payments that are recorded in one commit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rpcsvc.domain.order import Order, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.ports.wallets import PreparedTransfer
from rpcsvc.store.database import Rows
from tests.unit.journaled import WALLET, JournaledBooks, evm_payment, opened, xmr_payment


@asynccontextmanager
async def due(data_dir: Path, direction: Direction) -> AsyncIterator[tuple[JournaledBooks, Order]]:
    """An order with a planned payout, in a database with a journal."""
    async with opened(data_dir) as books:
        await books.monero.adopt_wallet(WALLET)
        yield books, await books.funded(await books.ordered(direction))


async def record(books: JournaledBooks, order: Order) -> None:
    """Sign the order's payout and record it, as its wallet does."""
    planned = order.transfers[0]
    if planned.network == "monero":
        made = xmr_payment(order, "aa")
        signed = PreparedTransfer(made.txid, (planned.transfer_id,))

        async def commit(rows: Rows) -> None:
            await books.monero.add_payment(made, rows)
    else:
        paid = evm_payment(planned.transfer_id, planned.units, planned.address, 4)
        first = paid.attempts[0]
        signed = PreparedTransfer(first.txid, (planned.transfer_id,))

        async def commit(rows: Rows) -> None:
            await books.evm.add_payment(paid, rows=rows)

    await books.processor.record([signed], commit)


async def on_record(books: JournaledBooks, order: Order) -> tuple[TransferState | None, bool]:
    """The payout's state in the order, and whether the wallet has a payment for it."""
    now = await books.store.order(order.order_id)
    name = order.transfers[0].transfer_id
    payout = now.transfer(name) if now else None
    paid = await books.monero.payment(name), await books.evm.payment(name)
    return payout.state if payout else None, any(paid)
