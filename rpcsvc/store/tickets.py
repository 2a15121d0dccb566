"""Support tickets as rows: each with its messages, and the share of a day that they take.

A message goes to a ticket that is there, and counts in the transaction that adds it.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from rpcsvc.store.changes import Ticket, TicketCharge, TicketMessage, TicketsTaken
from rpcsvc.store.database import Statement, Tables, from_row, insert

# Messages that the person may write to one ticket, the first one included.
MOST_MESSAGES: Final = 20

_INSERT: Final = insert("tickets", Ticket.__struct_fields__)
_INSERT_MESSAGE: Final = insert("ticket_messages", TicketMessage.__struct_fields__)
# They find nothing where the ticket was closed, or has as many messages as it may.
_COUNT_MESSAGE: Final = (
    "UPDATE tickets SET messages = messages + 1, awaits_answer = 1"
    f" WHERE ticket_id = :ticket_id AND messages < {MOST_MESSAGES}"
)
_MARK_ANSWERED: Final = "UPDATE tickets SET awaits_answer = 0 WHERE ticket_id = :ticket_id"
_COUNT_TICKET: Final = (
    "INSERT INTO ticket_counts (day, client, tickets, bytes) VALUES (:day, :client, 1, :size)"
    " ON CONFLICT (day, client) DO UPDATE SET tickets = ticket_counts.tickets + 1,"
    " bytes = ticket_counts.bytes + excluded.bytes WHERE ticket_counts.tickets < :most_tickets"
)
_COUNT_BYTES: Final = (
    "INSERT INTO ticket_counts (day, client, tickets, bytes) VALUES (:day, '', 1, :size)"
    " ON CONFLICT (day, client) DO UPDATE SET tickets = ticket_counts.tickets + 1,"
    " bytes = ticket_counts.bytes + excluded.bytes"
    " WHERE ticket_counts.bytes + excluded.bytes <= :most_bytes"
)
_FORGET_COUNTS: Final = "DELETE FROM ticket_counts WHERE day < :day - 1"
# Rows are numbered as they come: only the oldest thousand are looked at.
_OLD: Final = (
    "SELECT ticket_id FROM (SELECT seq, ticket_id, created_at FROM tickets ORDER BY seq LIMIT 1000)"
    " AS oldest WHERE created_at < :before"
)
_DELETE_MESSAGES: Final = "DELETE FROM ticket_messages WHERE ticket_id IN :found"
_DELETE: Final = "DELETE FROM tickets WHERE ticket_id IN :found"


class StoredTicket(Struct, frozen=True):
    """A support ticket. ``messages``: how many the person has written."""

    ticket_id: str
    created_at: int
    category: str
    order_id: str | None
    session_id: str | None
    wallet_address: str | None
    message: str
    secret_hash: str
    messages: int
    awaits_answer: bool


_SELECT: Final = f"SELECT {', '.join(StoredTicket.__struct_fields__)} FROM tickets"
_SELECT_MESSAGES: Final = (
    f"SELECT {', '.join(TicketMessage.__struct_fields__)} FROM ticket_messages"
    " WHERE ticket_id = :ticket_id ORDER BY seq"
)


class TicketRows:
    """The part of OrderStore for tickets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def tickets(self) -> list[StoredTicket]:
        """The tickets, oldest first."""
        rows = await self._db.fetch(f"{_SELECT} ORDER BY seq")
        return [from_row(StoredTicket, row) for row in rows]

    async def ticket(self, ticket_id: str) -> StoredTicket | None:
        """The ticket of that id."""
        sql = f"{_SELECT} WHERE ticket_id = :ticket_id"
        row = await self._db.fetch_one(sql, ticket_id=ticket_id)
        return None if row is None else from_row(StoredTicket, row)

    async def ticket_secret_hash(self, ticket_id: str) -> str | None:
        """The hash of a ticket's secret; None: there is no such ticket."""
        sql = "SELECT secret_hash FROM tickets WHERE ticket_id = :ticket_id"
        row = await self._db.fetch_one(sql, ticket_id=ticket_id)
        return None if row is None else str(row["secret_hash"])

    async def ticket_messages(self, ticket_id: str) -> list[TicketMessage]:
        """The messages of a ticket after its first one, oldest first."""
        rows = await self._db.fetch(_SELECT_MESSAGES, ticket_id=ticket_id)
        return [from_row(TicketMessage, row) for row in rows]

    async def close_ticket(self, ticket_id: str) -> bool:
        """Delete a ticket that was dealt with; False when there is none."""
        if await self.ticket(ticket_id) is None:
            return False
        await self._delete([ticket_id])
        return True

    async def tickets_taken(self, day: int, client: str) -> TicketsTaken:
        """Tickets charged on a day of UTC."""
        sql = (
            "SELECT client, tickets, bytes FROM ticket_counts"
            " WHERE day = :day AND client IN (:client, '')"
        )
        rows = {row["client"]: row for row in await self._db.fetch(sql, day=day, client=client)}
        return TicketsTaken(
            rows[client]["tickets"] if client in rows else 0, rows[""]["bytes"] if "" in rows else 0
        )

    async def forget_tickets(self, before: int) -> int:
        """Drop tickets made before that time, the oldest first, a bounded number at once.

        Returns how many.
        """
        found = [row["ticket_id"] for row in await self._db.fetch(_OLD, before=before)]
        if found:
            await self._delete(found)
        return len(found)

    async def _delete(self, found: list[str]) -> None:
        # The ticket first: a message being added holds its row, and is then deleted, too.
        values: dict[str, Any] = {"found": found}
        await self._db.write([Statement(_DELETE, values), Statement(_DELETE_MESSAGES, values)])


def ticket_statement(ticket: Ticket) -> Statement:
    """Store a ticket."""
    return Statement(_INSERT, asdict(ticket))


def message_statements(message: TicketMessage) -> list[Statement]:
    """Add a message to its ticket. The transaction fails where the ticket takes none."""
    counted = _COUNT_MESSAGE if message.answered_by is None else _MARK_ANSWERED
    return [
        Statement(counted, {"ticket_id": message.ticket_id}, finds=True),
        Statement(_INSERT_MESSAGE, asdict(message)),
    ]


def charge_statements(charge: TicketCharge) -> list[Statement]:
    """Count a ticket or a message, and delete the counts of days before yesterday.

    The transaction fails where a count exceeds its limit.
    """
    values = charge._asdict()
    return [
        Statement(_FORGET_COUNTS, values),
        Statement(_COUNT_TICKET, values, finds=True),
        Statement(_COUNT_BYTES, values, finds=True),
    ]
