"""An HTTP connection: its turns of the event loop, and its use of aiohttp."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
from aiohttp import web

from rpcsvc.http import connection as module
from rpcsvc.http.connection import ENDS_WITH_CALLER, TURN_SECONDS, HttpConnection, Turns


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
    """Other work of the loop takes none of the time of waiting requests."""
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


async def test_bytes_that_are_next_do_not_pause_reading() -> None:
    """Bytes that wait behind others do: more of them could arrive before their turn."""
    loop, server = Loop(), web.Server(Parked()._in_connection)
    await loop.turns.take()
    loop.now += TURN_SECONDS
    transports = [Mock(), Mock()]
    for transport in transports:
        transport.get_extra_info.return_value = None
        connection = HttpConnection(
            server, refuse, loop.turns, asyncio.Event(), loop=asyncio.get_running_loop()
        )
        connection.connection_made(transport)
        connection.data_received(GET)

    assert [transport.pause_reading.called for transport in transports] == [False, True]
    await loop.count(2)
    await server.shutdown(0)


# What the connection uses of aiohttp's without a promise, and what depends on it.
PRIVATE = {
    "_waiter": "is_idle: an idle connection can be closed for a new one",
    "_messages": "is_idle: a connection whose request waits for its handler is not closed",
    "_force_close": "a body that is still arriving is received while the service stops",
    "_reading_paused": "a held connection does not undo the flow control of a body",
}
SOURCE = Path(module.__file__)


def private_attributes(path: Path) -> set[str]:
    """The attributes with an underscore that a module reads or sets of anything."""
    found = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def slots_of_aiohttp() -> set[str]:
    return {name for kind in web.RequestHandler.__mro__ for name in getattr(kind, "__slots__", ())}


@pytest.mark.parametrize("name", PRIVATE)
def test_aiohttp_still_has_the_private_attribute(name: str) -> None:
    assert name in slots_of_aiohttp(), (
        f"aiohttp changed {name}. What depends on it: {PRIVATE[name]}"
    )


def test_connection_uses_the_known_private_attributes_only() -> None:
    assert private_attributes(SOURCE) & slots_of_aiohttp() == set(PRIVATE)


def test_only_connection_uses_private_attributes_of_aiohttp() -> None:
    others = [path for path in SOURCE.parent.rglob("*.py") if path != SOURCE]
    # Those whose names the service itself has in its own classes are left out.
    telling = slots_of_aiohttp() - {"_close", "_cache", "_manager", "_loop"}

    assert {
        path.name: used for path in others if (used := private_attributes(path) & telling)
    } == {}


class Parked:
    """A connection over TCP, whose handler waits for ``go_on``."""

    def __init__(self, *, ends_with_caller: bool = False) -> None:
        self.go_on, self.entered, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.was_cancelled = False
        self.ends_with_caller = ends_with_caller
        self.connection: HttpConnection | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Yield the client's streams; ``connection`` is the server's side."""
        loop = asyncio.get_running_loop()
        manager = web.Server(self._in_connection)
        self.connection = HttpConnection(
            manager, refuse, Turns(lambda: 0.0), asyncio.Event(), loop=loop
        )
        connection = self.connection
        server = await loop.create_server(lambda: connection, "127.0.0.1")
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await until(lambda: connection.transport is not None)
        try:
            yield reader, writer
        finally:
            self.go_on.set()
            writer.close()
            server.close()
            await manager.shutdown(5)

    async def _in_connection(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self.connection is not None
        return await self.connection.handle(cast("web.Request", request), self._handle)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.ends_with_caller:
            request[ENDS_WITH_CALLER] = True
        self.entered.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.ended.set()
        return web.Response(text="done")


def refuse(_request: web.Request, _error: Exception) -> web.Response:
    return web.Response(status=400)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110 - no event tells of the state of a connection
            await asyncio.sleep(0)


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_connection_is_idle_between_requests_only() -> None:
    parked = Parked()
    async with parked.open() as (reader, writer):
        connection = parked.connection
        assert connection is not None
        await until(connection.is_idle)
        writer.write(GET[:9])  # part of a head
        await asyncio.sleep(0.01)
        assert connection.is_idle()
        assert not connection.has_asked()

        writer.write(GET[9:])
        await parked.entered.wait()
        assert not connection.is_idle()
        assert connection.has_asked()

        parked.go_on.set()
        assert b"done" in await reader.readuntil(b"done")
        await until(connection.is_idle)


async def test_connection_with_a_request_to_handle_is_not_idle() -> None:
    parked = Parked()
    async with parked.open():
        connection = parked.connection
        assert connection is not None
        await until(connection.is_idle)

        connection.data_received(GET)

        assert not parked.entered.is_set()
        assert not connection.is_idle()


async def test_connection_has_asked_by_a_request_that_is_unreadable() -> None:
    parked = Parked()
    async with parked.open() as (reader, writer):
        writer.write(b"\x00\r\n\r\n")

        assert (await reader.readline()).split()[1] == b"400"
        assert parked.connection is not None
        assert parked.connection.has_asked()


@pytest.mark.parametrize("ends_with_caller", [True, False])
async def test_only_a_wait_is_cancelled_when_its_caller_hangs_up(ends_with_caller: bool) -> None:
    parked = Parked(ends_with_caller=ends_with_caller)
    async with parked.open() as (_, writer):
        writer.write(GET)
        await parked.entered.wait()

        writer.close()
        assert parked.connection is not None
        connection = parked.connection
        await until(lambda: connection.transport is None)
        await asyncio.sleep(0)
        parked.go_on.set()
        await parked.ended.wait()

    assert parked.was_cancelled == ends_with_caller
