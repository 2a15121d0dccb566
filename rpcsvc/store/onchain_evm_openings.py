"""Opening balances of the hot wallet as rows: the OpeningLedger port over SQLite."""

from __future__ import annotations

from typing import Final

from rpcsvc.settlement.onchain.evm.gas import Opening
from rpcsvc.store.database import Statement, Tables

_OPENING: Final = (
    "SELECT block_number, block_hash, nonce, wei FROM evm_openings WHERE network = ? AND sender = ?"
)
_RECORD: Final = (
    "INSERT INTO evm_openings (network, sender, block_number, block_hash, nonce, wei)"
    " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (network, sender) DO UPDATE SET"
    " block_number = excluded.block_number, block_hash = excluded.block_hash,"
    " nonce = excluded.nonce, wei = excluded.wei"
)


class SqliteOpeningLedger:
    """The OpeningLedger port (settlement/onchain/evm/gas.py) over a Database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def opening(self, network: str, sender: str) -> Opening | None:
        """The one on record; None before the first look."""
        row = self._db.read_one(_OPENING, (network, sender))
        if row is None:
            return None
        number, block_hash, nonce, wei = row
        return Opening(number, block_hash, nonce, int(wei))

    async def record(self, network: str, sender: str, opening: Opening) -> None:
        """Put it on record, in the place of one whose block was replaced."""
        values = (
            network, sender, opening.block_number, opening.block_hash, opening.nonce,
            str(opening.wei),
        )  # fmt: skip
        await self._db.write([Statement(_RECORD, values)])
