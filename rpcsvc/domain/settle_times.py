"""Times that swaps took to settle, as histograms that stay small.

A time begins when the last deposit of a payout is first seen, and ends when the payout is final: it
is the user's wait after paying. Orders that were refunded, cut into chunks, or settled by an
upstream have none, and none that were paid in part: they wait for the rest until they expire.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, NewType

from rpcsvc.domain.order import Order, OrderStatus
from rpcsvc.domain.pricing import ONE_USDC, Direction

# Histograms of so many days count, today's included.
DAYS: Final = 14
LEAST_SAMPLES: Final = 20
# Swaps worth less than each of these in USD, and the rest, are classes of their own.
_SIZES: Final = (100, 1_000, 10_000)
_LONGEST_SECONDS: Final = 7 * 86_400


def _bounds() -> Iterator[int]:
    bound = 1
    while bound < _LONGEST_SECONDS:
        yield bound
        bound = max(bound + 1, bound * 6 // 5)
    yield _LONGEST_SECONDS


# Upper bounds of the buckets in seconds, each at most a fifth above the one before.
BOUNDS: Final = tuple(_bounds())


# The swaps whose times are comparable, as "x2u/arbitrum/0": direction, chain, and the number of the
# class of size, counted from the smallest.
SwapKind = NewType("SwapKind", str)


class SettleTime(NamedTuple):
    """The time of one settled order: its kind, and the number of the bucket that it falls into."""

    kind: SwapKind
    bucket: int


class ObservedTime(NamedTuple):
    """Upper bounds in seconds for half and for 95 % of ``samples`` settled orders."""

    p50_seconds: int
    p95_seconds: int
    samples: int


def kind_of(direction: Direction, chain: str, deposit: int, output: int) -> SwapKind:
    """Return the kind of a swap; deposit and output in atomic units of their assets."""
    usdc = output if direction is Direction.XMR_TO_USDC else deposit
    size = sum(usdc >= usd * ONE_USDC for usd in _SIZES)
    return SwapKind(f"{direction.value}/{chain}/{size}")


def kind_of_order(order: Order) -> SwapKind:
    """Return the kind of an order by its agreed amounts."""
    terms = order.terms
    return kind_of(terms.direction, terms.chain, terms.deposit_amount, terms.expected_output)


def settle_time(before: Order, after: Order, now: int) -> SettleTime | None:
    """Return the time of an order that an event at ``now`` (ms) completed; None: it has none."""
    payout, done = after.payout, OrderStatus.COMPLETED
    if payout is None or after.status is not done or before.status is done or after.fills:
        return None
    paid = [d for d in after.deposits if d.transfer_id == payout.transfer_id]
    if sum(d.units for d in paid) < after.terms.deposit_amount or after.terms.is_bridge:
        return None
    seen = max(d.first_seen_at for d in paid)
    seconds = -(-max(0, now - seen) // 1000)
    bucket = bisect_left(BOUNDS, min(seconds, _LONGEST_SECONDS))
    return SettleTime(kind_of_order(after), bucket)


def observed_time(counts: Mapping[int, int]) -> ObservedTime | None:
    """Return the times of a histogram, orders by bucket; None below LEAST_SAMPLES."""
    samples = sum(counts.values())
    if samples < LEAST_SAMPLES:
        return None
    return ObservedTime(_percentile(counts, 50), _percentile(counts, 95), samples)


def _percentile(counts: Mapping[int, int], percent: int) -> int:
    needed, found = -(-sum(counts.values()) * percent // 100), 0
    for bucket in sorted(counts):
        found += counts[bucket]
        if found >= needed:
            return BOUNDS[bucket]
    raise ValueError("an empty histogram has no percentiles")
