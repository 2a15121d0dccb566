"""How long data is kept: answers to idempotency keys, tickets, answers of unpaid orders.

It deletes in small steps, so that no commit of an order waits long behind one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.orders.ports.store import OrderStore

log = structlog.get_logger(__name__)

HOUR_MS: Final = 3_600_000
_MINUTE_MS: Final = 60_000
# Orders that are pruned in one transaction.
STEP: Final = 200
# The stored answers of an unpaid order, with its idempotency key: no more than this. Measured by
# tools/unpaid_orders.py.
UNPAID_BYTES: Final = 11_000


@dataclass(frozen=True, slots=True)
class Kept:
    """For how long (ms) each is kept; ``unpaid_bytes`` bounds what unpaid orders hold in all."""

    responses: int
    tickets: int
    unpaid: int
    unpaid_bytes: int


class Retention:
    """Deletes what has been kept for long enough."""

    def __init__(self, store: OrderStore, clock: Clock, kept: Kept) -> None:
        self._store = store
        self._clock = clock
        self._kept = kept
        self._next_cleaning = 0
        self._next_pruning = 0

    async def clean(self) -> int:
        """Delete what is due now. Nothing is left to do after it: it counts as no work."""
        now = self._clock.now_ms()
        if now >= self._next_pruning:
            await self._prune(now)
        if now >= self._next_cleaning:
            self._next_cleaning = now + HOUR_MS
            await self._forget(now)
        return 0

    async def _prune(self, now: int) -> None:
        """One step; the next one follows at once while there is more."""
        most = self._kept.unpaid_bytes // UNPAID_BYTES
        pruned = await self._store.prune_unpaid(now - self._kept.unpaid, most, STEP)
        if pruned < STEP:
            self._next_pruning = now + _MINUTE_MS
        if pruned:
            log.info("unpaid_orders_pruned", count=pruned)

    async def _forget(self, now: int) -> None:
        forgotten = await self._store.forget_responses(now - self._kept.responses)
        if forgotten:
            log.info("idempotency_keys_forgotten", count=forgotten)
        dropped = await self._store.forget_tickets(now - self._kept.tickets)
        if dropped:
            log.info("tickets_forgotten", count=dropped)
