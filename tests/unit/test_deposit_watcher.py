"""A deposit is acknowledged only once its order has recorded it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from rpcsvc.domain.events import DepositConfirmed, DepositSeen, ImpossibleTransition
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositKey, DepositState, Order
from rpcsvc.orders.deposits import DEPOSITS_PER_PASS, DepositWatcher, events_of
from rpcsvc.orders.ports.venue import Rate
from rpcsvc.orders.ports.wallets import DepositSighting, Observation
from rpcsvc.orders.processor import Quarantine
from tests.sandbox import ManualClock
from tests.unit.orders import HOUR, NOW, key, terms


class Book:
    """One order, its only writer, and an engine that sees one deposit to it.

    ``refusals``: how many of the next events are refused, as if another event had come between.
    ``complete``: whether the engine reports its scan as complete.
    """

    networks = frozenset({key(1).network})

    def __init__(self, refusals: int) -> None:
        self.complete = self.final = True
        self.shown = [DepositSighting(key(1), "deposit here", 7, None, NOW, DepositState.CONFIRMED)]
        self.order_now = open_order(terms())
        self.refusals = refusals
        self.applied: list[type] = []
        self.acknowledged: list[DepositSighting] = []

    async def order(self, _order_id: str) -> Order:
        return self.order_now

    async def order_id_of_deposit_address(self, _network: str, _address: str) -> str:
        return "ord_1"

    async def apply(self, _order_id: str, event: Any) -> Order:
        if self.refusals:
            self.refusals -= 1
            raise ImpossibleTransition("something else happened")
        self.order_now = transition(self.order_now, event, NOW).order
        self.applied.append(type(event))
        return self.order_now

    def rate(self) -> Rate:
        return Rate(1, NOW, "the book")

    def is_paused(self) -> bool:
        return False

    async def observe(self) -> Observation:
        return Observation(self.shown, dict.fromkeys(self.networks, NOW) if self.complete else {})

    async def is_final(self, _key: DepositKey) -> bool:
        return self.final

    async def unfinal(self) -> list[DepositKey]:
        return []

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        self.acknowledged += sightings


@pytest.mark.parametrize("state", [DepositState.SEEN, DepositState.CONFIRMED])
def test_recorded_deposit_makes_no_event(state: DepositState) -> None:
    sighting = replace(Book(0).shown[0], state=state)
    order = open_order(terms())
    for event in events_of(order, sighting):
        order = transition(order, event, NOW).order
    assert order.deposits[0].state is state
    assert events_of(order, sighting) == []


def test_unconfirmed_deposit_is_a_single_event() -> None:
    sighting = replace(Book(0).shown[0], state=DepositState.SEEN)
    assert [type(each) for each in events_of(open_order(terms()), sighting)] == [DepositSeen]


def watcher_of(book: Book, quarantine: Quarantine, now: int = NOW) -> DepositWatcher:
    anything, clock = cast("Any", book), ManualClock()
    clock.now = now
    return DepositWatcher(anything, anything, anything, anything, quarantine, clock)


@pytest.mark.parametrize("refusals", [0, 1, 2])
async def test_an_order_that_changed_in_between_is_looked_at_again(refusals: int) -> None:
    book, quarantine = Book(refusals), Quarantine()
    watcher = watcher_of(book, quarantine)

    assert await watcher.reconcile() == 2

    assert book.applied == [DepositSeen, DepositConfirmed]
    assert len(book.acknowledged) == 1
    assert quarantine.health().ok


async def test_recordable_observation_hides_no_unrecordable_one() -> None:
    book, quarantine = Book(0), Quarantine()
    with quarantine.isolate("ord_1", key(2)):
        raise ZeroDivisionError

    await watcher_of(book, quarantine).reconcile()

    assert len(book.acknowledged) == 1, "this one is on record"
    assert "ord_1" in quarantine
    assert not quarantine.health().ok


async def test_unrecordable_observation_is_retried_not_acknowledged() -> None:
    book, quarantine = Book(100), Quarantine()
    watcher = watcher_of(book, quarantine)

    await watcher.reconcile()

    assert book.acknowledged == []
    assert not quarantine.health().ok
    book.refusals = 0
    await watcher.reconcile()
    assert len(book.acknowledged) == 1
    assert quarantine.health().ok


@pytest.mark.parametrize(
    ("now", "complete", "applied"),
    [
        (NOW + HOUR - 1, False, [DepositSeen, DepositConfirmed]),
        (NOW + HOUR, False, [DepositSeen]),
        (NOW + HOUR, True, [DepositSeen, DepositConfirmed]),
    ],
)
async def test_expired_order_is_decided_with_all_deposits_or_waits(
    now: int, complete: bool, applied: list[type]
) -> None:
    book = Book(0)
    book.complete = complete
    watcher = watcher_of(book, Quarantine(), now)

    await watcher.reconcile()

    assert book.applied == applied
    is_done = DepositConfirmed in applied
    assert len(book.acknowledged) == is_done, "else it is shown again"
    assert watcher.progress.lagging == (set() if is_done else {"ord_1"})


async def test_expired_order_waits_until_each_deposit_is_recorded() -> None:
    book = Book(0)
    book.shown = [replace(book.shown[0], key=key(n)) for n in range(DEPOSITS_PER_PASS + 1)]
    watcher = watcher_of(book, Quarantine(), NOW + HOUR)

    await watcher.reconcile()
    assert book.applied == [DepositSeen] * DEPOSITS_PER_PASS
    assert watcher.progress.lagging == {"ord_1"}

    await watcher.reconcile()
    assert book.applied[DEPOSITS_PER_PASS : DEPOSITS_PER_PASS + 2] == [
        DepositSeen,
        DepositConfirmed,
    ]
