"""Orders, keys and effects in the store, on each backend."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer, PriceLateDeposit
from rpcsvc.domain.machine import transition
from rpcsvc.domain.order import DepositKey, OnDeadline
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store import order_rows
from rpcsvc.store.changes import (
    Change,
    HistoryEntry,
    PendingEffect,
    Ticket,
    TicketCharge,
    TicketsTaken,
)
from rpcsvc.store.database import Database, StaleWrite, Statement, StoreConflict, Tables
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.orders import OrderStore
from tests.rows import statement
from tests.unit.orders import NOW, VIEW, created, fresh, response


@pytest.fixture
def store(database: Tables) -> OrderStore:
    return OrderStore(database, lambda: "key")


async def test_an_order_comes_back_as_it_was_committed(store: OrderStore, database: Tables) -> None:
    order = fresh()
    await store.commit(created(order))
    assert await store.order("ord_1") == order
    for event in (
        ev.DepositSeen(DepositKey("monero", "tx", 0), 2**53 + 1, None, NOW),
        ev.DepositConfirmed(DepositKey("monero", "tx", 0)),
    ):
        result = transition(order, event, NOW)
        order = result.order
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        await store.commit(Change(order=order, view=VIEW, history=entry, effects=result.effects))
    assert await store.order("ord_1") == order
    versions = "SELECT version FROM order_events WHERE order_id = 'ord_1' ORDER BY version"
    assert [tuple(row) for row in await database.fetch(versions)] == [(1,), (2,), (3,)]


async def test_a_planned_payout_is_due(store: OrderStore, database: Tables) -> None:
    books, order = OperatorBooks(database), fresh()
    await store.commit(created(order))
    assert await books.due() == {}
    units = order.terms.deposit_amount
    for event in (
        ev.DepositSeen(DepositKey("monero", "tx", 0), units, None, NOW),
        ev.DepositConfirmed(DepositKey("monero", "tx", 0)),
    ):
        result = transition(order, event, NOW)
        order = result.order
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        await store.commit(Change(order=order, view=VIEW, history=entry, effects=result.effects))
    assert order.payout is not None
    assert await books.due() == {("arbitrum", "payout"): order.payout.units}


async def test_key_order_and_answer_are_kept_together_or_not_at_all(
    store: OrderStore, database: Tables
) -> None:
    await store.commit(created(fresh(1), response("k")))
    with pytest.raises(StaleWrite):
        await store.commit(created(fresh(2), response("k")))
    assert await store.order("ord_2") is None
    assert [tuple(row) for row in await database.fetch("SELECT count(*) FROM event_log")] == [(1,)]
    assert [
        tuple(row) for row in await database.fetch("SELECT count(*) FROM idempotency_keys")
    ] == [(1,)]


async def test_old_answers_are_packed_some_at_a_time(store: OrderStore, database: Tables) -> None:
    for number, key in enumerate(("a", "b", "c", "young")):
        kept = replace(response(key), created_at=NOW + number)
        await store.commit(created(fresh(number), kept))
    assert [await store.pack_responses(NOW + 3, NOW + 3, 2) for _ in range(3)] == [2, 1, 0]
    packed = await database.fetch("SELECT packed FROM idempotency_keys ORDER BY seq")
    assert [row["packed"] for row in packed] == [1, 1, 1, 0]
    for key in ("a", "b", "c", "young"):
        found = await store.response("public", key)
        assert found is not None
        assert found.body == response(key).body


async def test_one_bad_write_does_not_take_its_neighbours_down(store: OrderStore) -> None:
    await store.commit(created(fresh(0), response("taken")))
    keys = ["a", "taken", "b", "c"]
    changes = [created(fresh(n), response(key)) for n, key in enumerate(keys, start=1)]
    results = await asyncio.gather(*map(store.commit, changes), return_exceptions=True)
    assert [isinstance(result, StaleWrite) for result in results] == [False, True, False, False]
    assert [await store.order(f"ord_{n}") is not None for n in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]


async def test_a_version_happens_once(store: OrderStore) -> None:
    await store.commit(created(fresh()))
    again = replace(fresh(), version=2)
    entry = HistoryEntry(1, NOW, "again", "awaiting_deposit", {})
    with pytest.raises(StoreConflict):
        await store.commit(Change(order=again, view=VIEW, history=entry))


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE event_log SET event = 'other'",
        "DELETE FROM event_log",
        "UPDATE deposits SET units = 1",
        "UPDATE transfers SET address = 'thief'",
        "UPDATE transfers SET units = units + 1",
        "UPDATE transfers SET raw = NULL",
        "INSERT INTO transfers SELECT NULL, transfer_id || 'x', order_id, kind, network, asset,"
        " address, units, fee, state, 'other', raw, reason, integrator_fee, receipt FROM transfers",
    ],
)
async def test_the_database_refuses_to_change_what_has_happened(
    store: OrderStore, database: Tables, sql: str
) -> None:
    order = fresh()
    await store.commit(created(order))
    for event in (
        ev.DepositSeen(DepositKey("monero", "tx", 0), order.terms.deposit_amount, None, NOW),
        ev.DepositConfirmed(DepositKey("monero", "tx", 0)),
        ev.TransferPrepared("ord_1/payout/1", "id", "00"),
    ):
        order = transition(order, event, NOW).order
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        await store.commit(Change(order=order, view=VIEW, history=entry))
    with pytest.raises(StoreConflict):
        await database.write([statement(sql, ())])


async def test_status_view_is_bound_to_its_time_and_service_version(
    store: OrderStore, database: Tables
) -> None:
    await store.commit(created(fresh()))
    view = await store.status_view("ord_1", NOW)
    assert view is not None
    assert view == ("pay here", VIEW.body, None)
    assert await store.status_view("ord_1", NOW + 1000) is None
    assert await OrderStore(database, lambda: "other").status_view("ord_1", NOW) is None


async def test_pending_effects_come_back_with_prepared_transfers_first(
    store: OrderStore,
) -> None:
    for number in (1, 2):
        order = fresh(number)
        await store.commit(created(order))
        deposit = DepositKey("monero", f"tx{number}", 0)
        steps: list[ev.Event] = [
            ev.DepositSeen(deposit, order.terms.deposit_amount, None, NOW),
            ev.DepositConfirmed(deposit),
        ]
        if number == 2:
            steps.append(ev.TransferPrepared("ord_2/payout/1", "id", "00"))
        for event in steps:
            result = transition(order, event, NOW)
            order = result.order
            entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
            await store.commit(
                Change(order=order, view=VIEW, history=entry, effects=result.effects)
            )
    first, second = (
        PendingEffect(f"ord_{n}", AdvanceTransfer(f"ord_{n}/payout/1")) for n in (2, 1)
    )
    assert await store.pending_effects() == [first, second]
    await store.commit(Change(done=(first, PendingEffect("ord_1", PriceLateDeposit()))))
    assert await store.pending_effects() == [second]


async def test_woken_transfer_is_taken_once(store: OrderStore) -> None:
    order = fresh(1)
    await store.commit(created(order))
    deposit = DepositKey("monero", "tx", 0)
    seen = ev.DepositSeen(deposit, order.terms.deposit_amount, None, NOW)
    for event in (seen, ev.DepositConfirmed(deposit)):
        result = transition(order, event, NOW)
        order = result.order
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        await store.commit(Change(order=order, view=VIEW, history=entry, effects=result.effects))
    assert await store.take_woken() == []
    assert await store.wake_transfer("ord_1/payout/1")
    assert not await store.wake_transfer("ord_1/refund/1"), "it is not pending"
    assert not await store.wake_transfer("ord_2/payout/1"), "there is no such order"
    assert await store.take_woken() == ["ord_1/payout/1"]
    assert await store.take_woken() == []


async def test_overdue_leaves_out_a_deadline_action(
    store: OrderStore,
) -> None:
    waiting, stuck = fresh(1), fresh(2)
    for order in (waiting, replace(stuck, on_deadline=OnDeadline.REFUND)):
        await store.commit(created(order))
    late = waiting.deadline_at or 0
    assert await store.overdue(late, 9, {}) == ["ord_1", "ord_2"]
    assert await store.overdue(late, 9, {}, but=OnDeadline.REFUND) == ["ord_1"]
    assert await store.overdue(late, 1, {}) == ["ord_1"]
    assert await store.overdue(NOW, 9, {}) == []


async def test_overdue_orders_wait_for_the_scan_of_their_network(
    store: OrderStore,
) -> None:
    waiting, paying = fresh(1), replace(fresh(2), on_deadline=OnDeadline.REPUBLISH)
    for order in (waiting, paying):
        await store.commit(created(order))
    late, network = waiting.deadline_at or 0, waiting.terms.deposit_network
    assert await store.overdue(late + 9, 9, {network: late - 1}) == ["ord_2"]
    assert await store.overdue(late + 9, 9, {network: 0, "elsewhere": late}) == ["ord_2"]
    assert await store.overdue(late + 9, 9, {network: late}) == ["ord_1", "ord_2"]
    assert await store.overdue(late + 9, 9, {"elsewhere": 0}) == ["ord_1", "ord_2"]


async def test_orders_that_are_not_over_are_open(store: OrderStore) -> None:
    waiting, over = fresh(1), fresh(2)
    for order in (waiting, over):
        await store.commit(created(order))
    over = transition(over, ev.DeadlinePassed(), over.deadline_at or 0).order
    assert over.status.is_terminal
    assert sorted(await store.open_orders()) == ["ord_1", "ord_2"]
    entry = HistoryEntry(over.version, NOW, "e", over.status.value, {})
    await store.commit(Change(order=over, view=VIEW, history=entry))
    assert await store.open_orders() == ["ord_1"]


async def test_an_annotation_is_read_back_until_it_is_removed(database: Tables) -> None:
    ledger, books = UnrecordedLedger(database), OperatorBooks(database)
    assert await ledger.annotated("monero") == []
    await books.annotate("monero", "tx", "paid by hand", NOW)
    assert await ledger.annotated("monero") == ["tx"]
    await books.remove_annotation("monero", "tx")
    assert await ledger.annotated("monero") == []


async def test_several_changes_are_committed_together_or_not_at_all(
    store: OrderStore,
) -> None:
    await store.commit(created(fresh(1)))
    with pytest.raises(StoreConflict):
        await store.commit(created(fresh(2)), created(fresh(1)))
    assert await store.order("ord_2") is None
    await store.commit(created(fresh(2)), created(fresh(3)))
    assert await store.order("ord_2") is not None
    assert await store.order("ord_3") is not None


async def test_old_keys_are_forgotten_and_young_ones_kept(store: OrderStore) -> None:
    for number, key in enumerate(["old", "older", "young"]):
        kept = replace(response(key), created_at=NOW + number * 1000)
        await store.commit(created(fresh(number), kept))
    assert await store.forget_responses(NOW + 2000) == 2
    assert await store.response("public", "old") is None
    assert await store.response("public", "young") is not None
    assert await store.forget_responses(NOW + 2000) == 0


async def test_old_keys_are_forgotten_in_portions(
    store: OrderStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_rows, "_KEYS_AT_ONCE", 2)
    for number in range(7):
        await store.commit(created(fresh(number), response(f"key {number}")))
    commits = list[int]()
    database.on_commit(lambda writes, _seconds: commits.append(writes))
    assert await store.forget_responses(NOW + 10**6) == 7
    assert len(commits) == 4
    assert await store.forget_responses(NOW + 10**6) == 0


async def test_a_clock_set_weeks_ahead_drops_no_young_keys(store: OrderStore) -> None:
    hour, month = 3_600_000, 30 * 86_400_000
    for number, hours in enumerate((0, 1, 24)):
        kept = replace(response(f"after {hours} h"), created_at=NOW + hours * hour)
        await store.commit(created(fresh(number), kept))
    assert await store.forget_responses(NOW + month) == 2
    assert await store.response("public", "after 24 h") is not None
    assert await store.forget_responses(NOW + month) == 1
    assert await store.forget_responses(NOW + month) == 0


async def test_order_is_written_over_its_read_version_only(store: OrderStore) -> None:
    order = fresh()
    await store.commit(created(order))
    seen = ev.DepositSeen(DepositKey("monero", "tx", 0), 1, None, NOW)
    after = transition(order, seen, NOW).order
    entry = HistoryEntry(after.version, NOW, "e", after.status.value, {})
    await store.commit(Change(order=after, view=VIEW, history=entry))
    with pytest.raises(StaleWrite):
        await store.commit(Change(order=after, view=VIEW, history=entry), created(fresh(2)))
    assert await store.order("ord_2") is None, "nothing of a stale write is kept"
    assert await store.order("ord_1") == after


async def test_deposits_come_back_in_the_order_in_which_they_came(store: OrderStore) -> None:
    order = fresh()
    await store.commit(created(order))
    for txid in ("b", "c", "a"):
        order = transition(
            order, ev.DepositSeen(DepositKey("monero", txid, 0), 1, None, NOW), NOW
        ).order
        entry = HistoryEntry(order.version, NOW, "e", order.status.value, {})
        await store.commit(Change(order=order, view=VIEW, history=entry))
    found = await store.order("ord_1")
    assert found is not None
    assert [deposit.key.txid for deposit in found.deposits] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("order_id IN :names", ["ord_1"]),
        ("order_id NOT IN :names", ["ord_2"]),
        ("order_id IN :none", []),
        ("order_id NOT IN :none", ["ord_1", "ord_2"]),
        ("on_deadline IS DISTINCT FROM :null", ["ord_1", "ord_2"]),
        ("refund_address IS NOT DISTINCT FROM :null", ["ord_1", "ord_2"]),
    ],
)
async def test_lists_and_nulls_are_bound_as_values(
    store: OrderStore, database: Tables, where: str, expected: list[str]
) -> None:
    await store.commit(created(fresh(1)), created(fresh(2)))
    sql = f"SELECT order_id FROM orders WHERE {where} ORDER BY seq"
    rows = await database.fetch(sql, names=["ord_1", "ord_3"], none=[], null=None)
    assert [row["order_id"] for row in rows] == expected


async def test_query_with_a_missing_value_is_an_error(database: Tables) -> None:
    with pytest.raises(KeyError):
        await database.fetch("SELECT order_id FROM orders WHERE order_id = :order_id")
    with pytest.raises(StoreConflict):
        await database.write([Statement("DELETE FROM tickets WHERE ticket_id = :ticket_id")])


async def test_tickets_at_once_never_break_a_budget(store: OrderStore, database: Tables) -> None:
    async def take(number: int, client: str) -> None:
        ticket = Ticket(f"tkt_{number}", NOW, "other", "m", None, None, None)
        await store.commit(Change(ticket=ticket, charge=TicketCharge(3, client, 100, 3, 500)))

    made = await asyncio.gather(
        *(take(number, "one" if number < 5 else "other") for number in range(12)),
        return_exceptions=True,
    )
    assert made.count(None) == 5
    assert all(isinstance(each, StaleWrite) for each in made if each is not None)
    assert await store.tickets_taken(3, "one") == TicketsTaken(3, 500)
    assert await store.tickets_taken(3, "other") == TicketsTaken(2, 500)
    assert len(await database.fetch("SELECT seq FROM tickets")) == 5
