"""An order in each state that its page shows differently, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn
from unittest.mock import patch

from rpcsvc.settlement.sandbox.engine import SimulatedAuthorizations
from tests.contract import bff
from tests.contract.bff import ORDER, SESSION
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
from tests.contract.paying import fund as pay
from tests.contract.paying import header, offered, signed
from tests.contract.serving import MONERO, Served, serving

# The block time of a chain that practically stands still.
_NO_BLOCKS_MS = 3_600_000


class Staged(NamedTuple):
    """Orders by state at one service."""

    served: Served
    orders: dict[str, Ordered]


@asynccontextmanager
async def settled_states(data_dir: Path) -> AsyncIterator[Staged]:
    """Orders before and after money moves."""
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
    """Orders while money moves: here the confirmation of USDC takes very long."""
    async with serving(data_dir, sandbox__usdc_block_ms=_NO_BLOCKS_MS) as served:
        orders = {
            "detected": await make_order(served, U2X),
            "executing": await make_order(served, X2U, refundAddress=MONERO),
            "executing-chunks": await _order_in_chunks(served),
            "deposit-removed": await make_order(served, U2X),
            "signed-payment": await make_order(served, U2X),
            "deposit-confirmed": await make_order(served, X2U, refundAddress=MONERO),
        }
        for name in ("detected", "executing", "executing-chunks"):
            await fund(served, orders[name])
        await until(served, orders["detected"], status="deposit_detected")
        await until(served, orders["executing"], status="executing_swap")
        await until(served, orders["executing-chunks"], status="executing_swap")
        await _lose_deposit(served, orders["deposit-removed"])
        with patch.object(SimulatedAuthorizations, "carry_out", _give_no_answer):
            await _pay_by_signature(served, orders["signed-payment"])
            await fault(served, "engine_down")
            await fund(served, orders["deposit-confirmed"])
            await until(served, orders["deposit-confirmed"], status="deposit_confirmed")
            yield Staged(served, orders)


async def _order_in_chunks(served: Served) -> Ordered:
    """An order in two parts, the second of which is swapped a minute after the first."""
    body = {**ORDER, "fromAmount": str(4 * 10**12), "twapConfig": {"intervalMs": 60_000}}
    answer = await bff.post(served, "/orders", body)
    return Ordered(answer.body["orderId"], SESSION)


async def _lose_deposit(served: Served, order: Ordered) -> None:
    await fund(served, order, amount="50")
    await until(served, order, amountDue="100")
    await fault(served, "drop_deposit", orderId=order.order_id)
    await until(served, order, amountDue="150")


async def _pay_by_signature(served: Served, order: Ordered) -> None:
    payment = await signed(await offered(served, order.order_id))
    answer = await pay(served, order.order_id, **header(payment))
    assert answer.status == 202, answer.body


async def _give_no_answer(*_: object) -> NoReturn:
    raise ConnectionError("no reply")


@asynccontextmanager
async def refunding_states(data_dir: Path) -> AsyncIterator[Staged]:
    """A refund that is not sent yet: the engine is down."""
    async with serving(data_dir) as served:
        order = await make_order(served, X2U, refundAddress=MONERO)
        await fund(served, order, amount="0.01")
        await until(served, order, status="deposit_detected")
        await fault(served, "engine_down")
        await fault(served, "advance_clock", seconds=3 * 3600)
        await until(served, order, status="refunding")
        yield Staged(served, {"refunding": order})


Staging = Callable[[Path], AbstractAsyncContextManager[Staged]]
STAGINGS: tuple[Staging, ...] = (settled_states, moving_states, refunding_states)
