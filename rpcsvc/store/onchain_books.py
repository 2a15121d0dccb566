"""What the on-chain wallets have signed away, over both sides.

What does not live here: the rows themselves (onchain_monero.py, onchain_evm_payments.py).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.domain.money import XMR, Asset
from rpcsvc.store.sqlite import Tables

# What can never be made any more is not counted: nor is what its order took back before it was
# published, which its wallet withdraws before it signs anything else.
_SENT: Final = {
    "XMR": "SELECT coalesce(sum(units), 0) FROM monero_payments AS p WHERE purpose = 'transfer'"
    " AND prepared_at >= ? AND state NOT IN ('failed', 'withdrawn')"
    " AND NOT (state = 'prepared' AND EXISTS (SELECT 1 FROM transfers AS t"
    "  WHERE t.state = 'cancelled' AND t.transfer_id IN (SELECT p.transfer_id UNION ALL"
    "   SELECT e.transfer_id FROM monero_payees AS e WHERE e.payment_id = p.transfer_id)))",
    "USDC": "SELECT coalesce(sum(units), 0) FROM evm_payments AS p WHERE purpose = 'transfer'"
    " AND prepared_at >= ? AND state NOT IN ('failed', 'withdrawn')"
    " AND NOT (state = 'prepared' AND EXISTS (SELECT 1 FROM transfers AS t"
    "  WHERE t.state = 'cancelled' AND t.transfer_id = p.payment_id))",
}
# A transfer whose payment was signed for others too, and taken back for one of them, is signed
# anew.
_SIGNED: Final = {
    "XMR": "SELECT 1 FROM monero_payments WHERE transfer_id = ?1 UNION ALL"
    " SELECT 1 FROM monero_payees AS own WHERE own.transfer_id = ?1 AND own.live = 1"
    " AND NOT EXISTS (SELECT 1 FROM monero_payees AS e JOIN transfers AS t USING (transfer_id)"
    "  WHERE e.payment_id = own.payment_id AND t.state = 'cancelled')",
    "USDC": "SELECT 1 FROM evm_payments WHERE payment_id = ?1",
}


class OnchainBooks:
    """Sums over the payments of the service's wallets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    def sent_since(self, asset: Asset, at: int) -> int:
        """Atomic units signed away for orders since ``at`` (ms), over all networks."""
        row = self._db.read_one(_SENT[_side(asset)], (at,))
        return int(row[0]) if row else 0

    def is_signed(self, asset: Asset, transfer_id: str) -> bool:
        """Whether a transfer has a payment on record: nothing is signed for it any more."""
        return self._db.read_one(_SIGNED[_side(asset)], (transfer_id,)) is not None


def _side(asset: Asset) -> str:
    return "XMR" if asset is XMR else "USDC"
