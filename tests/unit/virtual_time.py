"""A clock for tests of concurrent waits."""

from __future__ import annotations

import asyncio
import heapq


class VirtualTime:
    """A clock that jumps to the next waiter once all tasks wait."""

    def __init__(self) -> None:
        self.now = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sequence = 0

    def now_ms(self) -> int:
        return self.now

    async def sleep_ms(self, ms: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._waiting, (self.now + ms, self._sequence, future))
        await future

    async def settle(self) -> None:
        """Run all tasks until they wait."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def pass_until(self, at: int) -> None:
        """Advance the time to ``at``."""
        await self.settle()
        while self._waiting and self._waiting[0][0] <= at:
            self.now, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
            await self.settle()
        self.now = max(self.now, at)
