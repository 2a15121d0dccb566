"""Spreads the work of ready requests over turns of the event loop.

asyncio runs all that is ready before it looks at timers and sockets again: two hundred requests of
5 ms that arrive together would hold it for a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

# How long requests may work in one turn of the loop; one that has begun is not interrupted.
TURN_SECONDS: Final = 0.05


class Turns:
    """Admits work to the current turn of the loop until TURN_SECONDS are used.

    The rest waits, and begins in later turns: one piece in each, in the order of its arrival.
    ``now`` gives monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ends_at: float | None = None
        self._waiting: deque[Callable[[], None]] = deque()

    def has_room(self) -> bool:
        """Return whether work may begin in this turn. In an event loop."""
        if self._ends_at is None:
            self._begin()
            return True
        return not self._waiting and self._now() < self._ends_at

    def wait(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later turn, after what waits already. Only if there is no room."""
        self._waiting.append(work)

    async def take(self) -> None:
        """Return in a turn that has room: at once, if this one has."""
        if not self.has_room():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.wait(partial(_wake, turn))
            await turn

    def _begin(self) -> None:
        self._ends_at = self._now() + TURN_SECONDS
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._ends_at = None
        if self._waiting:
            self._begin()
            self._waiting.popleft()()


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
