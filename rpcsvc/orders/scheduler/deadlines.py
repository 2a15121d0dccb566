"""Passes the deadlines of orders that are due, ends price locks that the rate has broken, and
reservations for deposits that did not come.

Where deposits decide what happens at a deadline, it waits until the deposit scan has passed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.deposit_rules import breaking_rate
from rpcsvc.domain.events import DeadlinePassed, ImpossibleTransition, LockBroken
from rpcsvc.domain.order import OnDeadline
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.ports.venue import RateSource
from rpcsvc.orders.processor import OrderProcessor, Quarantine
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

DEADLINES_PER_TICK = 200

LOCKS_PER_TICK = 200
EXPIRED_PER_TICK = 200


class Deadlines:
    """The deadlines of all orders. ``is_paused``: whether outgoing money is stopped."""

    def __init__(
        self,
        store: OrderStore,
        processor: OrderProcessor,
        progress: ScanProgress,
        quarantine: Quarantine,
        clock: Clock,
        *,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._processor = processor
        self._progress = progress
        self._quarantine = quarantine
        self._clock = clock
        self._is_paused = is_paused

    async def keep(self) -> int:
        """Apply the oldest deadlines that are due; returns how many."""
        now = self._clock.now_ms()
        if self._is_paused():
            # A payout may have been made that only the operator knows of: he says so (adopts it)
            # while it is planned. No refund could go out now anyway.
            overdue = await self._overdue(now, OnDeadline.REFUND)
            again = overdue
        else:
            overdue = await self._overdue(now)
            # Another event may have postponed the deadline of one that is quarantined.
            again = list(dict.fromkeys([*overdue, *self._quarantine.failing(DeadlinePassed)]))
        await asyncio.gather(*(self._pass_deadline(order_id) for order_id in again))
        return len(overdue)

    async def _overdue(self, now: int, but: OnDeadline | None = None) -> list[str]:
        """Return the oldest orders that are due, and whose deposits in time are all known."""
        behind = self._progress.lagging
        # Orders that fail, or wait, stay the oldest: others are found behind any number of them.
        most = DEADLINES_PER_TICK + len(self._quarantine.failing(DeadlinePassed)) + len(behind)
        found = await self._store.overdue(now, most, self._progress.complete_until, but=but)
        return [order_id for order_id in found if order_id not in behind]

    async def _pass_deadline(self, order_id: str) -> None:
        with self._quarantine.isolate(order_id, DeadlinePassed):
            order, now = await self._store.order(order_id), self._clock.now_ms()
            if order is None or order.deadline_at is None or order.deadline_at > now:
                return
            if not self._progress.covers(order):
                return  # it changed after it was found due
            try:
                await self._processor.apply(order_id, DeadlinePassed())
            except ImpossibleTransition as refused:
                log.warning("deadline_not_applied", order_id=order_id, reason=str(refused))


class PriceLocks:
    """Compares the locks of open orders with the current rate, once a pass of the worker."""

    def __init__(
        self,
        store: OrderStore,
        processor: OrderProcessor,
        rates: RateSource,
        quarantine: Quarantine,
        clock: Clock,
        *,
        break_bps: int,
    ) -> None:
        self._store = store
        self._processor = processor
        self._rates = rates
        self._quarantine = quarantine
        self._clock = clock
        self._break_bps = break_bps

    async def break_due(self) -> int:
        """End the locks that the current rate breaks; returns how many were due.

        Without a fresh rate nothing can be compared: health says so, and no order can be made.
        """
        try:
            rate = self._rates.rate().usdc_per_xmr
        except Unavailable:
            return 0
        now = self._clock.now_ms()
        most = LOCKS_PER_TICK + len(self._quarantine.failing(LockBroken))
        due = [
            order_id
            for direction in Direction
            for order_id in await self._store.locked_beyond(
                direction, breaking_rate(direction, rate, self._break_bps), now, most
            )
        ]
        await asyncio.gather(*(self._break(order_id, rate) for order_id in due))
        return len(due)

    async def _break(self, order_id: str, rate: int) -> None:
        with self._quarantine.isolate(order_id, LockBroken):
            try:
                await self._processor.apply(order_id, LockBroken(rate))
            except ImpossibleTransition as refused:
                log.info("price_lock_kept", order_id=order_id, reason=str(refused))


class ExpiredReservations:
    """Ends reservations for deposits that did not come in time, once that is known."""

    def __init__(self, store: OrderStore, progress: ScanProgress, clock: Clock) -> None:
        self._store = store
        self._progress = progress
        self._clock = clock

    async def end(self) -> int:
        """End the reservations that are due; returns 0, because no work follows from it."""
        lagging = self._progress.lagging
        most = EXPIRED_PER_TICK + len(lagging)  # those that wait are found again each time
        known, now = self._progress.complete_until, self._clock.now_ms()
        found = await self._store.expired_reservations(now, most, known)
        if ended := [order_id for order_id in found if order_id not in lagging]:
            await self._store.end_reservations(ended, now)
        return 0
