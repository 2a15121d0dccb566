"""The tickets that are taken in a day, from each client and in all.

Their total size bounds what a day adds to the database. The counts are stored with the tickets, so
they hold over a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from rpcsvc.clock import day_of, ms_to_next_day
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.store import Ticket, TicketCharge

# What a ticket takes beside its texts: numbers, ids, its row and its client's count.
_ROW_BYTES: Final = 200


class TicketBudget:
    """At most ``per_client`` tickets of a client and ``size`` bytes in all per day of UTC.

    ``taken`` are the charges of the day so far, by client.
    """

    def __init__(self, per_client: int, size: int, now: int, taken: Mapping[str, tuple[int, int]]):
        self._per_client = per_client
        self._size = size
        self._day = day_of(now)
        self._of_client = Counter({client: tickets for client, (tickets, _) in taken.items()})
        self._taken = sum(size for _, size in taken.values())

    def charge(self, client: str, ticket: Ticket) -> TicketCharge:
        """Take a ticket of a client, named as it is stored. Raises Unavailable."""
        now, size = ticket.created_at, _size(ticket)
        if day_of(now) != self._day:
            self._day = day_of(now)
            self._of_client.clear()
            self._taken = 0
        if self._of_client[client] >= self._per_client:
            raise _refusal(f"More than {self._per_client} tickets a day.", now)
        if self._taken + size > self._size:
            raise _refusal("No more tickets can be taken today.", now)
        self._of_client[client] += 1
        self._taken += size
        return TicketCharge(self._day, client, size)


def _size(ticket: Ticket) -> int:
    texts = (ticket.message, ticket.category, ticket.wallet_address or "")
    return _ROW_BYTES + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _refusal(message: str, now: int) -> Unavailable:
    return Unavailable(
        f"{message} Write again tomorrow, or to the contact that the service publishes.",
        retry_after=-(-ms_to_next_day(now) // 1_000),
    )
