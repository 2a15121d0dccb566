"""Holding the lease: taking it, renewing it, and its expiry by the holder's own clock."""

from __future__ import annotations

import asyncio

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.store.leases import (
    ASK_MS,
    MARGIN_MS,
    RENEW_MS,
    SETTLER,
    HeldLease,
    Lease,
    LeaseKeeper,
    Leases,
    LeaseTaken,
)

LASTS_MS = 10_000


class ScriptedLeases(Leases):
    """Leases with scripted answers, each after ``takes_ms``; time passes by waiting only."""

    def __init__(self, answers: list[int | bool | None], takes_ms: int = 0) -> None:
        self.answers = answers
        self.takes_ms = takes_ms
        self.now = 0
        self.asked_at: list[int] = []
        self.released: list[int] = []
        self.taken_over: list[int | None] = []

    def now_ms(self) -> int:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.now += round(seconds * 1000)

    def _answer(self) -> int | bool | None:
        self.asked_at.append(self.now)
        self.now += self.takes_ms
        return self.answers.pop(0)

    async def take(
        self, _name: str, _holder: str, _lasts_ms: int | None, over: int | None = None
    ) -> int | None:
        self.taken_over.append(over)
        return self._answer()

    async def renew(self, _name: str, _token: int, _lasts_ms: int) -> bool:
        found = self._answer()
        if found is None:
            raise Unavailable("no database")
        return bool(found)

    async def release(self, _name: str, token: int) -> None:
        self.released.append(token)

    async def held(self, _name: str) -> HeldLease | None:
        if self.answers[:1] != [None]:
            return None
        self._answer()
        return HeldLease("another", 1)

    def keeper(self, lasts_ms: int | None = LASTS_MS) -> LeaseKeeper:
        return LeaseKeeper(self, "me", lasts_ms, now_ms=self.now_ms, pause=self.pause)


async def test_standby_asks_until_the_lease_is_free() -> None:
    leases = ScriptedLeases([None, None, 7])
    lease = await leases.keeper().take(asyncio.Event())
    assert (lease.name, lease.token) == (SETTLER, 7)
    assert leases.asked_at == [0, ASK_MS, 2 * ASK_MS]


async def test_standby_looks_while_another_one_holds_the_lease() -> None:
    leases, looked_at = ScriptedLeases([None, None, 7]), list[int]()

    async def look() -> HeldLease | None:
        looked_at.append(leases.now)
        return None

    assert (await leases.keeper().take(asyncio.Event(), look)).token == 7
    assert looked_at == [0, ASK_MS]


async def test_standby_takes_over_the_lease_that_its_watch_names() -> None:
    class Held(ScriptedLeases):
        async def held(self, _name: str) -> HeldLease | None:
            return HeldLease("another", 1)

    async def look() -> HeldLease | None:
        return HeldLease("another", 1) if leases.now == 2 * ASK_MS else None

    leases = Held([2])
    lease = await leases.keeper().take(asyncio.Event(), look)
    assert (lease.token, leases.asked_at, leases.taken_over) == (2, [2 * ASK_MS], [1])


async def test_time_counts_from_before_the_question() -> None:
    leases = ScriptedLeases([1], takes_ms=4_000)
    lease = await leases.keeper().take()
    leases.now = LASTS_MS - MARGIN_MS - 1
    assert lease.has_time()
    assert lease.left_ms() == MARGIN_MS + 1
    leases.now += 1
    assert not lease.has_time()


async def test_lease_without_end_always_has_time() -> None:
    leases = ScriptedLeases([1])
    async with leases.keeper(None).held() as lease:
        leases.now = 10**12
        assert lease.has_time()
        assert lease.left_ms() is None
    assert leases.released == []


async def test_renewal_that_fails_is_tried_again_while_time_runs_out() -> None:
    leases = ScriptedLeases([1, None, None, None, None, True, False])
    keeper = leases.keeper()
    lease = await keeper.take()
    had_time: list[bool] = []
    pause = leases.pause

    async def poll(seconds: float) -> None:
        await pause(seconds)
        had_time.append(lease.has_time())

    keeper._pause = poll
    await keeper.renew(lease, LASTS_MS)
    assert leases.asked_at == [n * RENEW_MS for n in range(7)]
    assert had_time == [True, True, True, False, False, True]
    assert lease.lost.is_set()
    assert not lease.has_time()


async def test_lease_is_released_at_the_end() -> None:
    leases = ScriptedLeases([3, *[True] * 1000])
    async with leases.keeper().held():
        pass
    assert leases.released == [3]


async def test_lost_lease_stays_lost() -> None:
    lease = Lease(SETTLER, 1, 0, lambda: 0)
    lease.lose()
    lease.extend(10**12)
    assert not lease.has_time()


class Gone(ScriptedLeases):
    """Leases on a database that is unreachable at first."""

    async def held(self, name: str) -> HeldLease | None:
        if self.now < 5 * ASK_MS:
            raise Unavailable("no database")
        return await super().held(name)


async def test_standby_outlives_a_database_that_is_away() -> None:
    leases = Gone([1])
    lease = await leases.keeper().take(asyncio.Event())
    assert (lease.token, leases.now) == (1, 5 * ASK_MS)


async def test_start_without_a_database_does_not_wait() -> None:
    with pytest.raises(Unavailable):
        await Gone([1]).keeper().take()


async def test_process_that_does_not_wait_names_the_holder() -> None:
    with pytest.raises(LeaseTaken, match="another"):
        await ScriptedLeases([None]).keeper().take()


async def test_standby_that_is_stopped_gives_up() -> None:
    stop = asyncio.Event()

    class Stopped(ScriptedLeases):
        async def pause(self, seconds: float) -> None:
            await super().pause(seconds)
            stop.set()

    with pytest.raises(LeaseTaken):
        await Stopped([None] * 9).keeper().take(stop)


async def test_lease_taken_by_another_in_between_is_awaited() -> None:
    class Raced(ScriptedLeases):
        async def held(self, _name: str) -> HeldLease | None:
            return None

    leases = Raced([None, None, 5])
    lease = await leases.keeper().take(asyncio.Event())
    assert (lease.token, leases.now) == (5, 2 * ASK_MS)
