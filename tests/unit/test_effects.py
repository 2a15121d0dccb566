"""When effects are retried: by the clock, and also after the clock was set back."""

from __future__ import annotations

from pathlib import Path

from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.orders.payouts import AwaitsBlock
from tests.sandbox import HOUR_MS, ManualClock, sandbox
from tests.unit.effect_runners import Stuck, runner


async def test_clock_set_back_makes_no_effect_wait_longer(tmp_path: Path) -> None:
    clock, payouts = ManualClock(), Stuck()
    payouts.gate.set()
    async with sandbox(tmp_path) as box:
        effects = runner(box, payouts, clock)
        assert await effects.start_due() == 1
        await effects.drain()

        clock.now -= HOUR_MS
        assert await effects.start_due() == 0, "its pause is not over"
        clock.now += 60_000

        assert await effects.start_due() == 1
        await effects.drain()
        assert payouts.calls == 2


async def test_retry_pause_doubles_every_eight_tries_up_to_a_minute(
    tmp_path: Path,
) -> None:
    clock, payouts = ManualClock(), Stuck()
    payouts.gate.set()
    pauses = []
    async with sandbox(tmp_path) as box:
        effects = runner(box, payouts, clock, poll_ms=10_000)
        assert await effects.start_due() == 1
        for _ in range(26):
            await effects.drain()
            before = clock.now
            while await effects.start_due() == 0:
                clock.now += 10_000
            pauses.append(clock.now - before)
        await effects.drain()
    assert pauses == [10_000] * 8 + [20_000] * 8 + [40_000] * 8 + [60_000] * 2


class Awaiting(Stuck):
    """Payouts whose transfer may end with a block; ``height``: the newest one that was seen."""

    height = 100

    async def advance(self, order_id: str, effect: AdvanceTransfer) -> AwaitsBlock:
        self.calls += 1
        return AwaitsBlock("monero", 104)

    def heights(self) -> dict[str, int]:
        return {"monero": self.height}


async def test_transfer_is_looked_at_with_its_block(tmp_path: Path) -> None:
    clock, payouts = ManualClock(), Awaiting()
    async with sandbox(tmp_path) as box:
        effects = runner(box, payouts, clock, poll_ms=10_000)
        started = [await effects.start_due()]
        await effects.drain()
        for payouts.height in (103, 104, 104):
            started.append(await effects.start_due())
            await effects.drain()
        clock.now += 10_000
        started.append(await effects.start_due())
        await effects.drain()
    assert started == [1, 0, 1, 0, 1], "with its block, and then by the clock: a node may lag"
