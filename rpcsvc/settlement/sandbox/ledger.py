"""The sandbox's simulated chains, and their rows.

A chain makes a block every ``block_ms`` from ``base_at`` on: heights are pure functions of time, so
an idle chain costs nothing and a restart misses no block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.store.database import StaleWrite, Statement, Tables, from_row, insert, to_row, update

T = TypeVar("T")

MONERO = "monero"
# How often a change is made again when another replica changed the chains meanwhile.
TRIES: Final = 5

_CHAIN: Final = (
    "network", "base_height", "base_at", "block_ms", "paused", "inventory", "balance",
)  # fmt: skip
_TX: Final = (
    "network", "txid", "kind", "recipient", "sender", "units", "fee", "broadcast_at",
    "block_height", "state", "watched",
)  # fmt: skip
_SELECT_TX: Final = f"SELECT {', '.join(_TX)} FROM sandbox_transactions"
_INSERT_TX: Final = f"{insert('sandbox_transactions', _TX)} ON CONFLICT (network, txid) DO NOTHING"
_ADD_CHAIN: Final = f"{insert('sandbox_chains', _CHAIN)} ON CONFLICT (network) DO NOTHING"
_PUT_CHAIN: Final = update(
    "sandbox_chains", ("base_height", "base_at", "paused"), "network = :network"
)
_MOVE_BALANCE: Final = (
    "UPDATE sandbox_chains SET balance = balance + :units WHERE network = :network"
)
_ADD_BLOCK: Final = (
    "INSERT INTO sandbox_blocks (network, height, hash, mined_at, orphaned)"
    " VALUES (:network, :height, :hash, :mined_at, 0) ON CONFLICT DO NOTHING"
)
_ORPHAN_BLOCK: Final = (
    "UPDATE sandbox_blocks SET orphaned = 1 WHERE network = :network AND height = :height"
)
_IS_TX: Final = "network = :network AND txid = :txid"
_MINE_TX: Final = (
    "UPDATE sandbox_transactions SET state = 'mined', block_height = :height, watched = :watched"
    f" WHERE {_IS_TX} AND state = 'mempool'"
)
_IS_AS_READ: Final = f"{_IS_TX} AND state = :was AND block_height IS NOT DISTINCT FROM :height"
_POOL_TX: Final = (
    "UPDATE sandbox_transactions SET state = :state, block_height = NULL, broadcast_at = :now,"
    f" watched = 1 WHERE {_IS_AS_READ}"
)
_UNWATCH_TX: Final = f"UPDATE sandbox_transactions SET watched = 0 WHERE {_IS_AS_READ}"
_ADD_FAULT: Final = f"{insert('sandbox_faults', ('order_id', 'fault'))} ON CONFLICT DO NOTHING"
_IS_FAULT: Final = "order_id = :order_id AND fault = :fault"
_PUT_SETTING: Final = (
    f"{insert('sandbox_settings', ('name', 'value'))}"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)
_MOVE_SETTING: Final = f"{_PUT_SETTING} WHERE sandbox_settings.value = :was"


class SimulatedChain(Struct, frozen=True):
    """A simulated chain. ``inventory`` and ``balance`` are the service's wallet, atomic units."""

    network: str
    base_height: int
    base_at: int
    block_ms: int
    paused: bool
    inventory: int
    balance: int

    def height(self, now: int) -> int:
        """The height of the newest block at ``now``."""
        if self.paused:
            return self.base_height
        return self.base_height + max(0, now - self.base_at) // self.block_ms

    def including_height(self, broadcast_at: int, now: int) -> int | None:
        """The height of the first block after ``broadcast_at``; None if it is yet to come."""
        if self.paused:
            return None
        height = max(self.height(broadcast_at), self.base_height) + 1
        return height if height <= self.height(now) else None

    def mined_at(self, height: int) -> int:
        """The time of the block at ``height``."""
        return self.base_at + (height - self.base_height) * self.block_ms

    def pause(self, now: int) -> SimulatedChain:
        """The chain without new blocks from ``now`` on."""
        return replace(self, base_height=self.height(now), base_at=now, paused=True)

    def resume(self, now: int) -> SimulatedChain:
        """The chain with new blocks again from ``now`` on."""
        return replace(self, base_at=now, paused=False) if self.paused else self


def block_hash(network: str, height: int, fork: int) -> str:
    """A block's hash; ``fork`` differs between rival blocks of one height."""
    return hashlib.sha256(f"{network}/{height}/{fork}".encode()).hexdigest()


