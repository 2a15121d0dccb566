"""A deposit scanner whose clock follows the block time, and transactions pending on its node."""

from __future__ import annotations

from typing import Any

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.records import PoolSighting
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.unit.evm_chain import HOT, OURS, SEEN, TOKEN, Reader, key, pays, txid_of

NODE = ("node", "eth_getBlockByNumber")
MINUTE, HOUR, DAY = 60_000, 3_600_000, 24 * 3_600_000


async def reading(database: SqliteDatabase) -> Reader:
    """A scanner after one pass without waiting orders, at the time of the newest block."""
    ledger = EvmDepositLedger(database)
    await ledger.adopt_wallet(HOT)
    await ledger.add_addresses(OURS)
    made = Reader(ledger)
    made.chain.mine(count=50)
    made.clock.now = (made.chain.genesis + 10 * made.chain.head) * 1000
    assert await made.poll() == {}
    return made


def waits(name: str, data: bytes, to: str | None = TOKEN) -> dict[str, Any]:
    """A transaction of the pending block."""
    return {"hash": txid_of(name), "to": to, "input": "0x" + data.hex(), "nonce": "0x0"}


def paying(name: str, to: int = 0, units: int = 5) -> dict[str, Any]:
    return waits(name, usdc.transfer(OURS[to].address, units))


async def sighting(reader: Reader, name: str) -> PoolSighting | None:
    return await reader.ledger.pool_sighting("arbitrum", txid_of(name))


def later(reader: Reader, seconds: int) -> None:
    reader.clock.now += seconds * 1000


async def mined(reader: Reader, name: str, *, at: int) -> None:
    """Mine a payment of 5 to the first address in a block at this time (ms)."""
    reader.chain.genesis = at // 1000 - 10 * (reader.chain.head + 1)
    reader.chain.mine((name, pays(5)))
    reader.clock.now = at
    assert await reader.poll() == {key(name): SEEN}


async def held(reader: Reader) -> dict[int, int]:
    return await reader.ledger.pool_counts("arbitrum", [item.index for item in OURS])
