"""Reads an order's event log, and waits for its next event: a commit wakes the waits.

A wait belongs to a call and touches no order. It reads at its start and when it is woken, and a
long poll once more at its end: heartbeats of a stream read nothing. Waits of calls and of streams
share their places: once all are taken, the longest wait ends early and makes room.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, Literal, TypeVar

import structlog
from msgspec import Struct, field

from rpcsvc.domain.clients import Client
from rpcsvc.domain.events import Event
from rpcsvc.domain.order import Order
from rpcsvc.errors import RateLimited, Unavailable
from rpcsvc.store.changes import HistoryEntry
from rpcsvc.store.orders import OrderStore

LONGEST_WAIT_SECONDS: Final = 25
MOST_EVENTS: Final = 100  # of one answer
# A client has at most a quarter of the places.
_CLIENTS_THAT_FILL: Final = 4
_RETRY_SECONDS: Final = 5
# How soon events are seen that another process on the same database has committed.
POLL_SECONDS: Final = 1.0
# A wait for something that is in no event is woken with each look at the log.
_BEFORE_ALL: Final = -1

Kind = Literal["call", "stream"]
T = TypeVar("T")

log = structlog.get_logger(__name__)


class _OpenWait(Struct, eq=False):
    """A call or a stream that waits for what comes after a version of an order.

    ``is_over``: it has to end now, as if its time had passed.
    """

    kind: Kind
    order_id: str
    after: int
    customer: Client
    is_over: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """Have it end now."""
        self.is_over = True
        self.woken.set()


class Waits:
    """The waits of this process: calls that wait once, and streams that go on.

    ``most`` may wait at once, and a quarter of them for one client.
    """

    def __init__(self, store: OrderStore, most: int) -> None:
        self.most = most
        self._store = store
        # The longest wait is the first.
        self._places: dict[_OpenWait, None] = {}
        self._of_customer: Counter[Client] = Counter()
        self._of_order: dict[str, dict[_OpenWait, None]] = {}
        self._is_over = False

    @property
    def counts(self) -> Mapping[Kind, int]:
        """How many calls and streams wait now."""
        kinds = Counter(wait.kind for wait in self._places)
        return {"call": kinds["call"], "stream": kinds["stream"]}

    def require(self, client: Client) -> None:
        """Raise RateLimited if a client has no place left."""
        if self._of_customer[client.customer] >= max(1, self.most // _CLIENTS_THAT_FILL):
            raise RateLimited(
                "Too many of your calls wait for events already. Ask again without waiting, or"
                " later.",
                retry_after=_RETRY_SECONDS,
            )

    async def history(
        self, order_id: str, after: int, seconds: float, client: Client
    ) -> list[HistoryEntry]:
        """Return the order's history after a version, oldest first; wait for its first entry.

        Empty after the time limit, when it makes room for another wait, and when the service stops.
        Raises RateLimited and Unavailable.
        """
        if not seconds:
            return await self._store.history(order_id, after, MOST_EVENTS)
        with self._waiting("call", order_id, after, client) as wait:
            found = await self._next(wait, asyncio.get_running_loop().time() + seconds)
            # Safety read: a commit that woke nobody is answered at the end of the wait.
            return found or await self._store.history(order_id, after, MOST_EVENTS)

    async def follow(
        self, order_id: str, after: int, seconds: float, client: Client
    ) -> AsyncGenerator[list[HistoryEntry], None]:
        """Yield the order's history after a version, oldest first, each part as soon as it is
        there.

        Yields an empty list after the time limit without any. Ends when it makes room for another
        wait, and when the service stops. Raises RateLimited and Unavailable.
        """
        with self._waiting("stream", order_id, after, client) as wait:
            loop = asyncio.get_running_loop()
            while not wait.is_over:
                found = await self._next(wait, loop.time() + seconds)
                if found:
                    wait.after = found[-1].version
                if len(found) == MOST_EVENTS:
                    wait.woken.set()  # there may be more
                yield found

    async def _next(self, wait: _OpenWait, deadline: float) -> list[HistoryEntry]:
        """The history once there is any; empty, without a read, at the deadline and the end."""
        while await _is_woken(wait.woken, deadline) and not wait.is_over:
            wait.woken.clear()
            found = await self._store.history(wait.order_id, wait.after, MOST_EVENTS)
            if found:
                return found
        return []

    async def until(
        self, order_id: str, look: Callable[[], Awaitable[T | None]], seconds: float, client: Client
    ) -> T | None:
        """Return what ``look`` finds, once a wake of the order lets it find something.

        None after the time limit, when it makes room for another wait, when the service stops, and
        at once where the client has no place left.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        with ExitStack() as places:
            try:
                waiting = self._waiting("call", order_id, _BEFORE_ALL, client)
                wait = places.enter_context(waiting)
            except RateLimited:
                return None
            while await _is_woken(wait.woken, deadline):
                wait.woken.clear()
                found = await look()
                if found is not None or wait.is_over:
                    return found
        return None

    @contextmanager
    def _waiting(
        self, kind: Kind, order_id: str, after: int, client: Client
    ) -> Iterator[_OpenWait]:
        """Take a place for the length of the block. Raises RateLimited.

        The wait is woken at first, and at each commit of the order.
        """
        self.require(client)
        if len(self._places) >= self.most:
            longest = next(iter(self._places))
            self._free(longest)
            longest.end()
        wait = _OpenWait(kind, order_id, after, client.customer, self._is_over)
        wait.woken.set()
        self._places[wait] = None
        self._of_customer[wait.customer] += 1
        self._of_order.setdefault(order_id, {})[wait] = None
        try:
            yield wait
        finally:
            self._free(wait)
            del self._of_order[order_id][wait]
            if not self._of_order[order_id]:
                del self._of_order[order_id]

    def _free(self, wait: _OpenWait) -> None:
        """Give the place of a wait back, unless it has lost it already."""
        if wait not in self._places:
            return
        del self._places[wait]
        self._of_customer[wait.customer] -= 1
        if not self._of_customer[wait.customer]:
            del self._of_customer[wait.customer]

    def observe(self, _before: Order | None, after: Order, _event: Event | None) -> None:
        """Take note of a commit (OrderProcessor.on_commit)."""
        self.wake(after.order_id)

    def wake(self, order_id: str) -> None:
        """An event of the order was committed."""
        for wait in self._of_order.get(order_id, ()):
            wait.woken.set()

    async def follow_log(self) -> None:
        """Wake who waits for what other processes commit, until cancelled: one query for all."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._of_order:
                continue
            try:
                versions = await self._store.versions(list(self._of_order))
            except Unavailable as error:  # who waits reads the log at the end, and says so
                log.warning("event_log_read_failed", reason=error.message)
                continue
            for order_id, version in versions.items():
                seen = (wait.after for wait in self._of_order.get(order_id, ()))
                if version > min(seen, default=version):
                    self.wake(order_id)

    def end(self) -> None:
        """End all, now and from now on: the service stops."""
        self._is_over = True
        for waits in self._of_order.values():
            for wait in waits:
                wait.end()


async def _is_woken(woken: asyncio.Event, deadline: float) -> bool:
    """Return whether it is set before the deadline, in seconds of the event loop's clock."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await woken.wait()
    return woken.is_set()
