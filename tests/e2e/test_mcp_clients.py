"""Swaps to the end by the official SDK's client, over HTTP and over stdio with ``rpcsvc mcp``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import ElicitRequestParams, ElicitResult

from tests.contract.serving import serving
from tests.e2e.processes import call, server
from tests.mcp import swap, whole_swap

MODES: tuple[Literal["auto", "legacy"], ...] = ("auto", "legacy")


@pytest.mark.parametrize("mode", MODES)
async def test_sdk_client_swaps_both_ways_over_http(
    tmp_path: Path, mode: Literal["auto", "legacy"]
) -> None:
    async with serving(tmp_path) as served, Client(f"{served.url}/mcp", mode=mode) as client:
        assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
        for direction in ("x2u", "u2x"):
            assert (await whole_swap(client, direction))["state"] == "completed"
        assert served.count("orders") == 2


@pytest.mark.parametrize("mode", MODES)
async def test_sdk_client_swaps_both_ways_over_stdio(
    tmp_path: Path, mode: Literal["auto", "legacy"]
) -> None:
    async with Client(stdio(tmp_path), mode=mode) as client:
        for direction in ("x2u", "u2x"):
            assert (await whole_swap(client, direction))["state"] == "completed"


async def test_stdio_reaches_a_service_at_its_url(tmp_path: Path) -> None:
    async with serving(tmp_path / "service") as served:
        passed_on = stdio(tmp_path / "mine", "--url", served.url)
        async with Client(passed_on) as client:
            made = await client.call_tool("create_swap", swap())
            assert made.structured_content["state"] == "waiting_for_funding"
        assert served.count("orders") == 1
    assert not (tmp_path / "mine").exists()


async def test_stdio_reaches_a_server_over_its_socket(tmp_path: Path) -> None:
    async with server(tmp_path) as at, Client(stdio(tmp_path)) as client:
        arguments = swap()
        made = await client.call_tool("create_swap", arguments)
        order_id = made.structured_content["data"]["order"]["orderId"]
        seen = await call(at, "swap.list", {"sessionId": arguments["sessionId"]})
        assert [order["orderId"] for order in seen["data"]["orders"]] == [order_id]
        for direction in ("x2u", "u2x"):
            assert (await whole_swap(client, direction))["state"] == "completed"
        at.kill()
        with pytest.raises(MCPError, match="No service answers"):
            await client.call_tool("get_capabilities", {})


@pytest.mark.parametrize("agreed", [True, False])
async def test_sdk_client_asks_its_user_first(tmp_path: Path, agreed: bool) -> None:
    questions: list[str] = []

    async def ask(context: Any, params: ElicitRequestParams) -> ElicitResult:
        questions.append(params.message)
        return ElicitResult(action="accept", content={"agreed": agreed})

    async with (
        serving(tmp_path) as served,
        Client(f"{served.url}/mcp", elicitation_callback=ask) as client,
    ):
        made = await client.call_tool("create_swap", swap())
        assert (made.is_error, served.count("orders")) == (not agreed, int(agreed))
        assert len(questions) == 1


def stdio(data_dir: Path, *options: str) -> Any:
    """The transport of a client that starts ``rpcsvc mcp``."""
    words = ["-m", "rpcsvc", "mcp", "--data-dir", str(data_dir), *options]
    environ = {
        "RPCSVC_RATE_LIMIT__ENABLED": "false",
        "RPCSVC_SANDBOX__XMR_BLOCK_MS": "50",
        "RPCSVC_SANDBOX__USDC_BLOCK_MS": "50",
    }
    return stdio_client(StdioServerParameters(command=sys.executable, args=words, env=environ))
