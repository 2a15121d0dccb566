"""The rate source port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Rate:
    """A price: USDC units (10^-6) per whole XMR, as of a time, from a named source."""

    usdc_per_xmr: int
    as_of: int
    source: str


class RateSource(Protocol):
    """Gives the current rate. Raises errors.Unavailable when there is no fresh one."""

    def rate(self) -> Rate:
        """The current rate."""
        ...
