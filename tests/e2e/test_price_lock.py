"""The price lock on the sandbox: within it, after it, and when the rate breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.clock import iso8601
from rpcsvc.errors import Unavailable
from tests.e2e.audit import audit
from tests.rows import all_rows
from tests.sandbox import MONERO, Sandbox, attested, sandbox

BOTH = pytest.mark.parametrize("direction", ["x2u", "u2x"])
LOCK_MS = 900_000
# Against the service by a little, and by more than orders.lock_break_bps.
LITTLE = {"x2u": "164.5", "u2x": "165.5"}
MUCH = {"x2u": "163", "u2x": "167"}
# In favour of the service: the payer may then get less than minReceived.
BAD = {"x2u": "150", "u2x": "180"}


def payout(answer: dict[str, Any]) -> dict[str, Any]:
    (found,) = [t for t in answer["data"]["transfers"] if t["kind"] == "payout"]
    return dict(found)


async def quoted(box: Sandbox, direction: str) -> dict[str, Any]:
    amount = "0.8" if direction == "x2u" else "150"
    answer = await box.call("swap.quote", direction=direction, chain="arbitrum", amount=amount)
    return dict(answer["data"]["quote"])


@BOTH
async def test_end_of_the_lock_is_stated_before_and_after_an_order(
    box: Sandbox, direction: str
) -> None:
    end = iso8601(box.clock.now + LOCK_MS)
    assert (await quoted(box, direction))["priceLockedUntil"] == end
    order = await box.order(direction)
    data = (await order.status())["data"]
    assert data["order"]["priceLockedUntil"] == end
    assert data["fundingInstructions"]["priceLockedUntil"] == end
    assert attested(data["order"])["priceLockedUntil"] == end
    assert "priceLockedUntil" in " ".join(data["fundingInstructions"]["warnings"])
    capabilities = await box.call("capabilities")
    assert capabilities["data"]["priceLockSeconds"] == 900


@BOTH
async def test_in_the_lock_the_quoted_rate_is_paid(box: Sandbox, direction: str) -> None:
    due = (await quoted(box, direction))["expectedOutput"]
    order = await box.order(direction)
    await box.jump(LOCK_MS)
    await order.fund()
    await box.fault("set_rate", rate=BAD[direction])
    await box.settle()
    answer = await order.status()
    assert payout(answer)["amount"] == due
    assert answer["data"]["deposits"][0]["rate"] == "165"


@BOTH
async def test_after_the_lock_the_rate_of_the_moment_is_paid(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await box.jump(LOCK_MS + 1)
    await box.fault("set_rate", rate=LITTLE[direction])
    due = (await quoted(box, direction))["expectedOutput"]
    await order.fund()
    await box.catch_up()
    await box.fault("set_rate", rate="165")
    await box.settle()
    answer = await order.status()
    assert payout(answer)["amount"] == due
    assert answer["data"]["deposits"][0]["rate"] == LITTLE[direction]


@BOTH
async def test_after_the_lock_a_rate_below_the_minimum_is_refunded(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await box.jump(LOCK_MS + 1)
    await box.fault("set_rate", rate=BAD[direction])
    await order.fund()
    answer = await order.settle_refund(direction)
    assert answer["data"]["outcome"] == "refunded"
    assert [t["kind"] for t in answer["data"]["transfers"]] == ["refund"]


@BOTH
async def test_a_move_against_the_service_breaks_the_lock(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await box.fault("set_rate", rate=LITTLE[direction])
    await box.jump(1_000)
    kept = (await order.status())["data"]["order"]
    assert kept["priceLockedUntil"] == iso8601(box.clock.now - 1_000 + LOCK_MS)

    await box.fault("set_rate", rate=MUCH[direction])
    await box.jump(1_000)
    answer = await order.status()
    assert answer["state"] == "waiting_for_funding"
    assert answer["data"]["order"]["priceLockedUntil"] == iso8601(box.clock.now)
    assert answer["data"]["fundingInstructions"]["priceLockedUntil"] == iso8601(box.clock.now)


async def test_who_pays_into_a_broken_lock_is_paid_fairly_or_refunded(box: Sandbox) -> None:
    order = await box.order("x2u")
    await box.fault("set_rate", rate="163")
    await box.jump(1_000)
    box.clock.now += 1
    await order.fund()
    await box.settle()
    await order.give_refund_address(MONERO)
    await box.settle()
    assert (await order.status())["data"]["outcome"] == "refunded"

    other = await box.order("x2u")
    await box.fault("set_rate", rate="161.3")  # 1.04 %, and minReceived is 1 % below the output
    await box.jump(1_000)
    await box.fault("set_rate", rate="162.9")
    box.clock.now += 1
    await other.fund()
    await box.settle()
    answer = await other.status()
    assert (answer["state"], answer["data"]["deposits"][0]["rate"]) == ("completed", "162.9")
    assert audit(box.up.settings.data_dir) == []


@BOTH
async def test_a_move_in_favour_of_the_service_does_not_break_the_lock(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    before = (await order.status())["data"]["order"]["priceLockedUntil"]
    await box.fault("set_rate", rate={"x2u": "200", "u2x": "130"}[direction])
    await box.jump(1_000)
    assert (await order.status())["data"]["order"]["priceLockedUntil"] == before


async def test_a_broken_lock_survives_a_restart_and_is_in_the_history(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        clock, order = box.clock, await box.order("x2u")
        await box.fault("set_rate", rate="163")
        await box.jump(1_000)
        broken_at = clock.now
    async with sandbox(tmp_path, clock) as again:
        found = await again.up.service.store.order(order.order_id)
        assert found is not None
        assert found.lock_broken_at == broken_at
        rows = all_rows(
            again.up.database,
            "SELECT event FROM order_events WHERE order_id = ? ORDER BY version",
            (order.order_id,),
        )
        assert [event for (event,) in rows] == ["OrderCreated", "LockBroken"]


async def test_the_lock_is_never_longer_than_the_deposit_window(tmp_path: Path) -> None:
    async with sandbox(tmp_path, flags={"orders.deposit_window_seconds": 60}) as box:
        found = (await (await box.order("x2u")).status())["data"]["order"]
        assert found["priceLockedUntil"] == found["expiresAt"]


# --- without a rate ----------------------------------------------------------------------------


@contextmanager
def outage(box: Sandbox) -> Iterator[None]:
    """No rate source has a rate."""

    def no_rate() -> None:
        raise Unavailable("No source tells a rate.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box.up.engine, "rate", no_rate)
        yield


async def test_lock_holds_without_a_rate_and_the_next_rate_breaks_it(box: Sandbox) -> None:
    paid, unpaid = await box.order("x2u"), await box.order("x2u")
    await box.fault("set_rate", rate=MUCH["x2u"])
    with outage(box):
        await box.jump(LOCK_MS // 2)
        await paid.fund()
        await box.settle()
        answer = await paid.status()
        assert (answer["state"], answer["data"]["deposits"][0]["rate"]) == ("completed", "165")
    await box.jump(1_000)
    order = (await unpaid.status())["data"]["order"]
    assert order["priceLockedUntil"] == iso8601(box.clock.now)


@pytest.mark.parametrize(
    ("outage_ms", "outcome"), [(LOCK_MS - 60_000, "completed"), (LOCK_MS + 60_000, "refunded")]
)
async def test_after_the_lock_a_deposit_waits_for_a_rate(
    box: Sandbox, outage_ms: int, outcome: str
) -> None:
    """Until orders.prepare_timeout_seconds, 15 minutes as well; then it is refunded."""
    order = await box.order("u2x")
    await box.jump(LOCK_MS + 1)
    with outage(box):
        await order.fund()
        await box.settle()
        answer = await order.status()
        assert answer["data"]["order"]["status"] == "deposit_confirmed"
        assert answer["data"]["deposits"][0]["rate"] is None
        await box.jump(outage_ms)
    await box.settle(80)
    assert (await order.status())["data"]["outcome"] == outcome
