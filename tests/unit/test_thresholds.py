"""Confirmations by amount: one form for XMR and USDC, numbers first and tags last."""

from __future__ import annotations

import pytest

from rpcsvc.domain.money import USDC, XMR
from rpcsvc.errors import SettingsError
from rpcsvc.settlement.onchain.thresholds import (
    DepthTag,
    Threshold,
    read_thresholds,
    threshold_of,
)

ONE = 10**6
SAFE, FINALIZED = DepthTag.SAFE, DepthTag.FINALIZED


def test_thresholds_are_read_in_units_of_the_asset() -> None:
    found = read_thresholds(
        "s", ["0=1", "0.5=9", "500=safe", "5000=finalized"], USDC, list(DepthTag)
    )
    assert found == (
        Threshold(0, 1),
        Threshold(ONE // 2, 9),
        Threshold(500 * ONE, SAFE),
        Threshold(5000 * ONE, FINALIZED),
    )
    assert read_thresholds("s", ["0=10", "50=20"], XMR)[1] == Threshold(50 * 10**12, 20)


@pytest.mark.parametrize(
    ("units", "depth"),
    [(1, 1), (500 * ONE - 1, 1), (500 * ONE, 20), (5000 * ONE, FINALIZED), (10**18, FINALIZED)],
)
def test_threshold_of_an_amount_is_the_last_it_reaches(units: int, depth: int | DepthTag) -> None:
    found = read_thresholds("s", ["0=1", "500=20", "5000=finalized"], USDC, [FINALIZED])
    assert threshold_of(found, units).depth == depth


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["1=5"],
        ["0=0"],
        ["0=5", "500=4"],
        ["0=5", "0=6"],
        ["0=1", "500=20", "0.5=30"],
        ["0=finalized", "500=64"],
        ["0=finalized", "500=safe"],
        ["0=1", "500=latest"],
        ["0=1", "500=safe"],
        ["0=1", "0.0000001=2"],
        ["0=1", "five=2"],
        ["0"],
    ],
)
def test_thresholds_that_fall_or_name_no_depth_are_refused(given: list[str]) -> None:
    with pytest.raises(SettingsError, match=r"usdc: received .*allowed: USDC=.* or finalized, "):
        read_thresholds("usdc", given, USDC, [FINALIZED])
