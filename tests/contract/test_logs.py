"""The log has what the operator needs, and no secrets."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from rpcsvc import __version__
from rpcsvc.logs import mask, shorten_addresses
from tests.contract.processes import free_port
from tests.contract.serving import EVM, MONERO, SWAP, TOKEN

KEY = "a-key-that-should-stay-private"


async def test_no_secret_and_no_whole_address_reaches_the_log(tmp_path: Path) -> None:
    port = free_port()
    child = subprocess.Popen(  # noqa: ASYNC220 - it only starts
        [sys.executable, "-m", "rpcsvc", "serve", "--port", port, "--data-dir", str(tmp_path)],
        env={"AGENT_RPC_TOKEN": TOKEN, "RPCSVC_LOG__FORMAT": "json", "PATH": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    lines = []
    try:
        for line in child.stderr:
            lines.append(line)
            if '"serving"' in line:
                break
        for request in UNREADABLE:
            await say_it_badly(int(port), request)
        answers = await talk(f"http://127.0.0.1:{port}")
    finally:
        child.terminate()
        lines += child.stderr.readlines()
        child.stderr.close()
        status = child.wait(timeout=180)
    assert status == 0
    events = [json.loads(line)["event"] for line in lines]
    assert {"serving", "request_refused", "operation", "order_transition", "stopped"} <= set(events)
    assert not [line for line in lines if '"level":"error"' in line]  # clients cause no errors
    deposit = answers["data"]["fundingInstructions"]["depositAddress"]
    for secret in (TOKEN, KEY, EVM, MONERO, deposit):
        assert secret not in "".join(lines)


# A token with a control character; a body with malformed chunks.
UNREADABLE = (
    b"POST /rpc HTTP/1.1\r\nx-agent-rpc-token: %b\x00\r\n\r\n" % TOKEN.encode(),
    b"POST /rpc HTTP/1.1\r\nhost: [::1]\r\nx-agent-rpc-token: %b\r\ntransfer-encoding: chunked\r\n"
    b"content-type: application/json\r\n\r\nzz\r\n" % TOKEN.encode(),
)


async def say_it_badly(port: int, request: bytes) -> None:
    """Send a request that can't be parsed as HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    assert b"400" in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def talk(url: str) -> dict[str, Any]:
    params = {**SWAP, "idempotency-key": KEY}
    async with aiohttp.ClientSession(headers={"x-agent-rpc-token": TOKEN}) as session:

        async def call(method: str, params: dict[str, Any]) -> dict[str, Any]:
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            async with session.post(f"{url}/rpc", json=message) as response:
                return dict((await response.json())["result"])

        made = await call("service.swap.execute", params)
        await call("service.swap.execute", {**params, "to": MONERO})
        order_id = made["data"]["order"]["orderId"]
        await call("service.sandbox.fund", {"orderId": order_id})
        seen = ""
        while seen != "deposit_detected":
            seen = (await call("service.swap.status", {"orderId": order_id}))["state"]
    return made


def test_secrets_are_masked_by_name_and_addresses_by_form() -> None:
    event = {"event": "x", "agent_rpc_token": TOKEN, "note": f"from {EVM} to {MONERO}"}
    masked = mask(None, "info", event)
    assert masked["agent_rpc_token"] == "********"
    assert masked["note"] == "from 0x529084...9EE7 to 888tNkZr...up3H"
    assert shorten_addresses("nothing to hide") == "nothing to hide"


def test_terminal_gets_lines_for_people_and_a_greeting(tmp_path: Path) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    served = ["serve", "--port", port, "--data-dir", str(data_dir)]
    ours, theirs = os.openpty()
    blocks = {"RPCSVC_SANDBOX__XMR_BLOCK_MS": "50", "RPCSVC_SANDBOX__USDC_BLOCK_MS": "50"}
    child = subprocess.Popen(
        [sys.executable, "-m", "rpcsvc", *served], stderr=theirs, env={**os.environ, **blocks}
    )
    os.close(theirs)
    lines: list[str] = []
    try:
        with os.fdopen(ours, encoding="utf-8") as terminal:
            for line in terminal:
                lines.append(line.strip())
                if line.startswith("Page:"):
                    break
            # A terminal that is not read would block the service.
            threading.Thread(target=read_to_the_end, args=[terminal.fileno()], daemon=True).start()
            try_what_it_says(lines[-3:], port)
            child.terminate()
            assert child.wait(timeout=180) == 0
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    assert not [line for line in lines if line.startswith("{")]


def read_to_the_end(terminal: int) -> None:
    with suppress(OSError):  # EIO: the writers have closed it
        while os.read(terminal, 4096):
            pass


def try_what_it_says(greeting: list[str], port: str) -> None:
    what, command, page = greeting
    assert what.startswith(f"rpcsvc {__version__} serves with the engine sandbox")
    assert page == f"Page: http://127.0.0.1:{port}/"
    program, *words = shlex.split(command.removeprefix("Try:"))
    assert program == "rpcsvc"
    tried = subprocess.run(
        [sys.executable, "-m", "rpcsvc", *words],
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert tried.returncode == 0, tried.stderr
