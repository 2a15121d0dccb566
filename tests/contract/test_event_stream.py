"""swap.events as server-sent events: each event once, to the end, and no needless waits."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse

from rpcsvc.domain.clients import SOCKET
from rpcsvc.operations import events as events_module
from rpcsvc.orders.waits import Waits
from rpcsvc.store.changes import HistoryEntry
from tests.contract.following import (
    count_waiting,
    events,
    followed,
    ordered,
    until_none_waits,
    until_waiting,
)
from tests.contract.serving import UNKNOWN_ORDER, Served, serving

Json = dict[str, Any]


async def opened(served: Served, order_id: str, query: str = "", **headers: str) -> ClientResponse:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await served.client.get(
        f"/api/v1/agent/swap/events/{order_id}{query}",
        headers={"accept": "text/event-stream", **names},
    )


async def read(stream: ClientResponse) -> list[Json]:
    """The events of a stream up to its end; the id of each is checked against its data."""
    assert stream.status == 200
    found: list[Json] = []
    for block in blocks(await stream.text()):
        lines = dict(line.split(": ", 1) for line in block if ": " in line)
        found.append(json.loads(lines["data"]))
        assert found[-1]["cursor"] == int(lines["id"])
    return found


def blocks(text: str) -> list[list[str]]:
    """The lines of each block that a blank line ends, each of which a client delivers."""
    return [block.splitlines() for block in text.split("\n\n")[:-1]]


async def test_stream_sends_every_event_of_a_swap_and_ends(served: Served) -> None:
    order_id = await ordered(served)
    stream = await opened(served, order_id)
    reading = asyncio.create_task(read(stream))
    await until_waiting(served.up.service.waits)
    await served.post("/sandbox/fund", {"orderId": order_id})
    async with asyncio.timeout(60):
        seen = await reading
    assert seen == (await events(served, order_id))["data"]["events"]
    assert seen[-1]["type"] == "transfer.settled"
    assert stream.content_type == "text/event-stream"
    assert stream.headers["cache-control"].startswith("no-store")
    assert "x-service-signature" not in stream.headers
    await until_none_waits(served)


async def test_stream_resumes_after_the_last_event_to_the_end(
    served: Served,
) -> None:
    order_id = await ordered(served)
    await served.post("/sandbox/fund", {"orderId": order_id})
    seen = await followed(served, order_id, "transfer.settled")
    assert await read(await opened(served, order_id, "?after=4")) == seen[4:]
    # A browser keeps the address of its first request: the header is newer.
    resumed = await opened(served, order_id, "?after=1", last_event_id="5")
    assert await read(resumed) == seen[5:]
    reported = await opened(served, order_id, last_event_id=str(len(seen)))
    assert (reported.status, await reported.read()) == (204, b"")
    assert "x-service-signature" in reported.headers


async def test_stream_begins_with_retry_and_stays_alive(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "HEARTBEAT_SECONDS", 0.01)
    order_id = await ordered(served)
    async with asyncio.timeout(60), await opened(served, order_id, "?after=1") as stream:
        assert await stream.content.readline() == b"retry: 3000\n"
        assert await stream.content.readexactly(4) == b":\n:\n"
        await served.post("/sandbox/fund", {"orderId": order_id})
        text = (await stream.read()).decode()
    assert all(any(line.startswith("data: ") for line in block) for block in blocks(text))
    assert "\n:\n" in text


@pytest.mark.parametrize(
    ("query", "headers", "field"),
    [
        ("?waitSec=5", {}, "waitSec"),
        ("", {"last_event_id": "-1"}, "last-event-id"),
        ("", {"last_event_id": "one"}, "last-event-id"),
        ("?colour=red", {}, "colour"),
    ],
)
async def test_stream_refuses_what_it_can_not_take(
    served: Served, query: str, headers: dict[str, str], field: str
) -> None:
    answer = await opened(served, await ordered(served), query, **headers)
    body = await answer.json()
    assert (answer.status, body["validationErrors"][0]["field"]) == (400, field)


async def test_stream_of_no_order_is_refused_as_json(served: Served) -> None:
    answer = await opened(served, UNKNOWN_ORDER)
    assert (answer.status, (await answer.json())["error"]["code"]) == (404, "order_not_found")


@pytest.mark.parametrize("accept", ["application/json, text/event-stream", "*/*", ""])
async def test_events_are_json_for_who_takes_json(served: Served, accept: str) -> None:
    answer = await opened(served, await ordered(served), accept=accept)
    assert (await answer.json())["data"]["cursor"] == 1


async def test_dropped_stream_ends_at_once_and_leaves_the_order(served: Served) -> None:
    order_id = await ordered(served)
    stream = await opened(served, order_id)
    await until_waiting(served.up.service.waits)
    began = time.monotonic()
    stream.close()
    await until_none_waits(served)
    assert time.monotonic() - began < 5
    await served.post("/sandbox/fund", {"orderId": order_id})
    await followed(served, order_id, "transfer.settled")


@pytest.mark.parametrize("name", ["events", "status"])
async def test_dropped_long_poll_ends_at_once(served: Served, name: str) -> None:
    order_id = await ordered(served)
    path = f"/agent/swap/{name}/{order_id}"
    query = {"after": 1, "waitSec": 25} if name == "events" else {"waitSec": 25}
    waiting = asyncio.create_task(served.http("GET", path, params=query))
    await until_waiting(served.up.service.waits)
    waiting.cancel()
    await until_none_waits(served)
    assert (await events(served, order_id))["ok"]


async def test_stop_ends_streams(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        stream = await opened(served, await ordered(served))
        await until_waiting(served.up.service.waits)
        served.up.service.waits.end()
        assert [event["type"] for event in await read(stream)] == ["order.created"]


async def test_streams_of_one_client_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, limits__connections=16) as served:
        order_id = await ordered(served)
        streams = [await opened(served, order_id) for _ in range(2)]
        refused = await opened(served, order_id)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 0
        assert (await events(served, order_id))["ok"]
        streams[0].close()
        await until_waiting(served.up.service.waits)
        again = await opened(served, order_id)
        assert again.status == 200
        for stream in (streams[1], again):
            stream.close()


async def test_5000_streams_read_nothing_until_something_happens(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_id = await ordered(served)
    store, reads = served.up.service.store, 0
    history = store.history

    async def counted(order_id: str, after: int, limit: int) -> list[HistoryEntry]:
        nonlocal reads
        reads += 1
        return await history(order_id, after, limit)

    monkeypatch.setattr(store, "history", counted)
    waits = Waits(store, 20_000)
    served.up.service.processor.on_commit(waits.observe)

    async def next_of_one() -> int:
        async with aclosing(waits.follow(order_id, 1, 600, SOCKET)) as parts:
            async for entries in parts:
                return entries[0].version
        return 0

    tasks = [asyncio.create_task(next_of_one()) for _ in range(5_000)]
    async with asyncio.timeout(60):
        await until_waiting(waits, 5_000)
        assert reads == 5_000
        await events(served, order_id, after=1, waitSec=1)
        assert reads == 5_002  # only those of the call
        await served.post("/sandbox/fund", {"orderId": order_id})
        assert set(await asyncio.gather(*tasks)) == {2}
    assert count_waiting(waits) == 0
