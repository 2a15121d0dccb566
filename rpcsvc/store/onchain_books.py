"""What the on-chain wallets have signed away, over both adapters.

What does not live here: the rows themselves (onchain_monero.py, onchain_evm_payments.py).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.domain.events import order_of
from rpcsvc.domain.money import XMR, Asset
from rpcsvc.domain.order import Transfer
from rpcsvc.store.database import Tables

_SENT: Final = {
    "XMR": "SELECT coalesce(sum(units), 0) FROM monero_payments WHERE purpose = 'transfer'"
    " AND prepared_at >= ? AND state <> 'failed'",
    "USDC": "SELECT coalesce(sum(units), 0) FROM evm_payments WHERE purpose = 'transfer'"
    " AND prepared_at >= ? AND state <> 'failed'",
}
# Payments that are out, of transfers whose ids lie between ?1 and ?2.
_OUT: Final = (
    "SELECT payment_id, txid, address, units FROM monero_payments"
    " WHERE state IN ('relaying', 'published', 'settled') AND payment_id > ?1 AND payment_id < ?2"
    " UNION ALL SELECT e.transfer_id, p.txid, e.address, e.units FROM monero_payees AS e"
    " JOIN monero_payments AS p ON p.payment_id = e.payment_id"
    " WHERE p.state IN ('relaying', 'published', 'settled')"
    " AND e.transfer_id > ?1 AND e.transfer_id < ?2"
    " UNION ALL SELECT p.payment_id, a.txid, p.recipient, p.units FROM evm_payments AS p"
    " JOIN evm_attempts AS a ON a.payment_id = p.payment_id AND a.number = 1"
    " WHERE p.state IN ('published', 'settled') AND p.payment_id > ?1 AND p.payment_id < ?2"
)
_KNOWN: Final = "SELECT transfer_id, state FROM transfers WHERE order_id = ?"
_NOT_PAID: Final = ("planned", "failed", "cancelled")


class OnchainBooks:
    """Sums over the payments of the service's wallets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def sent_since(self, asset: Asset, at: int) -> int:
        """Atomic units signed away for orders since ``at`` (ms), over all networks."""
        row = self._db.read_one(_SENT["XMR" if asset is XMR else "USDC"], (at,))
        return int(row[0]) if row else 0

    async def unmatched(self, transfer: Transfer) -> str | None:
        """A payment on record that the transfer's order does not know, in words; None: none is.

        The payment journal may bring one to an order that a restored copy carries on otherwise:
        what it pays next would be paid a second time.
        """
        order_id = order_of(transfer.transfer_id)
        out = self._db.read(_OUT, (f"{order_id}/", f"{order_id}0"))
        states = dict(self._db.read(_KNOWN, (order_id,))) if out else {}
        for transfer_id, txid, address, units in out:
            if transfer_id == transfer.transfer_id:
                same = (address.lower(), units) == (transfer.address.lower(), transfer.units)
            else:
                same = states.get(transfer_id, "planned") not in _NOT_PAID
            if not same:
                return (
                    f"{txid} paid {units} units for {transfer_id} of this order, which the database"
                    f" has otherwise: settle it, then rpcsvc payouts close"
                    f" {transfer.transfer_id} {txid} --note TEXT"
                )
        return None
