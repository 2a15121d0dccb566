"""Payments of both adapters, unrecorded transactions and unattributed deposits: OnchainBooks, and
the UnrecordedLedger port over a database; and the pause of payouts that all replicas share.

An EVM address is the same on all networks, but only a deposit on the order's network counts. USDC
sent to it on another network is swept, and the operator has to return it by hand.
"""

from __future__ import annotations

from typing import Final

from rpcsvc.domain.events import order_of
from rpcsvc.domain.money import XMR, Asset
from rpcsvc.domain.order import Transfer
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.leases import SETTLER

_SENT: Final = {
    "XMR": "SELECT coalesce(sum(units), 0) AS units FROM monero_payments"
    " WHERE purpose = 'transfer' AND prepared_at >= :at AND state <> 'failed'",
    "USDC": "SELECT coalesce(sum(units), 0) AS units FROM evm_payments"
    " WHERE purpose = 'transfer' AND prepared_at >= :at AND state <> 'failed'",
}
# Payments that are out, of transfers whose ids lie between two.
_OUT: Final = (
    "SELECT payment_id AS transfer_id, txid, address, units FROM monero_payments"
    " WHERE state IN ('relaying', 'published', 'settled')"
    "  AND payment_id > :after AND payment_id < :before"
    " UNION ALL SELECT e.transfer_id, p.txid, e.address, e.units FROM monero_payees AS e"
    " JOIN monero_payments AS p ON p.payment_id = e.payment_id"
    " WHERE p.state IN ('relaying', 'published', 'settled')"
    "  AND e.transfer_id > :after AND e.transfer_id < :before"
    " UNION ALL SELECT p.payment_id, a.txid, p.recipient, p.units FROM evm_payments AS p"
    " JOIN evm_attempts AS a ON a.payment_id = p.payment_id AND a.number = 1"
    " WHERE p.state IN ('published', 'settled')"
    "  AND p.payment_id > :after AND p.payment_id < :before"
)
_STATES: Final = "SELECT transfer_id, state FROM transfers WHERE order_id = :order_id"
_NOT_PAID: Final = ("planned", "failed", "cancelled")

_PAUSED: Final = "SELECT reason FROM payout_pause"
# Changes nothing: it waits for payments that are being committed, and later ones for the pause.
_HOLD_LEASE: Final = "UPDATE leases SET token = token WHERE name = :name"
_PAUSE: Final = (
    "INSERT INTO payout_pause (id, reason, paused_at) VALUES (1, :reason, :at)"
    " ON CONFLICT (id) DO UPDATE SET reason = payout_pause.reason || '; ' || excluded.reason"
    " WHERE payout_pause.reason NOT LIKE '%' || excluded.reason || '%'"
)
_UNPAUSED: Final = (
    "SELECT token FROM leases WHERE name = :name AND NOT EXISTS (SELECT 1 FROM payout_pause)"
)


class SqlPause:
    """The pause of payouts as a row; ``unpaused`` is a condition of each payment's commit."""

    # After the look at the lease in its transaction, which waits for a pause that is being made.
    unpaused: Final = Statement(_UNPAUSED, {"name": SETTLER}, first=True, finds=True)

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def reason(self) -> str | None:
        """Why payouts are paused; None: they are not. Raises errors.Unavailable."""
        row = await self._db.fetch_one(_PAUSED)
        return None if row is None else str(row["reason"])

    async def pause(self, reason: str, at: int) -> None:
        """Let no further payment be committed; a reason is added to earlier ones. ``at`` in ms.

        Raises errors.Unavailable.
        """
        await self._db.write(
            [
                Statement(_HOLD_LEASE, {"name": SETTLER}, first=True),
                Statement(_PAUSE, {"reason": reason, "at": at}),
            ]
        )

    async def resume(self) -> None:
        """Let payments be committed again. Raises errors.Unavailable."""
        await self._db.write([Statement("DELETE FROM payout_pause")])


class OnchainBooks:
    """Sums over the payments of the service's wallets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def sent_since(self, asset: Asset, at: int) -> int:
        """Atomic units signed for orders since ``at`` (ms), over all networks."""
        row = await self._db.fetch_one(_SENT["XMR" if asset is XMR else "USDC"], at=at)
        return int(row["units"]) if row else 0

    async def unmatched(self, transfer: Transfer) -> str | None:
        """A recorded payment that conflicts with the transfer's order, in words; None if there is
        none.

        The payment journal may restore a payment for an order that an older copy of the database
        carries on differently: the next transfer would pay a second time.
        """
        order_id = order_of(transfer.transfer_id)
        out = await self._db.fetch(_OUT, after=f"{order_id}/", before=f"{order_id}0")
        known = await self._db.fetch(_STATES, order_id=order_id) if out else []
        states = {row["transfer_id"]: row["state"] for row in known}
        for row in out:
            if row["transfer_id"] == transfer.transfer_id:
                paid = (row["address"].lower(), row["units"])
                same = paid == (transfer.address.lower(), transfer.units)
            else:
                same = states.get(row["transfer_id"], "planned") not in _NOT_PAID
            if not same:
                return (
                    f"{row['txid']} paid {row['units']} units for {row['transfer_id']} of this"
                    " order, which the database has otherwise: settle it, then rpcsvc payouts close"
                    f" {transfer.transfer_id} {row['txid']} --note TEXT"
                )
        return None
