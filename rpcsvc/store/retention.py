"""Deleting what is no longer needed: old answers and tickets, and what unpaid orders hold.

An order itself is never deleted. One that ended unpaid keeps its terms, deposit address and
history; a deposit that comes later finds all that a refund needs.
"""

from __future__ import annotations

from typing import Final

from rpcsvc.store.database import Statement, Tables

# Rows are numbered as they come: only the oldest thousand are looked at.
_OLD_TICKETS: Final = (
    "SELECT seq FROM (SELECT seq, created_at FROM tickets ORDER BY seq LIMIT 1000) AS oldest"
    " WHERE created_at < ?"
)
# Twice what falls due between two times of forgetting, so that what is left over gets less.
_FORGOTTEN_AT_ONCE_MS: Final = 2 * 3_600_000
_NEWEST_TOO_MANY: Final = (
    "SELECT unpaid_since FROM orders WHERE unpaid_since IS NOT NULL"
    " ORDER BY unpaid_since DESC LIMIT 1 OFFSET ?"
)
_SELECT_UNPAID: Final = (
    "SELECT seq FROM orders WHERE unpaid_since IS NOT NULL AND unpaid_since < ?"
    " ORDER BY unpaid_since LIMIT ?"
)
# A deposit may come between the query and these: they change nothing of its order then. The order
# goes last, since it says so. Its status answer is rendered for whoever asks.
_PRUNE: Final = (
    "DELETE FROM idempotency_keys WHERE order_seq ="
    " (SELECT seq FROM orders WHERE seq = ? AND unpaid_since IS NOT NULL)",
    "DELETE FROM status_views WHERE order_seq ="
    " (SELECT seq FROM orders WHERE seq = ? AND unpaid_since IS NOT NULL)",
    "UPDATE relays SET raw = x'' WHERE order_id ="
    " (SELECT order_id FROM orders WHERE seq = ? AND unpaid_since IS NOT NULL)",
    "UPDATE orders SET unpaid_since = NULL WHERE seq = ? AND unpaid_since IS NOT NULL",
)


class SqliteRetention:
    """The part of the OrderStore port that deletes."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def prune_unpaid(self, before: int, most: int, limit: int) -> int:
        """Delete the stored answers of orders that ended unpaid: of those that ended before that
        time, and of the oldest of those beyond ``most``. ``limit`` at once; returns how many.
        """
        excess = self._db.read_one(_NEWEST_TOO_MANY, (most,))
        if excess is not None:
            before = max(before, excess[0] + 1)
        found = self._db.read(_SELECT_UNPAID, (before, limit))
        if found:
            await self._db.write([Statement(sql, (seq,)) for sql in _PRUNE for (seq,) in found])
        return len(found)

    async def forget_tickets(self, before: int) -> int:
        """Drop tickets made before that time, the oldest first and so many at once.

        Returns how many.
        """
        row = self._db.read_one(f"SELECT count(*) FROM ({_OLD_TICKETS})", (before,))  # noqa: S608 - a constant
        count = int(row[0]) if row else 0
        if count:
            sql = f"DELETE FROM tickets WHERE seq IN ({_OLD_TICKETS})"  # noqa: S608 - a constant
            await self._db.write([Statement(sql, (before,))])
        return count

    async def forget_responses(self, before: int) -> int:
        """Drop idempotency keys made before that time, and within two hours of the oldest.

        Returns how many. This is called once an hour: what falls due is gone in time, but a clock
        that was set weeks ahead costs no key that a retry may still come with.
        """
        oldest = self._db.read_one("SELECT created_at FROM idempotency_keys ORDER BY seq LIMIT 1")
        if oldest is None:
            return 0
        before = min(before, oldest[0] + _FORGOTTEN_AT_ONCE_MS)
        # Keys are numbered as they come, so the old ones are those up to the first young one.
        row = self._db.read_one(
            "SELECT count(*), max(seq) FROM idempotency_keys WHERE seq < coalesce("
            "(SELECT seq FROM idempotency_keys WHERE created_at >= ? ORDER BY seq LIMIT 1),"
            " (SELECT max(seq) + 1 FROM idempotency_keys))",
            (before,),
        )
        count, last = row
        if count:
            sql = "DELETE FROM idempotency_keys WHERE seq <= ?"
            await self._db.write([Statement(sql, (last,))])
        return int(count)
