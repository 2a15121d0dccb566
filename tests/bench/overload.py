"""Twice the rate that the service can serve, from 64 connections: latencies, refusals and memory.

Half of the requests make orders, half read the status of one. Each connection has its own schedule,
and sends late while it waits for an answer: none is pipelined. Every answer is read.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from tests.bench import seeding
from tests.bench.driver import HOST, Server, succeeded
from tests.bench.report import Reading, Report

CONNECTIONS: Final = 64
_CARRIED_SHARE: Final = 0.2  # of the time, to measure the rate that can be served
_KEPT: Final = 3
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]{1,9})\r\n", re.IGNORECASE)


@dataclass
class _Seen:
    """The answers of all connections; latencies in seconds, from sending."""

    status: array[float] = field(default_factory=lambda: array("d"))
    creates: int = 0
    late: int = 0
    orders: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def refuse(self, what: str) -> None:
        """Record an unexpected answer."""
        if len(self.wrong) < _KEPT:
            self.wrong.append(what[:400])

    @property
    def answers(self) -> int:
        """The number of answers."""
        return len(self.status) + self.creates


class Overload:
    """One run against one server."""

    def __init__(self, server: Server, order_ids: list[str], found: Report) -> None:
        self._server = server
        self._order_ids = order_ids
        self._report = found
        self._creates = seeding.create_requests()

    async def run(self, seconds: float) -> None:
        """Measure the rate that can be served, then send twice as much; read the memory."""
        carried_for = seconds * _CARRIED_SHARE
        carried = (await self._load(carried_for, 0.0)).answers / carried_for
        memory = [self._megabytes()]
        asked = _Seen()
        for _ in range(2):  # start, middle, end
            await self._load(seconds / 2, CONNECTIONS / (2 * carried), asked)
            memory.append(self._megabytes())
        self._print(carried, asked, seconds, memory)

    async def _load(self, seconds: float, interval: float, seen: _Seen | None = None) -> _Seen:
        seen = seen or _Seen()
        until = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(CONNECTIONS):
                group.create_task(self._connection(number, until, interval, seen))
        return seen

    async def _connection(self, number: int, until: float, interval: float, seen: _Seen) -> None:
        try:
            await self._requests(number, until, interval, seen)
        except (OSError, EOFError) as error:
            seen.refuse(f"a connection was lost: {error!r}")

    async def _requests(self, number: int, until: float, interval: float, seen: _Seen) -> None:
        reader, writer = await asyncio.open_connection(HOST, self._server.port)
        statuses = _statuses(self._order_ids[number::CONNECTIONS])
        due = time.perf_counter() + interval * number / CONNECTIONS
        turn = number
        while (now := time.perf_counter()) < until:
            if due > now:
                await asyncio.sleep(due - now)
            elif interval:
                seen.late += 1
            due = max(due + interval, now)
            turn += 1
            if turn % 2:
                order_id, request = next(statuses)
                await self._status(order_id, request, reader, writer, seen)
            else:
                await self._create(next(self._creates), reader, writer, seen)
        writer.close()

    async def _status(
        self,
        order_id: str,
        request: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seen: _Seen,
    ) -> None:
        sent = time.perf_counter()
        order = await _order_of(request, reader, writer, seen)
        seen.status.append(time.perf_counter() - sent)
        if order is not None and order["orderId"] != order_id:
            seen.refuse(f"the status of {order_id} was answered with {order['orderId']}")

    async def _create(
        self,
        request: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seen: _Seen,
    ) -> None:
        order = await _order_of(request, reader, writer, seen)
        seen.creates += 1
        if order is None:
            return
        if order["orderId"] in seen.orders:
            seen.refuse(f"two creates were answered with {order['orderId']}")
        seen.orders.add(order["orderId"])

    def _megabytes(self) -> float:
        return self._server.resident_bytes() / 1e6

    def _print(self, carried: float, seen: _Seen, seconds: float, memory: list[float]) -> None:
        self._report.problems += [f"overload: {what}" for what in seen.wrong]
        ordered = sorted(seen.status)
        p99 = ordered[int(0.99 * len(ordered))] * 1000 if ordered else 0.0
        growth = memory[2] / memory[1] if memory[1] else 0.0
        self._report.readings += [
            Reading("overload", "p99 of status, overloaded", "ms", (p99,), under=250.0),
            Reading("overload-memory", "memory, end over middle", "x", (growth,), under=1.05),
        ]
        shown = ", ".join(f"{megabytes:.1f}" for megabytes in memory)
        self._report.remarks += [
            f"overload: {carried:,.0f}/s carried, {2 * carried:,.0f}/s offered,"
            f" {seen.answers / seconds:,.0f}/s answered, {seen.late:,} sent late",
            f"overload: resident MB at start, middle, end: {shown}",
        ]


def _statuses(order_ids: list[str]) -> Iterator[tuple[str, bytes]]:
    while True:
        for order_id in order_ids:
            params = {"orderId": order_id}
            yield order_id, seeding.http_request("service.swap.status", params, order_id)


async def _order_of(
    request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: _Seen
) -> dict[str, Any] | None:
    """The order in the answer; None for a failure, which is recorded."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    size = _LENGTH.search(head)
    body = await reader.readexactly(int(size[1]) if size else 0)
    if not succeeded(head, body):
        seen.refuse(f"a request failed: {head!r} {body!r}")
        return None
    return dict(orjson.loads(body)["result"]["data"]["order"])
