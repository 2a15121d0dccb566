"""A short, seeded run of random orders and faults on the full stack (soak.py has the long one)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.regtest.daemons import Miner, WalletRpc
from tests.regtest.soak import soak

pytestmark = pytest.mark.slow

STEPS = 20


async def test_orders_under_faults_are_paid_once_and_money_balances(
    tmp_path: Path, miner: Miner, shared_wallet_rpc: WalletRpc
) -> None:
    tally = await soak(tmp_path, miner, shared_wallet_rpc, 5, lambda steps: steps >= STEPS)

    assert (tally.double, tally.lost, tally.differences) == (0, 0, [])
    assert tally.orders > 0
    assert tally.faults > 0
