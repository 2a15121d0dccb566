"""SIGHUP to a running process: settings are taken again, and no call is dropped."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.contract.serving import SWAP
from tests.e2e.processes import Server, until

OLD, NEW = "the-old-token-of-the-desk", "the-new-token-of-the-desk"


def table(token: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[clients.desk]\ntoken_sha256 = ["{digest}"]\nscopes = ["read", "order"]\n'


async def create(server: Server, token: str) -> tuple[int, Any]:
    return await post(server, "create", token, SWAP)


async def post(server: Server, path: str, token: str, body: Any) -> tuple[int, Any]:
    url, headers = f"{server.url}/api/v1/agent/swap/{path}", {"x-agent-rpc-token": token}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def waiting(server: Server, order_id: str) -> int:
    """The status of a call that waits for the order's next event."""
    url = f"{server.url}/api/v1/agent/swap/status/{order_id}?waitSec=20"
    headers = {"x-agent-rpc-token": OLD}
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers) as response,
    ):
        assert (await response.json())["ok"]
        return response.status


async def reload(server: Server, event: str) -> None:
    """Send SIGHUP, and return once the log has one more of the event."""
    before = server.log.read_text().count(event)
    os.kill(server.pid, signal.SIGHUP)

    async def is_logged() -> bool:
        return server.log.read_text().count(event) > before

    await until(is_logged)


async def test_sighup_takes_clients_and_drops_no_call(tmp_path: Path) -> None:
    config = tmp_path / "rpcsvc.toml"
    config.write_text(table(OLD))
    server = Server(tmp_path / "data", environ={"RPCSVC_CONFIG": str(config)})
    try:
        await server.ready()
        status, made = await create(server, OLD)
        assert status == 200
        order_id, session = made["data"]["order"]["orderId"], made["data"]["sessionId"]
        waits = asyncio.create_task(waiting(server, order_id))
        config.write_text(f"{table(NEW)}max_order_usd = ten\n")
        await reload(server, "settings_reload_refused")
        assert (await create(server, OLD))[0] == 200
        config.write_text(f"graceful_seconds = 11\n{table(NEW)}")
        await reload(server, "setting_needs_restart")
        assert (await create(server, OLD))[0] == 401
        assert not waits.done()
        cancelled = {"sessionId": session}
        assert (await post(server, f"cancel/{order_id}", NEW, cancelled))[0] == 200
        assert await waits == 200
    finally:
        assert server.stop() == 0
