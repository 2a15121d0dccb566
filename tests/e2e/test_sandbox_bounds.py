"""Amounts beyond the sandbox's integers are refused before they stop the simulated chains."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.sandbox import EVM, HOUR_MS, MONERO, Sandbox

MOST = "9223372.036854775807"  # XMR: 2^63 - 1 atomic units


async def test_a_deposit_that_the_wallet_could_not_hold_is_refused(box: Sandbox) -> None:
    order = await box.order("x2u")
    answer = await box.call("sandbox.fund", orderId=order.order_id, amount=MOST)
    assert answer["error"]["code"] == "amount_above_maximum"
    most = answer["error"]["details"]["maximum"]
    answer = await box.call("sandbox.fund", orderId=order.order_id, amount=most)
    assert answer["ok"]
    # While it is in the pool no other deposit fits; once it is mined the chains go on.
    again = await box.call("sandbox.fund", orderId=order.order_id, amount="0.1")
    assert again["error"]["code"] == "amount_above_maximum"
    await box.settle()
    other = await box.order("u2x")
    await other.fund()
    await box.settle()
    assert (await other.status())["state"] == "completed"


async def test_a_dropped_deposit_comes_back_only_where_there_is_room(box: Sandbox) -> None:
    order, other = await box.order("x2u"), await box.order("x2u")
    await order.fund("100")
    await order.fault("drop_deposit")
    probe = await box.call("sandbox.fund", orderId=other.order_id, amount=MOST)
    await other.fund(probe["error"]["details"]["maximum"])
    answer = await box.call("sandbox.fault", fault="restore_deposit", orderId=order.order_id)
    assert answer["error"]["code"] == "amount_above_maximum"


@pytest.mark.parametrize("rate", ["0.009999", "1000000.000001", "0.000001"])
async def test_a_rate_that_no_xmr_has_is_refused(box: Sandbox, rate: str) -> None:
    answer = await box.call("sandbox.fault", fault="set_rate", rate=rate)
    assert answer["validationErrors"][0]["field"] == "rate"
    assert answer["error"]["details"]["allowed"] == ["0.01 to 1000000"]


@pytest.mark.parametrize("rate", ["0.01", "1000000"])
@pytest.mark.parametrize(("direction", "to"), [("x2u", EVM), ("u2x", MONERO)])
async def test_the_largest_order_at_the_limits_of_the_rate_is_made(
    box: Sandbox, rate: str, direction: str, to: str
) -> None:
    await box.fault("set_rate", rate=rate)
    swap = {"direction": direction, "chain": "base", "amount": "9000000"}
    refused = await box.call("swap.quote", **swap)
    swap["amount"] = refused["error"]["details"]["maximum"]
    answer = await box.call("swap.execute", **swap, to=to)
    assert answer["ok"], answer


async def test_advances_of_the_clock_at_once_all_count(box: Sandbox) -> None:
    before = box.up.service.clock.now_ms()
    await asyncio.gather(*(box.fault("advance_clock", seconds=3600) for _ in range(10)))
    assert box.up.service.clock.now_ms() == before + 10 * HOUR_MS


async def test_the_clock_stops_before_years_of_five_digits(box: Sandbox) -> None:
    year = 31_536_000
    answer: dict[str, Any] = {"ok": True}
    for _ in range(100):
        answer = await box.call("sandbox.fault", fault="advance_clock", seconds=year)
        if not answer["ok"]:
            break
    assert answer["validationErrors"][0]["field"] == "seconds"
    assert (await box.call("swap.quote", direction="x2u", chain="base", amount="1"))["ok"]
