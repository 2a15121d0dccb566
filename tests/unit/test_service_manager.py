"""Notifications to systemd, read from a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import LogCapture

from rpcsvc.health import Health
from rpcsvc.serving import (
    ALIVE,
    PINGS_PER_PERIOD,
    READY,
    STOPPING,
    ServiceManager,
    service_manager,
)
from tests.e2e.processes import TIMEOUT_SECONDS, free_port
from tests.logs import captured


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """The log of the module."""
    return captured(monkeypatch, "rpcsvc.serving")


@pytest.fixture
def manager_socket(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(str(tmp_path / "notify"))
        received.settimeout(TIMEOUT_SECONDS)
        yield received


def waiting(received: socket.socket) -> list[str]:
    """The messages that have arrived."""
    received.setblocking(False)
    found = []
    while True:
        try:
            found.append(received.recv(4096).decode())
        except BlockingIOError:
            return found


async def pinged(address: str, *healths: Health) -> list[float]:
    """Ping once for each health; returns the pauses between."""
    pauses: list[float] = []
    rest = iter(healths)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == len(healths):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await ServiceManager(address, 30.0, pause).ping(lambda: next(rest))
    return pauses


async def test_watchdog_is_pinged_thrice_a_period(manager_socket: socket.socket) -> None:
    pauses = await pinged(manager_socket.getsockname(), Health(True), Health(True))
    assert pauses == [30.0 / PINGS_PER_PERIOD] * 2
    assert waiting(manager_socket) == [ALIVE, ALIVE]


async def test_ping_is_withheld_while_unhealthy(
    manager_socket: socket.socket, log: LogCapture
) -> None:
    hangs = Health(False, "hangs")
    await pinged(manager_socket.getsockname(), hangs, hangs, Health(True))
    assert waiting(manager_socket) == [ALIVE]
    assert [each["reason"] for each in log.entries] == ["hangs"]


async def test_abstract_address_of_the_manager_is_understood() -> None:
    name = f"rpcsvc-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(f"\0{name}")
        service_manager({"NOTIFY_SOCKET": f"@{name}"}).notify(READY, "STATUS=Serving")
        assert waiting(received) == [f"{READY}\nSTATUS=Serving"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid() + 1)},
    ],
)
async def test_no_ping_where_no_watchdog_waits(
    manager_socket: socket.socket, environ: dict[str, str]
) -> None:
    where = {"NOTIFY_SOCKET": manager_socket.getsockname()}
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await service_manager({**environ, **where}).ping(lambda: Health(True))
    assert waiting(manager_socket) == []


def test_manager_that_is_gone_is_logged(tmp_path: Path, log: LogCapture) -> None:
    ServiceManager(str(tmp_path / "gone"), None).notify(READY)
    assert [each["event"] for each in log.entries] == ["service_manager_unreachable"]


async def test_service_says_ready_alive_and_stopping(
    tmp_path: Path, manager_socket: socket.socket
) -> None:
    port = free_port()
    environ = {
        **os.environ,
        "NOTIFY_SOCKET": manager_socket.getsockname(),
        "WATCHDOG_USEC": "300000",
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rpcsvc", "serve", "--port", str(port),
        "--data-dir", str(tmp_path / "data"), env=environ, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        heard: list[str] = []

        async def until(word: str) -> None:
            while not (heard and word in heard[-1]):
                heard.append((await asyncio.to_thread(manager_socket.recv, 4096)).decode())

        await until(READY)
        assert heard[-1] == f"{READY}\nSTATUS=Serving http://127.0.0.1:{port}"
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await until(ALIVE)
        child.send_signal(signal.SIGTERM)
        await until(STOPPING)
        assert await child.wait() == 0
        assert {each.partition("\n")[0] for each in heard} == {READY, ALIVE, STOPPING}
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
