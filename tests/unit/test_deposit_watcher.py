"""A sighting is acknowledged when its order has it on record, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from rpcsvc.domain.events import DepositConfirmed, DepositSeen
from rpcsvc.domain.order import Order
from rpcsvc.domain.states import DepositState
from rpcsvc.domain.transition import ImpossibleTransition, open_order, transition
from rpcsvc.orders.aside import OrdersAside
from rpcsvc.orders.deposits import DepositWatcher
from rpcsvc.orders.ports import DepositSighting
from tests.unit.test_transition import NOW, key, terms


class Book:
    """One order, its only writer, and an engine that sees one deposit to it.

    ``refusals``: how often the next events are refused, as if another one had come between.
    """

    def __init__(self, refusals: int) -> None:
        self.order_now = open_order(terms())
        self.refusals = refusals
        self.applied: list[type] = []
        self.acknowledged: list[DepositSighting] = []

    def order(self, _order_id: str) -> Order:
        return self.order_now

    def order_id_of_deposit_address(self, _network: str, _address: str) -> str:
        return "ord_1"

    async def apply(self, _order_id: str, event: Any) -> Order:
        if self.refusals:
            self.refusals -= 1
            raise ImpossibleTransition("something else happened")
        self.order_now = transition(self.order_now, event, NOW).order
        self.applied.append(type(event))
        return self.order_now

    async def observe(self) -> Sequence[DepositSighting]:
        return [DepositSighting(key(1), "deposit here", 7, None, NOW, DepositState.CONFIRMED)]

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        self.acknowledged += sightings


def watcher_of(book: Book, aside: OrdersAside) -> DepositWatcher:
    anything = cast("Any", book)
    return DepositWatcher(anything, anything, anything, aside)


@pytest.mark.parametrize("refusals", [0, 1, 2])
async def test_an_order_that_changed_in_between_is_looked_at_again(refusals: int) -> None:
    book, aside = Book(refusals), OrdersAside()
    watcher = watcher_of(book, aside)

    assert await watcher.reconcile() == 2

    assert book.applied == [DepositSeen, DepositConfirmed]
    assert len(book.acknowledged) == 1
    assert aside.health().ok


async def test_a_sighting_that_can_be_recorded_does_not_hide_that_another_could_not() -> None:
    book, aside = Book(0), OrdersAside()
    with aside.isolate("ord_1", key(2)):
        raise ZeroDivisionError

    await watcher_of(book, aside).reconcile()

    assert len(book.acknowledged) == 1, "this one is on record"
    assert "ord_1" in aside
    assert not aside.health().ok


async def test_a_sighting_that_can_not_be_recorded_is_not_acknowledged_but_shown_again() -> None:
    book, aside = Book(100), OrdersAside()
    watcher = watcher_of(book, aside)

    await watcher.reconcile()

    assert book.acknowledged == []
    assert not aside.health().ok
    book.refusals = 0
    await watcher.reconcile()
    assert len(book.acknowledged) == 1
    assert aside.health().ok
