"""Support tickets, and what they took of each client's budget, as rows."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Final

from rpcsvc.orders.ports.store import Ticket, TicketCharge
from rpcsvc.store.database import Statement, Tables, insert

_INSERT: Final = insert("tickets", [field.name for field in fields(Ticket)])
_COUNT: Final = (
    "INSERT INTO ticket_counts (day, client, tickets, bytes) VALUES (:day, :client, 1, :size)"
    " ON CONFLICT (day, client) DO UPDATE SET tickets = ticket_counts.tickets + 1,"
    " bytes = ticket_counts.bytes + excluded.bytes"
)
_FORGET_COUNTS: Final = "DELETE FROM ticket_counts WHERE day < :day"
# Rows are numbered as they come: only the oldest thousand are looked at.
_OLD: Final = (
    "SELECT seq FROM (SELECT seq, created_at FROM tickets ORDER BY seq LIMIT 1000) AS oldest"
    " WHERE created_at < :before"
)


class SqlTickets:
    """The part of the OrderStore port that is about tickets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def tickets_taken(self, day: int) -> dict[str, tuple[int, int]]:
        """Tickets and bytes that each client was charged on a day of UTC."""
        sql = "SELECT client, tickets, bytes FROM ticket_counts WHERE day = :day"
        rows = await self._db.fetch(sql, day=day)
        return {row["client"]: (row["tickets"], row["bytes"]) for row in rows}

    async def forget_tickets(self, before: int) -> int:
        """Drop tickets made before that time, the oldest first and so many at once.

        Returns how many.
        """
        found = [row["seq"] for row in await self._db.fetch(_OLD, before=before)]
        if found:
            sql = "DELETE FROM tickets WHERE seq IN :found"
            await self._db.write([Statement(sql, {"found": found})])
        return len(found)


def ticket_statement(ticket: Ticket) -> Statement:
    """Keep a ticket."""
    return Statement(_INSERT, asdict(ticket))


def charge_statements(charge: TicketCharge) -> list[Statement]:
    """Count a ticket, and forget the days before."""
    values = charge._asdict()
    return [Statement(_FORGET_COUNTS, values), Statement(_COUNT, values)]
