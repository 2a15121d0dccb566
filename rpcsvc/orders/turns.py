"""What waits for one wallet: payouts and refunds take turns, each first come, first served.

Refunds have time, and for next to nothing anyone may bring about any number of them; a payout that
is not signed in time is taken back. So as many payouts as refunds go, however many wait of each.
What does not live here: when something is due, and how it is carried out (effects.py).
"""

from __future__ import annotations

from collections import deque

from rpcsvc.domain.states import TransferKind
from rpcsvc.orders.ports import PendingEffect


class Turns:
    """The queues of one wallet."""

    def __init__(self) -> None:
        self._payouts: deque[PendingEffect] = deque()
        self._refunds: deque[PendingEffect] = deque()
        self._turn = (self._payouts, self._refunds)  # the first goes next, if any waits there

    def add(self, kind: TransferKind, pending: PendingEffect) -> None:
        """Have it wait behind all of its kind."""
        (self._payouts if kind is TransferKind.PAYOUT else self._refunds).append(pending)

    def take(self) -> PendingEffect | None:
        """Whose turn it is; None when nothing waits."""
        for waiting, other in (self._turn, self._turn[::-1]):
            if waiting:
                self._turn = (other, waiting)
                return waiting.popleft()
        return None

    def clear(self) -> None:
        """Have nothing wait any more."""
        for waiting in self._turn:
            waiting.clear()
