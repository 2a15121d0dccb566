"""Orders that ended without a deposit: their answers are pruned, late deposits still handled."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpcsvc.orders import policy
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from rpcsvc.store.backends.sqlite.maintenance import check_database
from tests.rows import all_rows
from tests.sandbox import EVM, HOUR_MS, MONERO, Placed, Sandbox, sandbox
from tools.order_sizes import unpaid

DAY_MS = 24 * HOUR_MS
WAYS = ("x2u", "u2x")
LATE = {"x2u": "0.5", "u2x": "90"}
REFUND_TO = {"x2u": MONERO, "u2x": EVM}
KEY = "0123456789abcdef"


async def make(box: Sandbox, direction: str, **more: Any) -> Placed:
    amount = "0.8" if direction == "x2u" else "150"
    answer = await box.call(
        "swap.execute",
        direction=direction,
        chain="arbitrum",
        amount=amount,
        to=REFUND_TO["u2x" if direction == "x2u" else "x2u"],
        refundAddress=REFUND_TO[direction],
        **more,
    )
    assert answer["ok"], answer
    return Placed(box, answer["data"]["order"]["orderId"], answer["data"]["sessionId"])


async def cancel(box: Sandbox, order: Placed) -> None:
    answer = await box.call("swap.cancel", orderId=order.order_id, sessionId=order.session_id)
    assert answer["ok"], answer


def holds(box: Sandbox, order: Placed) -> bool:
    """Whether answers of the order are stored."""
    tables = ("status_views", "idempotency_keys")
    query = " UNION ALL ".join(f"SELECT order_seq FROM {table}" for table in tables)
    seq = "(SELECT seq FROM orders WHERE order_id = ?)"
    found = all_rows(
        box.up.database, f"SELECT 1 FROM ({query}) WHERE order_seq = {seq}", (order.order_id,)
    )
    return bool(found)


class LateDeposits(NamedTuple):
    """An order whose ``deposits`` come after ``day`` days; never if ``day`` is None."""

    direction: str
    is_cancelled: bool
    day: int | None
    deposits: int


CASES = st.builds(
    LateDeposits,
    st.sampled_from(WAYS),
    st.booleans(),
    st.none() | st.sampled_from([1, 29, 31, 62]),
    st.integers(1, 2),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(CASES, min_size=1, max_size=5))
def test_late_deposits_are_refunded_however_old_the_order(cases: list[LateDeposits]) -> None:
    asyncio.run(run(cases))


async def run(cases: list[LateDeposits]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with sandbox(Path(folder)) as box:
            orders = [await make(box, case.direction) for case in cases]
            for order, case in zip(orders, cases, strict=True):
                if case.is_cancelled:
                    await cancel(box, order)
            addresses = [
                (await each.status())["data"]["order"]["depositAddress"] for each in orders
            ]
            await box.jump(2 * HOUR_MS)
            for day in range(1, 64):
                await box.jump(DAY_MS)
                for order, case in zip(orders, cases, strict=True):
                    for _ in range(case.deposits if day == case.day else 0):
                        await order.fund(LATE[case.direction])
            await box.settle(8)
            for order, case, address in zip(orders, cases, addresses, strict=True):
                data = (await order.status())["data"]
                assert (data["outcome"], data["order"]["depositAddress"]) == ("expired", address)
                refunds = [each for each in data["transfers"] if each["status"] == "settled"]
                to = [(each["kind"], each["address"]) for each in refunds]
                assert to == [("refund", REFUND_TO[case.direction])] * (
                    case.deposits if case.day else 0
                )
                assert holds(box, order) is bool(case.day), "it is pruned unless money came"
        assert check_database(Path(folder)) == []


async def test_a_pruned_order_answers_as_before(box: Sandbox) -> None:
    order = await make(box, "x2u")
    await cancel(box, order)
    before = [await order.status(), *await by_bff(box, order)]
    await box.jump(31 * DAY_MS)
    assert not holds(box, order)
    assert [await order.status(), *await by_bff(box, order)] == before
    again = await box.call("swap.cancel", orderId=order.order_id, sessionId=order.session_id)
    assert again["ok"]


async def by_bff(box: Sandbox, order: Placed) -> list[dict[str, Any]]:
    """The order and its session's orders, as a front end sees them."""
    shown = await box.bff("orders.get", orderId=order.order_id)
    return [shown, await box.bff("orders.list", session=order.session_id)]


async def test_answers_are_kept_until_their_time(box: Sandbox) -> None:
    order = await make(box, "x2u", key=KEY)
    await cancel(box, order)
    await box.jump(29 * DAY_MS)
    assert holds(box, order)


async def test_above_the_size_the_oldest_unpaid_orders_are_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "UNPAID_BYTES", 1024 * 1024 // 3)
    async with sandbox(tmp_path, flags={"orders.unpaid_bytes": 1024 * 1024}) as box:
        orders = [await make(box, "u2x", key=f"{KEY}{number}") for number in range(6)]
        for order in orders[:-1]:
            box.clock.now += 1
            await cancel(box, order)
        await box.jump(60_000)
        assert [holds(box, each) for each in orders] == [False, False, True, True, True, True]
        same = await make(box, "u2x", key=f"{KEY}5")
        assert same.order_id == orders[5].order_id, "an order that awaits money keeps its key"


async def test_pruning_goes_in_small_steps(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "STEP", 2)
    orders = [await make(box, "x2u") for _ in range(5)]
    for order in orders:
        await cancel(box, order)
    box.clock.now += 31 * DAY_MS
    left = []
    for _ in range(4):
        await box.up.worker.tick()
        left.append(sum(holds(box, each) for each in orders))
    assert left == [3, 1, 0, 0]


async def test_a_deposit_right_before_the_deletion_keeps_the_answers(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = await make(box, "x2u", key=KEY)
    await cancel(box, order)
    read = box.up.database.fetch

    async def read_and_be_late(sql: str, **values: Any) -> list[Any]:
        found = await read(sql, **values)
        if found and "unpaid_since <" in sql:
            with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as other, other:
                other.execute("UPDATE orders SET unpaid_since = NULL")
        return found

    monkeypatch.setattr(box.up.database, "fetch", read_and_be_late)
    assert await box.up.service.store.prune_unpaid(box.clock.now + 1, 0, 10) == 1
    assert holds(box, order)
    assert (await make(box, "x2u", key=KEY)).order_id == order.order_id


async def test_an_unpaid_order_holds_no_more_than_is_budgeted(tmp_path: Path) -> None:
    before, after = await unpaid(100, tmp_path)
    assert 3_000 < before - after <= policy.UNPAID_BYTES
