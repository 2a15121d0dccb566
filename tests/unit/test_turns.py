"""Work that is ready at once is spread over turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rpcsvc.http.turns import TURN_SECONDS, Turns


class Loop:
    """A clock that work moves, and a count of the loop's turns."""

    def __init__(self) -> None:
        self.now, self.turn = 100.0, 0
        self.turns = Turns(lambda: self.now)
        self.began: list[tuple[str, int]] = []

    def work(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.began.append((name, self.turn))
            self.now += seconds

        return run

    def run(self, name: str, seconds: float) -> None:
        work = self.work(name, seconds)
        if self.turns.has_room():
            work()
        else:
            self.turns.wait(work)

    async def handle(self, name: str, seconds: float) -> None:
        await self.turns.take()
        self.work(name, seconds)()

    async def count(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
            self.turn += 1


async def test_quick_work_is_done_in_one_turn() -> None:
    loop = Loop()
    await loop.turns.take()
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(loop.handle(str(number), TURN_SECONDS / 100))
        group.create_task(loop.count(5))

    assert loop.began == [(str(number), 0) for number in range(50)]


async def test_long_work_waits_for_a_turn_of_its_own() -> None:
    loop = Loop()
    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(loop.handle(name, TURN_SECONDS))
        group.create_task(loop.count(10))

    assert [name for name, _ in loop.began] == list("abcd")
    turns = [turn for _, turn in loop.began]
    assert turns == sorted(set(turns))


async def test_waiting_work_keeps_its_order() -> None:
    loop = Loop()
    loop.run("first", 0)
    waiting = asyncio.create_task(loop.handle("second", 0))
    await asyncio.sleep(0)
    loop.run("third", 0)
    await waiting
    await loop.count(3)

    assert [name for name, _ in loop.began] == ["first", "second", "third"]


async def test_time_that_is_used_up_comes_back_with_a_turn() -> None:
    loop = Loop()
    await loop.turns.take()
    assert loop.turns.has_room()
    loop.now += TURN_SECONDS
    assert not loop.turns.has_room()
    await loop.turns.take()
    assert loop.turns.has_room()


async def test_one_piece_of_work_begins_in_each_turn_at_least() -> None:
    """Whatever else the loop does takes none of the time of what waits."""
    loop = Loop()

    async def keep_busy() -> None:
        for _ in range(20):
            loop.now += 10 * TURN_SECONDS
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(loop.handle(name, TURN_SECONDS))
            group.create_task(keep_busy())
        group.create_task(loop.count(12))

    assert [name for name, _ in loop.began] == list("abcd")
    assert [turn for _, turn in loop.began][-1] <= 10


async def test_thousands_that_wait_keep_their_order() -> None:
    loop = Loop()
    async with asyncio.TaskGroup() as group:
        for number in range(2_000):
            group.create_task(loop.handle(str(number), TURN_SECONDS / 100))

    assert [name for name, _ in loop.began] == [str(number) for number in range(2_000)]


async def test_cancelled_wait_stops_no_other() -> None:
    loop = Loop()
    names = ("first", "cancelled", "other")
    tasks = [asyncio.create_task(loop.handle(name, TURN_SECONDS)) for name in names]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await tasks[2]

    assert [name for name, _ in loop.began] == ["first", "other"]
