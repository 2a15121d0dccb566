"""After a restart a payout is signed only once its deposits were checked again."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from rpcsvc.domain.order import DepositKey
from rpcsvc.settlement.onchain.evm.deposits import EvmDepositScanner
from rpcsvc.settlement.onchain.evm.records import EvmDeposit
from rpcsvc.settlement.onchain.monero.deposits import DepositScanner
from rpcsvc.settlement.onchain.monero.records import DepositRecord

DEEP = 1000


def scanners() -> dict[str, Any]:
    """New scanners, with ledgers that have a deposit deep in the chain."""
    on_record: dict[str, Any] = {
        "arbitrum": EvmDeposit("arbitrum", "tx", 0, 1, "0xa", 1, "0xb", 1, DEEP, "h"),
        "monero": DepositRecord("tx", 0, "8a", 1, 0, 1, DEEP, None),
    }
    anything = MagicMock()

    def ledger(name: str) -> Any:
        return MagicMock(deposit=AsyncMock(return_value=on_record[name]))

    return {
        "arbitrum": EvmDepositScanner(anything, ledger("arbitrum"), anything),
        "monero": DepositScanner(anything, ledger("monero"), anything, anything),
    }


@pytest.mark.parametrize("network", ["arbitrum", "monero"])
async def test_recorded_deposit_has_no_confirmations_before_a_scan(network: str) -> None:
    assert await scanners()[network].confirmations(DepositKey(network, "tx", 0)) == 0
