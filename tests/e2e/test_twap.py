"""TWAP orders on the sandbox: computed outputs, restarts between chunks, and falling rates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.pricing import ONE_USDC
from rpcsvc.settlement.sandbox.engine import price_at
from tests.e2e.audit import audit
from tests.sandbox import EVM, HOUR_MS, MONERO, ManualClock, Placed, Sandbox, sandbox

PATH = [0, 12, -7, 31, -20, 5, 5, -40]
BASE = 165 * ONE_USDC
STEP_MS = 10_000
FLAGS = {"sandbox.rate_path_bps": PATH}
USDC = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
XMR_SIDE = {"chainId": 0, "token": "XMR"}
USDC_SIDE = {"chainId": 42161, "token": USDC}


@asynccontextmanager
async def booth(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Sandbox]:
    async with sandbox(tmp_path, clock, FLAGS) as box:
        yield box


async def make(box: Sandbox, direction: str, amount: int, **config: Any) -> Placed:
    sent, received = (XMR_SIDE, USDC_SIDE) if direction == "x2u" else (USDC_SIDE, XMR_SIDE)
    extra = {"twapConfig": config} if config else {}
    answer = await box.bff(
        "orders.create",
        fromChainId=sent["chainId"], toChainId=received["chainId"],
        fromToken=sent["token"], toToken=received["token"],
        fromAmount=str(amount), toAddress=EVM if direction == "x2u" else MONERO, **extra,
    )  # fmt: skip
    order_id = answer["orderId"]
    order = await box.up.service.store.order(order_id)
    assert order is not None
    return Placed(box, order_id, order.terms.session_id)


async def seen(box: Sandbox, placed: Placed) -> dict[str, Any]:
    return await box.bff("orders.get", orderId=placed.order_id)


async def predicted(box: Sandbox, placed: Placed) -> int:
    """The output computed from the fill times and the price path alone."""
    order = await box.up.service.store.order(placed.order_id)
    assert order is not None
    terms = order.terms
    total = 0
    for fill in order.fills:
        rate = price_at(BASE, PATH, STEP_MS, fill.at)
        assert fill.rate == rate
        total += terms.price.at(rate).exchanged(terms.direction, fill.units)
    return total - terms.price.payout_fee


AMOUNTS = {"x2u": 7 * 10**12, "u2x": 1_100 * ONE_USDC}


async def test_chunks_go_on_though_the_clock_is_set_back(tmp_path: Path) -> None:
    clock = ManualClock()
    async with booth(tmp_path, clock) as box:
        placed = await make(box, "u2x", AMOUNTS["u2x"], intervalMs=10_000)
        await placed.fund()
        await box.settle(4)
        assert (await seen(box, placed))["twap"]["chunksCompleted"] == 1
        clock.now -= HOUR_MS
        await box.settle(60)
        assert (await seen(box, placed))["twap"]["status"] == "completed"


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_an_order_is_swapped_in_chunks_and_paid_their_sum(
    tmp_path: Path, direction: str
) -> None:
    async with booth(tmp_path, ManualClock()) as box:
        placed = await make(box, direction, AMOUNTS[direction])
        waiting = await seen(box, placed)
        assert (waiting["twap"]["status"], waiting["twap"]["chunksTotal"]) == ("pending", 4)
        await placed.fund()
        await box.settle(8)
        active = await seen(box, placed)
        assert (active["status"], active["twap"]["status"]) == ("executing_swap", "active")
        assert 0 < active["twap"]["filledQty"] < active["twap"]["totalQty"]
        await box.settle(40)
        done = await seen(box, placed)
        assert (done["status"], done["twap"]["status"]) == ("completed", "completed")
        assert done["actualOutput"] == str(await predicted(box, placed))
        assert done["twap"]["filledQty"] == done["twap"]["totalQty"]
        over_agent = (await placed.status())["data"]["order"]
        assert over_agent["actualOutput"] == done["actualOutput"]
    assert audit(tmp_path) == []


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_agent_status_lists_the_chunks_as_the_bff_does(
    tmp_path: Path, direction: str
) -> None:
    async with booth(tmp_path, ManualClock()) as box:
        placed = await make(box, direction, AMOUNTS[direction])
        reported: dict[str, set[int]] = {}
        await placed.fund()
        for _ in range(60):
            progress = (await placed.status())["data"]["order"]["twap"]
            assert progress == (await seen(box, placed))["twap"]
            reported.setdefault(progress["status"], set()).add(progress["estimatedTimeRemainingMs"])
            await box.settle(1)
        assert list(reported) == ["pending", "active", "completed"]
        # A stored answer would have the remaining time of the last chunk.
        assert len(reported["active"]) > 4
        assert reported["completed"] == {0}


async def test_agent_status_reports_that_no_chunk_was_swapped(tmp_path: Path) -> None:
    async with booth(tmp_path, ManualClock()) as box:
        cancelled = await make(box, "u2x", AMOUNTS["u2x"])
        expired = await make(box, "u2x", AMOUNTS["u2x"])
        plain = await make(box, "u2x", 100 * ONE_USDC)
        owned = {"orderId": cancelled.order_id, "sessionId": cancelled.session_id}
        ended = await box.call("swap.cancel", **owned)
        assert ended["data"]["order"]["twap"]["status"] == "failed"
        await box.jump(3 * HOUR_MS)
        await box.settle(2)
        for placed in (cancelled, expired):
            order = (await placed.status())["data"]["order"]
            assert (order["status"], order["twap"]["status"]) == ("expired", "failed")
            assert order["twap"] == (await seen(box, placed))["twap"]
        assert "twap" not in (await plain.status())["data"]["order"]


async def test_restart_between_chunks_continues_with_the_next_one(tmp_path: Path) -> None:
    clock = ManualClock()
    async with booth(tmp_path, clock) as box:
        placed = await make(box, "x2u", AMOUNTS["x2u"], intervalMs=1_000)
        await placed.fund()
    counts = set()
    for _ in range(40):
        clock.now += 250
        async with booth(tmp_path, clock) as box:
            await box.catch_up()
            placed = Placed(box, placed.order_id, placed.session_id)
            answer = await seen(box, placed)
            counts.add(answer["twap"]["chunksCompleted"])
            if answer["status"] == "completed":
                assert answer["actualOutput"] == str(await predicted(box, placed))
    assert answer["status"] == "completed"
    assert counts == {0, 1, 2, 3, 4}
    assert audit(tmp_path) == []


async def test_remaining_chunks_wait_and_are_refunded_at_a_low_rate(
    tmp_path: Path,
) -> None:
    async with booth(tmp_path, ManualClock()) as box:
        placed = await make(box, "x2u", AMOUNTS["x2u"])
        await placed.fund()
        await box.settle(8)
        before = (await seen(box, placed))["twap"]["chunksCompleted"]
        assert before >= 1
        await box.fault("set_rate", rate="120")
        await box.settle(60)
        waits = await seen(box, placed)
        assert (waits["status"], waits["twap"]["chunksCompleted"]) == ("executing_swap", before)
        await box.jump(660_000)
        await box.settle(12)
        ended = await seen(box, placed)
        assert (ended["status"], ended["twap"]["status"]) == ("completed", "failed")
        assert int(ended["actualOutput"]) > 0
        assert ended["refundTxHash"] is None
        assert (await placed.status())["data"]["actionRequired"] == "refund_address"
        assert (await placed.give_refund_address(MONERO))["accepted"]
        await box.settle(6)
        refunded = await seen(box, placed)
        assert refunded["refundTxHash"]
        assert refunded["actualOutput"] == ended["actualOutput"]
        assert refunded["errorMessage"]
    assert audit(tmp_path) == []


async def test_rate_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async with booth(tmp_path, ManualClock()) as box:
        placed = await make(box, "u2x", AMOUNTS["u2x"])
        await placed.fund()
        await box.settle(3)
        await box.fault("rates_down")
        await box.settle(40)
        assert (await seen(box, placed))["status"] == "executing_swap"
        await box.fault("rates_up")
        await box.settle(60)
        assert (await seen(box, placed))["status"] == "completed"
    assert audit(tmp_path) == []


@pytest.mark.parametrize(
    ("amount", "config", "is_cut"),
    [
        (500 * ONE_USDC, {}, False),
        (500 * ONE_USDC + 1, {}, True),
        (900 * ONE_USDC, {"disabled": True}, False),
        (900 * ONE_USDC, {"chunkSizeUsd": 450}, False),
        (900 * ONE_USDC, {"chunkSizeUsd": 449}, True),
    ],
)
async def test_more_than_two_chunks_swap_in_chunks_unless_disabled(
    tmp_path: Path, amount: int, config: dict[str, Any], is_cut: bool
) -> None:
    async with booth(tmp_path, ManualClock()) as box:
        placed = await make(box, "u2x", amount, **config)
        answer = await seen(box, placed)
        assert ("twap" in answer) is is_cut
        await placed.fund()
        await box.settle(40)
        done = await seen(box, placed)
        assert done["status"] == "completed"
        if not is_cut:
            assert done["actualOutput"] == done["expectedOutput"]


async def test_deposit_that_is_reorged_out_takes_its_chunks_along(tmp_path: Path) -> None:
    async with booth(tmp_path, ManualClock()) as box:
        placed = await make(box, "u2x", AMOUNTS["u2x"])
        await placed.fund()
        await box.settle(14)
        assert (await seen(box, placed))["twap"]["chunksCompleted"] >= 2
        await placed.fault("drop_deposit")
        await box.settle(2)
        gone = await seen(box, placed)
        assert (gone["status"], gone["twap"]["chunksCompleted"]) == ("awaiting_deposit", 0)
        await placed.fault("restore_deposit")
        await box.settle(60)
        assert (await seen(box, placed))["status"] == "completed"
    assert audit(tmp_path) == []
