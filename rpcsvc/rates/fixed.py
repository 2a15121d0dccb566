"""A price that the operator has set. It is as old as the question: never stale.

What does not live here: prices from elsewhere (http.py), agreeing on one (median.py).
"""

from __future__ import annotations

from rpcsvc.clock import Clock
from rpcsvc.orders.ports.rates import Rate


class FixedRate:
    """Implements RateSource (orders/ports/). ``usdc_per_xmr``: USDC units per whole XMR."""

    def __init__(self, usdc_per_xmr: int, clock: Clock) -> None:
        if usdc_per_xmr <= 0:
            raise ValueError(f"a price is above 0, not {usdc_per_xmr}")
        self._usdc_per_xmr = usdc_per_xmr
        self._clock = clock

    def rate(self) -> Rate:
        """The price, as of now."""
        return Rate(self._usdc_per_xmr, self._clock.now_ms(), "fixed")
