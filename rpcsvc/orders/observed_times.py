"""Observed times of settled orders, read from the store at most once a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from rpcsvc.clock import Clock, day_of
from rpcsvc.domain.settle_times import ObservedTime, SwapKind, observed_time
from rpcsvc.errors import Unavailable
from rpcsvc.store.orders import OrderStore

_KEPT_MS: Final = 60_000


class ObservedTimes:
    """The observed time of each kind of swap.

    Each order settles some minutes after its deposit and is one of many samples, so a minute's age
    changes nothing that a user would decide by; a query for each quote would cost more. They are
    not known while the store can't be read: a price needs none of them.
    """

    def __init__(self, store: OrderStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._found: Mapping[SwapKind, ObservedTime | None] = {}
        self._read_at: int | None = None
        self._reading = asyncio.Lock()

    async def of(self, kind: SwapKind) -> ObservedTime | None:
        """Return the observed time of a kind; None below the least samples, and if not known."""
        if not self._is_fresh():
            async with self._reading:
                if not self._is_fresh():
                    await self._read()
        return self._found.get(kind)

    def _is_fresh(self) -> bool:
        return self._read_at is not None and abs(self._clock.now_ms() - self._read_at) < _KEPT_MS

    async def _read(self) -> None:
        now, found = self._clock.now_ms(), {}
        with suppress(Unavailable):
            counts = await self._store.settle_times(day_of(now))
            found = {kind: observed_time(each) for kind, each in counts.items()}
        self._found, self._read_at = found, now
