"""What left the wallets without being on record, as rows: the ForeignLedger port over SQLite."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import orjson

from rpcsvc.settlement.onchain.foreign import Stray
from rpcsvc.store.sqlite import Statement, Tables
from rpcsvc.store.stray_deposits import stray_deposits

_TELL_NONCE: Final = (
    "INSERT INTO evm_nonces (network, sender, told) VALUES (?, ?, ?)"
    " ON CONFLICT (network, sender) DO UPDATE SET told = max(told, excluded.told)"
)
_TELL_TRANSACTION: Final = (
    "INSERT OR IGNORE INTO told_transactions (network, txid, at) VALUES (?, ?, ?)"
)
_NOT_ON_RECORD: Final = (
    "SELECT DISTINCT value FROM json_each(?)"
    " WHERE value NOT IN (SELECT txid FROM monero_payments)"
    " AND value NOT IN (SELECT txid FROM explained_transactions WHERE network = 'monero')"
    " AND value NOT IN (SELECT txid FROM told_transactions WHERE network = 'monero')"
    " ORDER BY value"
)


class SqliteForeignLedger:
    """The ForeignLedger port (settlement/onchain/foreign.py) over a Database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    def nonce_told(self, network: str, sender: str) -> int | None:
        """Up to which nonce, itself left out, the operator was told; None: never."""
        sql = "SELECT told FROM evm_nonces WHERE network = ? AND sender = ?"
        row = self._db.read_one(sql, (network, sender))
        return int(row[0]) if row else None

    async def tell_nonce(self, network: str, sender: str, nonce: int) -> None:
        """Note that the operator was told of all nonces below this one."""
        await self._db.write([Statement(_TELL_NONCE, (network, sender, nonce))])

    def explained(self, network: str) -> list[str]:
        """The ids of the transactions that the operator made by hand, and said so."""
        sql = "SELECT txid FROM explained_transactions WHERE network = ? ORDER BY txid"
        return [str(row[0]) for row in self._db.read(sql, (network,))]

    def monero_cursor(self) -> int | None:
        """The newest block of Monero whose deposits are on record; None before the first look."""
        row = self._db.read_one("SELECT max(height) FROM monero_cursor")
        return None if row[0] is None else int(row[0])

    def not_on_record(self, txids: Collection[str]) -> list[str]:
        """Those of the wallet's Monero transactions that nobody knows of, in order."""
        listed = orjson.dumps(sorted(txids)).decode()
        return [str(row[0]) for row in self._db.read(_NOT_ON_RECORD, (listed,))]

    def strays(self) -> list[Stray]:
        """Confirmed deposits that are of no order and not explained; the first 1,000."""
        return stray_deposits(self._db)

    async def tell_transactions(self, network: str, txids: Collection[str], at: int) -> None:
        """Note that the operator was told of these."""
        rows = [Statement(_TELL_TRANSACTION, (network, txid, at)) for txid in txids]
        await self._db.write(rows)
