"""What proves a settled XMR transfer to anyone with a node of the network, as agents are told it.

Amounts are decimal strings of whole units. What does not live here: making the proof
(payments.py), checking one (receipt_check.py).
"""

from __future__ import annotations

from typing import Any

from rpcsvc.domain.money import XMR, format_units
from rpcsvc.settlement.onchain.monero.ledger import Receipt


def monero_receipt(receipt: Receipt, network: str) -> dict[str, Any]:
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
