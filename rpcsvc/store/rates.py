"""Published rates as rows, and the check of the last one within an order's transaction.

Times are the database's, so clocks of replicas are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rpcsvc.orders.ports.rates import RateBounds, RateRow
from rpcsvc.orders.ports.store import StaleWrite
from rpcsvc.store.database import Row, Statement, Tables

KEPT_MS: Final = 7 * 86_400_000

_LAST: Final = "seq = (SELECT max(seq) FROM rates)"
_IS_FRESH: Final = "published_at > now_ms() - :max_age_ms"
_PUBLISH: Final = (
    "INSERT INTO rates (published_at, usdc_per_xmr, token) SELECT now_ms(), :rate, :token"
    f" WHERE NOT EXISTS (SELECT 1 FROM rates WHERE {_LAST} AND token <> :token AND {_IS_FRESH}"
    " AND usdc_per_xmr NOT BETWEEN :least AND :most)"
)
_PRUNE: Final = "DELETE FROM rates WHERE published_at < now_ms() - :kept_ms"
_AGREES: Final = (
    f"SELECT seq FROM rates WHERE {_LAST} AND {_IS_FRESH} AND usdc_per_xmr BETWEEN :least AND :most"
)
_ROW: Final = (
    "SELECT usdc_per_xmr, published_at, now_ms() - published_at AS age_ms, token FROM rates"
)
_SELECT_LAST: Final = f"{_ROW} WHERE {_LAST}"
_SELECT_RECENT: Final = (
    f"{_ROW} WHERE seq IN (SELECT max(seq) FROM rates WHERE published_at > now_ms() - :span_ms"
    " GROUP BY published_at / :step_ms) ORDER BY seq"
)


class SqlRates:
    """The RateRows port (orders/ports/rates.py)."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def publish(self, rate: int, token: int, bounds: RateBounds) -> bool:
        """Add a rate; False if it deviates too far from a fresh rate of another token."""
        row = {"rate": rate, "token": token, **bounds._asdict()}
        try:
            await self._db.write(
                [Statement(_PUBLISH, row, finds=True), Statement(_PRUNE, {"kept_ms": KEPT_MS})]
            )
        except StaleWrite:
            return False
        return True

    async def last(self) -> RateRow | None:
        """The newest row."""
        row = await self._db.fetch_one(_SELECT_LAST)
        return None if row is None else _rate_row(row)

    async def recent(self, span_ms: int, step_ms: int) -> Sequence[RateRow]:
        """The last row of each step of the span that ends now, oldest first."""
        rows = await self._db.fetch(_SELECT_RECENT, span_ms=span_ms, step_ms=step_ms)
        return [_rate_row(row) for row in rows]


def rate_statements(bounds: RateBounds | None) -> Iterator[Statement]:
    """Statements that abort the transaction unless the last published rate is fresh and within
    bounds.
    """
    if bounds is not None:
        yield Statement(_AGREES, bounds._asdict(), finds=True)


def _rate_row(row: Row) -> RateRow:
    return RateRow(row["usdc_per_xmr"], row["published_at"], row["age_ms"], row["token"])
