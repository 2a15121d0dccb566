"""Real server processes, and a client that outlives their deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

SETTINGS = {
    "RPCSVC_RATE_LIMIT__ENABLED": "false",
    "RPCSVC_SANDBOX__XMR_BLOCK_MS": "50",
    "RPCSVC_SANDBOX__USDC_BLOCK_MS": "50",
    "RPCSVC_LOG__FORMAT": "json",
}
START_SECONDS = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process on a data directory."""

    def __init__(self, data_dir: Path, *, crash: tuple[str, str, int] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        module = ["rpcsvc"] if crash is None else ["tests.e2e.crashing", *map(str, crash)]
        self.log = data_dir.parent / f"{self.port}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *module, "serve", "--port", str(self.port),
                 "--data-dir", str(data_dir)],
                env={**os.environ, **SETTINGS}, stderr=log,
            )  # fmt: skip

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    async def death(self, seconds: float = 20) -> None:
        """Wait until the process has ended."""
        await asyncio.to_thread(self._process.wait, seconds)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """End it in order; returns its exit status."""
        if not self.is_dead:
            self._process.terminate()
        return self._process.wait(timeout=20)

    async def ready(self) -> bool:
        """Wait until it takes orders; False when it died before."""
        deadline = time.monotonic() + START_SECONDS
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if self.is_dead:
                    return False
                try:
                    async with session.get(f"{self.url}/readyz") as response:
                        if response.status == 200:
                            return True
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
        raise AssertionError(f"not ready: {self.log.read_text()[-2000:]}")


@asynccontextmanager
async def server(
    data_dir: Path, *, crash: tuple[str, str, int] | None = None
) -> AsyncIterator[Server]:
    """A server that is ready, or already dead of its crash."""
    running = Server(data_dir, crash=crash)
    try:
        await running.ready()
        yield running
    finally:
        if not running.is_dead:
            running.kill()


class Gone(Exception):
    """The server died before it answered."""


async def call(at: Server, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """One JSON-RPC call; its envelope. Raises Gone."""
    message = {"jsonrpc": "2.0", "id": 1, "method": f"service.{method}", "params": params}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{at.url}/rpc", json=message) as response,
        ):
            return dict(json.loads(await response.read())["result"])
    except (aiohttp.ClientError, ConnectionError) as error:
        raise Gone from error


async def until_over(at: Server, order_id: str, *, seconds: float = 20) -> dict[str, Any]:
    """Poll an order to its end. Raises Gone."""
    async with asyncio.timeout(seconds):
        while True:
            answer = await call(at, "swap.status", {"orderId": order_id})
            if answer["state"] in ("completed", "terminal_failure"):
                return answer
            await asyncio.sleep(0.02)
