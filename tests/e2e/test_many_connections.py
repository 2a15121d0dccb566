"""Idle connections do not keep other clients from being served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcsvc import bootstrap, serving
from rpcsvc.http import http_server
from rpcsvc.settings import load_settings
from tests.e2e.processes import TIMEOUT_SECONDS, Server, free_port, until

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
