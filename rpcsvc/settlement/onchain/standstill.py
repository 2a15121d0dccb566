"""Whether a node's chain goes on: one that has lost its peers may call itself in step.

It answers every question, of blocks that are long not the newest: deposits are not seen, and
payouts reach nobody. What does not live here: what a node says of itself (monero/link.py,
evm/link.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rpcsvc.clock import steady_ms

_MINUTE_MS: Final = 60_000


class Standstill:
    """Of one node, whose blocks come within ``patience_ms`` as good as always.

    ``steady`` gives ms of a clock that nobody can set.
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
