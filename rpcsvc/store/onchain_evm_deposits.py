"""The records of USDC deposits as rows: the EvmDepositLedger port over SQLite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson

from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.settlement.onchain.evm.ledger import (
    CursorMove,
    EvmAddress,
    EvmCursor,
    EvmDeposit,
    EvmWallet,
)
from rpcsvc.store.database import Statement
from rpcsvc.store.onchain_evm_pool import SqliteEvmPoolLedger

_ADD_WALLET = "INSERT INTO evm_wallet (id, hot_address, reserved_to) VALUES (1, ?, 0)"
# A trigger refuses a known index with another address.
_ADD_ADDRESS = (
    "INSERT INTO evm_addresses (address_index, address) VALUES (?, ?)"
    " ON CONFLICT (address_index) DO UPDATE SET address = excluded.address"
)
_RESERVE = "UPDATE evm_wallet SET reserved_to = ? WHERE id = 1"
_SELECT_DEPOSIT = (
    "SELECT d.network, d.txid, d.position, d.address_index, a.address, d.units, d.sender,"
    " d.first_seen_at, d.block_number, d.block_hash, d.acknowledged, d.watched"
    " FROM evm_deposits d JOIN evm_addresses a ON a.address_index = d.address_index"
)
_TO_WATCH = (
    f"{_SELECT_DEPOSIT} WHERE d.network = ? AND d.watched = 1"
    f" UNION ALL {_SELECT_DEPOSIT} WHERE d.network = ? AND d.block_number > ? AND d.watched = 0"
)
# A trigger refuses a known deposit with another recipient, amount, sender or time.
_PUT_DEPOSIT = (
    "INSERT INTO evm_deposits (network, txid, position, address_index, units, sender,"
    " first_seen_at, block_number, block_hash, acknowledged, watched)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (network, txid, position) DO UPDATE SET"
    " address_index = excluded.address_index, units = excluded.units, sender = excluded.sender,"
    " first_seen_at = excluded.first_seen_at,"
    " block_number = excluded.block_number, block_hash = excluded.block_hash,"
    " acknowledged = excluded.acknowledged, watched = excluded.watched"
)
_ACKNOWLEDGE = (
    "UPDATE evm_deposits SET acknowledged = ? WHERE network = ? AND txid = ? AND position = ?"
)
_PUT_CURSOR = (
    "INSERT INTO evm_cursor (network, number, hash) VALUES (?, ?, ?)"
    " ON CONFLICT (network, number) DO UPDATE SET hash = excluded.hash"
)
# Not the one that is put in by the same transaction, whichever of the two comes first.
_VOID_CURSORS = "DELETE FROM evm_cursor WHERE network = ? AND number > ? AND number <> ?"
# Whatever is replaced less deep than "keep" leaves one block to begin from.
_FORGET_CURSORS = (
    "DELETE FROM evm_cursor WHERE network = ? AND number <"
    " (SELECT max(number) FROM evm_cursor WHERE network = ? AND number <= ?)"
)


class SqliteEvmDepositLedger(SqliteEvmPoolLedger):
    """The EvmDepositLedger port (settlement/onchain/evm/ledger.py) over a Database."""

    # --- mnemonic and addresses ----------------------------------------------------------------

    async def wallet(self) -> EvmWallet | None:
        """The mnemonic of the first start."""
        row = self._db.read_one("SELECT hot_address, reserved_to FROM evm_wallet")
        return EvmWallet(*row) if row else None

    async def adopt_wallet(self, hot_address: str) -> None:
        """Record the mnemonic. Raises StoreConflict when there is one already."""
        await self._db.write([Statement(_ADD_WALLET, (hot_address,))])

    async def addresses_above(self, index: int) -> list[EvmAddress]:
        """The addresses with a higher index, in order."""
        sql = (
            "SELECT address_index, address FROM evm_addresses WHERE address_index > ?"
            " ORDER BY address_index"
        )
        return [EvmAddress(*row) for row in self._db.read(sql, (index,))]

    async def unknown_addresses(self, to: int) -> list[int]:
        """The indices from 1 up to ``to`` that have no address on record."""
        sql = "SELECT count(*) FROM evm_addresses WHERE address_index <= ?"
        if int(self._db.read_one(sql, (to,))[0]) == to:
            return []
        sql = "SELECT address_index FROM evm_addresses WHERE address_index <= ?"
        known = {index for (index,) in self._db.read(sql, (to,))}
        return [index for index in range(1, to + 1) if index not in known]

    async def highest_address(self) -> EvmAddress | None:
        """The newest address."""
        sql = "SELECT address_index, address FROM evm_addresses ORDER BY address_index DESC LIMIT 1"
        row = self._db.read_one(sql)
        return EvmAddress(*row) if row else None

    async def ours(self, addresses: Collection[str]) -> list[EvmAddress]:
        """Those that are recorded, of addresses in any case, by one query."""
        sql = (
            "SELECT address_index, address FROM evm_addresses"
            " WHERE address_lower IN (SELECT lower(value) FROM json_each(?))"
        )
        return [EvmAddress(*row) for row in self._db.read(sql, (_list(addresses),))]

    async def add_addresses(self, made: Sequence[EvmAddress]) -> None:
        """Record addresses, and that all up to the last may be handed out from now on.

        Raises StoreConflict when an index is there with another address.
        """
        await self._db.write(self.adding(made))

    def adding(self, made: Sequence[EvmAddress]) -> list[Statement]:
        """The statements of ``add_addresses``."""
        statements = [Statement(_ADD_ADDRESS, (item.index, item.address)) for item in made]
        return [*statements, self.reserving(made[-1].index)]

    async def reserve_addresses(self, index: int) -> None:
        """Addresses up to this index may have been handed out; those above were not."""
        await self._db.write([self.reserving(index)])

    def reserving(self, index: int) -> Statement:
        """The statement of ``reserve_addresses``."""
        return Statement(_RESERVE, (index,))

    # --- deposits ------------------------------------------------------------------------------

    async def cursors(self, network: str) -> list[EvmCursor]:
        """Blocks up to which deposits are committed, newest first."""
        sql = "SELECT number, hash FROM evm_cursor WHERE network = ? ORDER BY number DESC"
        return [EvmCursor(*row) for row in self._db.read(sql, (network,))]

    async def begin(self, network: str, cursors: Sequence[EvmCursor]) -> None:
        """Record where a network is looked at from."""
        await self._db.write([_put_cursor(network, cursor) for cursor in cursors])

    async def deposit(self, key: DepositKey) -> EvmDeposit | None:
        """One deposit."""
        where = "WHERE d.network = ? AND d.txid = ? AND d.position = ?"
        row = self._db.read_one(f"{_SELECT_DEPOSIT} {where}", tuple(key))
        return _deposit(row) if row else None

    async def deposits_by(self, network: str, txids: Collection[str]) -> list[EvmDeposit]:
        """The deposits made by these transactions, by one query."""
        where = "WHERE d.network = ? AND d.txid IN (SELECT value FROM json_each(?))"
        rows = self._db.read(f"{_SELECT_DEPOSIT} {where}", (network, _list(txids)))
        return [_deposit(row) for row in rows]

    async def deposits_to_watch(self, network: str, above: int) -> list[EvmDeposit]:
        """Deposits that are watched, and all in blocks above a number."""
        rows = self._db.read(_TO_WATCH, (network, network, above))
        return [_deposit(row) for row in rows]

    async def put_deposits(self, deposits: Sequence[EvmDeposit]) -> None:
        """Add deposits, or change block, acknowledged state and watch of known ones.

        Raises StoreConflict when anything else of a known one differs.
        """
        await self._db.write([Statement(_PUT_DEPOSIT, _deposit_row(item)) for item in deposits])

    async def acknowledge(
        self,
        states: Sequence[tuple[DepositKey, DepositState]],
        move: CursorMove | None,
    ) -> None:
        """Record the states that are committed, and move the cursor, in one transaction."""
        statements = [Statement(_ACKNOWLEDGE, (state.value, *key)) for key, state in states]
        if move is not None:
            statements.append(Statement(_VOID_CURSORS, (move.network, move.fork, move.to.number)))
            statements.append(_put_cursor(move.network, move.to))
            old = (move.network, move.network, move.keep)
            statements.append(Statement(_FORGET_CURSORS, old))
        if statements:
            await self._db.write(statements)


def _list(texts: Collection[str]) -> str:
    return orjson.dumps(list(texts)).decode()


def _put_cursor(network: str, cursor: EvmCursor) -> Statement:
    return Statement(_PUT_CURSOR, (network, cursor.number, cursor.hash))


def _deposit(row: tuple[Any, ...]) -> EvmDeposit:
    (
        network, txid, position, index, address, units, sender, at, number, block_hash,
        acknowledged, watched,
    ) = row  # fmt: skip
    state = None if acknowledged is None else DepositState(acknowledged)
    return EvmDeposit(
        network, txid, position, index, address, units, sender, at, number, block_hash, state,
        bool(watched),
    )  # fmt: skip


def _deposit_row(item: EvmDeposit) -> tuple[Any, ...]:
    acknowledged = None if item.acknowledged is None else item.acknowledged.value
    return (
        item.network, item.txid, item.position, item.address_index, item.units, item.sender,
        item.first_seen_at, item.block_number, item.block_hash, acknowledged, int(item.watched),
    )  # fmt: skip
