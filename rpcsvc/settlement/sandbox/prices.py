"""The sandbox's price path: what one XMR costs at any time, foretold by anyone.

A pure function of the time: no state, no randomness, so that a test can foretell the sum of a
TWAP order to the last unit, and a restart sees the same prices.
"""

from __future__ import annotations

from collections.abc import Sequence

BPS = 10_000


def price_at(base: int, path: Sequence[int], step_ms: int, now: int) -> int:
    """USDC units per XMR at ``now`` (ms): ``base`` moved by one of ``path``, in 1/10,000.

    The path begins anew whenever it ends; each of its elements holds for ``step_ms``. An empty
    path is a price that stands still.
    """
    if not path:
        return base
    return base * (BPS + path[now // step_ms % len(path)]) // BPS
