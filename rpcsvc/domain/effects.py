"""Work that follows from a transition, done after its commit and found again after a crash.

What does not live here: who does it (orders/payouts.py, orders/processor.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdvanceTransfer:
    """Bring a transfer to its end: prepare, publish, confirm, whatever is next."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class PriceLateDeposit:
    """Fetch a fresh rate for an order with deposits that have none."""


@dataclass(frozen=True, slots=True)
class FillChunk:
    """Swap the next chunk of a TWAP order when its time has come. ``index`` counts from 0."""

    index: int


Effect = AdvanceTransfer | PriceLateDeposit | FillChunk
