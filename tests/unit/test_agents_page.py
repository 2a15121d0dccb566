"""docs/use/agents.md: each way of integration, copied unchanged, ends in a completed swap."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.e2e.processes import SETTINGS, Server

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "use" / "agents.md").read_text()
URL = "http://127.0.0.1:8080"


def blocks(language: str, heading: str) -> list[str]:
    """The blocks of a language under a heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all examples: each makes its own order."""
    found = Server(tmp_path_factory.mktemp("server") / "data")
    try:
        assert asyncio.run(found.ready())
        yield found
    finally:
        found.kill()


async def output(*command: str) -> list[str]:
    """The lines of a program's stdout; the test fails if it does."""
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def test_python_of_the_agents_page_swaps(server: Server) -> None:
    by_async, by_sync = blocks("python", r"How does a Python program swap\?")
    lines = await output(sys.executable, "-c", by_async.replace(URL, server.url))
    assert lines[0] == "the user gets 131.29 USDC"
    assert lines[1].startswith("the user sends 0.8 XMR to ")
    assert lines[2].startswith("completed ")
    lines = await output(sys.executable, "-c", by_sync.replace(URL, server.url))
    assert lines[-1].endswith("transfer.settled completed")


async def test_x402_wallet_of_the_agents_page_swaps(server: Server) -> None:
    (program,) = blocks("python", r"How does an agent with an x402 wallet swap\?")
    lines = await output(sys.executable, "-c", program.replace(URL, server.url))
    assert lines[0] == "paid"
    assert lines[1].startswith("completed ")


async def test_curl_of_the_agents_page_swaps(server: Server) -> None:
    (script,) = blocks("sh", r"How do I swap with curl\?")
    lines = await output("bash", "-euo", "pipefail", "-c", script.replace(URL, server.url))
    assert (lines[0], lines[-1]) == ("True", "completed")
    assert '"type":"transfer.settled"' in "".join(lines)


async def test_functions_of_the_agents_page_are_callable(server: Server) -> None:
    (program,) = blocks("python", r"How does a model with function calling swap\?")
    lines = await output(sys.executable, "-c", program.replace(URL, server.url))
    assert "'create_swap'" in lines[0]
    assert lines[1] == "quoted"


async def test_desktop_agent_of_the_agents_page_swaps(tmp_path: Path) -> None:
    config, calls = (
        json.loads(block) for block in blocks("json", r"How does a desktop agent swap\?")
    )
    listed = config["mcpServers"]["rpcsvc"]
    assert (listed["command"], listed["args"][-2:]) == (".venv/bin/rpcsvc", ["--data-dir", "var"])
    words = ["-m", "rpcsvc", *listed["args"][:-1], str(tmp_path / "data")]
    started = StdioServerParameters(command=sys.executable, args=words, env=dict(SETTINGS))
    async with Client(stdio_client(started)) as client:
        order_id = ""
        for call in calls:
            given = {"sessionId": str(uuid.uuid4()), "orderId": order_id}
            arguments = {
                name: given[name] if str(value).startswith("<") else value
                for name, value in call["arguments"].items()
            }
            reported = await said(client, call["name"], arguments)
            order_id = reported["data"].get("order", {}).get("orderId", order_id)
        async with asyncio.timeout(60):
            while reported["state"] != "completed":
                reported = await said(client, call["name"], arguments)


async def said(client: Client, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The envelope in a tool's answer."""
    answer = await client.call_tool(name, arguments)
    assert not answer.is_error, answer
    return dict(answer.structured_content or {})
