"""An order in each state that its page shows differently, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from tests.contract.checkout import (
    U2X,
    X2U,
    Ordered,
    awaiting_refund_address,
    fault,
    fund,
    make_order,
    until,
)
from tests.contract.serving import MONERO, Served, serving

# Blocks of a chain that as good as stands still.
_STANDSTILL_MS = 3_600_000


class Staged(NamedTuple):
    """Orders by state at one service."""

    served: Served
    orders: dict[str, Ordered]


@asynccontextmanager
async def settled_states(data_dir: Path) -> AsyncIterator[Staged]:
    """What an order is before money moves, and after."""
    async with serving(data_dir) as served:
        orders = await _ended_badly(served)
        late = await make_order(served, X2U, refundAddress=MONERO)
        await fault(served, "advance_clock", seconds=3_700)
        orders |= {
            "window-over": late,
            "awaiting-xmr": await make_order(served, X2U, refundAddress=MONERO),
            "awaiting-xmr-risky": await make_order(served, X2U),
            "awaiting-usdc": await make_order(served, U2X),
            "partial": await make_order(served, X2U, refundAddress=MONERO),
            "completed-xmr": await make_order(served, X2U, refundAddress=MONERO),
            "completed-usdc": await make_order(served, U2X),
        }
        await fund(served, orders["partial"], amount="0.3")
        await until(served, orders["partial"], amountDue="0.5")
        for name in ("completed-xmr", "completed-usdc"):
            await fund(served, orders[name])
            await until(served, orders[name], status="completed")
        yield Staged(served, orders)


async def _ended_badly(served: Served) -> dict[str, Ordered]:
    orders = {
        name: await make_order(served, X2U, refundAddress=MONERO)
        for name in ("expired", "refunded", "refund-blocked", "failed")
    }
    await fault(served, "refund_fails", orderId=orders["refund-blocked"].order_id)
    for name, amount in (("refunded", "0.01"), ("refund-blocked", "0.01"), ("failed", "0.00005")):
        await fund(served, orders[name], amount=amount)
        await until(served, orders[name], status="deposit_detected")
    orders["refund-address"] = await awaiting_refund_address(served)  # hours pass in there
    for name in ("expired", "refunded", "failed"):
        await until(served, orders[name], status=name)
    await until(served, orders["refund-blocked"], actionRequired="refund_blocked")
    return orders


@asynccontextmanager
async def moving_states(data_dir: Path) -> AsyncIterator[Staged]:
    """What an order is while money moves: USDC takes very long to be confirmed here."""
    async with serving(data_dir, sandbox__usdc_block_ms=_STANDSTILL_MS) as served:
        orders = {
            "detected": await make_order(served, U2X),
            "executing": await make_order(served, X2U, refundAddress=MONERO),
        }
        for order in orders.values():
            await fund(served, order)
        await until(served, orders["detected"], status="deposit_detected")
        await until(served, orders["executing"], status="executing_swap")
        yield Staged(served, orders)
