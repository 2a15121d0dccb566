"""What EVM nodes were about to mine, as rows: a part of the EvmDepositLedger port over SQLite.

What does not live here: deposits and addresses (onchain_evm_deposits.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import orjson

from rpcsvc.settlement.onchain.evm.ledger import EvmAddress, PoolSighting
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.order_addresses import order_has

# In these an order takes a deposit at its quote. The index orders_awaiting is of just this form.
_WAITS = "o.status IN ('awaiting_deposit', 'deposit_detected')"
_IS_AWAITING = (
    "SELECT 1 FROM orders o"  # noqa: S608 - constants
    f" WHERE o.deposit_network = ? AND o.expires_at >= ? AND {_WAITS} LIMIT 1"
)
# Addresses are in any case here, and in that of the order there.
_ORDER_OF_ADDRESS = order_has("a")
_AWAITING = (
    "SELECT a.address_index, a.address"  # noqa: S608 - constants
    " FROM evm_addresses a JOIN orders o"
    f" ON {_ORDER_OF_ADDRESS}"
    " WHERE a.address_lower IN (SELECT lower(value) FROM json_each(?))"
    f" AND o.deposit_network = ? AND o.expires_at >= ? AND {_WAITS}"
)
_SELECT_SIGHTING = "SELECT network, txid, address_index, first_seen_at FROM evm_pool_sightings"
_PUT_SIGHTING = (
    "INSERT INTO evm_pool_sightings (network, txid, address_index, first_seen_at)"
    " VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_HAS_SIGHTINGS = "SELECT 1 FROM evm_pool_sightings WHERE network = ? LIMIT 1"
_FORGET_SIGHTINGS = (
    "DELETE FROM evm_pool_sightings AS s WHERE s.network = ? AND ("  # noqa: S608 - constants
    " EXISTS (SELECT 1 FROM evm_deposits d"
    "  WHERE d.network = s.network AND d.txid = s.txid AND d.watched = 0)"
    " OR s.first_seen_at < ? AND NOT EXISTS (SELECT 1 FROM evm_addresses a JOIN orders o"
    f"  ON {_ORDER_OF_ADDRESS}"
    f"  WHERE a.address_index = s.address_index AND o.deposit_network = s.network AND {_WAITS}))"
)


class SqliteEvmPoolLedger:
    """The part of the EvmDepositLedger port that is about pending blocks, over a Database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def is_awaiting(self, network: str, now_ms: int) -> bool:
        """Whether an order waits for a deposit on this network that would be in time now."""
        return self._db.read_one(_IS_AWAITING, (network, now_ms)) is not None

    async def awaiting(
        self, network: str, addresses: Collection[str], now_ms: int
    ) -> list[EvmAddress]:
        """Those of addresses, in any case, that such orders have; by one query."""
        rows = self._db.read(_AWAITING, (_list(addresses), network, now_ms))
        return [EvmAddress(*row) for row in rows]

    async def pool_sighting(self, network: str, txid: str) -> PoolSighting | None:
        """When a transaction was seen before it was mined."""
        row = self._db.read_one(
            f"{_SELECT_SIGHTING} WHERE network = ? AND txid = ?", (network, txid)
        )
        return PoolSighting(*row) if row else None

    async def pool_sightings(self, network: str, txids: Collection[str]) -> set[str]:
        """Those of these transactions that are recorded, by one query."""
        sql = (
            "SELECT txid FROM evm_pool_sightings"
            " WHERE network = ? AND txid IN (SELECT value FROM json_each(?))"
        )
        return {txid for (txid,) in self._db.read(sql, (network, _list(txids)))}

    async def pool_counts(self, network: str, indices: Collection[int]) -> dict[int, int]:
        """How many are recorded of each address, none where it is not named; by one query."""
        sql = (
            "SELECT address_index, COUNT(*) FROM evm_pool_sightings WHERE network = ?"
            " AND address_index IN (SELECT value FROM json_each(?)) GROUP BY address_index"
        )
        return dict(self._db.read(sql, (network, _list(indices))))

    async def put_pool_sightings(self, found: Sequence[PoolSighting]) -> None:
        """Record when transactions were first seen; what is recorded stays."""
        rows = [(item.network, item.txid, item.address_index, item.first_seen_at) for item in found]
        await self._db.write([Statement(_PUT_SIGHTING, row) for row in rows])

    async def forget_pool_sightings(self, network: str, before_ms: int) -> None:
        """Drop those older than that whose order does not wait, and those mined long ago."""
        if self._db.read_one(_HAS_SIGHTINGS, (network,)) is not None:
            await self._db.write([Statement(_FORGET_SIGHTINGS, (network, before_ms))])


def _list(values: Collection[str] | Collection[int]) -> str:
    return orjson.dumps(list(values)).decode()
