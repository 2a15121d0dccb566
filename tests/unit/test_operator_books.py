"""Sums over the wallets' books, read from one snapshot."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.sqlite.database import (
    DATABASE_NAME,
    SqliteDatabase,
    empty_snapshot,
    snapshot,
)
from rpcsvc.store.database import BooksUnreadable
from rpcsvc.store.operator_books import OperatorBooks, Owed, Signed, UnsweptTotal, owed, reserved
from tests.rows import statement
from tests.sandbox import sandbox

WEI = 10**18
_DEPOSIT = "INSERT INTO evm_deposits VALUES ('arbitrum', ?, 0, ?, ?, '0xUser', 1000, 7, 'h', ?, ?)"
_PAYMENT = (
    "INSERT INTO evm_payments (payment_id, network, sender, nonce, purpose, recipient, units,"
    " contract, data, gas, prepared_at, state, published_at, mined_txid, block_number, block_hash,"
    " gas_used, gas_price) VALUES (?, 'arbitrum', '0xHot', ?, ?, '0xUser', 7, '0xToken', x'00', 1,"
    " 1000, 'settled', 2000, ?, 9, 'h', ?, ?)"
)
_ATTEMPT = "INSERT INTO evm_attempts VALUES (?, ?, ?, x'00', ?, ?, ?)"
_MONERO = (
    "INSERT INTO monero_payments (payment_id, purpose, address, units, fee, txid, raw, metadata,"
    " tx_key, prepared_at, state, relayed_at, height)"
    " VALUES (?, ?, '4User', 5, ?, ?, x'00', '', 'key', 1000, ?, ?, ?)"
)


async def fill(database: SqliteDatabase, *rows: tuple[str, tuple[object, ...]]) -> None:
    await database.write([statement(sql, values) for sql, values in rows])


async def addresses(database: SqliteDatabase) -> None:
    for index in (1, 2, 3):
        await fill(database, ("INSERT INTO evm_addresses VALUES (?, ?)", (index, f"0x{index}")))


# --- sums --------------------------------------------------------------------------------------


async def test_deposit_addresses_are_summed_with_what_arrives(
    tmp_path: Path, database: SqliteDatabase
) -> None:
    await addresses(database)
    await fill(
        database,
        (_DEPOSIT, ("a", 1, 5, "confirmed", 0)),
        (_DEPOSIT, ("b", 2, 7, "confirmed", 1)),
        (_DEPOSIT, ("c", 2, 11, "seen", 1)),
        (_DEPOSIT, ("d", 3, 13, None, 1)),
    )
    await fill(
        database,
        (
            "INSERT INTO evm_sweeps VALUES"
            " ('arbitrum', 1, 1, '0x1', 'receive', 5, 'aa', NULL, 'done', 5)",
            (),
        ),
    )
    with snapshot(tmp_path) as taken:
        books = OperatorBooks(taken)
        assert await books.unswept() == {"arbitrum": UnsweptTotal(7, 1, 24)}
        assert await books.swept() == {"arbitrum": 5}


async def test_fees_are_summed_by_purpose_beyond_64_bits(
    tmp_path: Path, database: SqliteDatabase
) -> None:
    price = 2**62
    await fill(
        database,
        (_PAYMENT, ("t1", 0, "transfer", "x1", 3, price)),
        (_ATTEMPT, ("t1", 1, "x1", 9, 1, 10)),
        (_PAYMENT, ("t2", 1, "transfer", "x2", 5, price)),
        (_ATTEMPT, ("t2", 1, "x2", 9, 1, 10)),
        (_PAYMENT, ("s1", 2, "sweep", "x3", 1, 4)),
        (_ATTEMPT, ("s1", 1, "x3", 9, 1, 10)),
        (_MONERO, ("m1", "transfer", 3, "m1", "settled", 1, 9)),
        (_MONERO, ("m2", "transfer", 4, "m2", "failed", 1, None)),
        (_MONERO, ("m3", "upkeep", 5, "m3", "published", 1, None)),
    )
    with snapshot(tmp_path) as taken:
        books = OperatorBooks(taken)
        assert await books.gas_fees() == {"arbitrum": {"sweep": 4, "transfer": 8 * price}}
        assert await books.monero_fees() == {"transfer": 3, "upkeep": 5}


async def test_transfer_lists_its_transactions_and_the_mined_one(
    tmp_path: Path, database: SqliteDatabase
) -> None:
    await fill(
        database,
        (_PAYMENT, ("t1", 0, "transfer", "x1", 3, 4)),
        (_ATTEMPT, ("t1", 1, "x1", 9, 1, 10)),
        (_MONERO, ("m1", "transfer", 3, "mm", "settled", 1, 12)),
    )
    with snapshot(tmp_path) as taken:
        books = OperatorBooks(taken)
        assert await books.signed("t1") == [Signed("x1", 10, "settled", 9)]
        assert await books.signed("m1") == [Signed("mm", 1000, "settled", 12)]
        assert await books.signed("t2") == []


async def test_own_addresses_are_known_on_both_sides(
    tmp_path: Path, database: SqliteDatabase
) -> None:
    await addresses(database)
    await fill(
        database,
        ("INSERT INTO evm_wallet VALUES (1, '0xHot', 0)", ()),
        ("INSERT INTO monero_wallet VALUES (1, 'fakechain', '4Primary', 0)", ()),
        ("INSERT INTO monero_addresses VALUES (1, '8Sub')", ()),
    )
    with snapshot(tmp_path) as taken:
        books = OperatorBooks(taken)
        for ours in ("0x2", "0X2", "0xhot", "4Primary", "8Sub"):
            assert await books.is_own_address(ours), ours
        assert not await books.is_own_address("0x4")


async def test_open_orders_reserve_and_refunds_are_owed(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        open_one = await box.order("x2u")
        waiting = await box.order("x2u")
        await waiting.fund("0.01")
        await box.settle(4)
        done = await box.order("u2x")
        await done.fund()
        await box.settle(4)
        for _ in range(2):  # the order's hour, and the late window
            await box.jump(3_600_000)
        await box.settle(4)
        fresh = await box.order("u2x")
        with snapshot(tmp_path) as taken:
            orders = await OperatorBooks(taken).open_orders()
        order = await box.up.service.store.order(fresh.order_id)
    assert {each.order_id for each in orders} == {waiting.order_id, fresh.order_id}
    assert open_one.order_id not in {each.order_id for each in orders}
    assert owed(orders) == {"monero": Owed(0, 0, 10**10, 1)}
    assert order is not None
    reserved_units = order.terms.expected_output + order.terms.price.payout_fee
    assert reserved(orders, box.clock.now)["monero"] >= reserved_units + 10**10


async def test_due_sums_count_transfers_not_sent_yet(tmp_path: Path) -> None:
    """At each step of payouts in both directions, and of one that becomes a refund."""
    seen: set[tuple[str, str]] = set()
    async with sandbox(tmp_path) as box:
        placed = [await box.order(direction) for direction in ("x2u", "u2x", "u2x")]
        await box.fault("payout_fails", orderId=placed[2].order_id)
        for each in placed:
            await each.fund()
        books = OperatorBooks(box.up.database)
        for _ in range(20):
            await box.settle(0.5)
            expected: Counter[tuple[str, str]] = Counter()
            for each in placed:
                order = await box.up.service.store.order(each.order_id)
                assert order is not None
                for item in order.transfers:
                    if not item.state.is_final:
                        expected[item.network, item.kind.value] += item.units
            assert await books.due() == expected
            seen |= expected.keys()
    assert seen == {("arbitrum", "payout"), ("monero", "payout"), ("arbitrum", "refund")}


async def test_reservations_for_deposits_end_with_the_deposit_window(tmp_path: Path) -> None:
    """As in the service: in the late window an order reserves its received deposits only."""
    async with sandbox(tmp_path) as box:
        await box.order("u2x")
        part = await box.order("u2x")
        await part.fund("75")
        await box.catch_up()
        with snapshot(tmp_path) as taken:
            orders = await OperatorBooks(taken).open_orders()
    expires = {order.terms.expires_at for order in orders}
    whole = sum(o.terms.expected_output + o.terms.price.payout_fee for o in orders)
    assert reserved(orders, min(expires) - 1) == {"arbitrum": 75_000_000, "monero": whole}
    (paid,) = [order for order in orders if order.deposits]
    half = paid.terms.price.output(Direction.USDC_TO_XMR, 75_000_000)
    left = {"arbitrum": 75_000_000, "monero": half + paid.terms.price.payout_fee}
    assert reserved(orders, max(expires)) == left


# --- the snapshot ------------------------------------------------------------------------------


async def test_a_snapshot_stands_still_and_is_not_written_to(
    tmp_path: Path, database: SqliteDatabase
) -> None:
    count = "SELECT count(*) FROM evm_addresses"
    with snapshot(tmp_path) as taken:
        assert tuple(await taken.fetch_one(count) or ()) == (0,)
        await addresses(database)
        assert tuple(await taken.fetch_one(count) or ()) == (0,)
        with pytest.raises(Unavailable):
            await taken.write([statement("DELETE FROM evm_addresses", ())])
    with snapshot(tmp_path) as taken:
        assert tuple(await taken.fetch_one(count) or ()) == (3,)


async def test_a_database_of_another_version_is_not_guessed_at(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path)
    await database.close()
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.commit()
    with pytest.raises(BooksUnreadable, match="version 99;"), snapshot(tmp_path):
        pass


def test_what_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(BooksUnreadable, match="no database"), snapshot(tmp_path):
        pass
    (tmp_path / DATABASE_NAME).write_text("a letter to the operator")
    with pytest.raises(BooksUnreadable, match="can't be read"), snapshot(tmp_path):
        pass


async def test_before_the_first_start_nothing_has_happened() -> None:
    with empty_snapshot() as taken:
        books = OperatorBooks(taken)
        assert (await books.unswept(), await books.swept(), await books.open_orders()) == (
            {},
            {},
            [],
        )
