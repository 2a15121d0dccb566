"""Payments on EVM networks without a node: fees, and the database's constraints."""

from __future__ import annotations

import sqlite3
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.money import LARGEST_INTEGER
from rpcsvc.domain.order import DepositKey
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import Admission
from rpcsvc.errors import Unavailable
from rpcsvc.health import faults
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.evm.gas import (
    GasPrice,
    first_price,
    is_too_low,
    raised_price,
    with_l1_margin,
    with_margin,
)
from rpcsvc.settlement.onchain.evm.node import Conditions, EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, FeeData, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmPayments
from rpcsvc.settlement.onchain.evm.records import (
    BlockPoint,
    EvmPayment,
    EvmPaymentState,
    EvmPurpose,
    Inclusion,
    Sweep,
    SweepMethod,
    SweepState,
    UnsweptAddress,
)
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase
from rpcsvc.store.database import Commit, StoreConflict
from rpcsvc.store.orders import OrderStore
from tests.chain_options import evm_network
from tests.rows import statement
from tests.sandbox import ManualClock
from tests.unit.adapters import transfer
from tests.unit.evm_payments import GWEI, HOT, NET, attempt, payment
from tests.unit.orders import NOW
from tests.unit.reserving import Keeper, numbered


@pytest.fixture
def ledger(database: SqliteDatabase) -> EvmPaymentLedger:
    return EvmPaymentLedger(database)


def published(made: EvmPayment) -> EvmPayment:
    return replace(made, state=EvmPaymentState.PUBLISHED, published_at=2000)


def mined(made: EvmPayment, number: int = 9) -> Inclusion:
    return Inclusion(made.latest.txid, BlockPoint(number, f"0x{number}"), 45_000, 2 * GWEI, 0, 3)


def sweep(index: int, serial: int, payment_id: str | None = None, **more: Any) -> Sweep:
    given: dict[str, Any] = {"units": 5, "authorization": "aa", **more}
    return Sweep(
        NET, index, serial, f"0x{index}", given.pop("method", SweepMethod.RECEIVE),
        given.pop("units"), given.pop("authorization"), payment_id, **given,
    )  # fmt: skip


async def deposit(
    database: SqliteDatabase,
    index: int,
    units: int,
    state: str | None = "confirmed",
    network: str = NET,
) -> None:
    place = "(SELECT COUNT(*) FROM evm_deposits)"
    await database.write(
        [
            statement(
                "INSERT OR IGNORE INTO evm_addresses (address_index, address) VALUES (?, ?)",
                (index, f"0x{index}"),
                first=True,
            ),
            statement(
                "INSERT INTO evm_deposits (network, txid, position, address_index, units, sender,"
                " first_seen_at, block_number, block_hash, acknowledged, watched)"
                f" VALUES (?, '0xd', {place}, ?, ?, '0x1', 1000 - ?, 1, '0x', ?, 0)",
                (network, index, units, index, state),
            ),
        ]
    )


# --- fees --------------------------------------------------------------------------------------


def test_a_first_price_leaves_room_for_the_base_fee_to_double() -> None:
    price = first_price(FeeData(10 * GWEI, GWEI), 50_000, 10**18)
    assert price == GasPrice(21 * GWEI, GWEI)


def test_margin_is_dropped_before_the_bound() -> None:
    moment, gas = FeeData(10 * GWEI, GWEI), 50_000
    assert first_price(moment, gas, 15 * GWEI * gas) == GasPrice(15 * GWEI, GWEI)
    assert first_price(moment, gas, 11 * GWEI * gas) == GasPrice(11 * GWEI, GWEI)
    assert first_price(moment, gas, 11 * GWEI * gas - 1) is None


def test_a_network_without_fees_is_offered_one_wei() -> None:
    assert first_price(FeeData(0, 0), 50_000, 10**18) == GasPrice(1, 0)


@pytest.mark.parametrize("old", [GasPrice(1, 0), GasPrice(7, 1), GasPrice(3 * GWEI, GWEI)])
def test_replacement_raises_both_fees_by_the_percent_rounded_up(old: GasPrice) -> None:
    new = raised_price(old, FeeData(0, 0), 25, 50_000, 10**18)
    assert new is not None
    for before, after in ((old.max_fee, new.max_fee), (old.tip, new.tip)):
        assert after > before
        assert after * 100 >= before * 125


