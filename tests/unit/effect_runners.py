"""Effect runners whose engine is stuck."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.errors import Unavailable
from rpcsvc.orders.payouts import AwaitsBlock, Payouts
from rpcsvc.orders.scheduler.effects import EffectRunner
from tests.sandbox import ManualClock, Sandbox

TRANSFER = "ord_1/payout/1"


class Stuck(Payouts):
    """Payouts that never finish; they count their calls, in all and concurrent ones."""

    def __init__(self) -> None:
        self.calls, self.at_once, self.most = 0, 0, 0
        self.gate = asyncio.Event()

    async def advance(self, order_id: str, effect: AdvanceTransfer) -> bool | AwaitsBlock:
        self.calls += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await self.gate.wait()
        self.at_once -= 1
        raise Unavailable("not now")


def runner(
    box: Sandbox, payouts: Stuck, clock: ManualClock, *, poll_ms: int = 60_000
) -> EffectRunner:
    service = box.up.service
    made = EffectRunner(
        service.store,
        service.processor,
        payouts,
        box.up.engine,
        clock,
        poll_ms=poll_ms,
        payable=AsyncMock(return_value=None),
    )
    made.schedule("ord_1", [AdvanceTransfer(TRANSFER)])
    return made
