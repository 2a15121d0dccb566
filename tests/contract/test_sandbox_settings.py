"""The sandbox's settings: those of its operator, and those that a developer changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rpcsvc.settlement.sandbox.ledger import SandboxLedger, Setting
from tests.contract.serving import SWAP, Served, serving


async def test_a_read_that_began_before_a_change_does_not_undo_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SandboxLedger.settings
    has_read, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(ledger: SandboxLedger) -> dict[Setting, int]:
        found = await read(ledger)
        has_read.set()
        await may_answer.wait()
        return found

    monkeypatch.setattr(SandboxLedger, "settings", slow)
    advance = asyncio.create_task(
        served.post("/sandbox/fault", {"fault": "advance_clock", "seconds": 1})
    )
    await has_read.wait()
    fault = asyncio.create_task(served.post("/sandbox/fault", {"fault": "rates_down"}))
    # It has to wait for that read; one that did not wait would be done by then.
    await asyncio.wait({fault}, timeout=0.3)
    may_answer.set()
    assert [answer.status for answer in await asyncio.gather(advance, fault)] == [200, 200]
    assert (await served.post("/agent/swap/create", SWAP)).status == 503


async def test_sandbox_starts_with_payouts_that_cost_nothing(tmp_path: Path) -> None:
    async with serving(
        tmp_path, sandbox__xmr_payout_fee="0", sandbox__usdc_payout_fee="0"
    ) as served:
        order = await served.post("/agent/swap/create", SWAP)
    assert (order.status, order.body["data"]["quote"]["fees"]["network"]) == (200, "0")
