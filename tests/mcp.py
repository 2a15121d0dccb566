"""MCP messages as clients send them, and the official SDK's client."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from mcp import Client

from tests.contract.serving import EVM, MONERO, Answer, Served

STATELESS = "2026-07-28"
HANDSHAKE = ("2025-11-25", "2025-06-18")
META = "io.modelcontextprotocol/"
SWAPS: dict[str, dict[str, Any]] = {
    "x2u": {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM},
    "u2x": {"direction": "u2x", "chain": 42161, "amount": "150", "to": MONERO},
}


def swap(direction: str = "x2u") -> dict[str, Any]:
    """Arguments of create_swap, in a session of their own."""
    return {**SWAPS[direction], "sessionId": str(uuid.uuid4())}


def meta(version: str = STATELESS, **capabilities: Any) -> dict[str, Any]:
    return {
        f"{META}protocolVersion": version,
        f"{META}clientInfo": {"name": "test", "version": "1"},
        f"{META}clientCapabilities": capabilities,
    }


def message(method: str, params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 7, "method": method, "params": params}).encode()


async def stateless(
    served: Served, method: str, params: dict[str, Any] | None = None, **headers: str
) -> Answer:
    """A request of 2026-07-28 with the headers that it needs, unless ``headers`` say otherwise."""
    whole = {"_meta": meta(), **(params or {})}
    name = whole.get("name", whole.get("uri"))
    mirrored = {"mcp_protocol_version": STATELESS, "mcp_method": method}
    if name is not None:
        mirrored["mcp_name"] = str(name)
    return await served.raw(message(method, whole), "/mcp", **{**mirrored, **headers})


async def call(served: Served, tool: str, arguments: Any, **more: Any) -> dict[str, Any]:
    """The result of a tool's call of 2026-07-28."""
    answer = await stateless(served, "tools/call", {"name": tool, "arguments": arguments, **more})
    assert answer.status == 200, answer.body
    return dict(answer.body["result"])


async def whole_swap(client: Client, direction: str) -> dict[str, Any]:
    """A swap from its plan to its end, as an agent does it; the last answer."""
    arguments = swap(direction)
    plan = await client.call_tool("plan_swap", {"direction": direction})
    assert "amount" in plan.structured_content["missingInputs"]
    terms = {name: arguments[name] for name in ("direction", "chain", "amount")}
    quote = await client.call_tool("get_quote", terms)
    assert quote.structured_content["state"] == "quoted"
    created = await client.call_tool("create_swap", arguments)
    again = await client.call_tool("create_swap", arguments)
    order_id = created.structured_content["data"]["order"]["orderId"]
    assert again.structured_content["data"]["order"]["orderId"] == order_id
    await client.call_tool("sandbox_fund", {"orderId": order_id})
    async with asyncio.timeout(60):
        while True:
            status = await client.call_tool("get_swap_status", {"orderId": order_id})
            if status.structured_content["state"] in ("completed", "terminal_failure"):
                return dict(status.structured_content)
            await asyncio.sleep(0.05)
