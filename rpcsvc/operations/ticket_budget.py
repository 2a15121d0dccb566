"""How many tickets are taken in a day, from each client and in all.

Counted in memory: a restart begins a new day's budget. The size in all bounds what a day may add to
the database; the worker deletes what is old.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from rpcsvc.errors import Unavailable
from rpcsvc.orders.unfunded import Client

_DAY_MS: Final = 86_400_000
_CLIENTS: Final = 10_000


class TicketBudget:
    """At most ``per_client`` tickets of a client and ``size`` bytes in all per day of UTC.

    The UNIX socket, which is the operator's, is not counted. Nor is any client beyond the first
    10,000 of a day: ``size`` bounds these.
    """

    def __init__(self, per_client: int, size: int) -> None:
        self._per_client = per_client
        self._size = size
        self._day = -1
        self._of_client: Counter[Client] = Counter()
        self._taken = 0

    def charge(self, client: Client, size: int, now: int) -> None:
        """Take one ticket of ``size`` bytes at ``now`` (ms). Raises Unavailable."""
        if client.kind == "socket":
            return
        if now // _DAY_MS != self._day:
            self._day = now // _DAY_MS
            self._of_client.clear()
            self._taken = 0
        if self._of_client[client] >= self._per_client:
            raise _refusal(f"More than {self._per_client} tickets a day.", now)
        if self._taken + size > self._size:
            raise _refusal("No more tickets can be taken today.", now)
        if client in self._of_client or len(self._of_client) < _CLIENTS:
            self._of_client[client] += 1
        self._taken += size


def _refusal(message: str, now: int) -> Unavailable:
    return Unavailable(
        f"{message} Write again tomorrow, or to the contact that the service publishes.",
        retry_after=-(-(_DAY_MS - now % _DAY_MS) // 1_000),
    )
