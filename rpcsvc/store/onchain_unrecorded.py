"""Outgoing transactions and deposits that are of no order: the UnrecordedLedger port over SQLite.

An EVM address serves its order on all networks; USDC sent to it on another network than the order's
is no deposit of the order. It is swept, and its sender has to get it back by hand.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import orjson

from rpcsvc.settlement.onchain.unrecorded import UnattributedDeposit
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.order_addresses import order_has

_ACKNOWLEDGE_NONCE: Final = (
    "INSERT INTO evm_nonces (network, sender, acknowledged_below) VALUES (?, ?, ?)"
    " ON CONFLICT (network, sender) DO UPDATE SET acknowledged_below = excluded.acknowledged_below"
    " WHERE excluded.acknowledged_below > evm_nonces.acknowledged_below"
)
_ACKNOWLEDGE_TRANSACTION: Final = (
    "INSERT INTO acknowledged_transactions (network, txid, at) VALUES (?, ?, ?)"
    " ON CONFLICT DO NOTHING"
)
_NOT_ON_RECORD: Final = (
    "SELECT DISTINCT value FROM json_each(?)"
    " WHERE value NOT IN (SELECT txid FROM monero_payments)"
    " AND value NOT IN (SELECT txid FROM annotated_transactions WHERE network = 'monero')"
    " AND value NOT IN (SELECT txid FROM acknowledged_transactions WHERE network = 'monero')"
    " ORDER BY value"
)
_UNATTRIBUTED: Final = (
    "SELECT s.network, s.txid, s.address, s.units, (SELECT o.order_id FROM orders o"  # noqa: S608 - constants
    f"  WHERE {order_has('s')})"
    " FROM unattributed_deposits s WHERE NOT EXISTS (SELECT 1 FROM annotated_transactions e"
    "  WHERE e.network = s.network AND e.txid = s.txid)"
    " ORDER BY s.network, s.txid, s.position LIMIT 1000"
)


def unattributed_deposits(database: Tables) -> list[UnattributedDeposit]:
    """Confirmed deposits of no order that the operator has not explained; the first 1,000.

    Raises errors.Unavailable.
    """
    return [UnattributedDeposit(*row) for row in database.read(_UNATTRIBUTED)]


class SqliteUnrecordedLedger:
    """The UnrecordedLedger port (settlement/onchain/unrecorded.py) over a Database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def acknowledged_nonce(self, network: str, sender: str) -> int | None:
        """Up to which nonce, itself left out, the operator was told; None: never."""
        sql = "SELECT acknowledged_below FROM evm_nonces WHERE network = ? AND sender = ?"
        row = self._db.read_one(sql, (network, sender))
        return int(row[0]) if row else None

    async def acknowledge_nonce(self, network: str, sender: str, nonce: int) -> None:
        """Note that the operator was told of all nonces below this one."""
        await self._db.write([Statement(_ACKNOWLEDGE_NONCE, (network, sender, nonce))])

    async def explained(self, network: str) -> list[str]:
        """The ids of the transactions that the operator made by hand, and said so."""
        sql = "SELECT txid FROM annotated_transactions WHERE network = ? ORDER BY txid"
        return [str(row[0]) for row in self._db.read(sql, (network,))]

    async def monero_cursor(self) -> int | None:
        """The newest block of Monero whose deposits are on record; None before the first look."""
        row = self._db.read_one("SELECT max(height) FROM monero_cursor")
        return None if row[0] is None else int(row[0])

    async def not_on_record(self, txids: Collection[str]) -> list[str]:
        """Those of the wallet's Monero transactions that nobody knows of, in order."""
        listed = orjson.dumps(sorted(txids)).decode()
        return [str(row[0]) for row in self._db.read(_NOT_ON_RECORD, (listed,))]

    async def unattributed_deposits(self) -> list[UnattributedDeposit]:
        """Confirmed deposits that are of no order and not explained; the first 1,000."""
        return unattributed_deposits(self._db)

    async def acknowledge_transactions(self, network: str, txids: Collection[str], at: int) -> None:
        """Note that the operator was told of these."""
        rows = [Statement(_ACKNOWLEDGE_TRANSACTION, (network, txid, at)) for txid in txids]
        await self._db.write(rows)
