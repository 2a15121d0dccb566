"""Idle connections do not keep other clients from being served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcsvc import bootstrap, serving
from rpcsvc.http import http_server
from rpcsvc.settings import load_settings
from tests.e2e.processes import TIMEOUT_SECONDS, Server, free_port, until
from tests.e2e.swaps import SWAPS

Asked = tuple[asyncio.StreamReader, asyncio.StreamWriter]

IDLE = 1_200
REQUEST = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Limit the open files of child processes, not those of this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(IDLE + 200, hard), hard))
    yield 1_024
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(port: int, source: str) -> socket.socket:
    connection = socket.socket()
    connection.bind((source, 0))
    connection.connect(("127.0.0.1", port))
    return connection


def get(connection: socket.socket) -> bytes:
    connection.settimeout(TIMEOUT_SECONDS)
    connection.sendall(REQUEST)
    return connection.recv(64)


async def test_idle_connections_leave_room_for_others(tmp_path: Path, few_descriptors: int) -> None:
    """From six addresses: each is limited to its share, and the sum by the file descriptors."""
    server = Server(tmp_path / "data")
    try:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (few_descriptors, few_descriptors))
        await server.ready()
        with contextlib.ExitStack() as stack:
            for number in range(IDLE):
                source = f"127.0.0.{2 + number % 6}"
                stack.enter_context(connect(server.port, source))
                if number % 100 == 99:  # the system drops those beyond the backlog for a second
                    with connect(server.port, "127.0.0.100") as another:
                        assert get(another).startswith(b"HTTP/1.1 200")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(tmp_path / "data" / "rpcsvc.sock"))
                assert get(probe).startswith(b"HTTP/1.1 200")

            async def are_bounded() -> bool:
                held = len(await asyncio.to_thread(os.listdir, f"/proc/{server.pid}/fd"))
                return held <= few_descriptors - http_server.RESERVED_DESCRIPTORS // 2

            await until(are_bounded)
    finally:
        assert server.stop() == 0
    assert server.log.stat().st_size < 50_000


async def test_client_that_reads_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 0.2)
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.05)
    port = free_port()
    flags = {"data_dir": str(tmp_path), "port": port, "rate_limit.enabled": False}
    settings = load_settings(config_file=None, environ={}, flags=flags).settings
    async with bootstrap.running(settings) as up, serving.listening(up):
        connection = await asyncio.to_thread(connect, port, "127.0.0.1")
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        with connection, pytest.raises(ConnectionError):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while True:
                    await loop.sock_sendall(
                        connection, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100
                    )


POLLS = 2_000
# Networks of one customer's /59, and addresses of as many customers.
PREFIXES = [f"2001:db8:0:{number:x}::1" for number in range(17)]
ADDRESSES = [f"198.51.100.{number}" for number in range(17)]
STRANGER = "203.0.113.7"


async def asked(port: int, client: str, path: str, body: bytes = b"") -> Asked:
    """Send a request through a proxy; its answer may be read from the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    method = "POST" if body else "GET"
    writer.write(
        f"{method} /api/v1{path} HTTP/1.1\r\nhost: localhost\r\nx-forwarded-proto: https\r\n"
        f"x-forwarded-for: {client}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return reader, writer


async def answered(connection: Asked) -> tuple[int, Any]:
    """The status and the body of an answer; the connection is closed."""
    reader, writer = connection
    async with asyncio.timeout(TIMEOUT_SECONDS):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = re.findall(r"content-length: (\d+)", head)
        body = json.loads(await reader.readexactly(int(length)))
    writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("clients", "waiting", "ended", "status"),
    [(PREFIXES, 250, -1, 429), (ADDRESSES, 1_000, 0, 200)],
    ids=["one customer is refused more", "the longest of many makes room"],
)
async def test_2000_long_polls_leave_room_for_others(
    tmp_path: Path, clients: list[str], waiting: int, ended: int, status: int
) -> None:
    port = free_port()
    flags = {"data_dir": str(tmp_path), "port": port, "trusted_proxies": "127.0.0.1/32"}
    settings = load_settings(config_file=None, environ={}, flags=flags).settings
    async with bootstrap.running(settings) as up, serving.listening(up):
        swap = json.dumps(SWAPS["x2u"]).encode()
        _, made = await answered(await asked(port, STRANGER, "/agent/swap/execute", swap))
        events = f"/agent/swap/events/{made['data']['order']['orderId']}?after=1"
        polls: list[Asked] = []
        for first in range(0, POLLS, 100):
            names = [clients[number % 17] for number in range(first, first + 100)]
            asking = [asked(port, name, f"{events}&waitSec=25") for name in names]
            polls += await asyncio.gather(*asking)

        async def are_taken() -> bool:
            return up.service.waits.counts["call"] == waiting

        await until(are_taken)
        for _ in range(75):
            assert (await answered(await asked(port, STRANGER, events)))[0] == 200
        waited = await answered(await asked(port, STRANGER, f"{events}&waitSec=1"))
        assert (waited[0], waited[1]["data"]["events"]) == (200, [])
        assert (await answered(polls[ended]))[0] == status
        for _, writer in polls:
            writer.close()
