"""Histograms of settle times as rows, one for each day (UTC), kind of swap and bucket.

The times that they give are read at most once a minute.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from rpcsvc.clock import Clock, day_of
from rpcsvc.domain.settle_times import DAYS, ObservedTime, SettleTime, SwapKind, observed_time
from rpcsvc.errors import Unavailable
from rpcsvc.store.database import Statement, Tables

_COUNT: Final = (
    "INSERT INTO settle_times (day, kind, bucket, orders) VALUES (:day, :kind, :bucket, 1)"
    " ON CONFLICT (day, kind, bucket)"
    " DO UPDATE SET orders = settle_times.orders + 1"
)
_SELECT: Final = (
    "SELECT kind, bucket, sum(orders) AS orders FROM settle_times"
    " WHERE day > :before GROUP BY kind, bucket"
)
_FORGET: Final = "DELETE FROM settle_times WHERE day <= :before"
_KEPT_MS: Final = 60_000


async def settle_times(database: Tables, day: int) -> dict[SwapKind, dict[int, int]]:
    """Return the orders by kind and bucket of the DAYS that end with ``day``."""
    found: dict[SwapKind, dict[int, int]] = defaultdict(dict)
    for row in await database.fetch(_SELECT, before=day - DAYS):
        found[SwapKind(row["kind"])][row["bucket"]] = int(row["orders"])
    return dict(found)


def settle_time_statements(time: SettleTime, day: int) -> list[Statement]:
    """Statements that count an order on a day, and delete the days that count no longer."""
    counted = {"kind": time.kind, "bucket": time.bucket, "day": day}
    return [Statement(_FORGET, {"before": day - DAYS}), Statement(_COUNT, counted)]


class ObservedTimes:
    """The observed time of each kind of swap.

    Each order settles some minutes after its deposit and is one of many samples, so a minute's age
    changes nothing that a user would decide by; a query for each quote would cost more. They are
    not known while the database can't be read: a price needs none of them.
    """

    def __init__(self, database: Tables, clock: Clock) -> None:
        self._db = database
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
            counts = await settle_times(self._db, day_of(now))
            found = {kind: observed_time(each) for kind, each in counts.items()}
        self._found, self._read_at = found, now
