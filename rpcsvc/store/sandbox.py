"""The sandbox's chains as rows: the SandboxLedger port over SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcsvc.settlement.sandbox.chain import Chain, Fault, Mined, Setting, Tx, TxKind, TxState
from rpcsvc.store.database import Statement, Tables

_TX = (
    "network, txid, kind, recipient, sender, units, fee, broadcast_at, block_height, state, watched"
)
_SELECT_TX = f"SELECT {_TX} FROM sandbox_transactions"  # noqa: S608 - constants
_INSERT_TX = (
    f"INSERT INTO sandbox_transactions ({_TX}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
    " ON CONFLICT (network, txid) DO NOTHING"
)
_ADD_CHAIN = (
    "INSERT INTO sandbox_chains"
    " (network, base_height, base_at, block_ms, paused, inventory, balance)"
    " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_PUT_CHAIN = "UPDATE sandbox_chains SET base_height = ?, base_at = ?, paused = ? WHERE network = ?"
_MOVE_BALANCE = "UPDATE sandbox_chains SET balance = balance + ? WHERE network = ?"
_ADD_BLOCK = (
    "INSERT INTO sandbox_blocks (network, height, hash, mined_at, orphaned)"
    " VALUES (?, ?, ?, ?, 0) ON CONFLICT DO NOTHING"
)
_ORPHAN_BLOCK = "UPDATE sandbox_blocks SET orphaned = 1 WHERE network = ? AND height = ?"
_MINE_TX = (
    "UPDATE sandbox_transactions SET state = 'mined', block_height = ?, watched = ?"
    " WHERE network = ? AND txid = ?"
)
_POOL_TX = (
    "UPDATE sandbox_transactions SET state = ?, block_height = NULL, broadcast_at = ?, watched = 1"
    " WHERE network = ? AND txid = ?"
)
_UNWATCH_TX = (
    "UPDATE sandbox_transactions SET watched = 0"
    " WHERE network = ? AND txid = ? AND state = ? AND block_height IS NOT DISTINCT FROM ?"
)


class SqliteSandboxLedger:
    """The SandboxLedger port (settlement/sandbox/ledger.py) over a Database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def chains(self) -> list[Chain]:
        """All chains."""
        rows = self._db.read(
            "SELECT network, base_height, base_at, block_ms, paused, inventory, balance"
            " FROM sandbox_chains"
        )
        return [
            Chain(network, base_height, base_at, block_ms, bool(paused), inventory, balance)
            for network, base_height, base_at, block_ms, paused, inventory, balance in rows
        ]

    async def transaction(self, network: str, txid: str) -> Tx | None:
        """One transaction."""
        row = self._db.read_one(f"{_SELECT_TX} WHERE network = ? AND txid = ?", (network, txid))
        return _tx_from(row) if row else None

    async def watched(self) -> list[Tx]:
        """All transactions that the service has not finished with, oldest first."""
        return await self._txs("WHERE watched = 1 ORDER BY seq")

    async def transactions_to(self, network: str, recipient: str) -> list[Tx]:
        """All transactions to an address, oldest first."""
        return await self._txs(
            "WHERE network = ? AND recipient = ? ORDER BY seq", network, recipient
        )

    async def mined_above(self, network: str, height: int) -> list[Tx]:
        """All transactions in blocks above ``height``."""
        where = "WHERE network = ? AND state = 'mined' AND block_height > ? ORDER BY seq"
        return await self._txs(where, network, height)

    async def orphaned_count(self, network: str) -> int:
        """How many blocks the chain has lost to reorganisations."""
        sql = "SELECT count(*) FROM sandbox_blocks WHERE network = ? AND orphaned = 1"
        return int(self._db.read_one(sql, (network,))[0])

    async def has_fault(self, order_id: str, fault: Fault) -> bool:
        """Whether a fault waits for the order."""
        sql = "SELECT 1 FROM sandbox_faults WHERE order_id = ? AND fault = ?"
        return self._db.read_one(sql, (order_id, fault.value)) is not None

    async def settings(self) -> dict[Setting, int]:
        """All settings that were changed."""
        rows = self._db.read("SELECT name, value FROM sandbox_settings")
        return {Setting(name): value for name, value in rows}

    async def add_chains(self, chains: Sequence[Chain]) -> None:
        """Add the chains that are not there yet."""
        await self._db.write(
            [
                Statement(
                    _ADD_CHAIN,
                    (c.network, c.base_height, c.base_at, c.block_ms, int(c.paused), c.inventory,
                     c.balance),
                )
                for c in chains
            ]
        )  # fmt: skip

    async def put_chain(self, chain: Chain) -> None:
        """Change a chain's timing (not its balance)."""
        values = (chain.base_height, chain.base_at, int(chain.paused), chain.network)
        await self._db.write([Statement(_PUT_CHAIN, values)])

    async def broadcast(self, tx: Tx) -> None:
        """Put a transaction into the pool (or, REVERTED, on the chain); known ones stay as is."""
        await self._db.write([Statement(_INSERT_TX, _tx_row(tx))])

    async def mine(self, mined: Sequence[Mined]) -> None:
        """Take transactions into blocks and their amounts into the balance."""
        statements = []
        for m in mined:
            tx = m.tx
            watched = int(tx.kind is TxKind.DEPOSIT)
            statements += [
                Statement(_ADD_BLOCK, (tx.network, m.height, m.hash, m.mined_at)),
                Statement(_MINE_TX, (m.height, watched, tx.network, tx.txid)),
                Statement(_MOVE_BALANCE, (tx.balance_effect, tx.network)),
            ]
        await self._db.write(statements)

    async def unmine(self, txs: Sequence[Tx], now: int) -> None:
        """Orphan the blocks of mined transactions and put these back into the pool at ``now``."""
        statements = []
        for tx in txs:
            statements += [
                Statement(_ORPHAN_BLOCK, (tx.network, tx.block_height)),
                Statement(_POOL_TX, (TxState.MEMPOOL.value, now, tx.network, tx.txid)),
                Statement(_MOVE_BALANCE, (-tx.balance_effect, tx.network)),
            ]
        await self._db.write(statements)

    async def set_state(self, tx: Tx, state: TxState, now: int) -> None:
        """Drop a pooled transaction, or bring a dropped one back into the pool."""
        await self._db.write([Statement(_POOL_TX, (state.value, now, tx.network, tx.txid))])

    async def unwatch(self, txs: Sequence[Tx]) -> None:
        """The service is done with these, unless they have changed since they were read."""
        await self._db.write(
            [
                Statement(_UNWATCH_TX, (t.network, t.txid, t.state.value, t.block_height))
                for t in txs
            ]
        )

    async def add_fault(self, order_id: str, fault: Fault) -> None:
        """Have a fault wait for the order's next transfer."""
        sql = "INSERT INTO sandbox_faults (order_id, fault) VALUES (?, ?) ON CONFLICT DO NOTHING"
        await self._db.write([Statement(sql, (order_id, fault.value))])

    async def clear_fault(self, order_id: str, fault: Fault) -> None:
        """The fault has happened."""
        sql = "DELETE FROM sandbox_faults WHERE order_id = ? AND fault = ?"
        await self._db.write([Statement(sql, (order_id, fault.value))])

    async def put_setting(self, setting: Setting, value: int) -> None:
        """Change a setting for good."""
        sql = (
            "INSERT INTO sandbox_settings (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        await self._db.write([Statement(sql, (setting.value, value))])

    async def _txs(self, where: str, *values: Any) -> list[Tx]:
        return [_tx_from(row) for row in self._db.read(f"{_SELECT_TX} {where}", values)]


def _tx_row(tx: Tx) -> tuple[Any, ...]:
    return (
        tx.network, tx.txid, tx.kind.value, tx.recipient, tx.sender, tx.units, tx.fee,
        tx.broadcast_at, tx.block_height, tx.state.value, int(tx.watched),
    )  # fmt: skip


def _tx_from(row: tuple[Any, ...]) -> Tx:
    network, txid, kind, recipient, sender, units, fee, at, height, state, watched = row
    return Tx(
        network, txid, TxKind(kind), recipient, sender, units, fee, at, height, TxState(state),
        bool(watched),
    )  # fmt: skip
