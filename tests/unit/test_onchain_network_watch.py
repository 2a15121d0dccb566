"""A network whose nodes hang delays no pass of the worker, and loses no deposits."""

from __future__ import annotations

import asyncio
from typing import cast

from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.orders.ports.wallets import DepositSighting, Observation
from rpcsvc.settlement.onchain.adapter import HANGS_SECONDS, NetworkWatch, ServedNetwork

FOUND = Observation(
    [DepositSighting(DepositKey("monero", "ab" * 32, 1), "4a", 5, None, 1, DepositState.SEEN)],
    {"monero": 5},
)
NOTHING = Observation()


class SlowNetwork:
    """A network whose ``observe`` ends when the test lets it."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.looks = 0
        self.error: Exception | None = None

    async def observe(self) -> Observation:
        self.looks += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return FOUND


class Rig:
    """A NetworkWatch on a slow network, with a manual clock."""

    def __init__(self) -> None:
        self.network = SlowNetwork()
        self.now = 100.0
        self.watch = NetworkWatch(
            "monero", cast("ServedNetwork", self.network), timeout=0.001, now=lambda: self.now
        )


async def test_result_of_a_fast_scan_is_shown_at_once() -> None:
    rig = Rig()
    rig.network.answers.set()
    assert await rig.watch.observe() == FOUND
    assert rig.watch.has_looked
    assert rig.watch.health().ok


async def test_hanging_check_blocks_no_pass_and_is_not_repeated() -> None:
    rig = Rig()
    assert await rig.watch.observe() == NOTHING
    assert await rig.watch.observe() == NOTHING
    assert not rig.watch.has_looked
    assert rig.network.looks == 1
    await rig.watch.close()


async def test_result_of_a_late_scan_is_shown_by_the_next_pass() -> None:
    rig = Rig()
    assert await rig.watch.observe() == NOTHING
    rig.network.answers.set()
    assert await rig.watch.observe() == FOUND
    assert rig.watch.has_looked


async def test_hanging_scan_is_reported_until_it_ends() -> None:
    rig = Rig()
    await rig.watch.observe()
    rig.now += HANGS_SECONDS - 1
    assert rig.watch.health().ok
    rig.now += 1
    assert rig.watch.hangs()
    assert "the deposit scan has run for 15 s" in (rig.watch.health().detail or "")
    rig.network.answers.set()
    await rig.watch.observe()
    assert rig.watch.health().ok


async def test_failed_scan_is_reported_and_begun_again() -> None:
    rig = Rig()
    rig.network.answers.set()
    rig.network.error = RuntimeError("a bug")
    for looks in (1, 2):
        assert await rig.watch.observe() == NOTHING
        assert rig.network.looks == looks
        assert not rig.watch.has_looked
        assert rig.watch.is_blind()
        assert "the deposit scan has failed (RuntimeError)" in (rig.watch.health().detail or "")
    rig.network.error = None
    assert await rig.watch.observe() == FOUND
    assert rig.watch.health().ok
    assert not rig.watch.is_blind()


async def test_closing_ends_the_scan_under_way() -> None:
    rig = Rig()
    await rig.watch.observe()
    await rig.watch.close()
    assert len(asyncio.all_tasks()) == 1
    assert not rig.watch.hangs()
