"""The queue of one wallet: payouts and refunds alternate, each kind first come, first served.

Anyone can cause any number of refunds for next to nothing, while a payout that is not signed in
time is cancelled: refunds must not delay payouts.
"""

from __future__ import annotations

from collections import deque

from rpcsvc.domain.order import TransferKind
from rpcsvc.orders.ports.store import PendingEffect


class WalletQueue:
    """Pending transfers of one wallet."""

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
