"""Ends price locks early when the rate has moved too far against the service."""

from __future__ import annotations

import asyncio

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.deposit_rules import breaking_rate
from rpcsvc.domain.events import ImpossibleTransition, LockBroken
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.rates import RateSource
from rpcsvc.orders.ports.store import OrderStore
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.quarantine import Quarantine

log = structlog.get_logger(__name__)

LOCKS_PER_TICK = 200


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
