"""The XMR adapter without daemons: options, locks, and the database's constraints."""

from __future__ import annotations

from typing import Any

import pytest

from rpcsvc.settlement.onchain.adapter import ChainAdapter, ServedNetwork
from rpcsvc.settlement.onchain.monero.adapter import MoneroAdapter
from rpcsvc.settlement.onchain.monero.deposits import is_timelocked
from rpcsvc.settlement.onchain.monero.records import (
    MoneroPayment,
)
from rpcsvc.settlement.onchain.thresholds import Threshold
from tests.chain_options import monero_options

XMR = 10**12


def adapter(made: MoneroAdapter) -> tuple[ChainAdapter, ServedNetwork]:
    """For the type checker: both interfaces are implemented."""
    return made, made


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"nettype": "regtest"}, {"thresholds": ()}, {"thresholds": (Threshold(1, 10),)},
        {"thresholds": (Threshold(0, 10), Threshold(XMR, 5))}, {"thresholds": (Threshold(0, 0),)},
        {"thresholds": (Threshold(0, 1), Threshold(9, 2), Threshold(5, 3))},
        {"settled_after": 0}, {"failed_after": 0}, {"tracked_blocks": 0}, {"reserve": 0},
        {"pool_low": 0}, {"pool_low": 9, "pool_target": 8},
    ],
)  # fmt: skip
def test_options_that_can_not_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        monero_options(**wrong)


@pytest.mark.parametrize(
    ("units", "needed"),
    [(0, 10), (1, 10), (50 * XMR - 1, 10), (50 * XMR, 20), (10**18, 20)],
)
def test_confirmations_rise_with_the_value(units: int, needed: int) -> None:
    assert monero_options().required_confirmations(units) == needed


def test_no_password_is_shown() -> None:
    assert "secret" not in repr(monero_options(wallet_password="secret"))
    assert {"raw", "metadata", "tx_key"} <= MoneroPayment.HIDDEN


@pytest.mark.parametrize(
    ("unlock_time", "height", "now_ms", "locked"),
    [
        (0, 5, 0, False), (6, 5, 0, True), (5, 5, 0, False), (499_999_999, 5, 10**15, True),
        (1_800_000_000, 10**9, 1_799_999_999_999, True),
        (1_800_000_000, 5, 1_800_000_000_000, False),
    ],
)  # fmt: skip
def test_a_lock_is_a_height_or_a_time(
    unlock_time: int, height: int, now_ms: int, locked: bool
) -> None:
    assert is_timelocked(unlock_time, height, now_ms) is locked
