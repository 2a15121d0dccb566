"""``python -m tests.e2e.stepping serve ...``: the service; each SIGUSR2 sets its wall clock.

It goes ahead, back to the true time, far behind, back to the true time, and so on. Not far ahead:
the sandbox mines a deposit at the time that the clock showed when it was sent.
"""

from __future__ import annotations

import signal
from itertools import cycle
from typing import Final

from rpcsvc.__main__ import main
from rpcsvc.clock import SystemClock

STEPS_MS: Final = (5_000, 0, -600_000, 0)


def arm() -> None:
    """Have the signal step the clock."""
    steps, true_ms, offset = cycle(STEPS_MS), SystemClock.now_ms, 0

    def step(_number: int, _frame: object) -> None:
        nonlocal offset
        offset = next(steps)

    signal.signal(signal.SIGUSR2, step)
    SystemClock.now_ms = lambda self: true_ms(self) + offset  # type: ignore[method-assign]


if __name__ == "__main__":
    arm()
    main()
