"""A transfer is retried at once instead of after its pause, and never twice at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from rpcsvc.domain.events import AdvanceTransfer
from tests.sandbox import ManualClock, sandbox
from tests.unit.effect_runners import TRANSFER, Stuck, runner


async def test_retried_transfer_runs_at_once_and_restarts_its_pauses(
    tmp_path: Path,
) -> None:
    async with sandbox(tmp_path) as box:
        clock, stuck = ManualClock(), Stuck()
        effects = runner(box, stuck, clock)
        stuck.gate.set()
        assert await effects.start_due() == 1
        await effects.drain()
        assert await effects.start_due() == 0
        assert effects.wake_transfer(TRANSFER)
        assert await effects.start_due() == 1
        await effects.drain()
    assert stuck.calls == 2


async def test_transfer_woken_at_another_replica_runs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandbox(tmp_path) as box:
        stuck = Stuck()
        effects = runner(box, stuck, ManualClock())
        stuck.gate.set()
        assert await effects.start_due() == 1
        await effects.drain()
        monkeypatch.setattr(box.up.service.store, "take_woken", AsyncMock(return_value=[TRANSFER]))
        await effects.find()
        assert await effects.start_due() == 1
        await effects.drain()
    assert stuck.calls == 2


async def test_a_transfer_that_is_being_worked_on_is_left_alone(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        clock, stuck = ManualClock(), Stuck()
        effects = runner(box, stuck, clock)
        assert await effects.start_due() == 1
        await asyncio.sleep(0)
        assert not effects.wake_transfer(TRANSFER)
        assert not effects.wake_transfer("ord_2/payout/1")
        assert await effects.start_due() == 0
        stuck.gate.set()
        await effects.drain()
    assert (stuck.calls, stuck.most) == (1, 1)


async def test_retried_transfer_goes_first_and_others_keep_their_time(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        clock, stuck = ManualClock(), Stuck()
        stuck.gate.set()
        effects = runner(box, stuck, clock)
        effects.schedule("ord_2", [AdvanceTransfer("ord_2/payout/1")])
        assert await effects.start_due() == 2
        await effects.drain()
        assert effects.wake_transfer("ord_2/payout/1")
        assert await effects.start_due() == 1
        await effects.drain()
        clock.now += 60_000
        assert await effects.start_due() == 2
        await effects.drain()
