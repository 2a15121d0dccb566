"""The worker loop: scans for deposits, applies deadlines, runs effects.

``tick`` is one pass and may be called by hand (tests do); ``run`` repeats it until it is stopped.
Its steps beyond deposits are here: deadlines of orders, which wait for the deposit scan where
deposits decide; price locks that the rate has broken; and expired reservations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.domain.deposit_rules import breaking_rate
from rpcsvc.domain.events import DeadlinePassed, ImpossibleTransition, LockBroken
from rpcsvc.domain.order import OnDeadline
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import ServiceError, Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.ports.venue import RateSource
from rpcsvc.orders.processor import OrderProcessor, Quarantine
from rpcsvc.orders.scheduler.effects import EffectRunner
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

# From the beginning of a pass to that of the next one; and the least between two, for others.
TICK_MS = 200
LEAST_PAUSE_MS = 50
RESTART_SECONDS = 1
# A pass takes milliseconds, or seconds where there is much to catch up on.
LONG_PASS_MS = 60_000

# One step of a pass; returns how much there was to do.
Step = Callable[[], Awaitable[int]]
# An endless loop.
Loop = Callable[[], Coroutine[Any, Any, None]]

DEADLINES_PER_TICK = 200
LOCKS_PER_TICK = 200
EXPIRED_PER_TICK = 200


class Worker:
    """Runs the service's periodic work on orders.

    A pass takes ``steps`` in turn, then starts the effects of ``runners`` that are due. ``loops``
    run as long as the worker does, each begun again if it breaks.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        quarantine: Quarantine,
        *,
        runners: Sequence[EffectRunner] = (),
        loops: Sequence[Loop] = (),
    ) -> None:
        self._steps = tuple(steps)
        self._quarantine = quarantine
        self._runners = tuple(runners)
        self._loops = tuple(loops)
        self._pass_began: int | None = None
        self._wake = asyncio.Event()
        self._failure: str | None = None
        self._stopping = False

    def beside(self, loop: Loop) -> None:
        """Have one more loop run as long as the worker does."""
        self._loops += (loop,)

    async def recover(self) -> int:
        """Schedule the effects that an earlier process left; returns how many."""
        return sum([await runner.recover() for runner in self._runners])

    async def drain(self) -> None:
        """Wait until no effect is running."""
        for runner in self._runners:
            await runner.drain()

    async def wake_transfer(self, transfer_id: str) -> bool:
        """Move a transfer to the next pass instead of after its pause; whether it waited."""
        return any(runner.wake_transfer(transfer_id) for runner in self._runners)

    def wake(self) -> None:
        """Start the next pass now instead of at the end of the interval."""
        self._wake.set()

    def health(self) -> Health:
        """Return whether the last pass succeeded for every order and no pass hangs."""
        stall = self.stall()
        if not stall.ok:
            return stall
        if self._failure is not None:
            return Health(False, self._failure)
        return self._quarantine.health()

    def stall(self) -> Health:
        """Return the health: not ok while one pass lasts too long."""
        lasts = 0 if self._pass_began is None else steady_ms() - self._pass_began
        if lasts < LONG_PASS_MS:
            return Health(True)
        return Health(
            False,
            f"One pass of the worker loop has lasted {lasts // 1000} s so far. Check the disk"
            " and the daemons, then restart the service.",
        )

    async def run(self) -> None:
        """Repeat passes until ``stop``. ``health`` shows a failed one until the next is done."""
        recovered = await self.recover()
        log.info("worker_started", recovered_effects=recovered)
        loops = [asyncio.create_task(_kept_up(run)) for run in self._loops]
        try:
            while not self._stopping:
                next_at = steady_ms() + TICK_MS
                await self._pass_once()
                await self._pause(max(next_at - steady_ms(), LEAST_PAUSE_MS))
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        # The last pass may have been under way when stop() was called.
        await self._stop_runners()

    async def stop(self) -> None:
        """Let running work end with a commit, or leave it to the next start."""
        self._stopping = True
        self._wake.set()
        await self._stop_runners()

    async def _stop_runners(self) -> None:
        for runner in self._runners:
            await runner.stop()

    async def tick(self) -> int:
        """Make one pass; return how much there was to do. Effects are started, not awaited.

        A step that fails delays none of the others; the first failure is raised in the end.
        """
        done = 0
        failures: list[Exception] = []
        for step in (*self._steps, self._start_effects):
            try:
                done += await step()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        for further in failures[1:]:
            if repr(further) != repr(failures[0]):  # a database that is down stops all of them
                _log_failure(further)
        if failures:
            raise failures[0]
        return done

    async def _pass_once(self) -> None:
        self._pass_began = steady_ms()
        try:
            await self.tick()
            self._failure = None
        except Exception as error:  # noqa: BLE001 - logged, and in health
            self._failure = _log_failure(error)
        finally:
            self._pass_began = None

    async def _pause(self, milliseconds: int) -> None:
        try:
            async with asyncio.timeout(milliseconds / 1000):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _start_effects(self) -> int:
        return sum([await runner.start_due() for runner in self._runners])


def _log_failure(error: Exception) -> str:
    """Log why a step of a pass failed; returns what health says of it."""
    if isinstance(error, ServiceError):
        log.warning("worker_pass_failed", reason=error.message)
        return error.message
    log.error("worker_pass_failed", exc_info=error)
    return "The worker loop fails; the log has the cause."


async def _kept_up(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Restart a loop that an exception has ended: nobody else would notice."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("background_work_failed")
            await asyncio.sleep(RESTART_SECONDS)


# --- steps that time makes due -------------------------------------------------------------------


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
