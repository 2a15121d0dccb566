"""How long others of a wallet wait for a payment that is signed, and that its order never commits.

A crash between the two leaves such a payment, and its order takes it up again within a minute. One
that can't, since a step of it can't be recorded or its deposits are not seen, would keep all other
payouts of the wallet waiting for ever. What does not live here: taking it back
(monero/payments.py, evm/payments.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rpcsvc.clock import steady_ms

# Well within the time that an order waits for its payout to be signed, unless it is told to wait
# for less (orders.prepare_timeout_seconds): those that waited are paid then, and not refunded.
PATIENCE_MS: Final = 10 * 60_000


class Patience:
    """Of one wallet, with one such payment at a time. ``steady``: ms of a clock nobody can set."""

    def __init__(self, steady: Callable[[], int] = steady_ms) -> None:
        self._steady = steady
        self._waited_for: str | None = None
        self._since = 0

    def is_over(self, payment_id: str) -> bool:
        """Whether others have waited for it for too long; asked whenever one has to."""
        now = self._steady()
        if self._waited_for != payment_id:
            self._waited_for, self._since = payment_id, now
        return now - self._since >= PATIENCE_MS
