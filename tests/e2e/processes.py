"""Real server processes, and calls that report when a server has died."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from rpcsvc.local_secret import operator_headers
from rpcsvc.serving import SOCKET_NAME
from tests.e2e import forking
from tests.e2e.patched import VARIABLE

SETTINGS = {
    "RPCSVC_RATE_LIMIT__ENABLED": "false",
    "RPCSVC_ORDERS__UNFUNDED_SHARE": "100",
    "RPCSVC_ORDERS__UNFUNDED_ADDRESS_TOTAL_SHARE": "100",
    "RPCSVC_ORDERS__UNFUNDED_ADDRESS_SHARE": "100",
    "RPCSVC_ORDERS__UNFUNDED_ADDRESS_ORDERS": "100000",
    "RPCSVC_ORDERS__ADDRESS_ORDERS_A_DAY": "1000000",
    "RPCSVC_SANDBOX__XMR_BLOCK_MS": "50",
    "RPCSVC_SANDBOX__USDC_BLOCK_MS": "50",
    "RPCSVC_LOG__FORMAT": "json",
}
# For events that are due at once. Only a failing test or a very busy machine waits this long.
TIMEOUT_SECONDS: Final = 180.0
POLL_SECONDS = 0.05
# Below the ephemeral ports of the system.
PORTS: Final = range(20_000, 32_000)

T = TypeVar("T")
Crash = tuple[str, str, int]


def both_sides(*steps: tuple[str, int]) -> list[Crash]:
    """A crash before and one after each of these steps."""
    return [(seam, when, n) for seam, n in steps for when in ("before", "after")]


def crash_name(value: object) -> str | None:
    """A crash in the name of a test."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else None


def free_port() -> int:
    """A free port of 127.0.0.1 that is not handed out again for a long time.

    Test processes run side by side, and some time passes before a daemon listens, or listens
    again after it was killed: each port is handed out once in a round of thousands.
    """
    path = Path(tempfile.gettempdir()) / f"rpcsvc-test-port-{os.getuid()}"
    with path.open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        number = int(last.read() or PORTS.start)
        for _ in PORTS:
            number = number + 1 if number + 1 in PORTS else PORTS.start
            if _is_free(number):
                last.truncate(0)
                last.write(str(number))
                return number
    raise AssertionError(f"no port of {PORTS} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def until(look: Callable[[], Awaitable[T | None]], *, seconds: float = TIMEOUT_SECONDS) -> T:
    """Poll ``look`` until it returns a true value; TimeoutError after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not (seen := await look()):  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(POLL_SECONDS)
        return seen


class Server:
    """One server process on a data directory, forked or new. Its log is beside it by default."""

    def __init__(
        self,
        data_dir: Path,
        *,
        crash: Crash | None = None,
        environ: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        module: str = "rpcsvc",
        is_new: bool = False,
    ) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        if crash is not None:
            module = "tests.e2e.crashing"
        elif VARIABLE in (environ or {}):
            module = "tests.e2e.patched"
        served = ["serve", "--port", str(self.port), "--data-dir", str(data_dir)]
        self.log = (log_dir or data_dir.parent) / f"{self.port}.log"
        self._process = forking.start(
            module,
            [*map(str, crash or ()), *served],
            {**os.environ, **SETTINGS, **(environ or {})},
            self.log,
            is_new=is_new,
        )
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def is_dead(self) -> bool:
        return self._process.exitcode is not None

    async def death(self, seconds: float = TIMEOUT_SECONDS) -> int:
        """Wait until the process has ended; returns its exit status."""
        return await asyncio.to_thread(self._ended, seconds)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._ended()

    def stop(self) -> int:
        """End it with SIGTERM; returns its exit status."""
        if not self.is_dead:
            self._process.terminate()
        return self._ended()

    def _ended(self, seconds: float = TIMEOUT_SECONDS) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} goes on after {seconds} s")
        return self._process.exitcode

    async def health(self, path: str = "/health") -> dict[str, Any]:
        """The health document with its HTTP status under ``http``; empty while out of reach."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self.url}{path}") as response,
            ):
                return {**await response.json(), "http": response.status}
        except aiohttp.ClientError:
            return {}

    async def is_well(self) -> bool:
        """Whether every health check is ok now."""
        return (await self.health()).get("http") == 200

    async def ready(self) -> bool:
        """Wait until it is ready; False if it ended first."""

        async def ready_or_dead() -> bool:
            return self.is_dead or (await self.health("/readyz")).get("http") == 200

        try:
            await until(ready_or_dead)
        except TimeoutError:
            raise AssertionError(f"not ready: {self.log.read_text()[-2000:]}") from None
        return not self.is_dead


@asynccontextmanager
async def server(
    data_dir: Path,
    *,
    crash: Crash | None = None,
    environ: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    is_new: bool = False,
) -> AsyncIterator[Server]:
    """A server that is ready, or already killed at its crash point."""
    running = Server(data_dir, crash=crash, environ=environ, log_dir=log_dir, is_new=is_new)
    try:
        await running.ready()
        yield running
    finally:
        if not running.is_dead:
            running.kill()


def cpu_seconds(pid: int) -> float:
    """The CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Gone(Exception):
    """The server died before it answered."""


async def send(at: Server, message: Any) -> bytes:
    """One JSON-RPC message; the bytes of the answer. Raises Gone."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{at.url}/rpc", json=message) as response,
        ):
            return await response.read()
    except (aiohttp.ClientError, ConnectionError) as error:
        raise Gone from error


def message(method: str, params: dict[str, Any], number: int = 1) -> dict[str, Any]:
    """A JSON-RPC request; those of a batch have to differ in ``number``."""
    return {"jsonrpc": "2.0", "id": number, "method": f"service.{method}", "params": params}


async def call(at: Server, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """One JSON-RPC call; its envelope. Raises Gone."""
    return dict(json.loads(await send(at, message(method, params)))["result"])


async def call_for_data(at: Server, method: str, params: dict[str, Any]) -> tuple[Any, bytes]:
    """One JSON-RPC call that succeeds; its data, parsed and byte for byte. Raises Gone."""
    body = await send(at, message(method, params))
    envelope = json.loads(body)["result"]
    assert envelope["ok"], envelope
    return envelope["data"], body.partition(b'"data":')[2].rpartition(b',"requestId"')[0]


async def admin(data_dir: Path, method: str, params: dict[str, Any]) -> Any:
    """The result of an operator's call over the socket of a running service."""
    asked = {"jsonrpc": "2.0", "id": 1, "method": f"admin.{method}", "params": params}
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(data_dir / SOCKET_NAME))
        ) as session,
        session.post(
            "http://localhost/rpc", json=asked, headers=operator_headers(data_dir)
        ) as response,
    ):
        answer = await response.json()
    assert "result" in answer, answer
    return answer["result"]


async def until_over(at: Server, order_id: str) -> dict[str, Any]:
    """Poll an order to its end; its last status. Raises Gone."""

    async def over() -> dict[str, Any] | None:
        answer = await call(at, "swap.status", {"orderId": order_id})
        return answer if answer["state"] in ("completed", "terminal_failure") else None

    return await until(over)
