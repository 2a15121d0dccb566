"""Chunks: how a deposit is cut, what each brings, and when the next one is due."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import Fill, Order, TransferKind, TransferState, TwapPlan
from rpcsvc.domain.pricing import ONE_XMR, Direction
from tests.unit.orders import IN_CHUNKS, NOW, XMR_UNIT, key, terms

X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR
RATE = 165_000_000
directions = st.sampled_from(list(Direction))
rates = st.integers(1, 10**10)
plans = st.builds(TwapPlan, st.integers(1, 10**9), st.just(1_000))


def worth(direction: Direction, units: int, rate: int) -> Fraction:
    """USDC units that a deposit is worth."""
    return Fraction(units * rate, ONE_XMR) if direction is X2U else Fraction(units)


@given(plans, directions, rates, st.integers(1, 10**16))
def test_deposit_is_cut_into_equal_chunks_and_a_rest(
    plan: TwapPlan, direction: Direction, rate: int, total: int
) -> None:
    cut = twap.chunks_of(plan, direction, rate, total)
    assert sum(cut) == total
    assert len(set(cut[:-1])) <= 1
    assert min(cut) == min(cut[0], cut[-1]) > 0
    whole = math.floor(worth(direction, total, rate) / plan.chunk_units)
    size = math.floor(
        Fraction(plan.chunk_units) * (Fraction(ONE_XMR, rate) if direction is X2U else 1)
    )
    assert len(cut) == (min(max(1, whole), 1_000) if size else 1)
    if 1 < len(cut) < 1_000:
        assert cut[0] == size
    if len(cut) == 1_000:
        assert cut[0] == max(size, total // 1_000)


@given(plans, directions, rates, st.integers(1, 10**16))
def test_deposit_is_worth_cutting_above_two_chunks(
    plan: TwapPlan, direction: Direction, rate: int, total: int
) -> None:
    expected = worth(direction, total, rate) > 2 * plan.chunk_units
    assert twap.is_worth_cutting(plan, direction, rate, total) is expected


def test_bounds_of_cutting_are_exact() -> None:
    plan = TwapPlan(100, 1_000)
    assert not twap.is_worth_cutting(plan, U2X, RATE, 200)
    assert twap.is_worth_cutting(plan, U2X, RATE, 201)
    assert twap.chunks_of(plan, U2X, RATE, 199) == (199,)
    assert twap.chunks_of(plan, U2X, RATE, 200) == (100, 100)
    assert twap.chunks_of(plan, U2X, RATE, 299) == (100, 199)
    dust = TwapPlan(1, 1_000)
    assert twap.chunks_of(dust, X2U, 2 * ONE_XMR, 50) == (50,)


def filling(plan: TwapPlan = IN_CHUNKS) -> Order:
    agreed = terms(twap_plan=plan)
    order = open_order(
        replace(agreed, price=replace(agreed.price, funding_fee=9, integrator_bps=7))
    )
    order = replace(order, terms=replace(order.terms, min_received=1))
    order = transition(order, ev.DepositSeen(key(1), XMR_UNIT, None, NOW), NOW).order
    return transition(order, ev.DepositConfirmed(key(1)), NOW + 1).order


def filled(order: Order, rate: int, now: int) -> Order:
    return transition(order, ev.ChunkFilled(len(order.fills), rate), now).order


def test_each_chunk_bears_its_part_of_the_fixed_fee() -> None:
    order = filling()
    price, cut = order.terms.price.at(2 * RATE), twap.chunks(order, XMR_UNIT)
    spent = 0
    for index, units in enumerate(cut):
        order = filled(order, 2 * RATE, NOW + index)
        before, upto = sum(cut[:index]), sum(cut[: index + 1])
        share = price.fixed_fee * upto // XMR_UNIT - price.fixed_fee * before // XMR_UNIT
        spent += share
        output = price.exchanged(X2U, units) - share
        fee = price.integrator_fee(X2U, units)
        assert order.fills[-1] == Fill(units, output, fee, 2 * RATE, NOW + index)
    assert spent == price.fixed_fee
    assert twap.swapped_units(order) == XMR_UNIT


def test_chunk_is_swapped_at_just_the_least_rate() -> None:
    order = filling()
    units = twap.chunks(order, XMR_UNIT)[0]
    fill = twap.next_fill(order, RATE, NOW)
    assert fill is not None
    least = Fraction(fill.output * XMR_UNIT, units)
    for minimum, fair in ((math.floor(least), True), (math.floor(least) + 1, False)):
        agreed = replace(order, terms=replace(order.terms, min_received=minimum))
        assert (twap.next_fill(agreed, RATE, NOW) is not None) is fair


@pytest.mark.parametrize(
    ("interval", "waits"), [(1_000, 600_000), (60_000, 600_000), (60_001, 600_010)]
)
def test_chunk_waits_ten_intervals_or_ten_minutes(interval: int, waits: int) -> None:
    order = filling(TwapPlan(40_000_000, interval))
    assert twap.due_at(order) == NOW + 1
    assert twap.abandoned_at(order) == NOW + 1 + waits
    order = filled(order, RATE, NOW + 5)
    assert twap.due_at(order) == NOW + 5 + interval
    assert twap.abandoned_at(order) == NOW + 5 + interval + waits
    plain = open_order(terms())
    assert (twap.due_at(plain), twap.abandoned_at(plain)) == (NOW, NOW + 600_000)


def test_order_is_filling_from_the_first_chunk_to_the_payout() -> None:
    order = filling()
    assert twap.is_filling(order)
    assert [d.key for d in twap.counted(order)] == [key(1)]
    assert (twap.total_of(order), twap.is_filled(order)) == (XMR_UNIT, False)
    assert twap.is_cut(order, XMR_UNIT)
    size = twap.chunks(order, XMR_UNIT)[0]
    assert [twap.is_cut(order, units) for units in (size, 2 * size, 2 * size + 1)] == [
        False, False, True,
    ]  # fmt: skip
    for _ in twap.chunks(order, XMR_UNIT):
        assert twap.is_filling(order)
        order = filled(order, RATE, NOW)
    assert not twap.is_filling(order)
    assert not twap.is_filling(open_order(terms(twap_plan=IN_CHUNKS)))
    assert not twap.is_filling(open_order(terms()))
    assert not twap.is_cut(open_order(terms()), XMR_UNIT)


def test_deposits_are_assigned_again_without_chunks() -> None:
    order = filled(filling(), RATE, NOW)
    extra = replace(order.deposits[0], key=key(2), transfer_id=None)
    again = twap.assign_to_payout(replace(order, deposits=(*order.deposits, extra), leftover=3))
    assert (again.fills, again.leftover) == ((), 0)
    assert {d.transfer_id for d in again.deposits} == {"ord_1/payout/1"}
    dust = replace(extra, is_dust=True)
    kept = twap.assign_to_payout(replace(order, deposits=(dust,)))
    assert kept.deposits == (dust,)


def test_leftover_is_counted_from_deposits_chunks_and_refunds() -> None:
    order = filled(filling(), RATE, NOW)
    assert twap.count_leftover(order) == order
    order = transition(order, ev.FillingStopped(1), NOW).order
    rest = XMR_UNIT - order.fills[0].units
    assert twap.count_leftover(replace(order, leftover=0)).leftover == rest
    unfilled = replace(order, fills=(), leftover=7)
    assert twap.count_leftover(unfilled) == unfilled
    payout = order.payout
    assert payout is not None
    for state in TransferState:
        back = replace(
            payout,
            transfer_id="ord_1/refund/1",
            kind=TransferKind.REFUND,
            units=90,
            fee=10,
            state=state,
        )
        left = twap.count_leftover(replace(order, transfers=(payout, back))).leftover
        undone = state in (TransferState.FAILED, TransferState.CANCELLED)
        assert left == (rest if undone else rest - 100)
    gone = replace(order, deposits=(replace(order.deposits[0], units=1),))
    assert twap.count_leftover(gone).leftover == 0
