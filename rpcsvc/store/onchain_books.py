"""What the on-chain wallets have signed away, over both sides.

What does not live here: the rows themselves (onchain_monero.py, onchain_evm_payments.py).
"""

from __future__ import annotations

from rpcsvc.domain.money import XMR, Asset
from rpcsvc.store.sqlite import Tables

# What can never be made any more is not counted.
_SENT = {
    "XMR": "SELECT coalesce(sum(units), 0) FROM monero_payments WHERE purpose = 'transfer'"
    " AND prepared_at >= ? AND state NOT IN ('failed', 'withdrawn')",
    "USDC": "SELECT coalesce(sum(units), 0) FROM evm_payments WHERE purpose = 'transfer'"
    " AND prepared_at >= ? AND state NOT IN ('failed', 'withdrawn')",
}


class OnchainBooks:
    """Sums over the payments of the service's wallets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    def sent_since(self, asset: Asset, at: int) -> int:
        """Atomic units signed away for orders since ``at`` (ms), over all networks."""
        row = self._db.read_one(_SENT["XMR" if asset is XMR else "USDC"], (at,))
        return int(row[0]) if row else 0
