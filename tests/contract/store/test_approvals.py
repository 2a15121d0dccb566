"""Approvals as rows: one that holds for the same terms, decided once, used once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from rpcsvc.domain.clients import Approval, ApprovalState, ApprovalUse
from rpcsvc.store.approvals import ApprovalStore
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.changes import Change, HistoryEntry
from rpcsvc.store.database import StaleWrite, StoreConflict, Tables
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import NOW, VIEW
from tests.unit.reserving import numbered

ASKED = Approval(
    approval_id="apr_1",
    client="desk",
    key="a-key",
    terms="hash",
    state=ApprovalState.PENDING,
    requested_at=NOW,
    expires_at=NOW + 1_000,
    deposit=100,
    output=1_000,
    shown={"to": "somewhere", "refundAddress": None},
)


@pytest.fixture
def store(database: Tables) -> ApprovalStore:
    return ApprovalStore(database)


async def handles(database: Tables, stack: AsyncExitStack) -> list[Tables]:
    """Three replicas on PostgreSQL; the one handle of an SQLite file three times."""
    if not isinstance(database, PostgresqlDatabase):
        return [database] * 3
    others = [await PostgresqlDatabase.open(database.url) for _ in range(2)]
    for each in others:
        stack.push_async_callback(each.close)
    return [database, *others]


async def use(database: Tables, number: int, at: int = NOW) -> None:
    """Commit an order that uses the approval up. Raises StaleWrite."""
    order = numbered(number)
    entry = HistoryEntry(1, NOW, "OrderCreated", order.status.value, {})
    used = ApprovalUse(ASKED.approval_id, order.order_id, at)
    change = Change(order=order, view=VIEW, is_new=True, history=entry, approval=used)
    await OrderStore(database, lambda: "key").commit(change)


async def holding(store: ApprovalStore, now: int = NOW) -> Approval | None:
    return await store.holding("desk", "hash", "a-key", now)


async def test_what_was_asked_is_read_again(store: ApprovalStore) -> None:
    await store.ask(ASKED, None, 20)
    assert await holding(store) == await store.find("apr_1") == ASKED
    assert await store.newest(9) == [ASKED]
    for other in (("shop", "hash", "a-key"), ("desk", "other", "a-key"), ("desk", "hash", "")):
        assert await store.holding(*other, NOW) is None
    assert [await store.pending(at, "desk") for at in (NOW, NOW + 1_000)] == [1, 0]
    assert await store.pending(NOW, "shop") == 0


async def test_the_same_asked_at_once_over_replicas_is_one(database: Tables) -> None:
    async with AsyncExitStack() as stack:
        stores = [ApprovalStore(each) for each in await handles(database, stack)]
        made: Sequence[object] = await asyncio.gather(
            *(
                stores[number % 3].ask(replace(ASKED, approval_id=f"apr_{number}"), None, 20)
                for number in range(9)
            ),
            return_exceptions=True,
        )
        assert list(made).count(None) == 1
        assert all(isinstance(each, StoreConflict) for each in made if each is not None)
        assert len(await stores[0].newest(9)) == 1


async def test_grant_is_used_by_one_order_over_replicas(
    store: ApprovalStore, database: Tables
) -> None:
    await store.ask(ASKED, None, 20)
    with pytest.raises(StaleWrite):
        await use(database, 100)  # nobody has decided
    assert await store.decide("apr_1", ApprovalState.GRANTED, "Ada", NOW)
    async with AsyncExitStack() as stack:
        replicas = await handles(database, stack)
        made = await asyncio.gather(
            *(use(replicas[number % 3], number) for number in range(9)), return_exceptions=True
        )
        assert made.count(None) == 1
        assert all(isinstance(each, StaleWrite) for each in made if each is not None)
    used = await store.find("apr_1")
    assert used is not None
    assert used.state is ApprovalState.USED
    assert used.order_id == f"ord_{made.index(None)}"
    assert (used.decided_by, used.decided_at) == ("Ada", NOW)


async def test_grant_is_not_used_after_its_end(store: ApprovalStore, database: Tables) -> None:
    await store.ask(ASKED, None, 20)
    assert await store.decide("apr_1", ApprovalState.GRANTED, "Ada", NOW)
    with pytest.raises(StaleWrite):
        await use(database, 1, at=ASKED.expires_at)


async def test_decision_is_made_once_and_in_time(store: ApprovalStore) -> None:
    await store.ask(ASKED, None, 20)
    assert not await store.decide("apr_1", ApprovalState.GRANTED, "Ada", ASKED.expires_at)
    assert await store.decide("apr_1", ApprovalState.DENIED, "Ada", NOW)
    assert not await store.decide("apr_1", ApprovalState.GRANTED, "Bob", NOW)
    assert not await store.decide("apr_2", ApprovalState.GRANTED, "Bob", NOW)


async def test_next_one_ends_what_expired_or_is_replaced(store: ApprovalStore) -> None:
    await store.ask(ASKED, None, 20)
    later = replace(ASKED, approval_id="apr_2", requested_at=NOW + 1_000, expires_at=NOW + 2_000)
    await store.ask(later, None, 20)
    instead = replace(later, approval_id="apr_3")
    await store.ask(instead, "apr_2", 20)
    found = {each.approval_id: each.state.value for each in await store.newest(9)}
    assert found == {"apr_3": "pending", "apr_2": "ended", "apr_1": "ended"}
    assert await holding(store, NOW + 1_500) == instead


async def test_no_more_wait_than_the_most(database: Tables) -> None:
    """Calls at the same moment have each seen that one more may wait."""
    store = ApprovalStore(database)
    asked = [replace(ASKED, approval_id=f"apr_{n}", key=f"key-{n}") for n in range(5)]
    found = await asyncio.gather(
        *(store.ask(each, None, 3) for each in asked), return_exceptions=True
    )
    assert [type(each) for each in found if each is not None] == [StaleWrite] * 2
    assert await store.pending(NOW, "desk") == 3
    later = NOW + 1_000
    fresh = replace(ASKED, approval_id="apr_9", requested_at=later, expires_at=later + 1_000)
    await store.ask(fresh, None, 3)
