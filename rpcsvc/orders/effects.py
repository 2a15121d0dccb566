"""Carrying out effects after their commit, each until it is done, and again after a crash.

Effects of different transfers run side by side; the schedule is kept in memory because the
effects themselves are in the store: ``recover`` finds them all again. What does not live here:
how a transfer is sent (payouts.py).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterable

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.effects import AdvanceTransfer, Effect, PriceLateDeposit
from rpcsvc.domain.events import Repriced
from rpcsvc.domain.transition import ImpossibleTransition
from rpcsvc.errors import Unavailable
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.ports import OrderStore, PendingEffect, RateSource
from rpcsvc.orders.processor import OrderProcessor

log = structlog.get_logger(__name__)

MAX_BACKOFF_MS = 60_000
MAX_AT_ONCE = 64


class EffectRunner:
    """Runs pending effects when they are due."""

    def __init__(
        self,
        store: OrderStore,
        processor: OrderProcessor,
        payouts: Payouts,
        rates: RateSource,
        clock: Clock,
        *,
        poll_ms: int,
    ) -> None:
        self._store = store
        self._processor = processor
        self._payouts = payouts
        self._rates = rates
        self._clock = clock
        self._poll_ms = poll_ms
        self._due: list[tuple[int, int, PendingEffect]] = []
        self._order = itertools.count()
        self._known: set[PendingEffect] = set()
        self._attempts: dict[PendingEffect, int] = {}
        self._running: set[asyncio.Task[None]] = set()
        processor.on_effects(self.schedule)

    def schedule(self, order_id: str, effects: Iterable[Effect]) -> None:
        """Have the effects run as soon as there is room."""
        for effect in effects:
            self._push(PendingEffect(order_id, effect), self._clock.now_ms())

    def recover(self) -> int:
        """Schedule everything that the store says is pending; returns how many there are."""
        pending = self._store.pending_effects()
        for effect in pending:
            self._push(effect, self._clock.now_ms())
        return len(pending)

    def start_due(self) -> int:
        """Start the effects whose time has come; returns how many were started."""
        started = 0
        now = self._clock.now_ms()
        while self._due and self._due[0][0] <= now and len(self._running) < MAX_AT_ONCE:
            _, _, pending = heapq.heappop(self._due)
            task = asyncio.create_task(self._run(pending), name=f"effect {pending.order_id}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            started += 1
        return started

    async def drain(self) -> None:
        """Wait until no effect is running."""
        while self._running:
            await asyncio.wait(self._running)

    def _push(self, pending: PendingEffect, due: int) -> None:
        if pending not in self._known:
            self._known.add(pending)
            heapq.heappush(self._due, (due, next(self._order), pending))

    async def _run(self, pending: PendingEffect) -> None:
        try:
            done = await self._carry_out(pending)
        except Unavailable as error:
            log.warning("effect_postponed", order_id=pending.order_id, reason=error.message)
            done = False
        except Exception:
            # Whatever broke, the effect is still committed: keep trying and tell the operator.
            log.exception("effect_failed", order_id=pending.order_id)
            done = False
        self._known.discard(pending)
        if done:
            self._attempts.pop(pending, None)
        else:
            self._push(pending, self._clock.now_ms() + self._delay(pending))

    async def _carry_out(self, pending: PendingEffect) -> bool:
        if isinstance(pending.effect, AdvanceTransfer):
            return await self._payouts.advance(pending.order_id, pending.effect)
        return await self._reprice(pending.order_id, pending.effect)

    async def _reprice(self, order_id: str, effect: PriceLateDeposit) -> bool:
        event = Repriced(self._rates.rate().usdc_per_xmr)
        try:
            await self._processor.apply(order_id, event, done=(effect,), done_if_void=True)
        except ImpossibleTransition as refused:
            log.info("reprice_is_void", order_id=order_id, reason=str(refused))
        return True

    def _delay(self, pending: PendingEffect) -> int:
        """Milliseconds to the next try: doubling from the engine's poll interval."""
        attempt = self._attempts.get(pending, 0)
        self._attempts[pending] = attempt + 1
        return min(self._poll_ms << min(attempt // 8, 16), MAX_BACKOFF_MS)
