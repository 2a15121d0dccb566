"""Creates orders, reads their status and events, and waits until long polls are open."""

from __future__ import annotations

import asyncio
from typing import Any

from rpcsvc.orders.waits import Waits
from tests.contract.serving import SWAP, Served
from tests.e2e.processes import until

Json = dict[str, Any]


async def ordered(served: Served) -> str:
    """The id of a new order for `SWAP`."""
    data = (await served.post("/agent/swap/execute", SWAP)).body["data"]
    return str(data["order"]["orderId"])


async def events(served: Served, order_id: str, **query: Any) -> Json:
    return dict((await served.http("GET", f"/agent/swap/events/{order_id}", params=query)).body)


async def status(served: Served, order_id: str, **query: Any) -> Json:
    return dict((await served.http("GET", f"/agent/swap/status/{order_id}", params=query)).body)


async def until_status(served: Served, order_id: str, **wanted: Any) -> Json:
    """Return the status answer once its fields, or those of its data or order, are as wanted."""

    async def as_wanted() -> Json | None:
        answer = await status(served, order_id)
        fields = {**answer, **answer["data"], **answer["data"]["order"]}
        return answer if all(fields[name] == value for name, value in wanted.items()) else None

    return await until(as_wanted)


def count_waiting(waits: Waits) -> int:
    return sum(waits.counts.values())


async def until_waiting(waits: Waits, count: int = 1) -> None:
    async def as_many() -> bool:
        return count_waiting(waits) == count

    await until(as_many)


async def until_none_waits(served: Served) -> None:
    await until_waiting(served.up.service.waits, 0)


async def followed(served: Served, order_id: str, last: str) -> list[Json]:
    """All events up to the first of a type, read with successive long polls."""
    found: list[Json] = []
    async with asyncio.timeout(60):
        while not found or found[-1]["type"] != last:
            after = found[-1]["cursor"] if found else 0
            found += (await events(served, order_id, after=after, waitSec=5))["data"]["events"]
    return found
