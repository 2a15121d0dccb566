"""The history of orders that are over is reduced, and nothing else of them, on each backend."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import transition
from rpcsvc.domain.order import DepositKey, Order
from rpcsvc.domain.webhooks import Webhook
from rpcsvc.errors import Unavailable
from rpcsvc.store.changes import Change, HistoryEntry, PendingEffect
from rpcsvc.store.checks import BOOKS
from rpcsvc.store.database import Statement, StoreConflict, Tables
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.webhooks import WebhookStore
from tests.rows import statement
from tests.unit.orders import NOW, VIEW, created, fresh

LATER = NOW + 1_000_000
ALL = 1_000


def deposit_of(order: Order, number: int = 0) -> DepositKey:
    return DepositKey("monero", f"{order.order_id} {number}", 0)


def payment(order: Order, transfer_id: str) -> tuple[ev.Event, ...]:
    return (
        ev.TransferPrepared(transfer_id, f"id of {transfer_id}", "00"),
        ev.TransferPublished(transfer_id),
        ev.TransferSettled(transfer_id),
    )


class Books:
    """A store, and what its orders go through."""

    def __init__(self, database: Tables) -> None:
        self.database = database
        self.store = OrderStore(database, lambda: "key")

    async def open(self, number: int, webhook: Webhook | None = None) -> Order:
        order = fresh(number)
        await self.store.commit(replace(created(order), webhook=webhook))
        return order

    async def happen(self, order: Order, *events: ev.Event, now: int = NOW) -> Order:
        """Commit the events one by one; an effect is done once its transfer is settled."""
        for event in events:
            result = transition(order, event, now)
            order = result.order
            name = type(event).__name__
            entry = HistoryEntry(order.version, now, name, order.status.value, {})
            done: tuple[PendingEffect, ...] = ()
            if isinstance(event, ev.TransferSettled):
                done = (PendingEffect(order.order_id, ev.AdvanceTransfer(event.transfer_id)),)
            await self.store.commit(
                Change(order=order, view=VIEW, history=entry, effects=result.effects, done=done)
            )
        return order

    async def deposit(self, order: Order, number: int = 0, now: int = NOW) -> Order:
        key, units = deposit_of(order, number), order.terms.deposit_amount
        seen = ev.DepositSeen(key, units, None, now)
        return await self.happen(order, seen, ev.DepositConfirmed(key), now=now)

    async def completed(self, number: int = 1, webhook: Webhook | None = None) -> Order:
        order = await self.deposit(await self.open(number, webhook))
        return await self.happen(order, *payment(order, f"{order.order_id}/payout/1"))

    async def versions(self, order: Order) -> list[int]:
        return [entry.version for entry in await self.store.history(order.order_id, 0, ALL)]

    async def has_view(self, order: Order) -> bool:
        return await self.store.status_view(order.order_id, NOW) is not None

    async def problems(self) -> list[str]:
        """Problems that ``rpcsvc db check`` finds in the books."""
        return [what for what, query in BOOKS if await self.database.fetch(query)]


@pytest.fixture
def books(database: Tables) -> Books:
    return Books(database)


async def test_history_of_an_old_order_is_reduced_to_its_last_event(books: Books) -> None:
    order = await books.completed()
    stored, history = await books.store.order("ord_1"), await books.store.history("ord_1", 0, ALL)
    assert await books.store.reduce_history(NOW, ALL) == 0
    assert await books.has_view(order)
    assert await books.store.reduce_history(NOW + 1, ALL) == 1
    assert await books.store.history("ord_1", 0, ALL) == history[-1:]
    assert await books.store.history("ord_1", 2, ALL) == history[-1:]
    assert await books.store.history("ord_1", order.version, ALL) == []
    assert not await books.has_view(order)
    assert await books.store.order("ord_1") == stored
    assert await books.problems() == []
    assert await books.store.reduce_history(LATER, ALL) == 0


async def test_history_of_an_order_that_may_go_on_is_kept(books: Books) -> None:
    await books.open(1)
    waiting = await books.deposit(await books.completed(2), 1)
    assert waiting.action_required is not None
    owing = await books.happen(
        await books.deposit(await books.completed(3), 1), ev.RefundAddressGiven("there")
    )
    assert owing.status.is_terminal
    assert not owing.refunds[-1].state.is_final
    last = await books.completed(4, Webhook("https://a.example/hook"))
    kept = [await books.versions(order) for order in (waiting, owing, last)]
    assert await books.store.reduce_history(LATER, ALL) == 0
    assert [await books.versions(order) for order in (waiting, owing, last)] == kept
    assert await books.problems() == []


async def test_messages_of_a_webhook_are_shown_until_it_is_forgotten(books: Books) -> None:
    order = await books.completed(1, Webhook("https://a.example/hook"))
    await books.store.reduce_history(LATER, ALL)
    listed = await WebhookStore(books.database).deliveries("ord_1", ALL)
    assert [each.sequence for each in listed] == list(range(1, order.version + 1))
    await books.database.write([Statement("UPDATE webhook_deliveries SET state = 'dead'")])
    assert await books.store.forget_webhooks(LATER) == 1
    assert await books.store.reduce_history(LATER, ALL) == 1


async def test_late_deposit_restarts_the_time_of_a_reduced_order(books: Books) -> None:
    order = await books.completed()
    await books.store.reduce_history(LATER, ALL)
    ended = order.version
    order = await books.deposit(order, 1, now=LATER)
    order = await books.happen(order, ev.RefundAddressGiven("there"), now=LATER)
    order = await books.happen(order, *payment(order, order.refunds[-1].transfer_id), now=LATER)
    assert await books.versions(order) == list(range(ended, order.version + 1))
    assert await books.store.reduce_history(LATER, ALL) == 0
    assert await books.problems() == []
    named = ended + 3
    assert await books.store.reduce_history(LATER + 1, ALL) == 1
    assert await books.versions(order) == [named, order.version], "the auditor counts the address"
    assert await books.store.order("ord_1") == order
    assert await books.problems() == []


async def test_history_is_reduced_in_steps_the_oldest_first(books: Books) -> None:
    orders = [await books.completed(number) for number in range(1, 6)]
    assert [await books.store.reduce_history(LATER, 2) for _ in range(4)] == [2, 2, 1, 0]
    assert [await books.versions(order) for order in orders] == [[orders[0].version]] * 5


async def test_deposit_right_before_the_deletion_keeps_the_history(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = await books.completed()
    read = books.database.fetch

    async def read_and_be_late(sql: str, **values: Any) -> list[Any]:
        found = await read(sql, **values)
        monkeypatch.undo()
        await books.deposit(order, 1, now=LATER)
        return found

    monkeypatch.setattr(books.database, "fetch", read_and_be_late)
    assert await books.store.reduce_history(LATER, ALL) == 1
    assert await books.versions(order) == list(range(1, order.version + 3))
    assert await books.has_view(order)
    assert await books.problems() == []


async def test_failed_step_deletes_nothing(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    order = await books.completed()
    write = books.database.write

    async def fail_at_the_end(statements: Sequence[Statement]) -> None:
        await write([*statements, statement("UPDATE event_log SET event = 'other'")])

    monkeypatch.setattr(books.database, "write", fail_at_the_end)
    with pytest.raises((StoreConflict, Unavailable)):
        await books.store.reduce_history(LATER, ALL)
    assert await books.versions(order) == list(range(1, order.version + 1))
    assert await books.has_view(order)
    assert await books.problems() == []


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM event_log WHERE version = (SELECT max(version) FROM event_log)",
        "DELETE FROM event_log",
        "DELETE FROM event_log WHERE version = 1",
        "UPDATE orders SET history_from = version + 1",
        "UPDATE orders SET history_from = 0",
    ],
)
@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("is_reduced", [True, False])
async def test_last_event_and_open_orders_events_stay(
    books: Books, sql: str, is_over: bool, is_reduced: bool
) -> None:
    order = await (books.completed() if is_over else books.open(1))
    if is_reduced and is_over:
        await books.store.reduce_history(LATER, ALL)
        sql = sql.replace("version = 1", "version >= 1")
    elif is_reduced:
        # Even then: an order that is open keeps all of its history.
        order = await books.deposit(order)
        await books.database.write([statement("UPDATE orders SET history_from = version")])
    kept = await books.versions(order)
    with pytest.raises(StoreConflict):
        await books.database.write([statement(sql)])
    assert await books.versions(order) == kept


async def test_gap_in_a_reduced_history_is_found(books: Books) -> None:
    await books.completed()
    await books.store.reduce_history(LATER, ALL)
    assert await books.problems() == []
    await books.database.write([statement("UPDATE orders SET history_from = 2")])
    assert await books.problems() == ["an order's history has a gap"]


@pytest.mark.parametrize("seed", range(4))
async def test_reduced_histories_are_the_ends_of_whole_ones(books: Books, seed: int) -> None:
    """Orders go through random events while histories are reduced: no order shows it."""
    random = Random(seed)
    orders = [await books.open(number) for number in range(1, 7)]
    whole = {order.order_id: {1} for order in orders}
    named: dict[str, set[int]] = {order.order_id: set() for order in orders}
    now = NOW
    for step in range(60):
        place = random.randrange(len(orders))
        order, now = orders[place], now + random.choice([1, 1000])
        due = [item for item in order.transfers if not item.state.is_final]
        if due:
            events = payment(order, due[0].transfer_id)
        elif order.action_required is not None:
            events = (ev.RefundAddressGiven(f"there {step}"),)
            named[order.order_id].add(order.version + 1)
        elif order.version == 1 and random.random() < 0.3:
            events = (ev.Cancelled(),)
        else:
            key = deposit_of(order, step)
            events = (
                ev.DepositSeen(key, order.terms.deposit_amount, None, NOW),
                ev.DepositConfirmed(key),
            )
        orders[place] = after = await books.happen(order, *events, now=now)
        whole[order.order_id] |= set(range(order.version + 1, after.version + 1))
        if random.random() < 0.4:
            await books.store.reduce_history(now - random.choice([0, 500, 5000]), 2)
        assert await books.problems() == []
    while await books.store.reduce_history(now + 1, 2):
        pass
    for order in orders:
        assert await books.store.order(order.order_id) == order
        history = await books.store.history(order.order_id, 0, ALL)
        is_over = order.status.is_terminal and order.action_required is None
        if is_over and all(item.state.is_final for item in order.transfers):
            assert {e.event for e in history[:-1]} <= {"RefundAddressGiven"}
        gone = whole[order.order_id] - {e.version for e in history}
        assert not gone & named[order.order_id]
        unnamed = [e.version for e in history if e.event != "RefundAddressGiven"]
        assert max(gone, default=0) < min(unnamed, default=order.version)
        assert history[-1].version == order.version
