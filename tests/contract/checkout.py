"""Orders of every status, for tests of the page that shows them."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from tests.contract.following import until_status
from tests.contract.serving import EVM, MONERO, Served

X2U = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}
U2X = {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": MONERO}
Json = dict[str, Any]


class Ordered(NamedTuple):
    """An order and its owner's secret."""

    order_id: str
    session_id: str

    @property
    def path(self) -> str:
        return f"/orders/{self.order_id}"


async def make_order(served: Served, swap: Json, **more: Any) -> Ordered:
    answer = await served.post("/agent/swap/execute", {**swap, **more})
    assert answer.status == 200, answer.body
    return Ordered(answer.body["data"]["order"]["orderId"], answer.body["data"]["sessionId"])


async def fund(served: Served, order: Ordered, **params: str) -> None:
    answer = await served.post("/sandbox/fund", {"orderId": order.order_id, **params})
    assert answer.status == 200, answer.body


async def fault(served: Served, kind: str, **params: Any) -> None:
    answer = await served.post("/sandbox/fault", {"fault": kind, **params})
    assert answer.status == 200, answer.body


async def status_of(served: Served, order: Ordered) -> Json:
    answer = await served.http("GET", f"/agent/swap/status/{order.order_id}")
    return dict(answer.body["data"])


async def until(served: Served, order: Ordered, **wanted: Any) -> Json:
    """Return the data of the status answer once its fields are as wanted."""
    return dict((await until_status(served, order.order_id, **wanted))["data"])


async def until_paid_out(served: Served, order: Ordered) -> None:
    """Return once the order has a payout in any state."""
    async with asyncio.timeout(60):
        while True:
            if (await status_of(served, order))["transfers"]:
                return
            await asyncio.sleep(0.02)


async def awaiting_refund_address(served: Served) -> Ordered:
    """An order for USDC whose XMR deposit was too small, and that has no refund address."""
    order = await make_order(served, X2U)
    await fund(served, order, amount="0.01")
    await until(served, order, status="deposit_detected", amountDue="0.79")
    await fault(served, "advance_clock", seconds=3 * 3600)
    await until(served, order, actionRequired="refund_address")
    return order
