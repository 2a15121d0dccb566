"""What proves a settled transfer to anyone with a node of the network, as it is told to agents.

Amounts are decimal strings of whole units. What does not live here: making the proof
(monero_payments.py, evm_payments.py), checking one (receipt_check.py).
"""

from __future__ import annotations

from typing import Any

from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.settlement.onchain.evm_payment_ledger import EvmReceipt
from rpcsvc.settlement.onchain.monero_ledger import Receipt

Json = dict[str, Any]


def monero_receipt(receipt: Receipt, network: str) -> Json:
    """For check_tx_key, and check_tx_proof with the message, of any monero-wallet-rpc."""
    return {
        "network": network,
        "asset": XMR.symbol,
        "txid": receipt.txid,
        "address": receipt.address,
        "amount": format_units(receipt.units, XMR),
        "block": receipt.height,
        "transactionKey": receipt.tx_key,
        "transactionProof": receipt.proof,
        "proofMessage": receipt.transfer_id,
    }


def evm_receipt(receipt: EvmReceipt) -> Json:
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
