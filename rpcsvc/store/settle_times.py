"""Histograms of settle times as rows: one for each day (UTC), kind of swap and bucket."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from rpcsvc.domain.settle_times import DAYS, SettleTime, SwapKind
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


class SettleTimeRows:
    """The part of OrderStore for settle times."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def settle_times(self, day: int) -> dict[SwapKind, dict[int, int]]:
        """Return the orders by kind and bucket of the DAYS that end with ``day``."""
        found: dict[SwapKind, dict[int, int]] = defaultdict(dict)
        for row in await self._db.fetch(_SELECT, before=day - DAYS):
            found[SwapKind(row["kind"])][row["bucket"]] = int(row["orders"])
        return dict(found)


def settle_time_statements(time: SettleTime, day: int) -> list[Statement]:
    """Statements that count an order on a day, and delete the days that count no longer."""
    counted = {"kind": time.kind, "bucket": time.bucket, "day": day}
    return [Statement(_FORGET, {"before": day - DAYS}), Statement(_COUNT, counted)]
