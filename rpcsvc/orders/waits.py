"""Reads an order's event log, and waits for its next event: a commit wakes the waits.

A wait belongs to a call and touches no order. It reads at its start and when it is woken, and a
long poll once more at its end: heartbeats of a stream read nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeVar

import structlog

from rpcsvc.domain.events import Event
from rpcsvc.domain.order import Order
from rpcsvc.domain.unfunded import ADDRESS, Client
from rpcsvc.errors import RateLimited, Unavailable
from rpcsvc.store.changes import HistoryEntry
from rpcsvc.store.orders import OrderStore

LONGEST_WAIT_SECONDS: Final = 25
MOST_EVENTS: Final = 100  # of one answer
MOST_WAITS: Final = 10_000
MOST_WAITS_OF_ADDRESS: Final = 200
_RETRY_SECONDS: Final = 5
# How soon events are seen that another process on the same database has committed.
POLL_SECONDS: Final = 1.0
# A wait for something that is in no event is woken with each look at the log.
_BEFORE_ALL: Final = -1

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Room:
    """How many may wait at once, in all and of one client address."""

    def __init__(self, most: int, most_of_address: int) -> None:
        self._most = most
        self._most_of_address = most_of_address
        self._of_client: Counter[Client] = Counter()
        self.count = 0

    def require(self, client: Client) -> None:
        """Raise RateLimited if there is none left for this client."""
        is_greedy = client.kind == ADDRESS and self._of_client[client] >= self._most_of_address
        if is_greedy or self.count >= self._most:
            raise RateLimited(
                "Too many calls wait for events already. Ask again without waiting, or later.",
                retry_after=_RETRY_SECONDS,
            )

    @contextmanager
    def taken(self, client: Client) -> Iterator[None]:
        """Take a place for the length of the block. Raises RateLimited."""
        self.require(client)
        self._of_client[client] += 1
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]


class Waits:
    """The waits of this process, by order: calls that wait once, and streams that go on."""

    def __init__(
        self, store: OrderStore, calls: Room | None = None, streams: Room | None = None
    ) -> None:
        self._store = store
        self._calls = calls or Room(MOST_WAITS, MOST_WAITS_OF_ADDRESS)
        self.streams = streams or Room(MOST_WAITS, MOST_WAITS_OF_ADDRESS)
        self._waiting: dict[str, dict[asyncio.Event, int]] = {}
        self._is_over = False

    @property
    def count(self) -> int:
        """How many calls and streams wait now."""
        return self._calls.count + self.streams.count

    async def history(
        self, order_id: str, after: int, seconds: float, client: Client
    ) -> list[HistoryEntry]:
        """The order's history after a version, oldest first; waits for the first of it.

        Empty after so many seconds, and when the service stops. Raises RateLimited and Unavailable.
        """
        if not seconds:
            return await self._store.history(order_id, after, MOST_EVENTS)
        with self._calls.taken(client), self._watching(order_id, after) as woken:
            deadline = asyncio.get_running_loop().time() + seconds
            found = await self._next(order_id, after, woken, deadline)
            # Safety read: a commit that woke nobody is answered at the end of the wait.
            return found or await self._store.history(order_id, after, MOST_EVENTS)

    async def follow(
        self, order_id: str, after: int, seconds: float, client: Client
    ) -> AsyncGenerator[list[HistoryEntry], None]:
        """The order's history after a version, oldest first, each part as soon as it is there.

        An empty list after so many seconds without any. Ends when the service stops. Raises
        RateLimited and Unavailable.
        """
        with self.streams.taken(client), self._watching(order_id, after) as woken:
            loop = asyncio.get_running_loop()
            while not self._is_over:
                found = await self._next(order_id, after, woken, loop.time() + seconds)
                if found:
                    after = self._waiting[order_id][woken] = found[-1].version
                if len(found) == MOST_EVENTS:
                    woken.set()  # there may be more
                yield found

    async def _next(
        self, order_id: str, after: int, woken: asyncio.Event, deadline: float
    ) -> list[HistoryEntry]:
        """The history once there is any; empty at the deadline, without a read, and at a stop."""
        while await _is_woken(woken, deadline):
            woken.clear()
            found = await self._store.history(order_id, after, MOST_EVENTS)
            if found or self._is_over:
                return found
        return []

    async def until(
        self, order_id: str, look: Callable[[], Awaitable[T | None]], seconds: float, client: Client
    ) -> T | None:
        """What ``look`` finds, once a wake of the order lets it find something.

        None after so many seconds, when the service stops, and at once where no more may wait.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        with ExitStack() as waiting:
            try:
                waiting.enter_context(self._calls.taken(client))
            except RateLimited:
                return None
            woken = waiting.enter_context(self._watching(order_id, _BEFORE_ALL))
            while await _is_woken(woken, deadline):
                woken.clear()
                found = await look()
                if found is not None or self._is_over:
                    return found
        return None

    @contextmanager
    def _watching(self, order_id: str, after: int) -> Iterator[asyncio.Event]:
        """Set at first, and at each commit of the order, for the length of the block."""
        wait = asyncio.Event()
        wait.set()
        self._waiting.setdefault(order_id, {})[wait] = after
        try:
            yield wait
        finally:
            del self._waiting[order_id][wait]
            if not self._waiting[order_id]:
                del self._waiting[order_id]

    def observe(self, _before: Order | None, after: Order, _event: Event | None) -> None:
        """Take note of a commit (OrderProcessor.on_commit)."""
        self.wake(after.order_id)

    def wake(self, order_id: str) -> None:
        """An event of the order was committed."""
        for wait in self._waiting.get(order_id, ()):
            wait.set()

    async def follow_log(self) -> None:
        """Wake who waits for what other processes commit, until cancelled: one query for all."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._waiting:
                continue
            try:
                versions = await self._store.versions(list(self._waiting))
            except Unavailable as error:  # who waits reads the log at the end, and says so
                log.warning("event_log_read_failed", reason=error.message)
                continue
            for order_id, version in versions.items():
                if version > min(self._waiting.get(order_id, {}).values(), default=version):
                    self.wake(order_id)

    def end(self) -> None:
        """Wake all, now and from now on: the service stops."""
        self._is_over = True
        for waits in self._waiting.values():
            for wait in waits:
                wait.set()


async def _is_woken(woken: asyncio.Event, deadline: float) -> bool:
    """Whether it is set before the deadline, in seconds of the event loop's clock."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await woken.wait()
    return woken.is_set()
