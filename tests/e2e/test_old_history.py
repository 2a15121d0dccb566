"""Orders that ended long ago: their history is reduced, and everything else goes on as before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.audit.books import read_books
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.orders import policy
from tests.e2e.audit import audit
from tests.rows import one_row
from tests.sandbox import HOUR_MS, MONERO, Placed, Sandbox, sandbox

DAY_MS = 24 * HOUR_MS
KEPT = {"orders.history_keep_days": 90}
_STATUS = next(row for row in OPERATIONS if row.name == "swap.status")


@pytest.fixture
async def old(tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox that keeps histories for 90 days."""
    async with sandbox(tmp_path, flags=KEPT) as ready:
        yield ready


async def completed(box: Sandbox) -> Placed:
    order = await box.order("u2x")
    await order.fund()
    await box.settle(8)
    assert (await order.status())["data"]["outcome"] == "completed"
    return order


async def refunded(box: Sandbox) -> Placed:
    """An XMR order of which too little came, refunded to an address that was named later."""
    order = await box.order("x2u")
    await order.fund("0.01")
    await box.jump(2 * HOUR_MS)
    await box.settle(8)
    assert (await order.ask_for_refund(MONERO, order.session_id))["ok"]
    await box.settle(8)
    assert (await order.status())["data"]["outcome"] == "refunded"
    return order


async def status(order: Placed, box: Sandbox) -> bytes:
    """The status answer, as its bytes."""
    reply = await box.up.dispatcher.run(_STATUS, {"orderId": order.order_id}, Call("test"))
    return bytes(reply.body)


async def events(order: Placed, box: Sandbox, after: int = 0) -> list[dict[str, Any]]:
    answer = await box.call("swap.events", orderId=order.order_id, after=after)
    found: list[dict[str, Any]] = answer["data"]["events"]
    return found


def has_view(order: Placed, box: Sandbox) -> bool:
    seq = "(SELECT seq FROM orders WHERE order_id = ?)"
    found = one_row(
        box.up.database, f"SELECT 1 FROM status_views WHERE order_seq = {seq}", (order.order_id,)
    )
    return found is not None


@pytest.mark.parametrize("make", [completed, refunded])
async def test_reduced_order_answers_as_before_and_refunds_what_comes(
    old: Sandbox, tmp_path: Path, make: Any
) -> None:
    order = await make(old)
    whole, before = await events(order, old), await status(order, old)
    shown = await old.bff("orders.get", orderId=order.order_id)
    books = list(read_books(tmp_path).orders)
    last = whole[-1]["cursor"]
    await old.jump(89 * DAY_MS)
    assert await events(order, old) == whole
    assert has_view(order, old)
    await old.jump(2 * DAY_MS)

    assert not has_view(order, old)
    left = [whole[-1]] if make is completed else [named(whole), whole[-1]]
    assert await events(order, old) == left
    assert await events(order, old, last - 1) == [whole[-1]]
    assert await events(order, old, last) == []
    assert await status(order, old) == before
    assert await old.bff("orders.get", orderId=order.order_id) == shown
    assert list(read_books(tmp_path).orders) == books, "the auditor sees what it saw"
    assert audit(tmp_path) == []

    sent = len((await order.status())["data"]["transfers"])
    await order.fund("90" if make is completed else "0.5")
    await old.settle(8)
    data = (await order.status())["data"]
    transfers = [(each["kind"], each["status"]) for each in data["transfers"]]
    assert transfers[sent:] == [("refund", "settled")]
    later = await events(order, old, last)
    assert [each["cursor"] for each in later] == list(range(last + 1, last + 1 + len(later)))
    assert await events(order, old) == [*left, *later]
    await old.jump(80 * DAY_MS)
    assert await events(order, old) == [*left, *later]
    await old.jump(11 * DAY_MS)
    assert (await events(order, old))[-1] == later[-1]
    assert len(await events(order, old)) == len(left)
    assert audit(tmp_path) == []


def named(whole: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in whole if each["type"] == "refund_address.set")


async def test_histories_are_kept_for_ever_by_default(box: Sandbox) -> None:
    order = await completed(box)
    whole = await events(order, box)
    await box.jump(4_000 * DAY_MS)
    assert await events(order, box) == whole
    assert has_view(order, box)


async def test_stop_between_two_steps_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "STEP", 2)
    async with sandbox(tmp_path, flags=KEPT) as box:
        orders = [await completed(box) for _ in range(5)]
        before = [await status(order, box) for order in orders]
        last = [(await events(order, box))[-1] for order in orders]
        box.clock.now += 91 * DAY_MS
        await box.up.worker.tick()
        assert [has_view(order, box) for order in orders] == [False] * 2 + [True] * 3
        now = box.clock.now
    assert audit(tmp_path) == []
    async with sandbox(tmp_path, flags=KEPT) as box:
        box.clock.now = now
        left = []
        for _ in range(3):
            await box.up.worker.tick()
            left.append(sum(has_view(order, box) for order in orders))
        assert left[-1] == 0
        assert [await events(order, box) for order in orders] == [[each] for each in last]
        assert [await status(order, box) for order in orders] == before
    assert audit(tmp_path) == []
