"""The port of published rates: USDC units per XMR, times by the database's clock in ms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class RateBounds(NamedTuple):
    """Where a published rate has to be; it is no evidence once it is ``max_age_ms`` old."""

    least: int
    most: int
    max_age_ms: int


class RateRow(NamedTuple):
    """A published rate: when, how long ago, and the token of the lease it was published under."""

    usdc_per_xmr: int
    at: int
    age_ms: int
    token: int


class RateRows(Protocol):
    """Keeps published rates for a week. Everything may raise errors.Unavailable."""

    async def publish(self, rate: int, token: int, bounds: RateBounds) -> bool:
        """Add a rate; False where a fresh row of another token is out of the bounds."""
        ...

    async def last(self) -> RateRow | None:
        """The newest row."""
        ...

    async def recent(self, span_ms: int, step_ms: int) -> Sequence[RateRow]:
        """The last row of each step of the span that ends now, oldest first."""
        ...
