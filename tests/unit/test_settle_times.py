"""Settle times: which orders have one, how they are classed, and what a histogram says of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import settle_times
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import (
    Deposit,
    DepositKey,
    DepositState,
    Fill,
    Order,
    OrderStatus,
    Transfer,
    TransferKind,
)
from rpcsvc.domain.pricing import ONE_USDC, Direction
from rpcsvc.domain.settle_times import (
    BOUNDS,
    LEAST_SAMPLES,
    ObservedTime,
    SettleTime,
    SwapKind,
    kind_of,
    kind_of_order,
    observed_time,
    settle_time,
)
from tests.unit import orders
from tests.unit.orders import NOW, fresh

SIZES = (100, 1_000, 10_000)


def deposit(number: int, seen: int, transfer: str | None) -> Deposit:
    key = DepositKey("monero", f"tx{number}", 0)
    units = fresh().terms.deposit_amount // 2
    return Deposit(key, units, None, seen, DepositState.CONFIRMED, transfer)


def swapping() -> Order:
    payout = Transfer("ord_1:payout:1", TransferKind.PAYOUT, "arbitrum", USDC, "0x1", 1, 0)
    paid = (
        deposit(1, NOW, payout.transfer_id),
        deposit(2, NOW + 60_000, payout.transfer_id),
        deposit(3, NOW + 90_000, None),
    )
    return replace(fresh(), status=OrderStatus.EXECUTING_SWAP, transfers=(payout,), deposits=paid)


def test_bounds_never_change_since_histograms_are_stored() -> None:
    assert tuple(settle_times._bounds()) == BOUNDS
    assert BOUNDS[:12] == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14)
    assert (len(BOUNDS), BOUNDS[40], BOUNDS[-1]) == (72, 2_301, 604_800)


def test_time_of_an_order_is_of_its_kind_and_second() -> None:
    before = swapping()
    after = replace(before, status=OrderStatus.COMPLETED)
    terms = after.terms
    size = sum(terms.expected_output >= n * ONE_USDC for n in SIZES)
    kind = SwapKind(f"x2u/{terms.chain}/{size}")
    assert kind_of_order(after) == kind
    last = NOW + 60_000
    for bucket, bound in enumerate(BOUNDS):
        assert settle_time(before, after, last + bound * 1_000) == SettleTime(kind, bucket)
        later = settle_time(before, after, last + bound * 1_000 + 1)
        assert later == SettleTime(kind, min(bucket + 1, len(BOUNDS) - 1))
    assert settle_time(before, after, last) == SettleTime(kind, 0)


def test_kind_of_a_sale_of_usdc_is_its_deposit() -> None:
    found = kind_of(Direction.USDC_TO_XMR, "base", 1_000 * ONE_USDC, 1)
    assert found == SwapKind("u2x/base/2")
    sold = open_order(orders.terms(Direction.USDC_TO_XMR))
    assert kind_of_order(sold) == kind_of(
        Direction.USDC_TO_XMR, "arbitrum", sold.terms.deposit_amount, 1
    )


def test_percentiles_are_those_of_the_sorted_times() -> None:
    counts = dict.fromkeys(range(20), 1)
    assert observed_time(counts) == ObservedTime(BOUNDS[9], BOUNDS[18], 20)
    assert observed_time({**counts, 20: 1}) == ObservedTime(BOUNDS[10], BOUNDS[19], 21)
    hundred = dict.fromkeys(range(50), 2)
    assert observed_time(hundred) == ObservedTime(BOUNDS[24], BOUNDS[47], 100)
    assert observed_time({0: 945, 1: 55}) == ObservedTime(BOUNDS[0], BOUNDS[1], 1_000)
    with pytest.raises(ValueError, match="empty histogram"):
        settle_times._percentile({}, 50)


def test_time_begins_with_the_last_deposit_of_the_payout() -> None:
    before = swapping()
    after = replace(before, status=OrderStatus.COMPLETED)
    found = settle_time(before, after, NOW + 60_000 + 600_001)
    assert found is not None
    assert BOUNDS[found.bucket - 1] < 601 <= BOUNDS[found.bucket]
    assert settle_time(after, after, NOW) is None


@pytest.mark.parametrize("status", [s for s in OrderStatus if s is not OrderStatus.COMPLETED])
def test_only_a_completed_order_has_a_time(status: OrderStatus) -> None:
    assert settle_time(swapping(), replace(swapping(), status=status), NOW) is None


def test_order_without_own_deposits_or_in_chunks_has_no_time() -> None:
    before = swapping()
    after = replace(before, status=OrderStatus.COMPLETED)
    assert settle_time(before, replace(after, deposits=()), NOW) is None
    assert settle_time(before, replace(after, fills=(Fill(1, 1, 0, 1, NOW),)), NOW) is None


def test_order_that_was_paid_in_part_has_no_time() -> None:
    """An order that waited until it expired, whose size is not the one that it was made for."""
    before = swapping()
    after = replace(before, status=OrderStatus.COMPLETED)
    assert settle_time(before, replace(after, deposits=before.deposits[:1]), NOW) is None


def test_clock_that_went_back_gives_the_shortest_time() -> None:
    before = swapping()
    found = settle_time(before, replace(before, status=OrderStatus.COMPLETED), NOW - 1)
    assert found is not None
    assert found.bucket == 0


def test_sizes_are_classed_by_their_usdc() -> None:
    units = [99 * ONE_USDC, 100 * ONE_USDC, 999 * ONE_USDC, 1_000 * ONE_USDC, 10_000 * ONE_USDC]
    for direction in Direction:
        is_sold = direction is Direction.XMR_TO_USDC
        kinds = [kind_of(direction, "base", *((1, n) if is_sold else (n, 1))) for n in units]
        assert kinds == [f"{direction}/base/{size}" for size in (0, 1, 1, 2, 3)]


def test_bounds_grow_by_a_fifth_at_most() -> None:
    assert list(BOUNDS) == sorted(set(BOUNDS))
    assert len(BOUNDS) < 90
    assert all(b <= max(a + 1, a * 6 // 5) for a, b in pairwise(BOUNDS))


@given(st.lists(st.integers(0, len(BOUNDS) - 1), min_size=LEAST_SAMPLES, max_size=200))
def test_percentiles_are_bounds_of_that_share(buckets: list[int]) -> None:
    counts = {bucket: buckets.count(bucket) for bucket in buckets}
    found = observed_time(counts)
    assert found is not None
    assert found.samples == len(buckets)
    for bound, percent in ((found.p50_seconds, 50), (found.p95_seconds, 95)):
        within = sum(BOUNDS[bucket] <= bound for bucket in buckets)
        below = sum(BOUNDS[bucket] < bound for bucket in buckets)
        assert below * 100 < percent * len(buckets) <= within * 100


def test_too_few_samples_say_nothing() -> None:
    assert observed_time({}) is None
    assert observed_time({3: LEAST_SAMPLES - 1}) is None
    assert observed_time({3: LEAST_SAMPLES}) is not None
