"""Moves between networks: their amounts, and that balanced books need none."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain.money import USDC, XMR
from rpcsvc.treasury.wallets import Plan, Position, plan_moves

RATE = 165_000_000
DAY = 86_400_000
NETWORKS = ("monero", "arbitrum", "base", "polygon")


def position(network: str, free: int, target: int | None, **more: int) -> Position:
    asset = XMR if network == "monero" else USDC
    reserved = more.pop("reserved", 0)
    held = free + reserved
    given = {"spendable": held, "received": 0, "sent": 0, "window_ms": 7 * DAY, **more}
    return Position(network, asset, held, reserved=reserved, target=target, **given)


def reported(plan: Plan) -> list[tuple[str, str, int, int]]:
    return [(each.source.network, each.to.network, each.units, each.arrives) for each in plan.moves]


units = st.integers(0, 10**19)
books = st.lists(st.sampled_from(NETWORKS), unique=True).flatmap(
    lambda names: st.tuples(
        *(
            st.builds(
                Position, st.just(name), st.just(XMR if name == "monero" else USDC), held=units,
                spendable=units, reserved=units, received=units, sent=units,
                window_ms=st.just(7 * DAY), target=st.none() | units,
            )
            for name in names
        )
    )
)  # fmt: skip
rates = st.none() | st.integers(1, 10**12)
bands = st.integers(0, 99)


@given(books, rates, bands)
def test_plan_takes_no_more_than_is_free(
    positions: tuple[Position, ...], rate: int | None, band: int
) -> None:
    taken: Counter[str] = Counter()
    for move in plan_moves(positions, rate, band).moves:
        taken[move.source.network] += move.units
    for each in positions:
        units = taken[each.network]
        assert units == 0 or (
            each.target is not None
            and units <= each.spendable - each.reserved - each.target
            and units <= each.held - each.reserved - each.target
        )


@given(books, rates, bands)
def test_plan_conserves_money(positions: tuple[Position, ...], rate: int | None, band: int) -> None:
    for move in plan_moves(positions, rate, band).moves:
        assert move.units > 0
        assert move.arrives > 0
        if move.source.asset == move.to.asset:
            assert move.units == move.arrives
            continue
        assert rate is not None
        sent, arrived = move.units, move.arrives
        xmr, usdc = (sent, arrived) if move.source.asset == XMR else (arrived, sent)
        # An exchange is at the rate, within rounding in either direction.
        worth = xmr * rate
        assert worth >= usdc * 10**12 if move.source.asset == XMR else worth <= usdc * 10**12


@given(books, rates, bands)
def test_plan_fills_targets_and_names_the_rest(
    positions: tuple[Position, ...], rate: int | None, band: int
) -> None:
    plan = plan_moves(positions, rate, band)
    brought: Counter[str] = Counter()
    for move in plan.moves:
        brought[move.to.network] += move.arrives
    for each in positions:
        missing = brought[each.network] + plan.uncovered.get(each.network, 0)
        assert missing == each.missing(band)
        assert missing == 0 or each.free + missing == each.target


@given(books, rates, bands)
def test_plan_of_a_book_that_was_moved_is_empty(
    positions: tuple[Position, ...], rate: int | None, band: int
) -> None:
    plan = plan_moves(positions, rate, band)
    moved: Counter[str] = Counter()
    for move in plan.moves:
        moved[move.source.network] -= move.units
        moved[move.to.network] += move.arrives
    after = [
        replace(each, held=each.held + moved[each.network],
                spendable=each.spendable + moved[each.network])
        for each in positions
    ]  # fmt: skip
    again = plan_moves(after, rate, band)
    if not plan.uncovered:
        assert again == Plan((), {})


@given(books, rates)
def test_plan_of_balanced_books_is_empty(positions: tuple[Position, ...], rate: int | None) -> None:
    balanced = [replace(each, target=max(0, each.free), reserved=0) for each in positions]
    assert plan_moves(balanced, rate, 0) == Plan((), {})


# --- examples ----------------------------------------------------------------------------------


def test_move_within_an_asset_comes_before_an_exchange() -> None:
    positions = [
        position("monero", 30 * 10**12, 20 * 10**12),
        position("arbitrum", 1_000, 2_000_000_000),
        position("base", 600_000_000, 0),
    ]
    missing = 2_000_000_000 - 1_000
    plan = plan_moves(positions, RATE, 10)
    exchanged = missing - 600_000_000
    assert reported(plan) == [
        ("base", "arbitrum", 600_000_000, 600_000_000),
        ("monero", "arbitrum", -(-exchanged * 10**12 // RATE), exchanged),
    ]
    assert plan.uncovered == {}
    assert reported(plan_moves(positions, None, 10)) == reported(plan)[:1]
    assert plan_moves(positions, None, 10).uncovered == {"arbitrum": exchanged}


def test_network_that_runs_dry_first_is_filled_first() -> None:
    positions = [
        position("arbitrum", 100, 200, sent=7),
        position("base", 100, 200, sent=700, received=350),
        position("polygon", 250, 200),
    ]
    assert [each.dry_in_ms for each in positions] == [100 * DAY, 2 * DAY, None]
    plan = plan_moves(positions, RATE, 10)
    assert reported(plan) == [("polygon", "base", 50, 50)]
    assert plan.uncovered == {"arbitrum": 100, "base": 50}


@pytest.mark.parametrize(("free", "moved"), [(90, 0), (89, 11), (-5, 105)])
def test_network_within_the_band_is_left_as_it_is(free: int, moved: int) -> None:
    positions = [position("arbitrum", free, 100, reserved=5), position("base", 500, 0)]
    assert sum(each.units for each in plan_moves(positions, RATE, 10).moves) == moved


def test_locked_money_counts_as_held_and_is_not_moved() -> None:
    swept = position("arbitrum", 100, 100, spendable=0)
    unswept = position("base", 500, 0, spendable=30, reserved=10)
    assert plan_moves([swept, unswept], RATE, 10).moves == ()
    short = position("polygon", 0, 100)
    assert reported(plan_moves([swept, unswept, short], RATE, 10)) == [("base", "polygon", 20, 20)]


def test_network_without_a_target_is_left_as_it_is() -> None:
    positions = [position("arbitrum", 0, None), position("base", 500, None)]
    assert plan_moves([*positions, position("polygon", 0, 100)], RATE, 10).moves == ()
