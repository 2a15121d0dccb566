"""Leases and their fencing tokens, on each backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpcsvc.store.database import StaleWrite, Statement, StoreConflict, Tables
from rpcsvc.store.leases import SETTLER, Fenced, HeldLease, Lease, LeaseLost, Leases

LONG_MS = 3_600_000
_NOTE = (
    "INSERT INTO tickets (ticket_id, created_at, category, message, secret_hash)"
    " VALUES (:name, :token, :category, '', '')"
)
_NAMES = count()


@pytest.fixture
def leases(database: Tables) -> Leases:
    return Leases(database)


async def expire(database: Tables, name: str = SETTLER) -> None:
    """Let a lease expire."""
    sql = "UPDATE leases SET expires_at = 1 WHERE name = :name AND expires_at IS NOT NULL"
    await database.write([Statement(sql, {"name": name})])


async def note(tables: Tables, name: str | None, category: str = "", token: int = 0) -> None:
    """Write a row: a ticket, since tickets are numbered in the order of commits."""
    values = {"name": name, "category": category, "token": token}
    await tables.write([Statement(_NOTE, values)])


async def noted(database: Tables, category: str = "") -> list[str]:
    """The rows in their order."""
    sql = "SELECT ticket_id FROM tickets WHERE category = :category ORDER BY seq"
    return [row["ticket_id"] for row in await database.fetch(sql, category=category)]


async def test_lease_held_is_not_taken(leases: Leases) -> None:
    assert await leases.held(SETTLER) is None
    assert await leases.take(SETTLER, "a", LONG_MS) == 1
    assert await leases.take(SETTLER, "b", LONG_MS) is None
    assert await leases.held(SETTLER) == HeldLease("a", 1)


async def test_lease_is_taken_over_from_the_token_named(leases: Leases, database: Tables) -> None:
    """The old holder's writes are refused from then on, as after any other take-over."""
    await leases.take(SETTLER, "a", LONG_MS)
    assert await leases.take(SETTLER, "b", LONG_MS, over=2) is None
    assert await leases.take(SETTLER, "b", LONG_MS, over=1) == 2
    assert await leases.take(SETTLER, "c", LONG_MS, over=1) is None, "one of two standbys has it"
    with pytest.raises(LeaseLost):
        await note(Fenced(database, Lease(SETTLER, 1)), "late")


async def test_lease_that_ended_is_held_by_nobody(leases: Leases, database: Tables) -> None:
    await leases.take(SETTLER, "a", LONG_MS)
    await expire(database)
    assert await leases.held(SETTLER) is None


@pytest.mark.parametrize("left_ms", [100, 500, 1_000, 2_000, 5_000])
async def test_lease_is_taken_no_sooner_than_it_ends(
    leases: Leases, database: Tables, left_ms: int
) -> None:
    """By the database's clock, however long the question takes."""
    await leases.take(SETTLER, "a", LONG_MS)
    shorten = "UPDATE leases SET expires_at = now_ms() + :left_ms"
    await database.write([Statement(shorten, {"left_ms": left_ms})])
    ends_at = await expiry(database)
    if await leases.held(SETTLER) is None:
        assert await time_of(database) >= ends_at
    if await leases.take(SETTLER, "b", LONG_MS) is not None:
        taken_at = await expiry(database) - LONG_MS
        assert taken_at >= ends_at


async def expiry(database: Tables) -> int:
    (row,) = await database.fetch("SELECT expires_at FROM leases")
    return int(row["expires_at"])


async def time_of(database: Tables) -> int:
    (row,) = await database.fetch("SELECT now_ms() AS now")
    return int(row["now"])


async def test_lease_of_another_name_is_free(leases: Leases) -> None:
    assert await leases.take(SETTLER, "a", LONG_MS) == 1
    assert await leases.take("other", "b", LONG_MS) == 1


async def test_lease_taken_by_many_at_once_is_given_to_one(leases: Leases) -> None:
    tokens = await asyncio.gather(*(leases.take(SETTLER, f"p{n}", LONG_MS) for n in range(20)))
    assert sorted(token for token in tokens if token is not None) == [1]


async def test_lease_that_ended_is_taken_with_the_next_token(
    leases: Leases, database: Tables
) -> None:
    first = await leases.take(SETTLER, "a", LONG_MS)
    assert first is not None
    await expire(database)
    assert await leases.renew(SETTLER, first, LONG_MS), "nobody took it: it goes on"
    assert await leases.take(SETTLER, "b", LONG_MS) is None
    await expire(database)
    assert await leases.take(SETTLER, "b", LONG_MS) == first + 1
    assert not await leases.renew(SETTLER, first, LONG_MS)
    await leases.release(SETTLER, first)
    assert await leases.take(SETTLER, "c", LONG_MS) is None


async def test_lease_released_is_free_at_once(leases: Leases) -> None:
    first = await leases.take(SETTLER, "a", LONG_MS)
    assert first is not None
    await leases.release(SETTLER, first)
    assert await leases.take(SETTLER, "b", LONG_MS) == first + 1


async def test_lease_without_end_is_for_the_owner_lock(leases: Leases) -> None:
    assert await leases.take(SETTLER, "killed", LONG_MS) == 1
    assert await leases.take(SETTLER, "started again", None) == 2
    assert await leases.take(SETTLER, "copied", LONG_MS) == 3


