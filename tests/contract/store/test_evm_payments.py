"""The records of EVM payments, sweeps and openings, on each backend."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain.authorizations import SignedAuthorization
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import DepositState
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.usdc import Authorization
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.gas import Opening, OpeningLedger
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    BlockPoint,
    EvmDeposit,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    GasUse,
    Inclusion,
    Sweep,
    SweepMethod,
    SweepState,
    UnsweptAddress,
)
from rpcsvc.store.authorizations import AuthorizationKey, AuthorizationRecord, AuthorizationStore
from rpcsvc.store.changes import Change, HistoryEntry, StatusView
from rpcsvc.store.database import StoreConflict, Tables
from rpcsvc.store.orders import OrderStore
from tests.rows import statement
from tests.unit.evm_chain import HOT, OURS, USER, digest
from tests.unit.orders import NOW, terms

NET = "arbitrum"
FIRST = Attempt(digest("tx-1"), "aa", 2**62, 5, 1000)
RAISED = Attempt(digest("tx-2"), "bb", 2**62 + 1, 6, 2000)
SWEEP = Sweep(
    NET, 1, 1, OURS[0].address, SweepMethod.RECEIVE, 5, digest("nonce"), "sweep-1",
    SweepState.SIGNED, 0,
)  # fmt: skip


@pytest.fixture
async def ledger(database: Tables) -> EvmPaymentLedger:
    deposits = EvmDepositLedger(database)
    await deposits.adopt_wallet(HOT)
    await deposits.add_addresses(OURS)
    made = EvmDeposit(NET, digest("a"), 0, 1, OURS[0].address, 5, USER, 1000, 7, digest("block"))
    await deposits.put_deposits([replace(made, acknowledged=DepositState.CONFIRMED)])
    return EvmPaymentLedger(database)


def payment(
    name: str = "t1", nonce: int = 0, purpose: EvmPurpose = EvmPurpose.TRANSFER, **changes: Any
) -> EvmPayment:
    order = EvmPaymentOrder(name, purpose, USER, 7, "0xToken", b"\x00\xff", 60_000)
    first = replace(FIRST, txid=digest(f"{name}-1"))
    return replace(EvmPayment(NET, HOT, nonce, order, (first,), 1000), **changes)


def mined(item: EvmPayment, number: int = 9) -> EvmPayment:
    where = Inclusion(
        item.attempts[0].txid, BlockPoint(number, digest("b")), 50_000, 2**62, 1, 2, 7
    )
    return replace(item, state=EvmPaymentState.SETTLED, published_at=1500, inclusion=where)


async def test_a_payment_is_read_as_it_was_written(ledger: EvmPaymentLedger) -> None:
    assert await ledger.next_nonce(NET, HOT) == 0
    await ledger.add_payment(payment())
    assert await ledger.payment("t1") == payment()
    assert await ledger.has_transaction(payment().latest.txid)
    assert await ledger.next_nonce(NET, HOT) == 1
    out = replace(payment(), state=EvmPaymentState.PUBLISHED, published_at=1500)
    await ledger.put_payment(out)
    await ledger.add_attempt(out, RAISED)
    raised = replace(out, attempts=(*out.attempts, RAISED))
    assert await ledger.payments_in(NET, EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED) == [
        raised
    ]
    assert await ledger.mined_to(NET) == 0
    settled = mined(raised)
    await ledger.put_payment(settled)
    assert await ledger.mined_to(NET) == 9
    assert await ledger.ended_above(NET, 8) == [settled]
    assert await ledger.ended_above(NET, 9) == []


async def test_a_nonce_is_used_once_and_fees_only_rise(ledger: EvmPaymentLedger) -> None:
    await ledger.add_payment(payment())
    for wrong in (payment("t2"), payment("t1", 1)):
        with pytest.raises(StoreConflict):
            await ledger.add_payment(wrong)
    assert await ledger.payment("t2") is None
    with pytest.raises(StoreConflict, match="raises the fees"):
        await ledger.add_attempt(payment(), replace(RAISED, tip=FIRST.tip))
    settled = mined(payment())
    await ledger.put_payment(settled)
    # A reorganisation may have taken it: its nonce is needed by those after it.
    await ledger.add_attempt(settled, RAISED)
    with pytest.raises(StoreConflict, match="keeps what it is"):
        await ledger.put_payment(replace(payment(), state=EvmPaymentState.FAILED))
    assert await ledger.payment("t1") == replace(settled, attempts=(*settled.attempts, RAISED))


async def test_failed_payment_gets_no_attempt(ledger: EvmPaymentLedger) -> None:
    failed = replace(mined(payment()), state=EvmPaymentState.FAILED)
    await ledger.add_payment(payment())
    await ledger.put_payment(failed)
    with pytest.raises(StoreConflict, match="raises the fees"):
        await ledger.add_attempt(failed, RAISED)


async def test_failed_sweep_is_raised_to_spend_its_nonce_again(ledger: EvmPaymentLedger) -> None:
    signed = payment("sweep-1", purpose=EvmPurpose.SWEEP)
    failed = replace(mined(signed), state=EvmPaymentState.FAILED)
    await ledger.add_payment(signed, SWEEP)
    await ledger.put_payment(failed)
    gone = replace(failed, inclusion=None)
    await ledger.put_payment(gone)
    await ledger.add_attempt(gone, RAISED)
    assert await ledger.ended_above(NET, 9) == [replace(gone, attempts=(*gone.attempts, RAISED))]
    displaced = replace(gone, conflict=BlockPoint(9, digest("c")))
    await ledger.put_payment(displaced)
    assert await ledger.ended_above(NET, 9) == []


async def test_a_sweep_takes_what_an_address_holds(ledger: EvmPaymentLedger) -> None:
    assert await ledger.unswept(NET, 1) == [UnsweptAddress(1, OURS[0].address, 5, 1)]
    signed = payment("sweep-1", purpose=EvmPurpose.SWEEP)
    await ledger.add_payment(signed, SWEEP)
    assert await ledger.sweeps_under_way(NET) == [SWEEP]
    assert await ledger.unswept(NET, 1) == []
    with pytest.raises(StoreConflict):
        await ledger.add_sweep(replace(SWEEP, serial=2, payment_id=None))
    await ledger.put_payment(mined(signed))
    done = replace(SWEEP, state=SweepState.DONE, taken=5)
    await ledger.put_sweep(done)
    assert await ledger.unswept_of(NET, 1) == 0
    # The payment is reorged out and fails: the USDC counts as unswept again.
    await ledger.put_payment(replace(signed, state=EvmPaymentState.FAILED, published_at=1500))
    assert await ledger.unswept_of(NET, 1) == 5
    void = replace(SWEEP, state=SweepState.VOID)
    assert await ledger.void_sweeps(NET, 1) == [void]
    with pytest.raises(StoreConflict, match="how it ended"):
        await ledger.put_sweep(SWEEP)


async def test_gas_of_authorizations_is_their_cost_or_most(ledger: EvmPaymentLedger) -> None:
    kind, most = EvmPurpose.AUTHORIZATION, 60_000 * FIRST.max_fee
    await ledger.add_payment(payment("a1", 0, kind))
    await ledger.add_payment(payment("a2", 1, kind, prepared_at=2000))
    await ledger.add_payment(payment("t1", 2))
    waiting = GasUse(most, False, EvmPaymentState.PREPARED)
    assert await ledger.authorization_gas(NET, 1000) == [waiting, waiting]
    await ledger.put_payment(mined(payment("a1", 0, kind)))
    cost = GasUse(50_000 * 2**62, False, EvmPaymentState.SETTLED, 7)
    assert await ledger.authorization_gas(NET, 1000) == [cost, waiting]
    assert await ledger.authorization_gas(NET, 2000) == [waiting]
    assert await ledger.authorization_gas("base", 0) == []


async def test_gas_is_paid_where_its_order_bears_it(
    database: Tables, ledger: EvmPaymentLedger
) -> None:
    """An address belongs to one order: the recipient of an authorization identifies it."""
    orders = OrderStore(database, lambda: "key")
    made = replace(terms(Direction.USDC_TO_XMR), deposit_address=USER)
    order = open_order(made)
    entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
    view = StatusView(b"send a deposit", NOW + 1_000)
    await orders.commit(Change(order=order, view=view, is_new=True, history=entry))
    given = Authorization(HOT, USER, 7, 0, 2**33, b"\1" * 32)
    key = AuthorizationKey(NET, "0xToken", HOT, given.nonce.hex())
    signed = SignedAuthorization(given, b"\7" * 65)
    record = AuthorizationRecord(key, made.order_id, signed, NOW, is_gas_paid=True)
    await ledger.add_payment(payment("a1", 0, EvmPurpose.AUTHORIZATION))
    assert [use.is_paid for use in await ledger.authorization_gas(NET, 0)] == [False]
    await AuthorizationStore(database).add(record, order.version)
    assert [use.is_paid for use in await ledger.authorization_gas(NET, 0)] == [True]


@pytest.mark.parametrize("table", ["evm_payments", "evm_attempts", "evm_sweeps"])
async def test_what_was_signed_is_never_deleted(
    ledger: EvmPaymentLedger, database: Tables, table: str
) -> None:
    await ledger.add_payment(payment("sweep-1", purpose=EvmPurpose.SWEEP), SWEEP)
    with pytest.raises(StoreConflict, match="stays"):
        await database.write([statement(f"DELETE FROM {table}")])
    assert await ledger.payment("sweep-1") is not None


async def test_an_opening_changes_with_its_block_alone(database: Tables) -> None:
    ledger = OpeningLedger(database)
    assert await ledger.opening(NET, HOT) is None
    first = Opening(7, digest("block"), 3, 10**30)
    await ledger.record(NET, HOT, first)
    assert await ledger.opening(NET, HOT) == first
    with pytest.raises(StoreConflict, match="with its block alone"):
        await ledger.record(NET, HOT, replace(first, wei=1))
    again = replace(first, block_hash=digest("other"), wei=1)
    await ledger.record(NET, HOT, again)
    assert await ledger.opening(NET, HOT) == again
    for wrong in ("-1", "1e3", "", "9" * 79):
        with pytest.raises(StoreConflict):
            await database.write(
                [statement("UPDATE evm_openings SET wei = ?, block_hash = 'x'", (wrong,))]
            )
