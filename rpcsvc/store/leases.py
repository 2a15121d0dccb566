"""Leases as rows, and ``Fenced``: a database whose writes need the lease.

A write checks the lease's token in its own transaction. Taking the lease waits for a running
commit; a later write finds another token and is rolled back.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Final

from rpcsvc.orders.lease import HeldLease, Lease, LeaseLost
from rpcsvc.orders.ports.store import StaleWrite
from rpcsvc.store.database import Query, Row, Statement, Tables

_SELECT: Final = "SELECT holder, token FROM leases WHERE name = :name"
_HELD: Final = f"{_SELECT} AND expires_at > now_ms()"
_ADD: Final = (
    "INSERT INTO leases (name, holder, token, expires_at) VALUES (:name, :holder, 0, 0)"
    " ON CONFLICT DO NOTHING"
)
# A lease without an end comes from a copied SQLite database; nobody holds it.
_TAKE: Final = (
    "UPDATE leases SET holder = :holder, token = token + 1, expires_at = now_ms() + :lasts_ms"
    " WHERE name = :name AND (expires_at IS NULL OR expires_at <= now_ms())"
)
_TAKE_FOR_GOOD: Final = (
    "UPDATE leases SET holder = :holder, token = token + 1, expires_at = NULL WHERE name = :name"
)
_RENEW: Final = (
    "UPDATE leases SET expires_at = now_ms() + :lasts_ms WHERE name = :name AND token = :token"
)
_RELEASE: Final = "UPDATE leases SET expires_at = 0 WHERE name = :name AND token = :token"
_FENCE: Final = "SELECT token FROM leases WHERE name = :name AND token = :token"


class SqlLeases:
    """The Leases port (orders/lease.py)."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def take(self, name: str, holder: str, lasts_ms: int | None) -> int | None:
        """Take the lease and return its token; None while another process holds it."""
        taking = _TAKE_FOR_GOOD if lasts_ms is None else _TAKE
        values = {"name": name, "holder": holder, "lasts_ms": lasts_ms}
        try:
            await self._db.write(
                [Statement(_ADD, values, first=True), Statement(taking, values, finds=True)]
            )
        except StaleWrite:
            return None
        row = await self._db.fetch_one(_SELECT, name=name)
        # If this process was paused for longer than the lease lasts, another one may have taken it.
        return int(row["token"]) if row is not None and row["holder"] == holder else None

    async def renew(self, name: str, token: int, lasts_ms: int) -> bool:
        """Extend the lease from now; False when another process has taken it."""
        values = {"name": name, "token": token, "lasts_ms": lasts_ms}
        try:
            await self._db.write([Statement(_RENEW, values, finds=True)])
        except StaleWrite:
            return False
        return True

    async def release(self, name: str, token: int) -> None:
        """Release the lease, so that another process can take it at once."""
        await self._db.write([Statement(_RELEASE, {"name": name, "token": token})])

    async def held(self, name: str) -> HeldLease | None:
        """The current holder; None if the lease is free."""
        row = await self._db.fetch_one(_HELD, name=name)
        return None if row is None else HeldLease(row["holder"], row["token"])


class Fenced:
    """A database under a lease: once another process takes the lease, every write is refused."""

    def __init__(self, database: Tables, lease: Lease) -> None:
        self._db = database
        self._lease = lease
        values = {"name": lease.name, "token": lease.token}
        self._fence = Statement(_FENCE, values, first=True, finds=True)

    def fetch(self, sql: str, **values: Any) -> Coroutine[Any, Any, list[Row]]:
        """As Tables says."""
        return self._db.fetch(sql, **values)

    def fetch_one(self, sql: str, **values: Any) -> Coroutine[Any, Any, Row | None]:
        """As Tables says."""
        return self._db.fetch_one(sql, **values)

    def fetch_together(self, queries: Sequence[Query]) -> Coroutine[Any, Any, list[list[Row]]]:
        """As Tables says."""
        return self._db.fetch_together(queries)

    async def write(self, statements: Sequence[Statement]) -> None:
        """As Tables says. Raises LeaseLost if the lease was lost: nothing was written, and no later
        write will be.
        """
        if self._lease.lost.is_set():
            raise LeaseLost
        try:
            await self._db.write([self._fence, *statements])
        except StaleWrite:
            if await self._is_lost():
                self._lease.lose()
                raise LeaseLost from None
            raise

    async def _is_lost(self) -> bool:
        row = await self._db.fetch_one(_SELECT, name=self._lease.name)
        return row is None or bool(row["token"] != self._lease.token)
