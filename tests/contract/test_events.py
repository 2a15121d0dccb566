"""swap.events and waiting on status: each event once, in order, and no needless waits."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from rpcsvc.domain.clients import SOCKET
from rpcsvc.domain.events import Event
from rpcsvc.operations.events import TYPE_OF
from rpcsvc.orders.waits import Waits
from tests.contract.following import (
    count_waiting,
    events,
    followed,
    ordered,
    status,
    until_none_waits,
    until_waiting,
)
from tests.contract.serving import SWAP, UNKNOWN_ORDER, Served, serving

Json = dict[str, Any]


def test_every_event_of_the_machine_has_a_public_name() -> None:
    assert set(TYPE_OF) == {"OrderCreated", *(kind.__name__ for kind in get_args(Event))}
    assert len(set(TYPE_OF.values())) == len(TYPE_OF)


async def test_events_of_a_swap_come_once_and_in_order(served: Served) -> None:
    order_id = await ordered(served)
    await served.post("/sandbox/fund", {"orderId": order_id})
    seen = await followed(served, order_id, "transfer.settled")
    assert [event["cursor"] for event in seen] == list(range(1, len(seen) + 1))
    assert [event["type"] for event in seen] == [
        "order.created", "deposit.seen", "deposit.confirmed", "transfer.signed",
        "transfer.published", "transfer.settled",
    ]  # fmt: skip
    assert seen[-1]["state"] == "completed"
    assert seen[0]["deposit"] == {"txid": None, "amount": "0.8", "asset": "XMR"}
    assert seen[1]["deposit"]["amount"] == "0.8"
    assert all("deadlineAt" in event for event in seen[:-1])
    assert "deadlineAt" not in seen[-1]
    now = (await status(served, order_id))["data"]
    assert seen[-1]["transfer"]["txid"] == now["transfers"][0]["txid"]
    assert now["cursor"] == len(seen)
    assert (await events(served, order_id))["data"]["events"] == seen


async def test_events_are_waited_for_and_come_at_once(served: Served) -> None:
    order_id = await ordered(served)
    began = time.monotonic()
    assert (await events(served, order_id, after=1, waitSec=1))["data"]["events"] == []
    assert time.monotonic() - began >= 0.9
    waiting = asyncio.create_task(events(served, order_id, after=1, waitSec=25))
    polling = asyncio.create_task(status(served, order_id, sinceCursor=1, waitSec=25))
    async with asyncio.timeout(10):
        await until_waiting(served.up.service.waits, 2)
        await served.post("/sandbox/fund", {"orderId": order_id})
        assert (await waiting)["data"]["events"][0]["type"] == "deposit.seen"
        assert (await polling)["data"]["cursor"] >= 2
    assert count_waiting(served.up.service.waits) == 0


async def test_wait_for_an_unknown_order_is_refused(served: Served) -> None:
    async with asyncio.timeout(10):
        for answer in (
            await events(served, UNKNOWN_ORDER, waitSec=25),
            await status(served, UNKNOWN_ORDER, waitSec=25),
        ):
            assert answer["error"]["code"] == "order_not_found"


async def test_a_dropped_wait_leaves_the_order_alone(served: Served) -> None:
    order_id = await ordered(served)
    waiting = asyncio.create_task(events(served, order_id, after=1, waitSec=25))
    async with asyncio.timeout(10):
        await until_waiting(served.up.service.waits)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await served.post("/sandbox/fund", {"orderId": order_id})
    await followed(served, order_id, "transfer.settled")


async def test_a_stop_ends_waits(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        order_id = await ordered(served)
        waiting = asyncio.create_task(events(served, order_id, after=1, waitSec=25))
        async with asyncio.timeout(10):
            await until_waiting(served.up.service.waits)
            served.up.service.waits.end()
            assert (await waiting)["data"]["events"] == []


async def test_commit_wakes_all_who_wait(served: Served) -> None:
    order_id = await ordered(served)
    waits = Waits(served.up.service.store, 20_000)
    served.up.service.processor.on_commit(waits.observe)
    tasks = [asyncio.create_task(waits.history(order_id, 1, 25, SOCKET)) for _ in range(5_000)]
    async with asyncio.timeout(30):
        await until_waiting(waits, 5_000)
        await served.post("/sandbox/fund", {"orderId": order_id})
        found = await asyncio.gather(*tasks)
    assert all(entries[0].event == "DepositSeen" for entries in found)
    assert count_waiting(waits) == 0


async def test_waits_see_what_another_process_commits(served: Served) -> None:
    order_id = await ordered(served)
    elsewhere = Waits(served.up.service.store, 100)  # no commit of this process wakes it
    following = asyncio.create_task(elsewhere.follow_log())
    waiting = asyncio.create_task(elsewhere.history(order_id, 1, 25, SOCKET))
    async with asyncio.timeout(20):
        await until_waiting(elsewhere)
        await served.post("/sandbox/fund", {"orderId": order_id})
        assert (await waiting)[0].event == "DepositSeen"
    following.cancel()


def wait_of(order_id: str) -> Json:
    params = {"orderId": order_id, "sinceCursor": 1, "waitSec": 25}
    return {"jsonrpc": "2.0", "id": order_id, "method": "service.swap.status", "params": params}


async def test_waits_of_a_batch_wait_together(served: Served) -> None:
    orders = [await ordered(served) for _ in range(20)]
    plan = {"jsonrpc": "2.0", "id": "plan", "method": "service.swap.plan", "params": {}}
    batch = json.dumps([*map(wait_of, orders), plan]).encode()
    answer = asyncio.create_task(served.raw(batch))
    async with asyncio.timeout(20):
        await until_waiting(served.up.service.waits, len(orders))
        for order_id in orders:
            await served.post("/sandbox/fund", {"orderId": order_id})
        reported: Any = (await answer).body
    assert [each["id"] for each in reported] == [*orders, "plan"]
    assert all(each["result"]["data"]["cursor"] >= 2 for each in reported[:-1])


def tool_call(order_id: str) -> Json:
    arguments = wait_of(order_id)["params"]
    params = {"name": "get_swap_status", "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


@pytest.mark.parametrize(("path", "count"), [("/rpc", 2), ("/mcp", 1)])
async def test_wait_in_json_rpc_ends_with_its_caller(served: Served, path: str, count: int) -> None:
    order_id, waits = await ordered(served), served.up.service.waits
    message: Any = tool_call(order_id) if path == "/mcp" else [wait_of(order_id)] * count
    waiting = asyncio.create_task(served.raw(json.dumps(message).encode(), path))
    async with asyncio.timeout(15):
        await until_waiting(waits, count)
        waiting.cancel()
        await until_none_waits(served)
    assert (await status(served, order_id))["ok"]


async def test_batch_with_a_create_outlives_its_caller(served: Served) -> None:
    """A batch is cancelled only once all its calls but waits have ended."""
    order_id, waits = await ordered(served), served.up.service.waits
    create = {"jsonrpc": "2.0", "id": 1, "method": "service.swap.execute", "params": SWAP}
    batch = json.dumps([wait_of(order_id), create]).encode()
    waiting = asyncio.create_task(served.raw(batch))
    async with asyncio.timeout(15):
        await until_waiting(waits)
        waiting.cancel()
        await until_none_waits(served)
    assert served.count("orders") == 2
    assert (await status(served, order_id))["data"]["order"]["status"] == "awaiting_deposit"
