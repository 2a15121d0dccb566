"""One quarantined order must not stop the others."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.logs import captured
from tests.rows import statement
from tests.sandbox import Sandbox, sandbox

_CLAIM = """
    INSERT OR IGNORE INTO deposits (network, txid, output_index, order_id, units, first_seen_at,
        state, is_dust)
    SELECT network, txid, 0, ?, units, 0, 'seen', 0 FROM sandbox_transactions WHERE recipient = ?
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off tracebacks: rendering one at every tick would dominate the run time."""
    captured(monkeypatch, "rpcsvc.orders.processor")


async def _claim_deposit_of(box: Sandbox, address: str, other: str) -> None:
    """Put the deposit to ``address`` on record as another order's: the store will refuse it."""
    await box.up.database.write([statement(_CLAIM, (other, address))])


def _take_back_claim(data_dir: Path, other: str) -> None:
    """Delete the claim behind the triggers: the service never deletes a deposit."""
    with closing(sqlite3.connect(data_dir / DATABASE_NAME, isolation_level=None)) as database:
        database.execute("DROP TRIGGER deposits_are_never_deleted")
        database.execute("DELETE FROM deposits WHERE order_id = ?", (other,))


async def test_refused_order_is_quarantined_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    async with sandbox(tmp_path) as box:
        broken, thief, good = [await box.order("x2u") for _ in range(3)]
        for order in (broken, good):
            await order.fund()
        address = (await broken.status())["data"]["order"]["depositAddress"]
        await _claim_deposit_of(box, address, thief.order_id)

        await box.settle(8)

        assert (await good.status())["state"] == "completed"
        assert (await broken.status())["state"] == "waiting_for_funding"
        health = box.up.worker.health()
        assert not health.ok
        assert "order_quarantined" in (health.detail or "")


async def test_quarantined_order_is_retried_until_health_recovers(
    tmp_path: Path,
) -> None:
    async with sandbox(tmp_path) as box:
        broken, thief = await box.order("u2x"), await box.order("u2x")
        await broken.fund()
        address = (await broken.status())["data"]["order"]["depositAddress"]
        await _claim_deposit_of(box, address, thief.order_id)
        await box.settle(2)
        assert not box.up.worker.health().ok

        _take_back_claim(tmp_path, thief.order_id)
        await box.settle(8)

        assert (await broken.status())["state"] == "completed"
        assert box.up.worker.health().ok


async def test_nothing_is_signed_for_an_order_in_quarantine(tmp_path: Path) -> None:
    """The event that can't be recorded may be the removal of its deposit."""
    async with sandbox(tmp_path) as box:
        broken, thief = await box.order("u2x"), await box.order("u2x")
        await broken.fund()
        await box.catch_up()  # the first deposit is seen; the second will be the thief's
        await broken.fund("20")
        address = (await broken.status())["data"]["order"]["depositAddress"]
        await _claim_deposit_of(box, address, thief.order_id)

        await box.settle(8)

        order = await box.up.service.store.order(broken.order_id)
        assert order is not None
        assert [(t.kind, t.state) for t in order.transfers] == [("payout", "planned")]

        _take_back_claim(tmp_path, thief.order_id)
        await box.settle(8)

        assert (await broken.status())["state"] == "completed"
        assert box.up.worker.health().ok


async def test_a_fault_waits_while_the_chain_is_being_mined(tmp_path: Path) -> None:
    """Otherwise a deposit could be mined and dropped at once, and the chain's sums be wrong."""
    async with sandbox(tmp_path) as box:
        order = await box.order("x2u")
        await order.fund()
        engine = box.up.engine
        await engine.moving.acquire()  # the sandbox's own lock
        dropping = asyncio.create_task(order.fault("drop_deposit"))
        done, _ = await asyncio.wait({dropping}, timeout=0.05)
        assert not done
        engine.moving.release()
        await dropping
        await box.settle(4)

        assert (await order.status())["state"] == "waiting_for_funding"
