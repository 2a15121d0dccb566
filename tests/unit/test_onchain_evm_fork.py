"""The depth of rescans: lagging nodes return no events for blocks that they lack, and no error."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.scan import ForkFinder
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.unit.evm_chain import NETWORK, Chain


@pytest.mark.parametrize(
    ("block_seconds", "blocks"), [(0.1, 256), (0.25, 120), (2, 15), (12, 3), (60, 2)]
)
async def test_half_a_minute_of_blocks_is_read_again_within_bounds(
    database: SqliteDatabase, block_seconds: float, blocks: int
) -> None:
    network = replace(NETWORK, block_seconds=block_seconds)
    forks = ForkFinder(EvmConnection(Chain(), network), EvmDepositLedger(database))
    assert forks.overlap == blocks
