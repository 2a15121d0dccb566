"""The auditor's books give each order its own rows, on each backend."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.audit import books
from rpcsvc.audit.books import read_books_of
from rpcsvc.audit.records import Books, Many, OrderEntry, PaymentEntry, TransferEntry
from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import DepositKey, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.store.database import BooksUnreadable, Tables
from rpcsvc.store.orders import OrderStore
from tests.rows import statement
from tests.sandbox import ManualClock
from tests.unit.audit_world import X2U, World
from tests.unit.orders import NOW, terms

# Made in this sequence, which is not that of their ids; the number of their deposits.
MADE = (("ord_5", 2), ("ord_9", 0), ("ord_1", 1), ("ord_7", 3))
ELSEWHERE = "ord_1"
FILL = (
    "INSERT INTO fills (order_id, chunk, units, output, integrator_fee, rate, at)"
    " VALUES (?, ?, ?, 2, 0, 3, 1)"
)

# What an order of another service has no part in here: none of it may come into the books.
FOREIGN = (
    "INSERT INTO deposits (order_id, network, txid, output_index, units, first_seen_at, state,"
    " is_dust) VALUES (?, 'base', 'there', 0, 1, 1, 'confirmed', 0)",
    "INSERT INTO transfers (order_id, transfer_id, kind, network, asset, address, units, fee,"
    " integrator_fee, state) VALUES (?, 'there', 'payout', 'base', 'USDC', '0x1', 1, 0, 0,"
    " 'settled')",
    "INSERT INTO event_log (order_seq, version, at, event, status, details)"
    " SELECT seq, 9, 1, 'RefundAddressGiven', status, '{}' FROM orders WHERE order_id = ?",
)


@pytest.fixture
async def filled(database: Tables) -> Tables:
    """A database with the orders of MADE, of which another service settles ELSEWHERE."""
    processor = OrderProcessor(
        OrderStore(database, lambda: ""), ManualClock(NOW), lambda _order: None
    )
    for name, deposits in MADE:
        new = replace(
            terms(Direction.USDC_TO_XMR), order_id=name, deposit_address=f"0x{name[-1]:0>40}"
        )
        if name == ELSEWHERE:
            new = replace(new, upstream_id="there")
        await processor.open(open_order(new), None, None)
        for number in reversed(range(deposits)):
            await database.write([statement(FILL, (name, number, 7 + number))])
            if name != ELSEWHERE:
                paid = DepositKey(new.deposit_network, f"{name}-{number}", 0)
                await processor.apply(name, ev.DepositSeen(paid, new.deposit_amount, "0x1", NOW))
                await processor.apply(name, ev.DepositConfirmed(paid))
    await database.write([statement(sql, (ELSEWHERE,)) for sql in FOREIGN])
    return database


async def test_books_give_each_order_its_own_rows(filled: Tables) -> None:
    found = list((await read_books_of(filled)).orders)
    expected = [(name, count) for name, count in MADE if name != ELSEWHERE]
    assert [(order.order_id, len(order.deposits)) for order in found] == expected
    for order in found:
        numbers = range(len(order.deposits))
        assert [item.txid for item in order.deposits] == [f"{order.order_id}-{n}" for n in numbers]
        assert [item.units for item in order.fills] == [7 + number for number in numbers]
        assert bool(order.transfers) == bool(order.deposits)
        assert all(order.order_id in item.transfer_id for item in order.transfers)


async def test_books_with_rows_out_of_sequence_are_refused(
    filled: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = books._DEPOSITS.replace("BY o.seq,", "BY o.seq DESC,")
    assert turned != books._DEPOSITS
    monkeypatch.setattr(
        books, "_ALL", tuple(turned if s == books._DEPOSITS else s for s in books._ALL)
    )
    monkeypatch.setattr(books, "_DEPOSITS", turned)
    with pytest.raises(BooksUnreadable, match="out of sequence"):
        await read_books_of(filled)


def _settled(world: World) -> OrderEntry:
    return world.keep(world.pay_out(world.deposit(world.order(X2U), 10**12)))


def _is_unsettled(order: OrderEntry, payments: Many[PaymentEntry]) -> bool:
    return list(Books(orders=(order,), payments=payments).unsettled) == [order]


def test_unsettled_orders_are_those_a_transaction_may_belong_to() -> None:
    world = World()
    order = _settled(world)
    payments = world.books().payments
    transfer = order.transfers[0]

    def changed(**fields: object) -> TransferEntry:
        return replace(transfer, **fields)

    assert not _is_unsettled(order, payments)
    assert _is_unsettled(order, ())
    assert _is_unsettled(replace(order, status="expired"), payments)
    planned = changed(state=TransferState.PLANNED)
    assert _is_unsettled(replace(order, transfers=(planned,)), payments)
    elsewhere = changed(network="base")
    assert _is_unsettled(replace(order, transfers=(elsewhere,)), payments)
