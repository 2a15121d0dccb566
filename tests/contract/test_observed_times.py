"""observedTime: what settled orders took, on quote, status, and the pages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rpcsvc.clock import day_of
from rpcsvc.domain.settle_times import BOUNDS, LEAST_SAMPLES, SettleTime, SwapKind
from rpcsvc.errors import Unavailable
from rpcsvc.store import settle_times
from rpcsvc.store.database import Tables
from rpcsvc.store.settle_times import settle_time_statements
from tests.contract.bff import until_completed
from tests.contract.serving import BACK, MONERO, SWAP, Served
from tests.mcp import call

KIND = SwapKind("x2u/arbitrum/1")
QUOTED = {name: SWAP[name] for name in ("direction", "chain", "amount")}


async def settled(served: Served, seconds: int, orders: int = 1) -> None:
    """Count orders that took so long."""
    day = day_of(served.up.service.clock.now_ms())
    time = SettleTime(KIND, BOUNDS.index(seconds))
    for _ in range(orders):
        await served.up.database.write(settle_time_statements(time, day))


async def minute_later(served: Served) -> None:
    assert (await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 61})).body[
        "ok"
    ]


async def quote(served: Served, **more: Any) -> dict[str, Any]:
    answer = await served.post("/agent/swap/quote", {**QUOTED, **more})
    return dict(answer.body["data"]["quote"])


async def status(served: Served, order_id: str, query: str = "") -> dict[str, Any]:
    return dict((await served.http("GET", f"/agent/swap/status/{order_id}{query}")).body["data"])


async def test_quote_and_status_say_what_swaps_took(served: Served) -> None:
    made = await served.post("/agent/swap/create", SWAP)
    order_id = made.body["data"]["order"]["orderId"]
    assert "observedTime" not in made.body["data"]["quote"]
    assert (await quote(served))["observedTime"] is None
    assert (await status(served, order_id))["observedTime"] is None
    assert "observedTime" not in await status(served, order_id, "?detail=lean")
    await settled(served, BOUNDS[20], LEAST_SAMPLES - 2)
    await settled(served, BOUNDS[30], 2)
    await minute_later(served)
    said = {"p50Seconds": BOUNDS[20], "p95Seconds": BOUNDS[30], "samples": LEAST_SAMPLES}
    assert (await quote(served))["observedTime"] == said
    assert (await quote(served, detail="lean"))["observedTime"] == said
    assert (await status(served, order_id))["observedTime"] == said
    assert (await status(served, order_id, "?detail=lean"))["observedTime"] == said
    result = await call(served, "get_quote", QUOTED)
    assert result["structuredContent"]["data"]["quote"]["observedTime"] == said
    other = {name: BACK[name] for name in ("direction", "chain", "amount")}
    elsewhere = await served.rpc("swap.quote", other)
    assert elsewhere.body["result"]["data"]["quote"]["observedTime"] is None


async def test_one_query_a_minute_serves_all_reads(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], settle_times.settle_times

    async def counted(database: Tables, day: int) -> Any:
        reads.append(day)
        return await read(database, day)

    monkeypatch.setattr(settle_times, "settle_times", counted)
    for _ in range(5):
        await quote(served)
    assert len(reads) == 1
    await minute_later(served)
    await quote(served)
    assert len(reads) == 2


async def test_quotes_go_on_without_times_that_can_not_be_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And do not queue up to try one after the other."""
    reads = []

    async def down(_database: Tables, day: int) -> Any:
        reads.append(day)
        raise Unavailable("The store is down.")

    await quote(served)
    await minute_later(served)
    monkeypatch.setattr(settle_times, "settle_times", down)
    found = await asyncio.gather(*(quote(served) for _ in range(5)))
    assert [each["observedTime"] for each in found] == [None] * 5
    assert len(reads) == 1


async def test_completed_order_is_counted_and_says_no_time(served: Served) -> None:
    made = await served.post("/agent/swap/create", SWAP)
    order_id = made.body["data"]["order"]["orderId"]
    await served.post("/sandbox/fund", {"orderId": order_id})
    await until_completed(served, f"/orders/{order_id}", "Order")
    assert served.count("settle_times") == 1
    assert "observedTime" not in await status(served, order_id)


async def test_order_that_was_paid_in_part_is_not_counted(served: Served) -> None:
    """Cheap orders of a large size would tell others what theirs take."""
    made = await served.post("/agent/swap/create", {**SWAP, "amount": "40"})
    order_id = made.body["data"]["order"]["orderId"]
    await served.post("/sandbox/fund", {"orderId": order_id, "amount": "0.4"})
    assert (await status(served, order_id, "?waitSec=20&sinceCursor=1"))["deposits"]
    await served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 3_700})
    await until_completed(served, f"/orders/{order_id}", "Order")
    assert served.count("settle_times") == 0


async def test_refunded_order_is_not_counted(served: Served) -> None:
    made = await served.post("/agent/swap/create", {**SWAP, "refundAddress": MONERO})
    order_id = made.body["data"]["order"]["orderId"]
    await served.post("/sandbox/fault", {"fault": "payout_fails", "orderId": order_id})
    await served.post("/sandbox/fund", {"orderId": order_id})
    cursor = 0
    for _ in range(100):
        answer = await status(served, order_id, f"?waitSec=1&sinceCursor={cursor}")
        cursor = answer["cursor"]
        if answer["outcome"] is not None:
            break
    assert answer["outcome"] == "refunded"
    assert served.count("settle_times") == 0


async def test_pages_say_it_in_words(served: Served) -> None:
    made = await served.post("/agent/swap/create", SWAP)
    path = f"/orders/{made.body['data']['order']['orderId']}"
    assert "swaps like this" not in await (await served.client.get(path)).text()
    await settled(served, BOUNDS[-1], LEAST_SAMPLES)
    await minute_later(served)
    words = "of the last 20 swaps like this, half took at most 10080 min, and 95 of 100 at most"
    assert words in await (await served.client.get(path)).text()
    quoted = await served.client.post("/swap", data={**SWAP, "refundAddress": MONERO})
    assert words in await quoted.text()
