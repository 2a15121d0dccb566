"""A network whose node is down: its orders are not decided until the deposit scan has caught up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.orders.ports.wallets import Observation
from tests.sandbox import HOUR_MS, Sandbox, sandbox

NETWORK = {"x2u": "monero", "u2x": "arbitrum"}
OTHER = {"x2u": "u2x", "u2x": "x2u"}
HALF = {"x2u": "0.4", "u2x": "75"}
BOTH = pytest.mark.parametrize("direction", ["x2u", "u2x"])


@contextmanager
def without_scans(box: Sandbox, network: str) -> Iterator[None]:
    """The node of one network is down; deposits of the others are still reported."""
    engine = box.up.engine
    sees = engine.observe

    async def observe() -> Observation:
        found: Observation = await sees()
        shown = [each for each in found.sightings if each.key.network != network]
        return replace(
            found,
            sightings=shown,
            complete_until={n: at for n, at in found.complete_until.items() if n != network},
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "observe", observe)
        yield


@BOTH
async def test_a_part_that_came_in_time_while_its_node_was_down_counts(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await order.fund(HALF[direction])
    await box.settle()
    with without_scans(box, NETWORK[direction]):
        await order.fund(HALF[direction])
        await box.jump(2 * HOUR_MS)
        assert (await order.status())["state"] == "deposit_detected"
    answer = await order.settle_payout()
    assert [each["use"] for each in answer["data"]["deposits"]] == ["payout", "payout"]
    assert [each["kind"] for each in answer["data"]["transfers"]] == ["payout"]


@BOTH
async def test_order_paid_while_its_node_was_down_does_not_expire(
    box: Sandbox, direction: str
) -> None:
    paid, unpaid = await box.order(direction), await box.order(direction)
    elsewhere = await box.order(OTHER[direction])
    with without_scans(box, NETWORK[direction]):
        await paid.fund()
        await box.jump(2 * HOUR_MS)
        assert (await paid.status())["state"] == "waiting_for_funding"
        assert (await unpaid.status())["state"] == "waiting_for_funding"
        assert (await elsewhere.status())["state"] == "terminal_failure", "its network is seen"
        health = (await box.up.service.venue.progress())["deposits"]
        assert f"Deposit scan of {NETWORK[direction]} is" in (health.detail or "")
    await box.settle()
    assert (await paid.status())["state"] == "completed"
    assert (await unpaid.status())["state"] == "terminal_failure"
    assert (await box.up.service.venue.progress())["deposits"].ok


async def test_first_tick_decides_nothing_before_the_scan(
    tmp_path: Path,
) -> None:
    async with sandbox(tmp_path) as box:
        order = await box.order("x2u")
        await order.fund()
        clock = box.clock
    clock.now += 2 * HOUR_MS
    async with sandbox(tmp_path, clock) as box:
        with without_scans(box, "monero"):
            await box.catch_up()
        await box.settle()
        answer = await box.call("swap.status", orderId=order.order_id)
        assert answer["state"] == "completed"
