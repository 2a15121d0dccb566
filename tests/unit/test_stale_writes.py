"""Two writers of one order: writes carry the version they are based on, and are retried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import ImpossibleTransition
from rpcsvc.domain.machine import transition
from rpcsvc.domain.order import Order, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.orders.processor import TRIES, OrderProcessor
from rpcsvc.store.changes import Change, HistoryEntry
from rpcsvc.store.database import StaleWrite
from tests.unit.commits import due, on_record, record
from tests.unit.journaled import JournaledBooks, opened
from tests.unit.orders import NOW, key


def second(books: JournaledBooks) -> OrderProcessor:
    """A processor with locks of its own, as in another process."""
    return OrderProcessor(books.store, books.clock, lambda _order: None)


def seen(number: int) -> ev.DepositSeen:
    return ev.DepositSeen(key(number), 1_000, "sender", NOW)


async def test_a_change_of_an_older_version_writes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        order = await books.ordered(Direction.XMR_TO_USDC)
        await books.processor.apply(order.order_id, seen(1))
        stale = transition(order, seen(2), NOW).order
        entry = HistoryEntry(stale.version, NOW, "e", stale.status.value, {})
        with pytest.raises(StaleWrite):
            await books.store.commit(Change(order=stale, history=entry))
        found = await books.store.order(order.order_id)
        assert found is not None
        assert [deposit.key for deposit in found.deposits] == [key(1)]


async def test_a_stale_change_keeps_no_neighbour_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        order = await books.ordered(Direction.XMR_TO_USDC)
        results = await asyncio.gather(
            *(books.store.commit(change(order, number)) for number in (1, 2)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None), StaleWrite]


def change(order: Order, number: int) -> Change:
    after = transition(order, seen(number), NOW).order
    entry = HistoryEntry(after.version, NOW, "e", after.status.value, {})
    return Change(order=after, history=entry)


async def test_events_of_two_processors_all_happen_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        order = await books.ordered(Direction.XMR_TO_USDC)
        processors = books.processor, second(books)
        events = [seen(number) for number in range(1, 21)]
        await asyncio.gather(
            *(
                processors[number % 2].apply(order.order_id, event)
                for number, event in enumerate(events)
            )
        )
        found = await books.store.order(order.order_id)
        assert found is not None
        assert found.version == 1 + len(events)
        assert {deposit.key for deposit in found.deposits} == {event.key for event in events}


@pytest.mark.parametrize("direction", Direction)
async def test_record_while_another_process_cancels_writes_nothing(
    tmp_path: Path, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process cancels the order between this one's read and write."""
    async with due(tmp_path, direction) as (books, order):
        other = second(books)
        ledger = books.monero if direction is Direction.USDC_TO_XMR else books.evm
        add_payment = ledger.add_payment

        async def cancelled_first(*args: Any, **kwargs: Any) -> None:
            monkeypatch.setattr(ledger, "add_payment", add_payment)
            await other.apply(order.order_id, ev.DepositRemoved(key(1)))
            await add_payment(*args, **kwargs)

        monkeypatch.setattr(ledger, "add_payment", cancelled_first)
        with pytest.raises(ImpossibleTransition):
            await record(books, order)
        assert await on_record(books, order) == (TransferState.CANCELLED, False)
    async with opened(tmp_path) as books:
        assert books.adopted.payments == []


async def test_an_order_that_others_keep_changing_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as books:
        order = await books.ordered(Direction.XMR_TO_USDC)
        tries = 0

        async def always_stale(*_changes: Change) -> None:
            nonlocal tries
            tries += 1
            raise StaleWrite

        monkeypatch.setattr(books.store, "commit", always_stale)
        with pytest.raises(Unavailable):
            await books.processor.apply(order.order_id, seen(1))
        assert tries == TRIES
