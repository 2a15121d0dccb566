"""The records of the Monero wallet, on each backend."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain.events import DepositSeen
from rpcsvc.domain.money import XMR as XMR_ASSET
from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.domain.reservations import Admission
from rpcsvc.domain.withdrawals import Withdrawal
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import (
    Cursor,
    DepositRecord,
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
    Payee,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.wallet_types import Subaddress, SubaddressIndex
from rpcsvc.store.database import StoreConflict, Tables
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.withdrawals import WithdrawalStore
from tests.unit.orders import NOW
from tests.unit.reserving import Keeper, numbered

XMR = 10**12


@pytest.fixture
def ledger(database: Tables) -> MoneroLedger:
    return MoneroLedger(database)


def address(minor: int, text: str = "8x") -> Subaddress:
    return Subaddress(SubaddressIndex(0, minor), f"{text}{minor}")


def deposit(txid: str, minor: int = 1, height: int | None = None) -> DepositRecord:
    return DepositRecord(txid, minor, f"8x{minor}", XMR, 0, 1000, height, None)


def payment(name: str, *images: str) -> MoneroPayment:
    return MoneroPayment(
        name,
        MoneroPurpose.TRANSFER,
        "4x",
        XMR,
        5,
        f"txid-{name}",
        "00ff",
        "meta",
        "key",
        images,
        1000,
    )


async def test_the_first_wallet_stays(ledger: MoneroLedger) -> None:
    first = WalletRecord("mainnet", "4first", 0)
    await ledger.adopt_wallet(first)
    with pytest.raises(StoreConflict):
        await ledger.adopt_wallet(replace(first, primary_address="4second"))
    await ledger.reserve_addresses(7)
    assert await ledger.wallet() == replace(first, reserved_to=7)


async def test_an_index_keeps_its_address_and_an_address_its_index(
    ledger: MoneroLedger,
) -> None:
    await ledger.add_addresses([address(1), address(2)])
    await ledger.add_addresses([address(2), address(3)])
    assert await ledger.addresses_above(1) == [address(2), address(3)]
    assert await ledger.highest_address() == address(3)
    for wrong in (address(2, "8y"), Subaddress(SubaddressIndex(0, 9), "8x2")):
        with pytest.raises(StoreConflict):
            await ledger.add_addresses([address(4), wrong])
    assert await ledger.highest_address() == address(3)


async def test_deposit_keeps_its_first_seen_time_and_amount(
    ledger: MoneroLedger,
) -> None:
    await ledger.add_addresses([address(1)])
    await ledger.put_deposits([deposit("a")])
    await ledger.put_deposits([replace(deposit("a", 1, 8), first_seen_at=9999, units=1)])
    assert await ledger.deposit("a", 1) == deposit("a", 1, 8)


async def test_a_deposit_to_nobody_is_not_recorded(ledger: MoneroLedger) -> None:
    with pytest.raises(StoreConflict):
        await ledger.put_deposits([deposit("a", 77)])


async def test_watched_deposits_and_those_above_a_fork_are_looked_at(
    ledger: MoneroLedger,
) -> None:
    await ledger.add_addresses([address(1)])
    over = [
        replace(deposit(txid, 1, height), watched=False) for txid, height in (("a", 5), ("b", 9))
    ]
    await ledger.put_deposits([*over, deposit("c")])
    assert [item.txid for item in await ledger.deposits_to_watch(100)] == ["c"]
    assert [item.txid for item in await ledger.deposits_to_watch(8)] == ["b", "c"]


async def test_shown_deposit_is_on_no_order_until_one_has_it(
    ledger: MoneroLedger, database: Tables
) -> None:
    """A few of many to one order are recorded at a time, and none of one that fails."""
    await ledger.add_addresses([address(1)])
    keeper = Keeper(OrderStore(database, lambda: "key"))
    await keeper.open(numbered(1), Admission("a"))
    await ledger.put_deposits([deposit("aa"), deposit("bb"), deposit("cc")])
    await ledger.acknowledge([("cc", 1, DepositState.SEEN)], None, 0)
    assert await ledger.on_no_order() == 2 * XMR
    await keeper.apply("ord_1", DepositSeen(DepositKey("monero", "aa", 1), XMR, None, NOW))
    assert await ledger.on_no_order() == XMR


async def test_cursor_follows_acknowledgement_and_drops_stale_blocks(
    ledger: MoneroLedger,
) -> None:
    await ledger.add_addresses([address(1)])
    await ledger.put_deposits([deposit("a", 1, 5)])
    await ledger.acknowledge([("a", 1, DepositState.SEEN)], Cursor(5, "h5"), -1)
    await ledger.acknowledge([], Cursor(7, "h7"), 5)
    await ledger.acknowledge([], None, 5)
    assert await ledger.cursors() == [Cursor(7, "h7"), Cursor(5, "h5")]
    await ledger.acknowledge([("a", 1, DepositState.REMOVED)], Cursor(6, "g6"), 5)
    assert await ledger.cursors() == [Cursor(6, "g6"), Cursor(5, "h5")]
    found = await ledger.deposit("a", 1)
    assert found is not None
    assert found.acknowledged is DepositState.REMOVED


async def test_acknowledgement_ends_at_a_database_that_fell_back(
    ledger: MoneroLedger, database: Tables
) -> None:
    """Deposits that were scanned, or committed to an order, are lacking there."""
    order, moved = numbered(1), Cursor(6, "h6")
    keeper = Keeper(OrderStore(database, lambda: "key"))
    await keeper.open(order, Admission("a"))
    await ledger.add_addresses([Subaddress(SubaddressIndex(0, 1), order.terms.deposit_address)])
    await ledger.put_deposits([deposit("a")])
    with pytest.raises(Unavailable):
        await ledger.acknowledge([("b", 1, DepositState.SEEN)], moved, -1)
    with pytest.raises(Unavailable):
        await ledger.acknowledge([("a", 1, DepositState.SEEN)], moved, -1)
    with pytest.raises(Unavailable):
        await ledger.acknowledge([], moved, 5)
    await keeper.apply("ord_1", DepositSeen(DepositKey("monero", "a", 1), XMR, None, NOW))
    with pytest.raises(Unavailable):
        await ledger.acknowledge([("a", 1, DepositState.CONFIRMED)], moved, -1)
    assert await ledger.cursors() == []
    await ledger.acknowledge([("a", 1, DepositState.SEEN)], moved, -1)
    assert await ledger.cursors() == [moved]


async def test_one_payment_is_unpublished_at_a_time(ledger: MoneroLedger) -> None:
    first, second = payment("a", "i1"), payment("b", "i2")
    await ledger.add_payment(first)
    relaying = replace(first, state=MoneroPaymentState.RELAYING, relayed_at=5)
    for state in (first, relaying):
        await ledger.put_payment(state)
        with pytest.raises(StoreConflict):
            await ledger.add_payment(second)
    await ledger.put_payment(replace(relaying, state=MoneroPaymentState.PUBLISHED))
    await ledger.add_payment(second)
    assert [item.payment_id for item in await ledger.payments_in(MoneroPaymentState.PREPARED)] == [
        "b"
    ]


async def test_a_key_image_belongs_to_one_live_payment(ledger: MoneroLedger) -> None:
    first = payment("a", "i1", "i2")
    await ledger.add_payment(first)
    await ledger.put_payment(replace(first, state=MoneroPaymentState.PUBLISHED, relayed_at=5))
    with pytest.raises(StoreConflict):
        await ledger.add_payment(payment("b", "i2"))
    assert await ledger.payment("b") is None
    assert await ledger.live_key_images(["i1", "i2", "i3"]) == {"i1", "i2"}
    await ledger.put_payment(replace(first, state=MoneroPaymentState.FAILED, relayed_at=5))
    assert await ledger.live_key_images(["i1", "i2"]) == set()
    await ledger.add_payment(payment("b", "i2"))


async def test_a_payment_keeps_its_mark_and_its_end(ledger: MoneroLedger) -> None:
    first = payment("a", "i1")
    await ledger.add_payment(first)
    marked = replace(first, state=MoneroPaymentState.RELAYING, relayed_at=5)
    await ledger.put_payment(marked)
    with pytest.raises(StoreConflict):
        await ledger.put_payment(replace(marked, relayed_at=6))
    over = replace(marked, state=MoneroPaymentState.FAILED, conflict=Cursor(7, "h7"))
    await ledger.put_payment(over)
    with pytest.raises(StoreConflict):
        await ledger.put_payment(replace(over, state=MoneroPaymentState.PUBLISHED))
    assert await ledger.payment("a") == over


async def test_settled_payment_loses_its_metadata_and_keeps_its_bytes(
    ledger: MoneroLedger,
) -> None:
    signed = payment("a", "i1")
    await ledger.add_payment(signed)
    relayed = replace(signed, state=MoneroPaymentState.PUBLISHED, relayed_at=5)
    await ledger.put_payment(relayed)
    assert await ledger.payment("a") == relayed
    settled = replace(relayed, state=MoneroPaymentState.SETTLED, height=7)
    await ledger.put_payment(settled)
    assert await ledger.payment("a") == replace(settled, metadata="")
    assert signed.metadata


def batch(name: str, *payees: str) -> MoneroPayment:
    """A payment of several transfers; each has an address of its own name."""
    shares = tuple(Payee(item, f"4x-{item}", XMR) for item in payees)
    return replace(payment(name, f"image-{name}"), batch=shares, units=len(payees) * XMR)


async def test_a_payment_of_several_transfers_is_found_by_each(
    ledger: MoneroLedger,
) -> None:
    made = batch("batch_1", "a", "b")
    await ledger.add_payment(made)
    assert [await ledger.payment(name) for name in ("a", "b", "batch_1", "c")] == [
        made,
        made,
        made,
        None,
    ]
    with pytest.raises(LookupError):
        made.payee("c")


@pytest.mark.parametrize(
    "second", [payment("a", "i9"), batch("batch_2", "b", "c")], ids=["alone", "with another"]
)
async def test_a_transfer_is_paid_by_one_payment(
    ledger: MoneroLedger, second: MoneroPayment
) -> None:
    first = batch("batch_1", "a", "b")
    await ledger.add_payment(first)
    published = replace(first, state=MoneroPaymentState.PUBLISHED, relayed_at=5)
    await ledger.put_payment(published)
    with pytest.raises(StoreConflict):
        await ledger.add_payment(second)
    await ledger.put_payment(replace(published, state=MoneroPaymentState.FAILED))
    with pytest.raises(StoreConflict):
        await ledger.add_payment(second)


async def test_a_transfer_that_was_paid_alone_joins_no_batch(ledger: MoneroLedger) -> None:
    alone = payment("a", "i1")
    await ledger.add_payment(alone)
    await ledger.put_payment(replace(alone, state=MoneroPaymentState.PUBLISHED, relayed_at=5))
    with pytest.raises(StoreConflict):
        await ledger.add_payment(batch("batch_1", "a", "b"))


async def test_an_address_is_paid_once_in_a_payment(ledger: MoneroLedger) -> None:
    shares = (Payee("a", "4x", XMR), Payee("b", "4x", XMR))
    with pytest.raises(StoreConflict):
        await ledger.add_payment(replace(payment("batch_1", "i1"), batch=shares))


async def test_a_published_payment_of_no_order_is_found(ledger: MoneroLedger) -> None:
    for made in (payment("a", "i1"), batch("batch_1", "b", "c")):
        await ledger.add_payment(made)
        assert made not in await ledger.without_order()
        out = replace(made, state=MoneroPaymentState.PUBLISHED, relayed_at=5)
        await ledger.put_payment(out)
        assert out in await ledger.without_order()


async def test_payment_of_a_withdrawal_is_left_to_it(
    ledger: MoneroLedger, database: Tables
) -> None:
    made = payment("wd_0001", "i1")
    await ledger.add_payment(made)
    out = replace(made, state=MoneroPaymentState.PUBLISHED, relayed_at=5)
    await ledger.put_payment(out)
    assert await ledger.without_order() == [out]
    item = Withdrawal("wd_0001", "monero", XMR_ASSET, made.address, made.units, 1, 1, 1)
    await WithdrawalStore(database).add(item, None)
    assert await ledger.without_order() == []


async def test_settled_payments_are_found_by_height_or_without_one(
    ledger: MoneroLedger,
) -> None:
    for name, height in (("a", 5), ("b", 9)):
        item = payment(name, f"image-{name}")
        await ledger.add_payment(item)
        done = replace(item, state=MoneroPaymentState.SETTLED, relayed_at=5, height=height)
        await ledger.put_payment(done)
    assert [item.payment_id for item in await ledger.settled_above(5)] == ["b"]
    assert [item.payment_id for item in await ledger.settled_above(0)] == ["a", "b"]
    (last,) = await ledger.settled_above(5)
    await ledger.put_payment(replace(last, height=None))
    assert [item.payment_id for item in await ledger.settled_above(100)] == ["b"]
