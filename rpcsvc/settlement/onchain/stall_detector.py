"""Detects a node whose chain has stopped: without peers it may still call itself in sync.

Such a node answers every call from old blocks: deposits are not seen and payouts reach nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rpcsvc.clock import steady_ms

_MINUTE_MS: Final = 60_000


class StallDetector:
    """Watches one node, whose blocks nearly always come within ``patience_ms``.

    ``steady`` is a monotonic clock in ms.
    """

    def __init__(self, patience_ms: int, steady: Callable[[], int] = steady_ms) -> None:
        self._patience_ms = patience_ms
        self._steady = steady
        self._highest = -1
        self._since = 0

    def saw(self, height: int) -> None:
        """The node has told how high its chain is: of several behind one address, some are late."""
        if height > self._highest:
            self._highest, self._since = height, self._steady()

    def problem(self, node: str) -> str | None:
        """What to tell the operator of ``node``; None while blocks come."""
        lasts = self._steady() - self._since
        if self._highest < 0 or lasts < self._patience_ms:
            return None
        return f"{node} has shown no new block for {lasts // _MINUTE_MS} minutes"
