"""A signed payment is on record for its order and for its wallet, or for neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import ImpossibleTransition
from rpcsvc.domain.order import TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.settlement.onchain.journal.writer import marks_of
from rpcsvc.store.database import Rows, StoreConflict
from tests.unit.commits import due, on_record, record
from tests.unit.journaled import HOT, JournaledBooks, evm_payment, opened, xmr_payment
from tests.unit.orders import key


@pytest.mark.parametrize("direction", Direction)
async def test_record_commits_order_and_wallet_together(
    tmp_path: Path, direction: Direction
) -> None:
    async with due(tmp_path, direction) as (books, order):
        groups = count_commits(books)
        await record(books, order)
        assert await on_record(books, order) == (TransferState.PREPARED, True)
        assert groups == [1]


def count_commits(books: JournaledBooks) -> list[int]:
    """Count the writes from now on, in the only item."""
    counted, write = [0], books.db.write

    async def counting(statements: Rows) -> None:
        counted[0] += 1
        await write(statements)

    books.db.write = counting  # type: ignore[method-assign]
    return counted


@pytest.mark.parametrize("direction", Direction)
async def test_record_of_a_cancelled_transfer_writes_nothing(
    tmp_path: Path, direction: Direction
) -> None:
    """Not even a journal line: after a crash it would bring the payment back."""
    async with due(tmp_path, direction) as (books, order):
        await books.processor.apply(order.order_id, ev.DepositRemoved(key(1)))
        before = await marks_of(books.db)
        with pytest.raises(ImpossibleTransition):
            await record(books, order)
        assert await on_record(books, order) == (TransferState.CANCELLED, False)
        assert (await marks_of(books.db), await books.evm.next_nonce("arbitrum", HOT)) == (
            before,
            0,
        )
    async with opened(tmp_path) as books:
        assert books.adopted.payments == []


@pytest.mark.parametrize("direction", Direction)
async def test_record_that_the_wallet_refuses_leaves_the_order(
    tmp_path: Path, direction: Direction
) -> None:
    """Its nonce is used, or an earlier payment is not published yet."""
    async with due(tmp_path, direction) as (books, order):
        if direction is Direction.XMR_TO_USDC:
            await books.evm.add_payment(evm_payment("ord_2/payout/1", 7, HOT, 4))
        else:
            other = replace(xmr_payment(order, "bb"), payment_id="ord_2/payout/1")
            await books.monero.add_payment(other)
        with pytest.raises(StoreConflict):
            await record(books, order)
        assert await on_record(books, order) == (TransferState.PLANNED, False)