class TxState(StrEnum):
    """Where a simulated transaction is."""

    MEMPOOL = "mempool"
    MINED = "mined"
    DROPPED = "dropped"
    REVERTED = "reverted"


class TxKind(StrEnum):
    """Whether money comes to the service or leaves it."""

    DEPOSIT = "deposit"
    TRANSFER = "transfer"


class Tx(Struct, frozen=True):
    """A simulated transaction. ``watched``: the service has yet to commit its outcome."""

    network: str
    txid: str
    kind: TxKind
    recipient: str
    sender: str | None
    units: int
    fee: int
    broadcast_at: int
    block_height: int | None = None
    state: TxState = TxState.MEMPOOL
    watched: bool = True

    @property
    def balance_effect(self) -> int:
        """The change of the service's wallet once the transaction is mined, in atomic units."""
        return self.units if self.kind is TxKind.DEPOSIT else -(self.units + self.fee)


class Fault(StrEnum):
    """A fault that waits for the next transfer of an order, or its next signed payment."""

    PAYOUT_FAILS = "payout_fails"
    PAYOUT_UNKNOWN_SENT = "payout_unknown_sent"
    PAYOUT_UNKNOWN_LOST = "payout_unknown_lost"
    REFUND_FAILS = "refund_fails"
    FUNDING_FAILS = "funding_fails"
    FUNDING_UNKNOWN = "funding_unknown"


class Setting(StrEnum):
    """Integers that hold for the whole sandbox."""

    CLOCK_OFFSET_MS = "clock_offset_ms"
    USDC_PER_XMR = "usdc_per_xmr"
    ENGINE_DOWN = "engine_down"
    RATES_DOWN = "rates_down"


class Mined(Struct, frozen=True):
    """A transaction that a new block takes in."""

    tx: Tx
    height: int
    hash: str
    mined_at: int


async def on_current(change: Callable[[], Awaitable[T]]) -> T:
    """Return what ``change`` returns; call it again if its write was stale.

    Raises errors.Unavailable after some tries.
    """
    for _ in range(TRIES):
        try:
            return await change()
        except StaleWrite:
            continue
    raise Unavailable("Other replicas keep changing the simulated chains. Try again.")


