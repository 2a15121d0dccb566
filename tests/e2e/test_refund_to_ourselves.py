"""A refund to a deposit address of the service is refused: it would be refunded again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox import HOUR_MS, sandbox


@pytest.mark.parametrize("whose", ["its own", "another order's"])
async def test_a_deposit_address_is_refused_as_a_refund_address(tmp_path: Path, whose: str) -> None:
    async with sandbox(tmp_path) as box:
        order, other = await box.order("x2u"), await box.order("x2u")
        await box.jump(2 * HOUR_MS)
        await order.fund("0.8")
        await box.settle()
        assert (await order.status())["data"]["actionRequired"] == "refund_address"
        named = order if whose == "its own" else other
        address = (await named.status())["data"]["order"]["depositAddress"]

        answer = await order.ask_for_refund(address)

        assert answer["error"]["code"] == "invalid_destination"
        assert (await order.status())["data"]["actionRequired"] == "refund_address"
