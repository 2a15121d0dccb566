"""Polls the upstream for open orders, one after the other, until they end.

An order that can't be read is retried after a growing pause of its own; the upstream's limits and
breaker pause all of them. Orders that somebody polls get three calls of four.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Final, NamedTuple

import structlog

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.domain.events import ImpossibleTransition, UpstreamReported
from rpcsvc.domain.order import Order
from rpcsvc.errors import ServiceError
from rpcsvc.health import Health
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.upstream.engine import UpstreamEngine
from rpcsvc.settlement.upstream.requests import UpstreamResting, UpstreamStatus
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

# How often orders that other replicas made are looked for.
FIND_MS: Final = 1_000
# How long the first poll of a new order may take.
FIRST_ANSWER_MS: Final = 2_000
# An order is not asked for more often than this.
ASK_EVERY_MS: Final = 1_000
# One that could not be read is left alone for twice as long each time, up to this.
LONGEST_PAUSE_MS: Final = 300_000
# How long nobody is asked for after that: an upstream that starts again may be back by then.
AFTER_FAILURE_MS: Final = 250
# Health names the number of orders that could not be read for this long.
UNREAD_REPORTED_MS: Final = 3_600_000
# One call of this many is for the order that has waited longest, watched or not: where the limits
# leave room for watched orders only, others would wait for ever.
FOR_ALL_EVERY: Final = 4


class _Unread(NamedTuple):
    """An order that could not be read since ``since`` (ms), and how long it is left alone."""

    since: int
    pause_ms: int


class Follower:
    """Asks the upstream for the open orders."""

    def __init__(
        self, store: OrderStore, processor: OrderProcessor, upstream: UpstreamEngine, clock: Clock
    ) -> None:
        self._store = store
        self._processor = processor
        self._upstream = upstream
        self._clock = clock
        self._open: dict[str, int] = {}  # when each open order was last asked for
        self._watched: set[str] = set()
        self._unread: dict[str, _Unread] = {}
        self._find_at = 0
        self._calls = 0
        self._is_failing = False  # the last order that was asked for could not be read
        self._wake = asyncio.Event()
        self._first_asks: set[asyncio.Task[None]] = set()

    async def recover(self) -> None:
        """Follow the open orders of others; one that ended since is left once it is read."""
        for order_id in await self._store.open_relayed():
            self._open.setdefault(order_id, 0)
        self._wake.set()

    async def find(self) -> int:
        """Follow what other replicas have made, looked for once a second; returns 0: not work."""
        now = steady_ms()
        if now >= self._find_at:
            self._find_at = now + FIND_MS
            await self.recover()
        return 0

    def follow(self, order_id: str) -> None:
        """Follow a new order."""
        self._open[order_id] = self._clock.now_ms()
        self._wake.set()

    def watch(self, order_id: str) -> None:
        """A caller polls this order: give it priority."""
        if order_id in self._open:
            self._watched.add(order_id)

    async def run(self) -> None:
        """Poll one order after the other, as fast as the upstream's limits allow."""
        while True:
            if self._open:
                await asyncio.sleep(await self.ask_next() / 1000)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def ask_next(self) -> int:
        """Poll the order with the oldest answer, mostly a watched one.

        Returns how long to wait before the next call, in ms.
        """
        early = {order_id: self._early_ms(order_id) for order_id in self._turn()}
        due = {order_id for order_id, wait_ms in early.items() if not wait_ms}
        if not due:
            return min(ASK_EVERY_MS, *early.values())  # others may be due by then
        watched = self._watched & due
        self._calls += 1
        is_for_all = self._calls % FOR_ALL_EVERY == 0
        order_id = min(due if is_for_all else watched or due, key=self._open.__getitem__)
        self._watched.discard(order_id)
        # Watched orders wait for this call, for any order.
        wait_ms = await self._ask_safely(order_id, is_watched=bool(watched))
        if order_id in self._open:
            self._open[order_id] = self._clock.now_ms()
        return wait_ms

    async def ask_first(self, order_id: str) -> None:
        """Ask for an order that was just made, and wait a moment for the answer."""
        asking = asyncio.create_task(self.ask_now(order_id))
        self._first_asks.add(asking)
        asking.add_done_callback(self._first_asks.discard)
        await asyncio.wait([asking], timeout=FIRST_ANSWER_MS / 1000)

    async def ask_now(self, order_id: str) -> None:
        """Poll an open order once, where ``run`` does not. Failures are logged."""
        await self._ask_safely(order_id, is_watched=True)

    def _turn(self) -> Set[str]:
        """Return the orders from which the next one is asked for: after one that could not be read,
        those that could.

        Otherwise several unreadable orders would be failures in a row, and look like an upstream
        that is down.
        """
        readable = self._open.keys() - self._unread.keys() if self._is_failing else None
        return readable or self._open.keys()

    def _early_ms(self, order_id: str) -> int:
        """Return how long an order is left alone yet; 0 when it is due."""
        unread = self._unread.get(order_id)
        pause_ms = unread.pause_ms if unread else ASK_EVERY_MS
        early = self._open[order_id] + pause_ms - self._clock.now_ms()
        return early if 0 < early <= pause_ms else 0  # more, and the clock has gone back

    async def _ask_safely(self, order_id: str, *, is_watched: bool) -> int:
        self._is_failing = False
        wait_ms = 0
        try:
            await self._ask(order_id, is_watched=is_watched)
        except UpstreamResting as rest:
            log.warning("upstream_poll_failed", order_id=order_id, reason=rest.reason)
            wait_ms = rest.wait_ms
        except ServiceError as error:
            log.warning("upstream_poll_failed", order_id=order_id, reason=error.message)
            wait_ms = (error.retry_after or 1) * 1000
        except Exception:
            log.exception("upstream_poll_failed", order_id=order_id)
            wait_ms = ASK_EVERY_MS
        # An order that can't be read waits by itself; a report that can't be recorded pauses all.
        return AFTER_FAILURE_MS if self._is_failing else wait_ms

    async def _ask(self, order_id: str, *, is_watched: bool) -> None:
        order = await self._store.order(order_id)
        if order is None or order.terms.upstream_id is None or order.status.is_terminal:
            self._leave(order_id)
            return
        found = await self._ask_status(order, is_watched=is_watched)
        if found is not None:
            await self.take(order, found)

    async def take(self, order: Order, found: UpstreamStatus) -> Order:
        """Apply the upstream's report of an order; returns the order as committed."""
        event = UpstreamReported(found.status, found.report)
        try:
            order = await self._processor.apply(order.order_id, event, evidence=found.raw)
        except ImpossibleTransition as refused:
            order = await self._store.order(order.order_id) or order
            if found.status is not order.status:
                log.warning("upstream_report_ignored", order_id=order.order_id, reason=str(refused))
        if order.status.is_terminal:
            self._leave(order.order_id)
        return order

    async def _ask_status(self, order: Order, *, is_watched: bool) -> UpstreamStatus | None:
        try:
            found = await self._upstream.status(order.terms, is_watched=is_watched)
        except UpstreamResting:
            raise
        except Exception:
            self._is_failing = True
            if order.order_id in self._open:
                self._leave_alone(order.order_id)
            raise
        self._unread.pop(order.order_id, None)
        return found

    def _leave_alone(self, order_id: str) -> None:
        """An order could not be read: it is asked for again later, and later each time."""
        before = self._unread.get(order_id)
        if before is None:
            self._unread[order_id] = _Unread(self._clock.now_ms(), ASK_EVERY_MS)
        else:
            pause_ms = min(2 * before.pause_ms, LONGEST_PAUSE_MS)
            self._unread[order_id] = before._replace(pause_ms=pause_ms)

    def _leave(self, order_id: str) -> None:
        self._open.pop(order_id, None)
        self._unread.pop(order_id, None)
        self._watched.discard(order_id)

    def health(self) -> Health:
        """Well, with a note of the orders that could not be read for long."""
        long_ago = self._clock.now_ms() - UNREAD_REPORTED_MS
        unread = sum(each.since <= long_ago for each in self._unread.values())
        note = f"{unread} upstream orders could not be read for an hour" if unread else None
        return Health(True, note)