@pytest.mark.parametrize(
    "change", ["token = 0", "holder = 'thief'", "name = 'other'", "token = -1", "token = NULL"]
)
async def test_lease_keeps_its_token(leases: Leases, database: Tables, change: str) -> None:
    await leases.take(SETTLER, "a", LONG_MS)
    with pytest.raises(StoreConflict):
        await database.write([Statement(f"UPDATE leases SET {change}")])
    with pytest.raises(StoreConflict):
        await database.write([Statement("DELETE FROM leases")])
    assert await leases.held(SETTLER) == HeldLease("a", 1)


async def fenced(leases: Leases, database: Tables, holder: str) -> tuple[Lease, Fenced]:
    """The lease of a process, and its fenced database."""
    token = await leases.take(SETTLER, holder, LONG_MS)
    assert token is not None
    lease = Lease(SETTLER, token)
    return lease, Fenced(database, lease)


async def test_fenced_write_is_refused_after_another_took_over(
    leases: Leases, database: Tables
) -> None:
    paused, tables = await fenced(leases, database, "a")
    await note(tables, "before")
    await expire(database)
    await note(tables, "late, and nobody else there")
    _, others = await fenced(leases, database, "b")
    assert paused.has_time(), "it does not know yet"
    with pytest.raises(LeaseLost):
        await note(tables, "zombie")
    assert paused.lost.is_set()
    assert not paused.has_time()
    await note(others, "new")
    with pytest.raises(LeaseLost):
        await note(tables, "zombie")
    assert await noted(database) == ["before", "late, and nobody else there", "new"]


async def test_fenced_write_that_is_stale_stays_a_stale_write(
    leases: Leases, database: Tables
) -> None:
    lease, tables = await fenced(leases, database, "a")
    with pytest.raises(StaleWrite):
        await tables.write([Statement("UPDATE orders SET version = 2", finds=True)])
    assert not lease.lost.is_set()
    with pytest.raises(StoreConflict):
        await note(tables, None)
    await note(tables, "fine")


async def test_fenced_write_keeps_no_neighbour_back(leases: Leases, database: Tables) -> None:
    _, zombie = await fenced(leases, database, "a")
    await expire(database)
    _, tables = await fenced(leases, database, "b")
    results = await asyncio.gather(
        *(note((zombie, tables)[n % 2], str(n)) for n in range(8)), return_exceptions=True
    )
    assert [type(result) for result in results] == [LeaseLost, type(None)] * 4
    assert await noted(database) == ["1", "3", "5", "7"]


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "renew", "write", "expire", "release"]), st.integers(0, 2)),
    max_size=30,
)


class Replicas:
    """Three processes on one database, and their invariants."""

    def __init__(self, database: Tables) -> None:
        self.name = f"lease {next(_NAMES)}"
        self.db = database
        self.leases = Leases(database)
        self.held: list[Lease | None] = [None, None, None]
        self.current = 0
        self.written: list[str] = []

    async def take(self, number: int) -> None:
        token = await self.leases.take(self.name, f"{number} {next(_NAMES)}", LONG_MS)
        if token is not None:
            assert token == self.current + 1
            self.current, self.held[number] = token, Lease(self.name, token)

    async def renew(self, number: int) -> None:
        lease = self.held[number]
        if lease is not None:
            renewed = await self.leases.renew(self.name, lease.token, LONG_MS)
            assert renewed == (lease.token == self.current)

    async def write(self, number: int) -> None:
        lease = self.held[number]
        if lease is None:
            return
        name = f"{self.name}, {len(self.written)} by {lease.token}"
        try:
            await note(Fenced(self.db, lease), name, self.name, lease.token)
        except LeaseLost:
            assert lease.token < self.current
        else:
            assert lease.token == self.current
            self.written.append(name)

    async def expire(self, _number: int) -> None:
        await expire(self.db, self.name)

    async def release(self, number: int) -> None:
        lease = self.held[number]
        if lease is not None:
            await self.leases.release(self.name, lease.token)


async def test_only_the_latest_holder_writes(database: Tables) -> None:
    await examples(database, STEPS, one_by_one)


async def one_by_one(replicas: Replicas, steps: list[Step]) -> None:
    for name, number in steps:
        await getattr(replicas, name)(number)
    assert await noted(replicas.db, replicas.name) == replicas.written


async def test_writes_and_takeovers_at_once_are_in_the_order_of_tokens(database: Tables) -> None:
    """In no interleaving is a write of an older token committed after one of a newer token."""
    await examples(database, st.integers(1, 12), all_at_once)


async def all_at_once(replicas: Replicas, writes: int) -> None:
    name, database = replicas.name, replicas.db
    first = await replicas.leases.take(name, "a", LONG_MS)
    assert first is not None
    await expire(database, name)
    old = Fenced(database, Lease(name, first))

    async def take_over() -> None:
        second = await replicas.leases.take(name, "b", LONG_MS)
        assert second == first + 1
        await note(Fenced(database, Lease(name, second)), f"{name} 2", name, second)

    jobs = [note(old, f"{name} 1 {number}", name, first) for number in range(writes)]
    jobs.insert(writes // 2, take_over())
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), LeaseLost}
    found = await noted(database, name)
    assert found[-1] == f"{name} 2"
    assert len(found) == results.count(None)


Drawn = TypeVar("Drawn")


async def examples(
    database: Tables,
    strategy: st.SearchStrategy[Drawn],
    check: Callable[[Replicas, Drawn], Coroutine[Any, Any, None]],
) -> None:
    """Run the check on generated examples, all on one database, each with its own lease."""
    loop = asyncio.get_running_loop()

    def run(drawn: Drawn) -> None:
        asyncio.run_coroutine_threadsafe(check(Replicas(database), drawn), loop).result(60)

    tried = settings(
        max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    await asyncio.to_thread(tried(given(strategy)(run)))
