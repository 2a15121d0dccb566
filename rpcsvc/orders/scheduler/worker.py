"""The service's own pulse: look for deposits, keep deadlines, carry out effects.

``tick`` is one beat and may be called by hand (tests do); ``run`` beats until it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.domain.events import DeadlinePassed, ImpossibleTransition
from rpcsvc.domain.order import OnDeadline
from rpcsvc.errors import ServiceError
from rpcsvc.orders.deposits import DepositWatcher
from rpcsvc.orders.ports.health import Health
from rpcsvc.orders.ports.store import OrderStore
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.scheduler.effects import EffectRunner

log = structlog.get_logger(__name__)

TICK_MS = 200
DEADLINES_PER_TICK = 200
RESTART_SECONDS = 1
# A beat takes milliseconds, or seconds where there is much to catch up on.
LONG_BEAT_MS = 60_000


class Worker:
    """Moves orders on without anyone asking.

    ``beside``: endless loops that run as long as the beats do, each begun again if it breaks.
    """

    def __init__(
        self,
        store: OrderStore,
        processor: OrderProcessor,
        watcher: DepositWatcher,
        effects: EffectRunner,
        clock: Clock,
        *,
        is_paused: Callable[[], bool] = lambda: False,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self._store = store
        self._processor = processor
        self._watcher = watcher
        self._effects = effects
        self._quarantine = watcher.quarantine
        self._progress = watcher.progress
        self._clock = clock
        self._is_paused = is_paused
        self._each_beat: list[Callable[[], Awaitable[int]]] = []
        self._beside = tuple(beside)
        self._beat_began: int | None = None
        self._wake = asyncio.Event()
        self._failure: str | None = None
        self._stopping = False

    def on_beat(self, part: Callable[[], Awaitable[int]]) -> None:
        """Have ``part`` done in each beat, after deposits; it returns how much there was to do."""
        self._each_beat.append(part)

    def wake(self) -> None:
        """Beat now instead of at the end of the interval."""
        self._wake.set()

    def health(self) -> Health:
        """Whether the last beat went well, for every order, and none hangs."""
        lasts = 0 if self._beat_began is None else steady_ms() - self._beat_began
        if lasts >= LONG_BEAT_MS:
            return Health(False, f"The settlement loop has been in one beat for {lasts // 1000} s.")
        if self._failure is not None:
            return Health(False, self._failure)
        return self._quarantine.health()

    def watching(self) -> Health:
        """Whether deposits are seen on all networks, so that the deadlines there can be kept."""
        return self._progress.health()

    async def run(self) -> None:
        """Beat until ``stop``. A beat that fails is logged, shown by ``health``, and repeated."""
        recovered = await self._effects.recover()
        log.info("worker_started", recovered_effects=recovered)
        loops = [asyncio.create_task(_kept_up(run)) for run in self._beside]
        try:
            while not self._stopping:
                await self._beat()
                await self._pause()
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        # The last beat may have been under way when stop() looked.
        await self._effects.stop()

    async def stop(self) -> None:
        """Let the work in hand come to a committed end, or leave it to the next start."""
        self._stopping = True
        self._wake.set()
        await self._effects.stop()

    async def tick(self) -> int:
        """One beat; returns how much there was to do. Effects are started, not awaited.

        What fails keeps none of the rest waiting: then the first failure is raised in the end.
        """
        done = 0
        failures: list[Exception] = []
        for part in (self._watcher.reconcile, *self._each_beat, self._keep_deadlines,
                     self._start_effects):  # fmt: skip
            try:
                done += await part()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        for further in failures[1:]:
            if repr(further) != repr(failures[0]):  # a database that is down stops all of them
                _log_failure(further)
        if failures:
            raise failures[0]
        return done

    async def _beat(self) -> None:
        self._beat_began = steady_ms()
        try:
            await self.tick()
            self._failure = None
        except Exception as error:  # noqa: BLE001 - logged, and in health
            self._failure = _log_failure(error)
        finally:
            self._beat_began = None

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(TICK_MS / 1000):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _start_effects(self) -> int:
        return await self._effects.start_due()

    async def _keep_deadlines(self) -> int:
        now = self._clock.now_ms()
        if self._is_paused():
            # A payout may have been made that only the operator knows of: he says so (adopts it)
            # while it is planned. No refund could go out now anyway.
            overdue = await self._overdue(now, OnDeadline.REFUND)
            again = overdue
        else:
            overdue = await self._overdue(now)
            # Another event may have put off the deadline of one that is quarantined.
            again = list(dict.fromkeys([*overdue, *self._quarantine.failing(DeadlinePassed)]))
        await asyncio.gather(*(self._pass_deadline(order_id) for order_id in again))
        return len(overdue)

    async def _overdue(self, now: int, but: OnDeadline | None = None) -> list[str]:
        """The oldest that are due, and of which all is known that came in time."""
        behind = self._progress.lagging
        # Those that fail, or wait, stay the oldest: however many, others are found behind them.
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


def _log_failure(error: Exception) -> str:
    """Say in the log why a part of a beat failed; what health says of it."""
    if isinstance(error, ServiceError):
        log.warning("beat_failed", reason=error.message)
        return error.message
    log.error("beat_failed", exc_info=error)
    return "The settlement loop fails; the log has the cause."


async def _kept_up(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin again what ends by an exception: nobody else would notice that it is gone."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("background_work_failed")
            await asyncio.sleep(RESTART_SECONDS)
