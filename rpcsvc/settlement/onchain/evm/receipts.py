"""What proves a settled USDC transfer to anyone with a node of the network, as agents are told it.

Amounts are decimal strings of whole units. What does not live here: making the proof
(payments.py), checking one (receipt_check.py).
"""

from __future__ import annotations

from typing import Any

from rpcsvc.domain.money import USDC, format_units
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmReceipt


def evm_receipt(receipt: EvmReceipt) -> dict[str, Any]:
    """For eth_getTransactionReceipt of any node: the token's Transfer event at that index."""
    return {
        "network": receipt.network,
        "asset": USDC.symbol,
        "txid": receipt.txid,
        "address": receipt.recipient,
        "amount": format_units(receipt.units, USDC),
        "block": receipt.block_number,
        "chainId": receipt.chain_id,
        "token": receipt.token,
        "logIndex": receipt.log_index,
    }
