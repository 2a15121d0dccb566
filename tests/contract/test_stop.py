"""SIGTERM: accepted requests are finished and answered; no acknowledged order is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rpcsvc import bootstrap, serving
from rpcsvc.settings import load_settings
from rpcsvc.store.changes import Change
from tests.contract.processes import free_port, process
from tests.contract.serving import SWAP
from tests.e2e.processes import TIMEOUT_SECONDS


async def test_a_request_in_flight_is_answered_before_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    flags = {"data_dir": str(tmp_path), "port": port}
    settings = load_settings(config_file=None, environ={}, flags=flags).settings
    committing, go_on = asyncio.Event(), asyncio.Event()
    async with bootstrap.running(settings) as up:
        commit = up.service.store.commit

        async def slow_commit(change: Change) -> None:
            committing.set()
            await go_on.wait()
            await commit(change)

        monkeypatch.setattr(up.service.store, "commit", slow_commit)
        listening = serving.listening(up)
        await listening.__aenter__()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            call = asyncio.create_task(session.post("/api/v1/agent/swap/create", json=SWAP))
            await committing.wait()
            stopping = asyncio.create_task(listening.__aexit__(None, None, None))
            await _refuses_connections(port)
            assert not stopping.done()
            go_on.set()
            async with await call as response:
                assert (await response.json())["state"] == "waiting_for_funding"
            await stopping


async def _refuses_connections(port: str) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", int(port))
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0)


async def test_stop_under_load_keeps_every_acknowledged_order(
    tmp_path: Path,
) -> None:
    port = free_port()
    arguments = ["serve", "--port", port, "--data-dir", str(tmp_path)]
    acknowledged: dict[str, str] = {}
    async with process(*arguments) as child:
        await child.logged("serving")
        enough = asyncio.Event()
        clients = [asyncio.create_task(_load(port, n, acknowledged, enough)) for n in range(4)]
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await enough.wait()
        child.terminate()
        await asyncio.gather(*clients)
        assert (await child.ended())[0] == 0
    async with process(*arguments) as child:
        await child.logged("serving")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for key, order_id in acknowledged.items():
                assert await _create(session, key) == order_id
        child.terminate()
        assert (await child.ended())[0] == 0


async def _load(
    port: str, number: int, acknowledged: dict[str, str], enough: asyncio.Event
) -> None:
    """Create orders until the server has ended; every answer must be complete and successful."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for count in range(10_000):
            key = f"{number:08}-{count:08}"
            try:
                acknowledged[key] = await _create(session, key)
            except aiohttp.ClientConnectionError:
                return
            if len(acknowledged) >= 20:
                enough.set()


async def _create(session: aiohttp.ClientSession, key: str) -> str:
    params: dict[str, Any] = {**SWAP, "idempotency-key": key}
    call = {"jsonrpc": "2.0", "id": key, "method": "service.swap.create", "params": params}
    async with session.post("/rpc", json=call) as response:
        answer = json.loads(await response.read())
        assert response.status == 200
        return str(answer["result"]["data"]["order"]["orderId"])


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: x"], ids=["nothing", "half"])
async def test_a_connection_that_sends_no_whole_request_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(serving, "IDLE_SECONDS", 0.05)
    port = free_port()
    flags = {"data_dir": str(tmp_path), "port": port}
    settings = load_settings(config_file=None, environ={}, flags=flags).settings
    async with bootstrap.running(settings) as up, serving.listening(up):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(sent)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("rest", [b"{}", b""], ids=["it arrives", "it stalls"])
async def test_body_arriving_during_a_stop_is_finished_or_refused(
    tmp_path: Path, rest: bytes
) -> None:
    port = free_port()
    flags = {"data_dir": str(tmp_path), "port": port}
    settings = load_settings(config_file=None, environ={}, flags=flags).settings
    async with bootstrap.running(settings) as up:
        listening = serving.listening(up)
        await listening.__aenter__()
        idle, closing = await asyncio.open_connection("127.0.0.1", int(port))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(
            b"POST /api/v1/agent/swap/plan HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        )
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        stopping = asyncio.create_task(listening.__aexit__(None, None, None))
        await _refuses_connections(port)
        assert not stopping.done()
        writer.write(rest)
        assert await idle.read() == b"", "an idle connection is closed at once"
        answer = (await reader.read()).lower()
        assert answer.startswith(b"http/1.1 200 " if rest else b"http/1.1 503 ")
        assert b"\r\nconnection: close\r\n" in answer
        await stopping
        for each in (writer, closing):
            each.close()
            await each.wait_closed()
