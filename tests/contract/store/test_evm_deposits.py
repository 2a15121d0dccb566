"""The records of USDC deposits, on each backend."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain.events import DepositSeen
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import Admission
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.records import (
    CursorMove,
    EvmAddress,
    EvmCursor,
    EvmDeposit,
    EvmWallet,
)
from rpcsvc.store.database import StoreConflict, Tables
from rpcsvc.store.orders import OrderStore
from tests.rows import statement
from tests.unit.evm_chain import CONFIRMED, HOT, OURS, SEEN, STRANGER, USER, digest
from tests.unit.orders import NOW
from tests.unit.reserving import Keeper, numbered


@pytest.fixture
async def ledger(database: Tables) -> EvmDepositLedger:
    made = EvmDepositLedger(database)
    await made.adopt_wallet(HOT)
    await made.add_addresses(OURS)
    return made


def deposit(name: str = "a", **changes: Any) -> EvmDeposit:
    made = EvmDeposit(
        "arbitrum", digest(name), 0, 1, OURS[0].address, 5, USER, 1000, 7, digest("block")
    )
    return replace(made, **changes)


async def test_the_first_mnemonic_stays(ledger: EvmDepositLedger, database: Tables) -> None:
    with pytest.raises(StoreConflict):
        await ledger.adopt_wallet(USER)
    for sql in ("UPDATE evm_wallet SET hot_address = 'x'", "DELETE FROM evm_wallet"):
        with pytest.raises(StoreConflict):
            await database.write([statement(sql, ())])
    assert await ledger.wallet() == EvmWallet(HOT, 29)


async def test_an_index_keeps_its_address_and_an_address_its_index(
    ledger: EvmDepositLedger,
) -> None:
    await ledger.add_addresses(OURS[5:])
    for wrong in (EvmAddress(2, USER), EvmAddress(99, OURS[3].address), EvmAddress(0, USER)):
        with pytest.raises(StoreConflict):
            await ledger.add_addresses([EvmAddress(50, STRANGER), wrong])
    assert await ledger.addresses_above(0) == OURS
    assert await ledger.highest_address() == OURS[-1]


async def test_an_address_is_ours_in_any_case(ledger: EvmDepositLedger) -> None:
    asked = [OURS[0].address.lower(), "0x" + OURS[1].address[2:].upper(), STRANGER, "", "'"]
    assert await ledger.ours(asked) == OURS[:2]
    assert await ledger.ours([]) == []


async def test_a_deposit_keeps_what_it_is(ledger: EvmDepositLedger, database: Tables) -> None:
    await ledger.put_deposits([deposit()])
    for other in (deposit(units=6), deposit(sender=STRANGER), deposit(address_index=2)):
        with pytest.raises(StoreConflict):
            await ledger.put_deposits([other])
    await ledger.put_deposits([deposit(block_number=8, watched=False)])
    await ledger.acknowledge([(deposit().key, CONFIRMED)], None)
    kept = deposit(block_number=8, watched=False, acknowledged=CONFIRMED)
    assert await ledger.deposit(deposit().key) == kept
    wrong = (
        "units = 6",
        "sender = ''",
        "address_index = 2",
        "first_seen_at = 1",
        "position = 9",
        "txid = 'x'",
        "acknowledged = 'lost'",
        "block_hash = NULL",
    )
    for change in wrong:  # fmt: skip
        with pytest.raises(StoreConflict):
            await database.write([statement(f"UPDATE evm_deposits SET {change}", ())])
    with pytest.raises(StoreConflict):
        await database.write([statement("DELETE FROM evm_deposits", ())])
    assert await ledger.deposit(deposit().key) == kept


async def test_a_deposit_to_nobody_or_of_nothing_is_not_recorded(
    ledger: EvmDepositLedger,
) -> None:
    for wrong in (deposit(address_index=999), deposit(units=0)):
        with pytest.raises(StoreConflict):
            await ledger.put_deposits([wrong])


async def test_deposits_are_found_by_network_transaction_and_watch(
    ledger: EvmDepositLedger,
) -> None:
    rows = [
        deposit("a"), deposit("b", watched=False), deposit("c", watched=False, block_number=9),
        deposit("a", network="ethereum"), deposit("d", block_number=None, block_hash=None),
    ]  # fmt: skip
    await ledger.put_deposits(rows)
    watched = await ledger.deposits_to_watch("arbitrum", 8)
    assert {item.txid for item in watched} == {digest(name) for name in "acd"}
    assert await ledger.deposits_by("arbitrum", [digest("b"), digest("none")]) == [rows[1]]
    assert await ledger.deposit(rows[3].key) == rows[3]
    assert await ledger.deposit(deposit("none").key) is None


async def test_blocks_above_a_fork_are_void_and_one_below_is_kept(
    ledger: EvmDepositLedger,
) -> None:
    numbers = (3, 5, 8, 10)
    await ledger.begin("arbitrum", [EvmCursor(number, f"old{number}") for number in numbers])
    await ledger.begin("ethereum", [EvmCursor(99, "other")])
    await ledger.acknowledge([], CursorMove("arbitrum", EvmCursor(9, "new"), fork=8, keep=6))
    expected = [EvmCursor(9, "new"), EvmCursor(8, "old8"), EvmCursor(5, "old5")]
    assert await ledger.cursors("arbitrum") == expected
    assert await ledger.cursors("ethereum") == [EvmCursor(99, "other")]


async def test_acknowledgement_ends_at_a_database_that_fell_back(
    ledger: EvmDepositLedger, database: Tables
) -> None:
    """Deposits that were scanned, or committed to an order, are lacking there."""
    order = numbered(1, Direction.USDC_TO_XMR)
    order = replace(order, terms=replace(order.terms, deposit_address=OURS[0].address))
    key, network = deposit().key, order.terms.deposit_network
    assert network == key.network
    keeper = Keeper(OrderStore(database, lambda: "key"))
    await keeper.open(order, Admission("a"))
    await ledger.begin(network, [EvmCursor(8, "old")])
    await ledger.put_deposits([deposit()])
    moved = CursorMove(network, EvmCursor(9, "new"), fork=8, keep=6)
    with pytest.raises(Unavailable):
        await ledger.acknowledge([(deposit("b").key, SEEN)], moved)
    with pytest.raises(Unavailable):
        await ledger.acknowledge([(key, SEEN)], moved)
    with pytest.raises(Unavailable):
        await ledger.acknowledge([], replace(moved, fork=7))
    await keeper.apply("ord_1", DepositSeen(key, 5, USER, NOW))
    with pytest.raises(Unavailable):
        await ledger.acknowledge([(key, CONFIRMED)], moved)
    assert await ledger.newest_cursor(network) == EvmCursor(8, "old")
    await ledger.acknowledge([(key, SEEN)], moved)
    assert await ledger.newest_cursor(network) == moved.to
