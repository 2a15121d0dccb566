"""Bounds on the number and age of remembered pending payments, and the database's constraints."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rpcsvc.domain.order import OrderStatus
from rpcsvc.settlement.onchain.evm import scan as evm_pool
from rpcsvc.settlement.onchain.evm.deposit_ledger import _AWAITING, _IS_AWAITING
from rpcsvc.settlement.onchain.evm.records import PoolSighting
from rpcsvc.settlement.onchain.evm.scan import MOST_PER_ADDRESS, pending_payments, read_pending
from rpcsvc.store.backends.sqlite.database import SqliteDatabase, compiled
from rpcsvc.store.database import StoreConflict
from tests.rows import all_rows, statement
from tests.unit.evm_chain import OURS, TOKEN, Reader, txid_of
from tests.unit.evm_pending import (
    DAY,
    HOUR,
    MINUTE,
    NODE,
    held,
    later,
    mined,
    paying,
    reading,
    sighting,
)
from tests.waiting import wait_for_deposit


@pytest.fixture
async def reader(database: SqliteDatabase) -> Reader:
    """An order waits at the first address, for a hundred seconds more."""
    made = await reading(database)
    await wait_for_deposit(database, OURS[0].address, expires_at=made.clock.now + 100_000)
    return made


# --- bounds --------------------------------------------------------------------------------------


async def test_hints_of_an_address_are_bounded(reader: Reader, database: SqliteDatabase) -> None:
    await wait_for_deposit(database, OURS[1].address, expires_at=reader.clock.now + MINUTE)
    for number in range(3):
        flood = [paying(f"flood{number}.{n}") for n in range(500)]
        reader.chain.pool = [*flood, paying("honest", to=1)]
        later(reader, 1)
        await reader.poll()
        assert await held(reader) == {1: MOST_PER_ADDRESS, 2: 1}


async def test_hints_of_one_scan_are_bounded_and_the_next_adds_more(
    reader: Reader, database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evm_pool, "MOST_PER_LOOK", 10)
    for item in OURS[1:12]:
        await wait_for_deposit(database, item.address, expires_at=reader.clock.now + MINUTE)
    reader.chain.pool = [paying(f"tx{n}", to=n) for n in range(12)]
    await reader.poll()
    assert sum((await held(reader)).values()) == 10
    later(reader, 1)
    await reader.poll()
    assert sum((await held(reader)).values()) == 12


async def test_no_more_calls_are_read_than_a_block_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evm_pool, "_MOST_CALLS", 3)
    block = read_pending(NODE[0], {"transactions": [paying(f"tx{n}") for n in range(5)]})
    assert [item.txid for item in pending_payments(block, TOKEN)] == [
        txid_of(f"tx{n}") for n in range(3)
    ]


async def test_hints_that_are_of_no_use_any_more_are_forgotten(
    reader: Reader, database: SqliteDatabase
) -> None:
    await wait_for_deposit(
        database, OURS[1].address, expires_at=reader.clock.now + DAY, status=OrderStatus.EXPIRED
    )
    at = reader.clock.now
    rows = [("waits", 1, at), ("over", 2, at), ("young", 2, at + 1), ("unknown", 3, at)]
    await reader.ledger.put_pool_sightings(
        [PoolSighting("arbitrum", txid_of(name), index, when) for name, index, when in rows]
        + [PoolSighting("base", txid_of("over"), 2, at)]
    )

    async def left() -> list[str]:
        return [name for name, _, _ in rows if await sighting(reader, name) is not None]

    reader.clock.now = at + DAY
    await reader.poll()
    assert await left() == ["waits", "over", "young", "unknown"]
    reader.restart()
    reader.clock.now = at + DAY + 1
    await reader.poll()
    assert await left() == ["waits", "young"], "an order that waits may still be paid by the first"
    assert await reader.ledger.pool_sighting("base", txid_of("over")) is not None
    reader.clock.now += HOUR
    await reader.poll()
    assert await left() == ["waits"]


async def test_hint_of_an_unwatched_deposit_is_forgotten(
    reader: Reader,
) -> None:
    reader.chain.pool = [paying("a")]
    await reader.poll()
    reader.chain.pool = []
    await mined(reader, "a", at=reader.clock.now)
    reader.clock.now += HOUR
    await reader.poll()
    assert await sighting(reader, "a") is not None
    reader.chain.mine(count=60)
    for _ in range(3):  # confirmed, watched no more, forgotten
        reader.clock.now += HOUR
        await reader.poll()
    assert await sighting(reader, "a") is None
    assert len(reader.book) == 1


# --- the database --------------------------------------------------------------------------------


def plan_of(database: SqliteDatabase, sql: str, values: Sequence[object]) -> str:
    return " ".join(
        str(row)
        for row in all_rows(database, f"EXPLAIN QUERY PLAN {compiled(sql).text}", tuple(values))
    )


async def test_whether_anyone_waits_is_known_without_reading_orders(
    database: SqliteDatabase,
) -> None:
    plan = plan_of(database, _IS_AWAITING, ("arbitrum", 7))
    assert "orders_awaiting (deposit_network=? AND expires_at>?)" in plan
    assert "SCAN" not in plan


async def test_orders_are_found_by_their_addresses(database: SqliteDatabase) -> None:
    plan = plan_of(database, _AWAITING, ("[]", "arbitrum", 7))
    assert "SEARCH a USING" in plan
    assert "(address_lower=?)" in plan
    assert "SEARCH o USING INDEX orders_by_address_ends" in plan


async def test_a_hint_never_changes_and_is_of_an_address_of_ours(
    reader: Reader, database: SqliteDatabase
) -> None:
    await reader.ledger.put_pool_sightings([PoolSighting("arbitrum", txid_of("a"), 1, 5)])
    with pytest.raises(StoreConflict):
        await database.write([statement("UPDATE evm_pool_sightings SET first_seen_at = 1", ())])
    with pytest.raises(StoreConflict):
        await reader.ledger.put_pool_sightings([PoolSighting("arbitrum", txid_of("b"), 99, 5)])
    assert await sighting(reader, "a") == PoolSighting("arbitrum", txid_of("a"), 1, 5)
