"""The triggers of the database refuse changes to terms, deposits and sent transfers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositKey, DepositState, Order, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.store.changes import Change, HistoryEntry, StatusView
from rpcsvc.store.database import StoreConflict, Tables
from rpcsvc.store.order_rows import DEPOSIT, ORDER, TRANSFER
from rpcsvc.store.orders import OrderStore
from tests.rows import statement
from tests.unit.orders import NOW, terms

KEY = DepositKey("arbitrum", "tx", 0)
PAYOUT = "ord_1/payout/1"
# The columns that may change. Every other column, also a future one, must not.
CHANGES = {
    "orders": {
        "status", "status_at", "version", "deadline_at", "on_deadline", "refund_address",
        "action_required", "error_message", "completed_at",
        "leftover", "lock_broken_at", "unpaid_since",
    },
    "deposits": {"state", "transfer_id", "is_dust"},
    "transfers": {"state", "txid", "raw", "reason", "receipt"},
}  # fmt: skip


@pytest.fixture
async def store(database: Tables) -> OrderStore:
    """A store with one order that has a deposit."""
    store = OrderStore(database, lambda: "key")
    order = open_order(terms(Direction.USDC_TO_XMR))
    await commit(store, order, is_new=True)
    seen = ev.DepositSeen(KEY, order.terms.deposit_amount, "0xSender", NOW)
    await after(store, order, seen, ev.DepositConfirmed(KEY))
    return store


async def commit(store: OrderStore, order: Order, *, is_new: bool = False) -> None:
    entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
    view = StatusView(b"{}", None)
    await store.commit(Change(order=order, view=view, is_new=is_new, history=entry))


async def after(store: OrderStore, order: Order, *events: ev.Event) -> Order:
    """Commit the events one by one."""
    for event in events:
        order = transition(order, event, NOW).order
        await commit(store, order)
    return order


def kept() -> list[tuple[str, str]]:
    """Every table and column that must not change."""
    columns = {"orders": ORDER, "deposits": DEPOSIT, "transfers": TRANSFER}
    return [
        (table, column)
        for table, changes in CHANGES.items()
        for column in ("seq", *columns[table])
        if column not in changes
    ]


NUMBERS = {
    "twap_chunk_units", "twap_interval_ms", "price_locked_until", "rate", "receive_amount",
}  # fmt: skip


def another(column: str, value: int | str | None) -> int | str:
    """A different value that the column's constraints accept."""
    if value is None and column in NUMBERS:
        return 1
    if isinstance(value, int):
        return value + 1
    return {"u2x": "x2u", "payout": "refund", "XMR": "USDC", None: "1"}.get(value, f"{value}1")


async def everything(database: Tables, table: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in await database.fetch(f"SELECT * FROM {table}")]


@pytest.mark.parametrize(("table", "column"), kept())
async def test_identifying_columns_can_not_be_changed(
    store: OrderStore, database: Tables, table: str, column: str
) -> None:
    assert await store.order("ord_1") is not None
    before = await everything(database, table)
    (row,) = await database.fetch(f"SELECT {column} FROM {table}")
    with pytest.raises(StoreConflict, match=r"keeps (its|what it is)"):
        await database.write(
            [statement(f"UPDATE {table} SET {column} = ?", (another(column, row[column]),))]
        )
    assert await everything(database, table) == before


@pytest.mark.parametrize("table", CHANGES)
async def test_no_order_deposit_or_transfer_is_ever_deleted(
    store: OrderStore, database: Tables, table: str
) -> None:
    assert await store.order("ord_1") is not None
    with pytest.raises(StoreConflict, match="stays"):
        await database.write([statement(f"DELETE FROM {table}", ())])
    assert len(await everything(database, table)) == 1


async def test_all_that_happens_to_an_order_is_still_taken(store: OrderStore) -> None:
    order = await store.order("ord_1")
    assert order is not None
    order = await after(
        store,
        order,
        ev.TransferPrepared(PAYOUT, "id", "00"),
        ev.TransferPublished(PAYOUT),
        ev.TransferUnknown(PAYOUT, "the node does not answer"),
        ev.TransferSettled(PAYOUT, '{"txid":"id"}'),
    )
    assert await store.order("ord_1") == order
    assert order.payout is not None
    assert order.payout.state is TransferState.SETTLED


async def test_deposit_that_returns_keeps_sender_and_first_seen_time(
    store: OrderStore,
) -> None:
    order = await store.order("ord_1")
    assert order is not None
    units = order.terms.deposit_amount
    order = await after(
        store,
        order,
        ev.DepositRemoved(KEY),
        ev.DepositSeen(KEY, units, "0xOther", NOW + 1000),
        ev.DepositConfirmed(KEY),
    )
    assert await store.order("ord_1") == order
    (deposit,) = order.deposits
    assert (deposit.sender, deposit.first_seen_at) == ("0xSender", NOW)
    assert deposit.state is DepositState.CONFIRMED


async def test_order_written_with_other_terms_keeps_its_own(
    store: OrderStore,
) -> None:
    order = await store.order("ord_1")
    assert order is not None
    other = replace(order, terms=replace(order.terms, to_address="thief"), version=4)
    await commit(store, other)
    written = await store.order("ord_1")
    assert written is not None
    assert written.version == 4
    assert written.terms == order.terms
