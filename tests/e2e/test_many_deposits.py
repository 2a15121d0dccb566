"""An order with very many tiny deposits, which cost a sender almost nothing, delays no other."""

from __future__ import annotations

from pathlib import Path

from rpcsvc.orders.deposits import DEPOSITS_PER_PASS
from tests.e2e.audit import audit
from tests.sandbox import Placed, Sandbox, sandbox

MANY = 3 * DEPOSITS_PER_PASS + 1
ONE_UNIT = "0.000001"


async def deposits_of(box: Sandbox, placed: Placed) -> int:
    order = await box.up.service.store.order(placed.order_id)
    assert order is not None
    return len(order.deposits)


async def test_order_with_many_deposits_yields_to_the_next_order(
    tmp_path: Path,
) -> None:
    async with sandbox(tmp_path) as box:
        swamped, good = await box.order("u2x"), await box.order("u2x")
        for _ in range(MANY):
            await swamped.fund(ONE_UNIT)
        await good.fund()

        await box.up.worker.tick()

        assert await deposits_of(box, swamped) == DEPOSITS_PER_PASS
        assert await deposits_of(box, good) == 1


async def test_many_deposits_are_all_recorded_and_counted(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        swamped = await box.order("u2x")
        for _ in range(MANY):
            await swamped.fund(ONE_UNIT)
        await swamped.fund()  # the order's amount, since no deposit is recorded yet

        await box.settle(20)

        assert await deposits_of(box, swamped) == MANY + 1
        assert (await swamped.status())["state"] == "completed"
        assert audit(tmp_path) == []
