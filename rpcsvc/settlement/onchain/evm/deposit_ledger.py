"""USDC deposits and their addresses as rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.records import (
    CursorMove,
    EvmAddress,
    EvmCursor,
    EvmDeposit,
    EvmWallet,
    PoolSighting,
)
from rpcsvc.settlement.onchain.journal.files import EVM_ADDRESSES, AddressesEntry
from rpcsvc.settlement.onchain.journal.writer import JournaledWrites, PaymentJournal
from rpcsvc.store.database import (
    Row,
    StaleWrite,
    Statement,
    Tables,
    from_row,
    insert,
    to_row,
    update,
    upsert,
)

_ADD_WALLET: Final = (
    "INSERT INTO evm_wallet (id, hot_address, reserved_to) VALUES (1, :hot_address, 0)"
)
_SELECT_ADDRESS: Final = "SELECT a.address_index, a.address FROM evm_addresses a"
# A trigger refuses a known index with another address.
_ADD_ADDRESS: Final = upsert("evm_addresses", ("address_index", "address"), ("address_index",))
_RESERVE: Final = "UPDATE evm_wallet SET reserved_to = :reserved_to WHERE id = 1"
_DEPOSIT: Final = (
    "network", "txid", "position", "address_index", "units", "sender", "first_seen_at",
    "block_number", "block_hash", "acknowledged", "watched",
)  # fmt: skip
_DEPOSIT_KEY: Final = ("network", "txid", "position")
_SELECT_DEPOSIT: Final = (
    f"SELECT {', '.join(f'd.{name}' for name in _DEPOSIT)}, a.address"
    " FROM evm_deposits d JOIN evm_addresses a ON a.address_index = d.address_index"
)
_TO_WATCH: Final = (
    f"{_SELECT_DEPOSIT} WHERE d.network = :network AND d.watched = 1"
    f" UNION ALL {_SELECT_DEPOSIT} WHERE d.network = :network AND d.block_number > :above"
    "  AND d.watched = 0"
)
# A trigger refuses a known deposit with another recipient, amount, sender or time.
_PUT_DEPOSIT: Final = upsert("evm_deposits", _DEPOSIT, _DEPOSIT_KEY)
_ACKNOWLEDGE: Final = update(
    "evm_deposits",
    ("acknowledged",),
    "network = :network AND txid = :txid AND position = :position",
)
# These abort the transaction where the database was replaced since the scan by an older copy.
_HAS_DEPOSIT: Final = (
    "SELECT 1 FROM evm_deposits e"
    " WHERE e.network = :network AND e.txid = :txid AND e.position = :position"
)
_IS_OF_NO_ORDER: Final = (
    "NOT EXISTS (SELECT 1 FROM evm_addresses a JOIN orders o"
    " ON o.deposit_address_ends = a.address_ends AND o.deposit_address = a.address"
    " WHERE a.address_index = e.address_index AND o.deposit_network = e.network)"
)
_OF_ITS_ORDER: Final = (
    "FROM deposits d"
    " WHERE d.network = e.network AND d.txid = e.txid AND d.output_index = e.position"
)
_IS_RECORDED: Final = {
    DepositState.SEEN: f"{_HAS_DEPOSIT} AND"
    f" (EXISTS (SELECT 1 {_OF_ITS_ORDER}) OR {_IS_OF_NO_ORDER})",
    DepositState.CONFIRMED: f"{_HAS_DEPOSIT} AND"
    f" (EXISTS (SELECT 1 {_OF_ITS_ORDER} AND d.state <> 'seen') OR {_IS_OF_NO_ORDER})",
    DepositState.REMOVED: _HAS_DEPOSIT,
}
_HAS_CURSOR: Final = "SELECT 1 FROM evm_cursor WHERE network = :network AND number = :fork"
_PUT_CURSOR: Final = upsert("evm_cursor", ("network", "number", "hash"), ("network", "number"))
# Keeps the cursor that its transaction inserts, in either order of the statements.
_VOID_CURSORS: Final = (
    "DELETE FROM evm_cursor WHERE network = :network AND number > :fork AND number <> :to"
)
# A replacement less deep than "keep" leaves one block to begin from.
_FORGET_CURSORS: Final = (
    "DELETE FROM evm_cursor WHERE network = :network AND number <"
    " (SELECT max(number) FROM evm_cursor WHERE network = :network AND number <= :keep)"
)
# In these states an order accepts a deposit at its quote. The index orders_awaiting has this form.
_WAITS: Final = "o.status IN ('awaiting_deposit', 'deposit_detected')"
_IS_AWAITING: Final = (
    "SELECT 1 FROM orders o"
    f" WHERE o.deposit_network = :network AND o.expires_at >= :now AND {_WAITS} LIMIT 1"
)
_HAS_ADDRESS: Final = "o.deposit_address_ends = a.address_ends AND o.deposit_address = a.address"
_AWAITING: Final = (
    f"{_SELECT_ADDRESS} JOIN orders o ON {_HAS_ADDRESS} WHERE a.address_lower IN :addresses"
    f" AND o.deposit_network = :network AND o.expires_at >= :now AND {_WAITS}"
)
_SIGHTING: Final = ("network", "txid", "address_index", "first_seen_at")
_SELECT_SIGHTING: Final = (
    f"SELECT {', '.join(_SIGHTING)} FROM evm_pool_sightings WHERE network = :network"
)
_PUT_SIGHTING: Final = (
    f"{insert('evm_pool_sightings', _SIGHTING)} ON CONFLICT (network, txid) DO NOTHING"
)
_FORGET_SIGHTINGS: Final = (
    "DELETE FROM evm_pool_sightings AS s WHERE s.network = :network AND ("
    " EXISTS (SELECT 1 FROM evm_deposits d"
    "  WHERE d.network = s.network AND d.txid = s.txid AND d.watched = 0)"
    " OR s.first_seen_at < :before AND NOT EXISTS (SELECT 1 FROM evm_addresses a"
    f"  JOIN orders o ON {_HAS_ADDRESS}"
    f"  WHERE a.address_index = s.address_index AND o.deposit_network = s.network AND {_WAITS}))"
)


class EvmDepositLedger:
    """Keeps the mnemonic, addresses and deposits. Everything may raise errors.Unavailable.

    ``journal`` has a reserved address before the database; None: the process reserves none.
    """

    def __init__(self, database: Tables, journal: PaymentJournal | None = None) -> None:
        self._db = database
        self._writes = JournaledWrites(database, journal)

    # --- mnemonic and addresses ----------------------------------------------------------------

    async def wallet(self) -> EvmWallet | None:
        """The mnemonic of the first start."""
        row = await self._db.fetch_one("SELECT hot_address, reserved_to FROM evm_wallet")
        return from_row(EvmWallet, row) if row else None

    async def adopt_wallet(self, hot_address: str) -> None:
        """Record the mnemonic. Raises StoreConflict when there is one already."""
        await self._db.write([Statement(_ADD_WALLET, {"hot_address": hot_address})])

    async def addresses_above(self, index: int) -> list[EvmAddress]:
        """The addresses with a higher index, in order."""
        sql = f"{_SELECT_ADDRESS} WHERE a.address_index > :above ORDER BY a.address_index"
        return [_address(row) for row in await self._db.fetch(sql, above=index)]

    async def unknown_addresses(self, to: int) -> list[int]:
        """The indices from 1 up to ``to`` that have no address on record."""
        sql = "SELECT count(*) AS known FROM evm_addresses WHERE address_index <= :to"
        row = await self._db.fetch_one(sql, to=to)
        if row is not None and int(row["known"]) == to:
            return []
        sql = "SELECT address_index FROM evm_addresses WHERE address_index <= :to"
        known = {row["address_index"] for row in await self._db.fetch(sql, to=to)}
        return [index for index in range(1, to + 1) if index not in known]

    async def highest_address(self) -> EvmAddress | None:
        """The newest address."""
        row = await self._db.fetch_one(f"{_SELECT_ADDRESS} ORDER BY a.address_index DESC LIMIT 1")
        return _address(row) if row else None

    async def ours(self, addresses: Collection[str]) -> list[EvmAddress]:
        """The recorded ones among these addresses (compared without case), by one query."""
        sql = f"{_SELECT_ADDRESS} WHERE a.address_lower IN :addresses"
        return [_address(row) for row in await self._db.fetch(sql, addresses=_lower(addresses))]

    async def is_ours(self, address: str) -> bool:
        """Whether an address (compared without case) is on record as the service's own."""
        return bool(await self.ours([address]))

    async def add_addresses(self, made: Sequence[EvmAddress]) -> None:
        """Record addresses; all up to the last may be handed out then.

        Raises StoreConflict if an index is recorded with another address.
        """
        added = [
            Statement(_ADD_ADDRESS, {"address_index": item.index, "address": item.address})
            for item in made
        ]
        await self.reserve_addresses(made[-1].index, added)

    async def reserve_addresses(self, index: int, added: Sequence[Statement] = ()) -> None:
        """Record that addresses up to this index may have been handed out, and no higher ones.

        ``added`` is written with it.
        """
        reserved = Statement(_RESERVE, {"reserved_to": index})
        await self._writes.record(AddressesEntry(EVM_ADDRESSES, index), [*added, reserved])

    # --- deposits ------------------------------------------------------------------------------

    async def cursors(self, network: str) -> list[EvmCursor]:
        """Blocks up to which deposits are committed, newest first."""
        sql = "SELECT number, hash FROM evm_cursor WHERE network = :network ORDER BY number DESC"
        return [from_row(EvmCursor, row) for row in await self._db.fetch(sql, network=network)]

    async def newest_cursor(self, network: str) -> EvmCursor | None:
        """The first of ``cursors``, which may be hundreds; None before the first start."""
        sql = (
            "SELECT number, hash FROM evm_cursor WHERE network = :network"
            " ORDER BY number DESC LIMIT 1"
        )
        row = await self._db.fetch_one(sql, network=network)
        return None if row is None else from_row(EvmCursor, row)

    async def begin(self, network: str, cursors: Sequence[EvmCursor]) -> None:
        """Record the block from which a network is scanned: no deposit is in it or before."""
        await self._db.write([_put_cursor(network, cursor) for cursor in cursors])

    async def deposit(self, key: DepositKey) -> EvmDeposit | None:
        """Return a deposit by its key; None if it is not on record."""
        sql = (
            f"{_SELECT_DEPOSIT} WHERE d.network = :network AND d.txid = :txid"
            " AND d.position = :position"
        )
        row = await self._db.fetch_one(sql, **_key_values(key))
        return from_row(EvmDeposit, row) if row else None

    async def deposits_by(self, network: str, txids: Collection[str]) -> list[EvmDeposit]:
        """The deposits made by these transactions, by one query."""
        sql = f"{_SELECT_DEPOSIT} WHERE d.network = :network AND d.txid IN :txids"
        return [
            from_row(EvmDeposit, row)
            for row in await self._db.fetch(sql, network=network, txids=txids)
        ]

    async def deposits_to_watch(self, network: str, above: int) -> list[EvmDeposit]:
        """Deposits that are watched, and all in blocks above a number."""
        rows = await self._db.fetch(_TO_WATCH, network=network, above=above)
        return [from_row(EvmDeposit, row) for row in rows]

    async def put_deposits(self, deposits: Sequence[EvmDeposit]) -> None:
        """Add deposits, or change block, acknowledged state and watch of known ones.

        Raises StoreConflict when anything else of a known one differs.
        """
        await self._db.write([Statement(_PUT_DEPOSIT, to_row(item)) for item in deposits])

    async def acknowledge(
        self,
        states: Sequence[tuple[DepositKey, DepositState]],
        move: CursorMove | None,
    ) -> None:
        """Record the states that are committed, and move the cursor, in one transaction.

        Raises errors.Unavailable where the database lacks what was scanned, or an order's deposit:
        it fell back meanwhile, and the next scan shows them again.
        """
        statements = []
        for key, state in states:
            statements += [
                Statement(_IS_RECORDED[state], _key_values(key), finds=True),
                Statement(_ACKNOWLEDGE, {"acknowledged": state.value, **_key_values(key)}),
            ]
        if move is not None:
            moved = {
                "network": move.network, "fork": move.fork, "to": move.to.number,
                "keep": move.keep,
            }  # fmt: skip
            statements += [
                Statement(_HAS_CURSOR, {"network": move.network, "fork": move.fork}, finds=True),
                Statement(_VOID_CURSORS, moved),
                _put_cursor(move.network, move.to),
                Statement(_FORGET_CURSORS, moved),
            ]
        if not statements:
            return
        try:
            await self._db.write(statements)
        except StaleWrite:
            raise Unavailable("The database lacks what was scanned: it is scanned again.") from None

    # --- payments that a node is about to mine ---------------------------------------------------

    async def is_awaiting(self, network: str, now_ms: int) -> bool:
        """Whether an order on this network still accepts a deposit as on time."""
        return await self._db.fetch_one(_IS_AWAITING, network=network, now=now_ms) is not None

    async def awaiting(
        self, network: str, addresses: Collection[str], now_ms: int
    ) -> list[EvmAddress]:
        """Return the addresses (compared without case) of orders that accept a deposit as on time,
        by one query.
        """
        rows = await self._db.fetch(
            _AWAITING, addresses=_lower(addresses), network=network, now=now_ms
        )
        return [_address(row) for row in rows]

    async def pool_sighting(self, network: str, txid: str) -> PoolSighting | None:
        """Return the sighting of a transaction before it was mined; None without one."""
        row = await self._db.fetch_one(
            f"{_SELECT_SIGHTING} AND txid = :txid", network=network, txid=txid
        )
        return from_row(PoolSighting, row) if row else None

    async def pool_sightings(self, network: str, txids: Collection[str]) -> set[str]:
        """The recorded ones among these transactions, by one query."""
        sql = f"{_SELECT_SIGHTING} AND txid IN :txids"
        return {row["txid"] for row in await self._db.fetch(sql, network=network, txids=txids)}

    async def pool_counts(self, network: str, indices: Collection[int]) -> dict[int, int]:
        """Return the number of sightings by address, by one query; addresses without any are left
        out.
        """
        sql = (
            "SELECT address_index, count(*) AS sightings FROM evm_pool_sightings"
            " WHERE network = :network AND address_index IN :indices GROUP BY address_index"
        )
        rows = await self._db.fetch(sql, network=network, indices=indices)
        return {row["address_index"]: row["sightings"] for row in rows}

    async def put_pool_sightings(self, found: Sequence[PoolSighting]) -> None:
        """Record when transactions were first seen; earlier records stay."""
        await self._db.write([Statement(_PUT_SIGHTING, to_row(item)) for item in found])

    async def forget_pool_sightings(self, network: str, before_ms: int) -> None:
        """Drop old sightings whose order does not wait, and those of long mined transactions."""
        if await self._db.fetch_one(f"{_SELECT_SIGHTING} LIMIT 1", network=network) is not None:
            values = {"network": network, "before": before_ms}
            await self._db.write([Statement(_FORGET_SIGHTINGS, values)])


def _lower(addresses: Collection[str]) -> list[str]:
    return [address.lower() for address in addresses]


def _address(row: Row) -> EvmAddress:
    return EvmAddress(row["address_index"], row["address"])


def _put_cursor(network: str, cursor: EvmCursor) -> Statement:
    return Statement(_PUT_CURSOR, to_row(cursor, network=network))


def _key_values(key: DepositKey) -> dict[str, Any]:
    return {"network": key.network, "txid": key.txid, "position": key.output_index}
