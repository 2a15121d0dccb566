"""Requests to try a transfer now: how they reach the schedule, and that nothing runs twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.orders.retries import DIRECTORY, RetryRequests, follow_requests
from tests.sandbox import ManualClock, sandbox
from tests.unit.effect_runners import TRANSFER, Stuck, runner


def test_a_request_is_taken_once_and_names_its_transfer(tmp_path: Path) -> None:
    requests = RetryRequests(tmp_path)
    assert requests.take() == []
    requests.add(TRANSFER)
    requests.add(TRANSFER)
    assert requests.is_waiting(TRANSFER)
    assert (tmp_path / DIRECTORY).stat().st_mode & 0o777 == 0o700
    assert requests.take() == [TRANSFER]
    assert not requests.is_waiting(TRANSFER)
    assert requests.take() == []


def test_a_request_can_be_withdrawn(tmp_path: Path) -> None:
    requests = RetryRequests(tmp_path)
    requests.withdraw(TRANSFER)
    requests.add(TRANSFER)
    requests.withdraw(TRANSFER)
    assert requests.take() == []


def test_a_name_can_t_leave_the_directory(tmp_path: Path) -> None:
    requests = RetryRequests(tmp_path)
    requests.add("../../etc/passwd")
    assert [path.parent.name for path in tmp_path.rglob("*passwd*")] == [DIRECTORY]
    assert requests.take() == ["../../etc/passwd"]


async def test_requests_are_carried_out_until_cancelled(tmp_path: Path) -> None:
    requests, hurried = RetryRequests(tmp_path), []

    async def retry(transfer_id: str) -> bool:
        hurried.append(transfer_id)
        return True

    async def pause(_seconds: float) -> None:
        if len(hurried) == 2:
            raise asyncio.CancelledError
        requests.add(f"transfer {len(hurried)}")

    with pytest.raises(asyncio.CancelledError):
        await follow_requests(requests, retry, pause)
    assert hurried == ["transfer 0", "transfer 1"]


async def test_a_transfer_in_its_pause_goes_on_at_once_and_starts_its_pauses_anew(
    tmp_path: Path,
) -> None:
    async with sandbox(tmp_path) as box:
        clock, stuck = ManualClock(), Stuck()
        effects = runner(box, stuck, clock)
        stuck.gate.set()
        assert await effects.start_due() == 1
        await effects.drain()
        assert await effects.start_due() == 0
        assert effects.hurry(TRANSFER)
        assert await effects.start_due() == 1
        await effects.drain()
    assert stuck.calls == 2


async def test_a_transfer_that_is_being_worked_on_is_left_alone(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        clock, stuck = ManualClock(), Stuck()
        effects = runner(box, stuck, clock)
        assert await effects.start_due() == 1
        await asyncio.sleep(0)
        assert not effects.hurry(TRANSFER)
        assert not effects.hurry("ord_2/payout/1")
        assert await effects.start_due() == 0
        stuck.gate.set()
        await effects.drain()
    assert (stuck.calls, stuck.most) == (1, 1)


async def test_the_hurried_one_goes_first_and_the_others_keep_their_time(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        clock, stuck = ManualClock(), Stuck()
        stuck.gate.set()
        effects = runner(box, stuck, clock)
        effects.schedule("ord_2", [AdvanceTransfer("ord_2/payout/1")])
        assert await effects.start_due() == 2
        await effects.drain()
        assert effects.hurry("ord_2/payout/1")
        assert await effects.start_due() == 1
        await effects.drain()
        clock.now += 60_000
        assert await effects.start_due() == 2
        await effects.drain()
