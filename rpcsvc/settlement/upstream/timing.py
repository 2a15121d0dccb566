"""Time, waiting and chance for the upstream client: passed in, so that tests own them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import SystemRandom

from rpcsvc.clock import steady_ms


@dataclass(frozen=True, slots=True)
class Timing:
    """Where time, waiting and chance come from. ``random`` gives numbers in [0, 1)."""

    now_ms: Callable[[], int]
    sleep_ms: Callable[[int], Awaitable[None]]
    random: Callable[[], float]


def system_timing() -> Timing:
    """The machine's monotonic clock and chance."""

    async def sleep_ms(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    return Timing(steady_ms, sleep_ms, SystemRandom().random)