class SandboxLedger:
    """Keeps the simulated chains. Reads are of committed state; writes are durable on return.

    A write raises StaleWrite, and changes nothing, if another replica has changed the rows that it
    is based on.
    """

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def chains(self) -> list[SimulatedChain]:
        """Return all chains."""
        rows = await self._db.fetch(f"SELECT {', '.join(_CHAIN)} FROM sandbox_chains")
        return [from_row(SimulatedChain, row) for row in rows]

    async def transaction(self, network: str, txid: str) -> Tx | None:
        """Return a transaction by its id."""
        row = await self._db.fetch_one(f"{_SELECT_TX} WHERE {_IS_TX}", network=network, txid=txid)
        return from_row(Tx, row) if row else None

    async def watched(self) -> list[Tx]:
        """Return all transactions that the service still watches, oldest first."""
        return await self._txs("WHERE watched = 1 ORDER BY seq")

    async def transactions_to(self, network: str, recipient: str) -> list[Tx]:
        """Return all transactions to an address, oldest first."""
        where = "WHERE recipient_ends = :ends AND network = :network ORDER BY seq"
        found = await self._txs(where, network=network, ends=recipient[:9] + recipient[-9:])
        # Compared here: in the query, SQLite would pass the index by (store/orders.py).
        return [tx for tx in found if tx.recipient == recipient]

    async def mined_above(self, network: str, height: int) -> list[Tx]:
        """Return all transactions in blocks above ``height``."""
        where = (
            "WHERE network = :network AND state = 'mined' AND block_height > :height ORDER BY seq"
        )
        return await self._txs(where, network=network, height=height)

    async def orphaned_count(self, network: str) -> int:
        """Number of blocks that the chain lost to reorganisations."""
        row = await self._db.fetch_one(
            "SELECT count(*) AS blocks FROM sandbox_blocks"
            " WHERE network = :network AND orphaned = 1",
            network=network,
        )
        return int(row["blocks"]) if row else 0

    async def has_fault(self, order_id: str, fault: Fault) -> bool:
        """Return whether a fault waits for the order."""
        sql = f"SELECT 1 FROM sandbox_faults WHERE {_IS_FAULT}"
        return await self._db.fetch_one(sql, order_id=order_id, fault=fault.value) is not None

    async def settings(self) -> dict[Setting, int]:
        """Return all settings that were changed."""
        rows = await self._db.fetch("SELECT name, value FROM sandbox_settings")
        return {Setting(row["name"]): row["value"] for row in rows}

    async def add_chains(self, chains: Sequence[SimulatedChain]) -> None:
        """Add the chains that are not there yet."""
        await self._db.write([Statement(_ADD_CHAIN, to_row(chain)) for chain in chains])

    async def put_chain(self, chain: SimulatedChain) -> None:
        """Change a chain's timing (not its balance)."""
        await self._db.write([Statement(_PUT_CHAIN, to_row(chain))])

    async def broadcast(self, tx: Tx) -> None:
        """Add a transaction to the pool (or, REVERTED, to the chain); known ones stay unchanged."""
        await self._db.write([Statement(_INSERT_TX, to_row(tx))])

    async def broadcast_new(self, tx: Tx) -> None:
        """Add a transaction to the pool; stale if its txid is known."""
        await self._db.write([Statement(_INSERT_TX, to_row(tx), finds=True)])

    async def mine(self, mined: Sequence[Mined]) -> None:
        """Mine transactions and add their amounts to the balance."""
        statements = []
        for block in mined:
            tx = block.tx
            added = {
                "network": tx.network, "height": block.height, "hash": block.hash,
                "mined_at": block.mined_at,
            }  # fmt: skip
            taken = {
                "network": tx.network, "txid": tx.txid, "height": block.height,
                "watched": int(tx.kind is TxKind.DEPOSIT),
            }  # fmt: skip
            statements += [
                Statement(_ADD_BLOCK, added),
                Statement(_MINE_TX, taken, finds=True),
                _move(tx.network, tx.balance_effect),
            ]
        await self._db.write(statements)

    async def unmine(self, txs: Sequence[Tx], now: int) -> None:
        """Orphan the blocks of mined transactions and return these to the pool at ``now``."""
        statements = []
        for tx in txs:
            block = {"network": tx.network, "height": tx.block_height}
            statements += [
                Statement(_ORPHAN_BLOCK, block),
                _pool(tx, TxState.MEMPOOL, now),
                _move(tx.network, -tx.balance_effect),
            ]
        await self._db.write(statements)

    async def set_state(self, tx: Tx, state: TxState, now: int) -> None:
        """Drop a pooled transaction, or bring a dropped one back into the pool."""
        await self._db.write([_pool(tx, state, now)])

    async def unwatch(self, txs: Sequence[Tx]) -> None:
        """Stop watching transactions, unless they changed since they were read."""
        await self._db.write([Statement(_UNWATCH_TX, _as_read(tx)) for tx in txs])

    async def add_fault(self, order_id: str, fault: Fault) -> None:
        """Schedule a fault for the order's next transfer."""
        values = {"order_id": order_id, "fault": fault.value}
        await self._db.write([Statement(_ADD_FAULT, values)])

    async def clear_fault(self, order_id: str, fault: Fault) -> None:
        """Remove a fault that has happened."""
        sql = f"DELETE FROM sandbox_faults WHERE {_IS_FAULT}"
        await self._db.write([Statement(sql, {"order_id": order_id, "fault": fault.value})])

    async def put_setting(self, setting: Setting, value: int, was: int | None = None) -> None:
        """Change a setting permanently; stale if ``was`` is given and no longer its value."""
        values = {"name": setting.value, "value": value}
        if was is None:
            await self._db.write([Statement(_PUT_SETTING, values)])
        else:
            await self._db.write([Statement(_MOVE_SETTING, {**values, "was": was}, finds=True)])

    async def _txs(self, where: str, **values: Any) -> list[Tx]:
        rows = await self._db.fetch(f"{_SELECT_TX} {where}", **values)
        return [from_row(Tx, row) for row in rows]


def _move(network: str, units: int) -> Statement:
    return Statement(_MOVE_BALANCE, {"network": network, "units": units})


def _pool(tx: Tx, state: TxState, now: int) -> Statement:
    values = {**_as_read(tx), "state": state.value, "now": now}
    return Statement(_POOL_TX, values, finds=True)


def _as_read(tx: Tx) -> dict[str, Any]:
    """Names the transaction, and the state that it was read in."""
    return {
        "network": tx.network, "txid": tx.txid, "was": tx.state.value, "height": tx.block_height,
    }  # fmt: skip