def test_a_replacement_offers_at_least_the_moment() -> None:
    moment = FeeData(50 * GWEI, 3 * GWEI)
    new = raised_price(GasPrice(5 * GWEI, GWEI), moment, 25, 50_000, 10**18)
    assert new == GasPrice(103 * GWEI, 3 * GWEI)


def test_a_replacement_beyond_the_bound_is_none() -> None:
    gas, old = 50_000, GasPrice(8 * GWEI, GWEI)
    assert raised_price(old, FeeData(GWEI, 0), 25, gas, 10 * GWEI * gas) is not None
    assert raised_price(old, FeeData(20 * GWEI, 0), 25, gas, 10 * GWEI * gas) is None


def test_last_replacement_offers_the_cap_while_it_is_a_rise() -> None:
    gas, old, moment = 50_000, GasPrice(8 * GWEI, GWEI), FeeData(GWEI, 0)
    last = raised_price(old, moment, 25, gas, 10 * GWEI * gas - gas)
    assert last == GasPrice(10 * GWEI - 1, GWEI * 11 // 10)
    tenth = 8 * GWEI * 11 // 10
    assert raised_price(old, moment, 25, gas, tenth * gas) == GasPrice(tenth, GWEI * 11 // 10)
    assert raised_price(old, moment, 25, gas, tenth * gas - 1) is None
    assert raised_price(old, moment, 25, gas, -1) is None


def test_a_price_fits_the_database_whatever_the_bound() -> None:
    price = first_price(FeeData(LARGEST_INTEGER // 2 + 1, 0), 21_000, 2**200)
    assert price is not None
    assert price.max_fee == LARGEST_INTEGER


def test_price_is_too_low_when_the_next_block_would_refuse_it() -> None:
    price = GasPrice(10 * GWEI, GWEI)
    assert not is_too_low(price, FeeData(9 * GWEI, GWEI))
    assert not is_too_low(price, FeeData(9 * GWEI, 5 * GWEI))
    assert is_too_low(price, FeeData(9 * GWEI + 1, GWEI))


def test_a_gas_limit_has_a_quarter_to_spare() -> None:
    assert with_margin(40_001) == 50_001


def test_l1_margin_covers_a_doubling_and_a_quarter_more() -> None:
    assert with_l1_margin(1000) == 2500
    assert with_l1_margin(0) == 0


# --- earlier payments ----------------------------------------------------------------------------


class Node(EvmClient):
    """A node that may have the transaction of a payment, and has mined none."""

    def __init__(self, *, has_earlier: bool) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.has_earlier = has_earlier

    async def block(self, _at: Any = Tag.LATEST) -> Block:
        return Block(9, "0x9", "0x8", 0, None)

    async def receipt(self, _txid: str) -> None:
        return None

    async def transaction(self, _txid: str) -> Any:
        return object() if self.has_earlier else None

    async def nonce(self, _address: str, _at: Any = Tag.PENDING) -> int:
        return 0


@pytest.mark.parametrize("has_earlier", [False, True])
async def test_payout_is_signed_behind_none_that_is_not_out(
    ledger: EvmPaymentLedger, monkeypatch: pytest.MonkeyPatch, *, has_earlier: bool
) -> None:
    """An earlier process signed one: no node may ever get it, and nonces behind it would wait."""
    connection = EvmConnection(Node(has_earlier=has_earlier), evm_network(NET, 42161, "0xToken"))
    connection._is_checked = True
    nothing: Any = None
    signer: Any = SimpleNamespace(address=HOT)
    payments = EvmPayments(connection, signer, ledger, ManualClock(), nothing, nothing)
    await ledger.add_payment(payment("tr_1", 0))

    async def sign(_payments: EvmPayments, *_: object) -> list[EvmPayment]:
        return [payment("tr_2", 1)]

    async def record(_made: object, commit: Commit | None) -> None:
        assert commit is not None
        await commit(())

    monkeypatch.setattr(EvmPayments, "_sign_together", sign)
    second = replace(transfer(NET), transfer_id="tr_2")
    with nullcontext() if has_earlier else pytest.raises(Unavailable, match="not on the network"):
        await payments.prepare(second, (), record, {})
    assert (await ledger.payment("tr_2") is not None) is has_earlier


# --- payments in the database -------------------------------------------------------------------


async def test_a_payment_is_read_as_it_was_written(ledger: EvmPaymentLedger) -> None:
    first = payment("tr_1", 0)
    await ledger.add_payment(first)
    assert await ledger.payment("tr_1") == first
    changed = replace(published(first), inclusion=mined(first))
    await ledger.put_payment(changed)
    assert await ledger.payment("tr_1") == changed
    gone = replace(changed, inclusion=None, conflict=BlockPoint(4, "0x4"))
    await ledger.put_payment(gone)
    assert await ledger.payment("tr_1") == gone
    assert await ledger.payment("tr_2") is None


async def test_a_nonce_is_given_once_for_each_network(ledger: EvmPaymentLedger) -> None:
    await ledger.add_payment(payment("tr_1", 0))
    with pytest.raises(StoreConflict):
        await ledger.add_payment(payment("tr_2", 0))
    with pytest.raises(StoreConflict):
        await ledger.add_payment(payment("tr_1", 1))
    await ledger.add_payment(payment("tr_3", 0, network="base"))
    assert await ledger.next_nonce(NET, HOT) == await ledger.next_nonce("base", HOT) == 1
    assert await ledger.next_nonce("optimism", HOT) == 0
    assert await ledger.payment("tr_2") is None


async def test_a_failed_payment_keeps_its_nonce(ledger: EvmPaymentLedger) -> None:
    failed = replace(published(payment("tr_1", 0)), state=EvmPaymentState.FAILED)
    await ledger.add_payment(payment("tr_1", 0))
    await ledger.put_payment(failed)
    with pytest.raises(StoreConflict):
        await ledger.add_payment(payment("tr_2", 0))
    assert await ledger.next_nonce(NET, HOT) == 1


async def test_attempts_go_up_and_stay(ledger: EvmPaymentLedger) -> None:
    first = payment("tr_1", 0)
    await ledger.add_payment(first)
    with pytest.raises(StoreConflict):
        await ledger.add_attempt(first, attempt("same-fees", 5))
    await ledger.add_attempt(first, attempt("more", 7))
    found = await ledger.payment("tr_1")
    assert found is not None
    assert [item.txid for item in found.attempts] == [f"{NET}-tr_1", "more"]
    assert found.most_fee == 65_000 * 7 * GWEI
    with pytest.raises(StoreConflict):
        await ledger.add_attempt(first, attempt("second-again", 9))
    await ledger.put_payment(replace(published(found), state=EvmPaymentState.FAILED))
    with pytest.raises(StoreConflict):
        await ledger.add_attempt(found, attempt("after-the-end", 9))


async def test_settled_payment_may_be_raised_again(ledger: EvmPaymentLedger) -> None:
    """A reorganisation took it, and the nonces after it wait for its own."""
    first = payment("tr_1", 0)
    await ledger.add_payment(first)
    await ledger.put_payment(replace(published(first), state=EvmPaymentState.SETTLED))
    await ledger.add_attempt(first, attempt("after-a-reorganisation", 9))
    found = await ledger.payment("tr_1")
    assert found is not None
    assert (len(found.attempts), found.state) == (2, EvmPaymentState.SETTLED)


@pytest.mark.parametrize("over", [EvmPaymentState.FAILED, EvmPaymentState.SETTLED])
async def test_an_end_is_final(ledger: EvmPaymentLedger, over: EvmPaymentState) -> None:
    first = payment("tr_1", 0)
    await ledger.add_payment(first)
    await ledger.put_payment(replace(published(first), state=over))
    for state in set(EvmPaymentState) - {over}:
        published_at = None if state is EvmPaymentState.PREPARED else 2000
        with pytest.raises(StoreConflict):
            await ledger.put_payment(replace(first, state=state, published_at=published_at))


@pytest.mark.parametrize(
    "change",
    [
        "nonce = 5", "recipient = '0xThief'", "units = 8", "contract = '0xThief'", "data = x''",
        "gas = 1", "sender = '0xThief'", "network = 'base'", "purpose = 'sweep'",
        "payment_id = 'tr_9'", "prepared_at = 0",
    ],
)  # fmt: skip
async def test_what_is_signed_never_changes(
    ledger: EvmPaymentLedger, tmp_path: Path, change: str
) -> None:
    await ledger.add_payment(payment("tr_1", 0))
    _refused(tmp_path, f"UPDATE evm_payments SET {change}", "keeps what it is")


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DELETE FROM evm_payments", "a prepared payment stays"),
        ("UPDATE evm_attempts SET raw = x'00'", "never changes"),
        ("DELETE FROM evm_attempts", "what is signed stays"),
        ("UPDATE evm_sweeps SET units = 9", "a sweep keeps what it is"),
        ("DELETE FROM evm_sweeps", "a sweep stays"),
    ],
)
async def test_nothing_is_deleted_or_signed_over(
    ledger: EvmPaymentLedger, tmp_path: Path, sql: str, said: str
) -> None:
    await ledger.add_payment(payment("s", 0, purpose=EvmPurpose.SWEEP), sweep(2, 1, "s"))
    _refused(tmp_path, sql, said)


def _refused(directory: Path, sql: str, said: str) -> None:
    connection = sqlite3.connect(directory / DATABASE_NAME)
    with pytest.raises(sqlite3.IntegrityError, match=said):
        connection.execute(sql)
    connection.close()


async def test_settled_payments_are_found_by_block_or_without_one(
    ledger: EvmPaymentLedger,
) -> None:
    for nonce, number in enumerate((5, 9, None)):
        made = payment(f"tr_{nonce}", nonce)
        await ledger.add_payment(made)
        where = None if number is None else mined(made, number)
        over = replace(published(made), state=EvmPaymentState.SETTLED, inclusion=where)
        await ledger.put_payment(over)
    assert [item.nonce for item in await ledger.ended_above(NET, 5)] == [1, 2]
    assert [item.nonce for item in await ledger.ended_above(NET, 4)] == [0, 1, 2]
    assert await ledger.ended_above("base", 0) == []


async def test_payments_are_listed_by_nonce(ledger: EvmPaymentLedger) -> None:
    for nonce in (2, 0, 1):
        await ledger.add_payment(payment(f"tr_{nonce}", nonce))
    found = await ledger.payments_in(NET, EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED)
    assert [item.nonce for item in found] == [0, 1, 2]


# --- sweeps in the database ---------------------------------------------------------------------


async def test_unswept_is_what_was_confirmed_less_what_was_taken(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    await deposit(database, 2, 30)
    await deposit(database, 2, 12)
    await deposit(database, 2, 100, "seen")
    await deposit(database, 3, 9)
    await deposit(database, 3, 50, "confirmed", "base")
    assert await ledger.unswept(NET, 10) == [UnsweptAddress(2, "0x2", 42, 1)]
    assert await ledger.unswept(NET, 1) == [
        UnsweptAddress(2, "0x2", 42, 1),
        UnsweptAddress(3, "0x3", 9, 1),
    ]
    await ledger.add_payment(payment("s", 0, purpose=EvmPurpose.SWEEP), sweep(2, 1, "s", units=30))
    assert await ledger.unswept(NET, 10) == []
    assert await ledger.unswept_of(NET, 2) == 42
    under_way = await ledger.sweeps_under_way(NET)
    assert under_way == [sweep(2, 1, "s", units=30)]
    await ledger.put_sweep(replace(under_way[0], state=SweepState.DONE, taken=30))
    assert await ledger.unswept(NET, 10) == [UnsweptAddress(2, "0x2", 12, 2)]
    assert await ledger.unswept_of(NET, 2) == 12
    assert await ledger.unswept_of("base", 3) == 50


async def test_coming_deposits_are_swept_later_or_not_confirmed_yet(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    """Neither dust, nor a sweep that may be mined, nor a deposit that no order has on record."""
    await deposit(database, 2, 30)
    await deposit(database, 3, 9)
    await deposit(database, 4, 12, "seen")
    await deposit(database, 5, 100, None)
    await deposit(database, 6, 50, "confirmed", "base")
    watched = "UPDATE evm_deposits SET watched = 1 WHERE acknowledged IS NOT 'confirmed'"
    await database.write([statement(watched, ())])
    assert await ledger.coming(NET, 10) == 42
    await ledger.add_payment(payment("s", 0, purpose=EvmPurpose.SWEEP), sweep(2, 1, "s", units=30))
    assert await ledger.coming(NET, 10) == 12


async def test_deposit_that_awaits_finality_is_coming(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    """Its order has it, and the scanner shows it again until it is confirmed."""
    keeper = Keeper(OrderStore(database, lambda: ""))
    await keeper.open(numbered(1, Direction.USDC_TO_XMR), Admission("a"))
    await deposit(database, 1, 30, None)
    await database.write([statement("UPDATE evm_deposits SET watched = 1", ())])
    assert await ledger.coming(NET, 10) == 0
    seen = ev.DepositSeen(DepositKey(NET, "0xd", 0), 30, "sender", NOW)
    await keeper.apply("ord_1", seen, NOW)
    assert await ledger.coming(NET, 10) == 30


async def test_unswept_follows_what_becomes_of_a_deposit(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    await deposit(database, 2, 30, None)
    for state, units in (
        ("seen", 0), ("confirmed", 30), ("confirmed", 30), ("removed", 0), ("confirmed", 30),
        ("seen", 0),
    ):  # fmt: skip
        change = "UPDATE evm_deposits SET acknowledged = ? WHERE address_index = 2"
        await database.write([statement(change, (state,))])
        assert await ledger.unswept_of(NET, 2) == units
    assert await ledger.unswept(NET, 1) == []


async def test_what_was_swept_and_reorganised_away_is_not_swept_again(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    await deposit(database, 2, 30)
    await ledger.add_sweep(replace(sweep(2, 1), state=SweepState.DONE, taken=30))
    change = "UPDATE evm_deposits SET acknowledged = 'removed' WHERE address_index = 2"
    await database.write([statement(change, ())])
    assert await ledger.unswept_of(NET, 2) == -30
    await deposit(database, 2, 31)
    assert await ledger.unswept(NET, 1) == [UnsweptAddress(2, "0x2", 1, 2)]


async def test_an_address_has_one_sweep_under_way(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    await deposit(database, 2, 9)
    await ledger.add_payment(payment("a", 0, purpose=EvmPurpose.SWEEP), sweep(2, 1, "a"))
    with pytest.raises(StoreConflict):
        await ledger.add_payment(payment("b", 1, purpose=EvmPurpose.SWEEP), sweep(2, 2, "b"))
    assert await ledger.payment("b") is None
    await ledger.put_sweep(replace(sweep(2, 1, "a"), state=SweepState.VOID))
    with pytest.raises(StoreConflict):
        await ledger.put_sweep(sweep(2, 1, "a"))
    await ledger.add_payment(payment("b", 1, purpose=EvmPurpose.SWEEP), sweep(2, 2, "b"))
    assert [item.serial for item in await ledger.sweeps_under_way(NET)] == [2]


async def settled(ledger: EvmPaymentLedger, made: EvmPayment) -> EvmPayment:
    done = replace(made, state=EvmPaymentState.SETTLED, published_at=1)
    await ledger.put_payment(done)
    return done


async def test_a_sweep_is_void_once_its_settled_payment_has_failed(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    await deposit(database, 2, 9)
    made = payment("a", 0, purpose=EvmPurpose.SWEEP)
    await ledger.add_payment(made, done := sweep(2, 1, "a", units=9))
    await ledger.put_sweep(replace(done, state=SweepState.DONE, taken=9))
    with pytest.raises(StoreConflict):
        await ledger.put_sweep(replace(done, state=SweepState.VOID))
    paid = await settled(ledger, made)
    assert await ledger.unswept(NET, 1) == []
    await ledger.put_payment(replace(paid, state=EvmPaymentState.FAILED))
    assert await ledger.unswept(NET, 1) == [UnsweptAddress(2, "0x2", 9, 2)]
    (void,) = await ledger.void_sweeps(NET, 2)
    assert (void.state, void.taken) == (SweepState.VOID, 0)
    await ledger.put_sweep(replace(void, state=SweepState.DONE, taken=9))
    assert (await ledger.unswept(NET, 1), await ledger.void_sweeps(NET, 2)) == ([], [])


async def test_a_settled_payment_of_an_order_never_fails(ledger: EvmPaymentLedger) -> None:
    await ledger.add_payment(payment("a", 0))
    paid = await settled(ledger, payment("a", 0))
    for state in (EvmPaymentState.FAILED, EvmPaymentState.PUBLISHED):
        with pytest.raises(StoreConflict):
            await ledger.put_payment(replace(paid, state=state))


async def test_a_sweep_found_done_has_no_payment(
    database: SqliteDatabase, ledger: EvmPaymentLedger
) -> None:
    await deposit(database, 2, 9)
    with pytest.raises(StoreConflict):
        await ledger.add_sweep(sweep(2, 1))
    await ledger.add_sweep(replace(sweep(2, 1), state=SweepState.DONE, taken=4))
    assert await ledger.sweeps_under_way(NET) == []
    assert await ledger.unswept(NET, 1) == [UnsweptAddress(2, "0x2", 5, 2)]


# --- conditions --------------------------------------------------------------------------------


def test_a_condition_holds_until_it_is_dropped() -> None:
    conditions = Conditions(NET)
    conditions.set("a", "first")
    conditions.set("b", "second")
    conditions.set("a", "first, changed")
    assert conditions.present() == faults("first, changed", "second")
    conditions.set("a", None)
    conditions.set("c", None)
    assert conditions.present() == faults("second")
