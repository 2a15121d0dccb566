"""Tasks over MCP: waiting for an order's end by polling."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.serving import UNKNOWN_ORDER, Answer, Served, serving
from tests.mcp import call, message, meta, stateless, swap

TASKS = "io.modelcontextprotocol/tasks"
KNOWN = meta(extensions={TASKS: {}})


async def ordered(served: Served) -> str:
    made = await call(served, "create_swap", swap(), _meta=KNOWN)
    assert made["resultType"] == "complete"
    return str(made["structuredContent"]["data"]["order"]["orderId"])


async def wait(served: Served, order_id: str, **more: Any) -> dict[str, Any]:
    arguments = {"orderId": order_id, "waitSec": 25, **more}
    return await call(served, "get_swap_status", arguments, _meta=KNOWN)


async def task(served: Served, method: str, task_id: str, known: Any = KNOWN) -> Answer:
    params = {"taskId": task_id, "_meta": known}
    return await stateless(served, f"tasks/{method}", params, mcp_name=task_id)


async def ended(served: Served, task_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found = (await task(served, "get", task_id)).body["result"]
            assert found["resultType"] == "complete"
            if found["status"] != "working":
                return dict(found)
            await asyncio.sleep(0.05)


async def test_task_ends_with_the_order_across_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        discovered = (await stateless(served, "server/discover")).body["result"]
        assert TASKS in discovered["capabilities"]["extensions"]
        begun = await wait(served, await ordered(served))
        assert (begun["resultType"], begun["status"]) == ("task", "working")
        assert "Ask the user to send" in begun["statusMessage"]
        assert begun["createdAt"] == begun["lastUpdatedAt"]
        assert (begun["ttlMs"], begun["pollIntervalMs"]) == (None, 5000)
    async with serving(tmp_path) as served:
        assert (await task(served, "get", begun["taskId"])).body["result"]["status"] == "working"
        await served.post("/sandbox/fund", {"orderId": begun["taskId"]})
        done = await ended(served, begun["taskId"])
        assert done["lastUpdatedAt"] > done["createdAt"] == begun["createdAt"]
        assert done["result"]["structuredContent"]["state"] == "completed"
        assert done["result"]["isError"] is False
        again = await wait(served, begun["taskId"])
        assert (again["resultType"], again["structuredContent"]["state"]) == (
            "complete",
            "completed",
        )


async def test_cancelled_task_ends_no_swap(served: Served) -> None:
    begun = await wait(served, await ordered(served))
    for method in ("cancel", "update"):
        answer = await task(served, method, begun["taskId"])
        assert answer.body["result"]["resultType"] == "complete"
    assert (await task(served, "get", begun["taskId"])).body["result"]["status"] == "working"
    await served.post("/sandbox/fund", {"orderId": begun["taskId"]})
    done = await ended(served, begun["taskId"])
    assert done["result"]["structuredContent"]["state"] == "completed"


@pytest.mark.parametrize("method", ["get", "update", "cancel"])
async def test_tasks_need_their_capability_and_an_order(served: Served, method: str) -> None:
    order_id = await ordered(served)
    undeclared = await task(served, method, order_id, meta())
    error = undeclared.body["error"]
    assert (undeclared.status, error["code"]) == (400, -32021)
    assert error["data"]["requiredCapabilities"] == {"extensions": {TASKS: {}}}
    for task_id in (UNKNOWN_ORDER, "nonsense"):
        refused = await task(served, method, task_id)
        assert (refused.status, refused.body["error"]["code"]) == (400, -32602)
    params = {"taskId": order_id}
    shaken = await served.raw(message(f"tasks/{method}", params), "/mcp")
    assert shaken.body["error"]["code"] == -32601


async def test_wait_becomes_a_task_only_for_valid_arguments(served: Served) -> None:
    order_id = await ordered(served)
    undeclared = await call(served, "get_swap_status", {"orderId": order_id, "waitSec": 1})
    assert undeclared["resultType"] == "complete"
    for more in (
        {"waitSec": 26},
        {"waitSec": "5"},
        {"verify": "elsewhere"},
        {"orderId": UNKNOWN_ORDER},
    ):
        refused = await wait(served, order_id, **more)
        assert (refused["resultType"], refused["isError"]) == ("complete", True)
    plain = await call(served, "get_swap_status", {"orderId": order_id}, _meta=KNOWN)
    assert plain["structuredContent"]["ok"]
