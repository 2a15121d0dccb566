"""The service's own pulse: look for deposits, keep deadlines, carry out effects.

``tick`` is one beat and may be called by hand (tests do); ``run`` beats until it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.events import DeadlinePassed
from rpcsvc.domain.transition import ImpossibleTransition
from rpcsvc.errors import ServiceError
from rpcsvc.orders.deposits import DepositWatcher
from rpcsvc.orders.effects import EffectRunner
from rpcsvc.orders.ports import Health, OrderStore
from rpcsvc.orders.processor import OrderProcessor

log = structlog.get_logger(__name__)

DEADLINES_PER_TICK = 200
HOUR_MS = 3_600_000
RESTART_SECONDS = 1


class Worker:
    """Moves orders on without anyone asking."""

    def __init__(
        self,
        store: OrderStore,
        processor: OrderProcessor,
        watcher: DepositWatcher,
        effects: EffectRunner,
        clock: Clock,
        *,
        tick_ms: int,
        keep_responses_ms: int,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self._store = store
        self._processor = processor
        self._watcher = watcher
        self._effects = effects
        self._aside = watcher.aside
        self._clock = clock
        self._tick_ms = tick_ms
        self._keep_responses_ms = keep_responses_ms
        self._beside = tuple(beside)
        self._next_cleaning = 0
        self._wake = asyncio.Event()
        self._failure: str | None = None
        self._stopping = False

    def wake(self) -> None:
        """Beat now instead of at the end of the interval."""
        self._wake.set()

    def health(self) -> Health:
        """Whether the last beat went well, for every order."""
        if self._failure is not None:
            return Health(False, self._failure)
        return self._aside.health()

    async def run(self) -> None:
        """Beat until ``stop``. A beat that fails is logged, shown by ``health``, and repeated."""
        recovered = self._effects.recover()
        log.info("worker_started", recovered_effects=recovered)
        beside = [asyncio.create_task(_kept_up(run)) for run in self._beside]
        try:
            while not self._stopping:
                await self._beat()
                await self._pause()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        # The last beat may have started some after stop() looked.
        await self._effects.drain()

    async def stop(self) -> None:
        """Let the work in hand come to a committed end."""
        self._stopping = True
        self._wake.set()
        await self._effects.drain()

    async def tick(self) -> int:
        """One beat; returns how much there was to do. Effects are started, not awaited."""
        found = await self._watcher.reconcile()
        overdue = await self._keep_deadlines()
        await self._forget_old_responses()
        return found + overdue + self._effects.start_due()

    async def _beat(self) -> None:
        try:
            await self.tick()
            self._failure = None
        except ServiceError as error:
            self._failure = error.message
            log.warning("beat_failed", reason=error.message)
        except Exception:
            self._failure = "The settlement loop fails; the log has the cause."
            log.exception("beat_failed")

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._tick_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _keep_deadlines(self) -> int:
        overdue = self._store.overdue(self._clock.now_ms(), DEADLINES_PER_TICK)
        await asyncio.gather(*(self._pass_deadline(order_id) for order_id in overdue))
        return len(overdue)

    async def _pass_deadline(self, order_id: str) -> None:
        order = self._store.order(order_id)
        if order is None or order.deadline_at is None or order.deadline_at > self._clock.now_ms():
            return
        with self._aside.isolate(order_id):
            try:
                await self._processor.apply(order_id, DeadlinePassed())
            except ImpossibleTransition as refused:
                log.warning("deadline_not_applied", order_id=order_id, reason=str(refused))

    async def _forget_old_responses(self) -> None:
        now = self._clock.now_ms()
        if now < self._next_cleaning:
            return
        self._next_cleaning = now + HOUR_MS
        forgotten = await self._store.forget_responses(now - self._keep_responses_ms)
        if forgotten:
            log.info("idempotency_keys_forgotten", count=forgotten)


async def _kept_up(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin again what ends by an exception: nobody else would notice that it is gone."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("background_work_failed")
            await asyncio.sleep(RESTART_SECONDS)
