"""Signed authorizations, on each backend."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rpcsvc.domain.authorizations import SignedAuthorization
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Deposit, DepositKey, DepositState
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.usdc import Authorization
from rpcsvc.store.authorizations import (
    AuthorizationKey,
    AuthorizationRecord,
    AuthorizationState,
    AuthorizationStore,
    ClientDay,
)
from rpcsvc.store.changes import Change, HistoryEntry, StatusView
from rpcsvc.store.database import StaleWrite, StoreConflict, Tables
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.orders import OrderStore
from tests.rows import statement
from tests.unit.orders import NOW, terms

CONFIRMED, REMOVED = DepositState.CONFIRMED, DepositState.REMOVED
PAYER, TO = "0x" + "a1" * 20, "0x" + "0b" * 20


def record(nonce: int = 1, order_id: str = "ord_1", payer: str = PAYER) -> AuthorizationRecord:
    key = AuthorizationKey("arbitrum", "0xToken", payer, f"{nonce:064x}")
    given = Authorization(payer, TO, 150_000_000, 0, 2**33, bytes.fromhex(key.nonce))
    return AuthorizationRecord(key, order_id, SignedAuthorization(given, b"\7" * 65), NOW)


@pytest.fixture
async def store(database: Tables) -> AuthorizationStore:
    """A store with two orders."""
    orders = OrderStore(database, lambda: "key")
    for number in (1, 2):
        made = replace(
            terms(Direction.USDC_TO_XMR),
            order_id=f"ord_{number}",
            deposit_address=f"0x{number:040x}",
        )
        order = open_order(made)
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        view = StatusView(b"send a deposit", NOW + 1_000)
        await orders.commit(Change(order=order, view=view, is_new=True, history=entry))
    return AuthorizationStore(database)


async def test_authorization_is_found_as_it_was_recorded(store: AuthorizationStore) -> None:
    await store.add(record(), 1)
    assert await store.find(record().key) == record()
    assert await store.unresolved() == [record()]
    assert await store.unresolved_of("ord_1") == record()
    assert await store.unresolved_of("ord_2") is None
    assert await store.find(record(2).key) is None


@pytest.mark.parametrize(
    ("other", "version"),
    [
        pytest.param(record(2), 1, id="a second one of the order"),
        pytest.param(record(1, "ord_2"), 1, id="the nonce for another order"),
        pytest.param(record(2, "ord_2"), 2, id="an order that has changed"),
        pytest.param(record(2, "ord_3"), 1, id="no order"),
    ],
)
async def test_authorization_that_may_not_be_recorded_is_stale(
    store: AuthorizationStore, other: AuthorizationRecord, version: int
) -> None:
    await store.add(record(), 1)
    with pytest.raises(StaleWrite):
        await store.add(other, version)
    assert await store.unresolved() == [record()]


@pytest.mark.parametrize("end", [AuthorizationState.FAILED, AuthorizationState.CREDITED])
async def test_stored_status_is_passed_over_while_unresolved(
    store: AuthorizationStore, database: Tables, end: AuthorizationState
) -> None:
    orders = OrderStore(database, lambda: "key")

    async def served() -> list[bool]:
        found = [await orders.status_view(f"ord_{number}", NOW) for number in (1, 2)]
        return [view is not None for view in found]

    assert await served() == [True, True]
    await store.add(record(), 1)
    assert await served() == [False, True]
    sent = replace(record(), state=AuthorizationState.SENT, txid="0xt")
    await store.resolve(sent)
    assert await served() == [False, True]
    await store.resolve(replace(sent, state=end))
    assert await served() == [True, True]


async def test_one_of_many_concurrent_authorizations_is_recorded(store: AuthorizationStore) -> None:
    adding = [store.add(record(n, payer=f"0x{n:040x}"), 1) for n in range(1, 9)]
    added = await asyncio.gather(*adding, return_exceptions=True)
    assert [each for each in added if not isinstance(each, StaleWrite)] == [None]
    assert len(await store.unresolved()) == 1


async def test_failed_authorization_frees_its_order_permanently(store: AuthorizationStore) -> None:
    await store.add(record(), 1)
    failed = replace(record(), state=AuthorizationState.FAILED, reason="reverted")
    await store.resolve(failed)
    assert await store.unresolved() == []
    assert await store.find(record().key) == failed
    with pytest.raises(StaleWrite):
        await store.resolve(replace(failed, state=AuthorizationState.SENT, txid="t"))
    with pytest.raises(StaleWrite):
        await store.add(record(), 1)
    await store.add(record(2), 1)


async def test_sent_authorization_stays_unresolved_until_credited(
    store: AuthorizationStore, database: Tables
) -> None:
    books = OperatorBooks(database)
    assert await books.unresolved_authorizations() == 0
    await store.add(record(), 1)
    assert await books.unresolved_authorizations() == 1
    sent = replace(record(), state=AuthorizationState.SENT, txid="t")
    await store.resolve(sent)
    assert await store.unresolved_of("ord_1") == sent
    assert await books.unresolved_authorizations() == 1
    await store.resolve(replace(sent, state=AuthorizationState.CREDITED))
    assert await store.unresolved_of("ord_1") is None
    assert await books.unresolved_authorizations() == 0


async def deposited(database: Tables, txid: str, *states: DepositState) -> None:
    """Commit deposits of ord_1 that one transaction made, in these states."""
    orders = OrderStore(database, lambda: "key")
    before = await orders.order("ord_1")
    assert before is not None
    kept = [each for each in before.deposits if each.key.txid != txid]
    made = [
        Deposit(DepositKey("arbitrum", txid, position), 150_000_000, PAYER, NOW, state)
        for position, state in enumerate(states)
    ]
    order = replace(before, version=before.version + 1, deposits=(*kept, *made))
    entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
    await orders.commit(Change(order=order, history=entry))


async def test_authorization_without_its_deposit_is_sent_again(
    store: AuthorizationStore, database: Tables
) -> None:
    await store.add(record(), 1)
    sent = replace(record(), state=AuthorizationState.SENT, txid="t")
    credited = replace(sent, state=AuthorizationState.CREDITED)
    await store.resolve(credited)
    for states in ([CONFIRMED], [REMOVED, CONFIRMED]):
        await deposited(database, "t", *states)
        assert await store.find(record().key) == credited
    await deposited(database, "t", REMOVED, REMOVED)
    assert await store.unresolved_of("ord_1") == sent
    again = replace(credited, txid="with higher fees")
    await store.resolve(again)
    await deposited(database, again.txid or "", CONFIRMED)
    assert await store.find(record().key) == again


async def test_authorization_stays_credited_beside_another(
    store: AuthorizationStore, database: Tables
) -> None:
    await store.add(record(), 1)
    credited = replace(record(), state=AuthorizationState.CREDITED, txid="t")
    await store.resolve(credited)
    await store.add(record(2), 1)
    await deposited(database, "t", REMOVED)
    assert await store.find(record().key) == credited
    await store.resolve(replace(record(2), state=AuthorizationState.FAILED, reason="reverted"))
    await deposited(database, "other", CONFIRMED)
    assert await store.unresolved() == [replace(credited, state=AuthorizationState.SENT)]


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE funding_authorizations SET units = units + 1",
        "UPDATE funding_authorizations SET order_id = 'ord_2'",
        "UPDATE funding_authorizations SET nonce = 'other'",
        "UPDATE funding_authorizations SET state = 'recorded'",
        "UPDATE funding_authorizations SET state = 'credited', txid = NULL",
        "DELETE FROM funding_authorizations",
    ],
)
async def test_record_that_is_resolved_can_not_be_changed(
    store: AuthorizationStore, database: Tables, sql: str
) -> None:
    await store.add(record(), 1)
    await store.resolve(replace(record(), state=AuthorizationState.CREDITED, txid="t"))
    with pytest.raises(StoreConflict):
        await database.write([statement(sql)])


@pytest.mark.parametrize(("later", "kept"), [(8, 1), (9, 0)])
async def test_authorizations_of_a_client_are_counted_by_day(
    store: AuthorizationStore, later: int, kept: int
) -> None:
    await store.add(record(), 1, ClientDay("address:1", 7, 1))
    assert await store.sent_on("address:1", 7) == 1
    with pytest.raises(StaleWrite):
        await store.add(record(2, "ord_2"), 1, ClientDay("address:1", 7, 1))
    assert await store.find(record(2).key) is None
    await store.add(record(2, "ord_2"), 1, ClientDay("address:1", later, 1))
    assert [await store.sent_on("address:1", day) for day in (7, later)] == [kept, 1]
