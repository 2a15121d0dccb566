"""The stores that the benchmark grows are read and served by the product.

The wallets of its simulated chains do not hold the deposits of copied orders: no payouts are made.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench.seeding import clone_orders
from tests.e2e.audit import count
from tests.e2e.processes import call, server, until_over
from tests.e2e.swaps import SWAPS

COPIES = 30


async def test_copied_orders_are_orders_like_all_others(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    async with server(data_dir) as at:
        for swap in SWAPS.values():
            done, _ = [await call(at, "swap.create", swap) for _ in range(2)]
            order_id = done["data"]["order"]["orderId"]
            assert (await call(at, "sandbox.fund", {"orderId": order_id}))["ok"]
            await until_over(at, order_id)
        assert at.stop() == 0

    copied = clone_orders(data_dir, COPIES)

    assert count(data_dir, "orders") == 4 + COPIES
    async with server(data_dir) as at:
        for order_id in copied:
            answer = await call(at, "swap.status", {"orderId": order_id})
            assert answer["data"]["order"]["orderId"] == order_id
