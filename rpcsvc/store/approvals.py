"""Approvals as rows: orders of clients that wait for a person, and what became of each.

At most one that holds is there for the same terms and key of a client.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from msgspec.structs import asdict

from rpcsvc.domain.clients import Approval, ApprovalState, ApprovalUse
from rpcsvc.store.database import Row, StaleWrite, Statement, Tables, from_row, insert

_COLUMNS: Final = tuple(
    "idempotency_key" if name == "key" else name for name in Approval.__struct_fields__
)
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM approvals"
_HOLDS: Final = "state IN ('pending', 'granted', 'denied')"
_SELECT_HOLDING: Final = (
    f"{_SELECT} WHERE client = :client AND terms = :terms AND idempotency_key = :key"
    f" AND {_HOLDS} AND expires_at > :now"
)
_END: Final = (
    "UPDATE approvals SET state = 'ended' WHERE client = :client AND terms = :terms"
    f" AND idempotency_key = :idempotency_key AND {_HOLDS}"
    " AND (expires_at <= :requested_at OR approval_id = :replaced)"
)
# It fails where another process has asked for the same meanwhile.
_INSERT: Final = insert("approvals", _COLUMNS)
# It finds nothing where calls at the same moment have asked for too many.
_WITHIN: Final = (
    "UPDATE approvals SET state = 'pending' WHERE approval_id = :approval_id AND :most >="
    " (SELECT count(*) FROM approvals"
    " WHERE client = :client AND state = 'pending' AND expires_at > :requested_at)"
)
_DECIDE: Final = (
    "UPDATE approvals SET state = :state, decided_at = :now, decided_by = :by"
    " WHERE approval_id = :approval_id AND expires_at > :now"
    " AND (state = 'pending' OR state = 'granted' AND :state = 'denied')"
)
_PENDING: Final = (
    "SELECT count(*) AS number FROM approvals"
    " WHERE client = :client AND state = 'pending' AND expires_at > :now"
)
_USE: Final = (
    "UPDATE approvals SET state = 'used', order_id = :order_id"
    " WHERE approval_id = :approval_id AND state = 'granted' AND expires_at > :at"
)


class ApprovalStore:
    """Keeps approvals. Raises errors.Unavailable when the database can't serve it."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def holding(self, client: str, terms: str, key: str, now: int) -> Approval | None:
        """The approval that holds for an order, whatever was decided."""
        row = await self._db.fetch_one(
            _SELECT_HOLDING, client=client, terms=terms, key=key, now=now
        )
        return None if row is None else _approval_from(row)

    async def ask(self, approval: Approval, replaced: str | None, most: int) -> None:
        """Add an approval, in place of one that no longer covers the order.

        Raises StaleWrite where more than ``most`` of the client would wait then, and StaleWrite, or
        StoreConflict, where another process has asked meanwhile.
        """
        values = _values(approval)
        end = {**values, "replaced": replaced}
        within = {**values, "most": most}
        await self._db.write(
            [
                Statement(_END, end),
                Statement(_INSERT, values),
                Statement(_WITHIN, within, finds=True),
            ]
        )

    async def decide(self, approval_id: str, state: ApprovalState, by: str, now: int) -> bool:
        """Record a person's decision, or withdraw a grant that no order has used; False where there
        is nothing to decide under that id.
        """
        values = {"approval_id": approval_id, "state": state.value, "by": by, "now": now}
        try:
            await self._db.write([Statement(_DECIDE, values, finds=True)])
        except StaleWrite:
            return False
        return True

    async def find(self, approval_id: str) -> Approval | None:
        """The approval of that id."""
        row = await self._db.fetch_one(f"{_SELECT} WHERE approval_id = :id", id=approval_id)
        return None if row is None else _approval_from(row)

    async def newest(self, limit: int) -> list[Approval]:
        """Return approvals, the newest first."""
        rows = await self._db.fetch(f"{_SELECT} ORDER BY seq DESC LIMIT :limit", limit=limit)
        return [_approval_from(row) for row in rows]

    async def pending(self, now: int, client: str) -> int:
        """How many approvals of a client wait for a person."""
        rows = await self._db.fetch(_PENDING, now=now, client=client)
        return int(rows[0]["number"])


async def approval_of(database: Tables, order_id: str) -> Approval | None:
    """The approval that an order has used up."""
    row = await database.fetch_one(f"{_SELECT} WHERE order_id = :order_id", order_id=order_id)
    return None if row is None else _approval_from(row)


def use_statement(use: ApprovalUse) -> Statement:
    """Use an approval up for one order, if it is granted and holds; else the transaction fails."""
    return Statement(_USE, use._asdict(), finds=True)


def _values(approval: Approval) -> dict[str, Any]:
    shown = orjson.dumps(approval.shown).decode()
    return {
        **asdict(approval),
        "state": approval.state.value,
        "idempotency_key": approval.key,
        "shown": shown,
    }


def _approval_from(row: Row) -> Approval:
    return from_row(
        Approval,
        row,
        key=row["idempotency_key"],
        state=ApprovalState(row["state"]),
        shown=orjson.loads(row["shown"]),
    )
