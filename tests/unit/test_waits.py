"""Waits read the event log at their start and when woken: an idle order costs no reads."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, cast

import pytest

from rpcsvc.domain.clients import ADDRESS, SOCKET, Client
from rpcsvc.errors import RateLimited
from rpcsvc.orders.waits import MOST_EVENTS, Waits
from rpcsvc.store.changes import HistoryEntry
from rpcsvc.store.orders import OrderStore

HEARTBEAT = 0.01


class Log:
    """An event log in memory, which counts its reads."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.reads = 0

    async def history(self, order_id: str, after: int, limit: int) -> list[HistoryEntry]:
        self.reads += 1
        last = min(self.last.get(order_id, 0), after + limit)
        return [entry(version) for version in range(after + 1, last + 1)]


def entry(version: int) -> HistoryEntry:
    return HistoryEntry(version, 0, "DepositSeen", "awaiting_deposit", {})


def waits_on(log: Log, most: int = 1_000) -> Waits:
    return Waits(cast("OrderStore", log), most)


def at(address: str) -> Client:
    return Client(ADDRESS, address)


async def test_follow_reads_nothing_at_heartbeats() -> None:
    log = Log()
    waits = waits_on(log)
    orders, beats = [f"ord_{number}" for number in range(100)], 5

    async def followed(order_id: str) -> None:
        async with aclosing(waits.follow(order_id, 0, HEARTBEAT, SOCKET)) as parts:
            for _ in range(beats):
                assert await anext(parts) == []

    await asyncio.gather(*map(followed, orders))
    assert log.reads == len(orders)


async def test_follow_reads_once_when_woken() -> None:
    log = Log()
    waits = waits_on(log)
    async with aclosing(waits.follow("ord_1", 0, HEARTBEAT, SOCKET)) as parts:
        assert await anext(parts) == []
        for version in (1, 2):
            log.last["ord_1"] = version
            waits.wake("ord_1")
            assert [each.version for each in await anext(parts)] == [version]
            assert await anext(parts) == []
        waits.wake("ord_2")
        assert await anext(parts) == []
    assert log.reads == 3


async def test_follow_reads_on_while_parts_are_full() -> None:
    log = Log()
    log.last["ord_1"] = 2 * MOST_EVENTS + 1
    waits, sizes = waits_on(log), []
    async with aclosing(waits.follow("ord_1", 0, HEARTBEAT, SOCKET)) as parts:
        async for part in parts:
            sizes.append(len(part))
            if not part:
                break
    assert sizes == [MOST_EVENTS, MOST_EVENTS, 1, 0]


async def test_follow_misses_no_commit_while_it_reads() -> None:
    log = Log()
    waits = waits_on(log)
    read = log.history

    async def slow(*args: Any) -> list[HistoryEntry]:
        found = await read(*args)
        if log.reads == 1:
            log.last["ord_1"] = 1
            waits.wake("ord_1")
        return found

    log.history = slow  # type: ignore[assignment,method-assign]
    async with aclosing(waits.follow("ord_1", 0, 60, SOCKET)) as parts:
        async with asyncio.timeout(10):
            assert [each.version for each in await anext(parts)] == [1]


async def test_long_poll_reads_once_more_at_its_end() -> None:
    log = Log()
    waits = waits_on(log)
    waiting = asyncio.create_task(waits.history("ord_1", 0, 0.05, SOCKET))
    await asyncio.sleep(0)
    log.last["ord_1"] = 1  # no commit of this process
    assert [each.version for each in await waiting] == [1]
    assert log.reads == 2


async def test_a_stop_ends_streams() -> None:
    waits = waits_on(Log())
    async with aclosing(waits.follow("ord_1", 0, 60, SOCKET)) as parts:
        asyncio.get_running_loop().call_soon(waits.end)
        assert [part async for part in parts] == [[]]


async def test_calls_and_streams_share_their_places() -> None:
    waits = waits_on(Log(), most=8)
    somebody = at("192.0.2.1")
    call = asyncio.create_task(waits.history("ord_1", 0, 60, somebody))
    async with aclosing(waits.follow("ord_1", 0, HEARTBEAT, somebody)) as stream:
        await anext(stream)
        assert waits.counts == {"call": 1, "stream": 1}
        with pytest.raises(RateLimited):
            await waits.history("ord_1", 0, 60, somebody)
        assert await waits.history("ord_1", 0, HEARTBEAT, at("192.0.2.2")) == []
    waits.end()
    assert await call == []
    assert waits.counts == {"call": 0, "stream": 0}


async def test_networks_of_one_ipv6_customer_are_one_client() -> None:
    waits = waits_on(Log(), most=40)
    networks = [at(f"2001:db8:0:{number:x}::/64") for number in range(17)]
    calls = [asyncio.create_task(waits.history("ord_1", 0, 60, each)) for each in networks]
    refused = await asyncio.gather(*calls[10:], return_exceptions=True)
    assert all(isinstance(each, RateLimited) for each in refused)
    assert waits.counts["call"] == 10
    assert await waits.history("ord_1", 0, HEARTBEAT, at("2001:db8:1::/64")) == []
    waits.end()
    assert await asyncio.gather(*calls[:10]) == [[]] * 10


@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_longest_wait_makes_room_for_the_next(kind: str) -> None:
    log = Log()
    waits = waits_on(log, most=4)

    async def waiting(number: int) -> list[HistoryEntry]:
        client = at(f"192.0.2.{number}")
        if kind == "call":
            return await waits.history("ord_1", 0, 60, client)
        async with aclosing(waits.follow("ord_1", 0, 60, client)) as parts:
            return [entry async for part in parts for entry in part]

    tasks = [asyncio.create_task(waiting(number)) for number in range(6)]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    async with asyncio.timeout(10):
        assert await asyncio.gather(*tasks[:2]) == [[], []]
    assert done <= set(tasks[:2])
    assert sum(waits.counts.values()) == 4
    log.last["ord_1"] = 1
    waits.wake("ord_1")
    if kind == "stream":
        waits.end()
    assert all(not task.done() for task in tasks[2:])
    await asyncio.gather(*tasks[2:])
    assert sum(waits.counts.values()) == 0
