"""Spreads the work of ready requests over turns of the event loop.

asyncio runs all that is ready before it looks at timers and sockets again: two hundred requests of
5 ms that arrive together would hold it for a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

# How long work may begin without a new turn. What has begun is not interrupted.
TURN_SECONDS: Final = 0.05
# Most pieces of work that are tried in one turn: each that finds no time left costs a few us.
_MOST_TRIED: Final = 128

_Turn: TypeAlias = asyncio.Future[None]
_Queue: TypeAlias = deque[Callable[[], None]] | list[Callable[[], None]]


class Turns:
    """Admits work for TURN_SECONDS; the rest waits for later turns, and begins in its order.

    ``now`` gives monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ends_at: float | None = None  # None until work begins
        self._waiting: deque[Callable[[], None]] = deque()
        self._untimely: list[Callable[[], None]] = []  # had their turn, but no time was left
        self._count = 0  # of all that waits
        self._is_called = False

    def has_room(self) -> bool:
        """Return whether work may begin now."""
        return self._count == 0 and self._has_time()

    def wait(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later turn, after what waits already. In an event loop."""
        self._count += 1
        self._waiting.append(partial(self._do, work))
        self._call()

    async def take(self) -> None:
        """Return when there is room: at once, or in a later turn."""
        if self.has_room():
            return
        self._count += 1
        try:
            await self._turn(self._waiting)
            while not self._has_time():
                await self._turn(self._untimely)
        finally:
            self._count -= 1

    def _has_time(self) -> bool:
        now = self._now()
        if self._ends_at is None:
            self._ends_at = now + TURN_SECONDS
        return now < self._ends_at

    def _turn(self, queue: _Queue) -> _Turn:
        turn: _Turn = asyncio.get_running_loop().create_future()
        queue.append(partial(_wake, turn))
        self._call()
        return turn

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_called, self._ends_at = False, None
        self._waiting.extendleft(reversed(self._untimely))
        self._untimely.clear()
        try:
            for _ in range(min(len(self._waiting), _MOST_TRIED)):
                self._waiting.popleft()()
                if self._ends_at is not None and self._now() >= self._ends_at:
                    break
        finally:
            if self._waiting:
                self._call()

    def _do(self, work: Callable[[], None]) -> None:
        self._count -= 1
        self._has_time()  # which begins with this work, if it has not
        work()


def _wake(turn: _Turn) -> None:
    if not turn.done():
        turn.set_result(None)
