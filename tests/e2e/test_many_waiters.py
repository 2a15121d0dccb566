"""5,000 callers that wait for events of one service: their CPU and memory, and their answers."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Server, call, cpu_seconds, server, until
from tests.e2e.swaps import SWAPS

STREAMS, POLLS = 2_500, 2_500
ROOM = 12_000
QUIET_SECONDS = 12.0
ADDRESSES = 20  # a client may have a quarter of the places
LIMITS = {
    "RPCSVC_LIMITS__CONNECTIONS": str(ROOM),
    "RPCSVC_LIMITS__CONNECTIONS_PER_ADDRESS": str(ROOM),
}
# The measured figures are in docs/use/events.md.
MOST_CPU_SHARE = 0.05
MOST_BYTES_EACH = 64 * 1024

Open = tuple[asyncio.StreamReader, asyncio.StreamWriter]

pytestmark = pytest.mark.slow


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Allow this process and its children an open file for each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < ROOM + 1_000:
        pytest.skip(f"needs {ROOM + 1_000} open files, may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (ROOM + 1_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def opened(at: Server, number: int, order_id: str) -> Open:
    """A caller that waits for the order's next event, on a stream or by a long poll."""
    source = f"127.0.0.{2 + number % ADDRESSES}"
    reader, writer = await asyncio.open_connection("127.0.0.1", at.port, local_addr=(source, 0))
    path = f"/api/v1/agent/swap/events/{order_id}?after=1"
    accept = "text/event-stream"
    if number >= STREAMS:
        path, accept = f"{path}&waitSec=25", "application/json"
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: {accept}\r\n\r\n"
    writer.write(request.encode())
    if number < STREAMS:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    return reader, writer


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def waiting_are(at: Server, number: int) -> bool:
    """Whether so many callers wait."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        found = (await reader.read(-1)).decode()
        writer.close()
    lines = [line for line in found.splitlines() if line.startswith("rpcsvc_waits{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines) == number


async def test_5000_waiting_callers_cost_next_to_nothing(tmp_path: Path, descriptors: None) -> None:
    async with server(tmp_path / "data", environ=LIMITS) as at:
        made = [(await call(at, "swap.create", SWAPS["x2u"]))["data"]["order"] for _ in range(2)]
        quiet, busy = (order["orderId"] for order in made)
        idle = cpu_seconds(at.pid)
        await asyncio.sleep(QUIET_SECONDS)  # the CPU time of this span is measured
        idle = cpu_seconds(at.pid) - idle
        before = resident_bytes(at.pid)
        waiting: list[Open] = []
        for first in range(0, STREAMS + POLLS, 100):
            batch = range(first, first + 100)
            waiting += await asyncio.gather(*(opened(at, number, quiet) for number in batch))
        subject = [await opened(at, number, busy) for number in (0, STREAMS)]
        await until(lambda: waiting_are(at, STREAMS + POLLS + 2))
        spent = cpu_seconds(at.pid)
        await asyncio.sleep(QUIET_SECONDS)
        spent = cpu_seconds(at.pid) - spent
        share = (spent - idle) / QUIET_SECONDS
        each = (resident_bytes(at.pid) - before) / len(waiting)
        print(f"{len(waiting)} waiting: {share:.2%} of a core, {each / 1024:.1f} KiB each")
        assert share < MOST_CPU_SHARE
        assert each < MOST_BYTES_EACH

        await call(at, "sandbox.fund", {"orderId": busy})
        for reader, _ in subject:
            async with asyncio.timeout(30):
                await reader.readuntil(b"deposit.seen")
        for _, writer in (*waiting, *subject):
            writer.transport.abort()
        await until(lambda: waiting_are(at, 0))
        state = (await call(at, "swap.status", {"orderId": quiet}))["state"]
        assert state == "waiting_for_funding"
