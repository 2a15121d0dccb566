"""How far a transfer is by the books of its order, for the ledgers of the wallets.

What does not live here: the transfers themselves (orders.py).
"""

from __future__ import annotations

from rpcsvc.domain.states import TransferState
from rpcsvc.store.sqlite import Tables


class TransferStates:
    """The part of both payment ledgers' ports that is about the order layer's transfers."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    def transfer_state(self, transfer_id: str) -> TransferState | None:
        """What the order layer has committed of a transfer."""
        sql = "SELECT state FROM transfers WHERE transfer_id = ?"
        row = self._db.read_one(sql, (transfer_id,))
        return TransferState(row[0]) if row else None
