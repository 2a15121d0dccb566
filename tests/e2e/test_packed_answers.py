"""Answers of orders made an hour ago are packed, and are replayed and shown as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcsvc.operations.service import Call
from rpcsvc.operations.table import OPERATIONS
from tests.rows import all_rows
from tests.sandbox import EVM, HOUR_MS, MONERO, Placed, Sandbox
from tools.order_sizes import settled

ROWS = {row.name: row for row in OPERATIONS}
KEY = "0123456789abcdef"


async def reply(box: Sandbox, name: str, params: dict[str, Any]) -> bytes:
    found = await box.up.dispatcher.run(ROWS[name], params, Call("test", idempotency_key=KEY))
    return bytes(found.body).rpartition(b',"requestId"')[0]


def stored(box: Sandbox) -> tuple[int, int, int]:
    """The dictionary and the size of the only answer, and the number of status answers."""
    (row,) = all_rows(
        box.up.database,
        "SELECT packed, length(body), (SELECT count(*) FROM status_views) FROM idempotency_keys",
    )
    packed, size, views = row
    return packed, size, views


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_answer_of_an_hour_ago_is_packed_and_replayed(box: Sandbox, direction: str) -> None:
    to, amount = (EVM, "0.8") if direction == "x2u" else (MONERO, "150")
    params = {"direction": direction, "chain": "arbitrum", "amount": amount, "to": to}
    first = await reply(box, "swap.create", params)
    order_id = (await box.call("swap.create", **params, key=KEY))["data"]["order"]["orderId"]
    await Placed(box, order_id, "").fund()
    await box.settle(8)
    shown = await box.call("swap.status", orderId=order_id)
    assert shown["state"] == "completed"
    await box.jump(HOUR_MS - 60_000)
    packed, size, views = stored(box)
    assert (packed, views) == (0, 1)
    await box.jump(60_000)
    assert stored(box)[0] == 1
    assert stored(box)[1] < size // 7
    assert stored(box)[2] == 0
    assert await reply(box, "swap.create", params) == first
    assert await box.call("swap.status", orderId=order_id) == shown


async def test_order_that_lasts_an_hour_is_tidied_up_when_it_is_over(box: Sandbox) -> None:
    params = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}
    first = await reply(box, "swap.create", params)
    order_id = (await box.call("swap.create", **params, key=KEY))["data"]["order"]["orderId"]
    await box.jump(HOUR_MS + 2 * 60_000)
    await Placed(box, order_id, "").fund()
    await box.settle(8)
    await box.jump(20 * 60_000)
    await box.settle(8)
    shown = await box.call("swap.status", orderId=order_id)
    assert shown["state"] == "completed"
    await box.jump(2 * 60_000)
    packed, _, views = stored(box)
    assert (packed, views) == (1, 0)
    assert await reply(box, "swap.create", params) == first


async def test_status_answer_of_an_order_that_waits_stays(box: Sandbox) -> None:
    params = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}
    await reply(box, "swap.create", params)
    order_id = (await box.call("swap.create", **params, key=KEY))["data"]["order"]["orderId"]
    await Placed(box, order_id, "").fund("0.01")
    await box.jump(26 * HOUR_MS)
    answer = await box.call("swap.status", orderId=order_id)
    assert answer["data"]["actionRequired"] == "refund_address"
    packed, _, views = stored(box)
    assert (packed, views) == (1, 1)


async def test_settled_order_of_the_sandbox_holds_5_kib_at_most(tmp_path: Path) -> None:
    before, tables = await settled(100, tmp_path)
    assert sum(tables.values()) < 5 * 1024 < before
