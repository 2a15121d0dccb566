"""Reservations as rows: their sums, and the bounds checked in an order's commit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import (
    ALL,
    BY_ADDRESS,
    TOTAL,
    UPSTREAM,
    Admission,
    Claims,
    Reservation,
    ReservationChange,
    Reserved,
    reservations_of,
)
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.changes import Change, RelayRecord, RelayState
from rpcsvc.store.checks import reservation_problems
from rpcsvc.store.database import StaleWrite, Statement, Tables
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import HOUR, NOW, key
from tests.unit.reserving import Keeper, numbered, wrong_sums

ONE, OTHER, TOKEN = "address:1", "address:2", "token:a"
NEEDED = reservations_of(numbered(1))["arbitrum"]
DAY = NOW // 86_400_000


@pytest.fixture
def keeper(database: Tables) -> Keeper:
    return Keeper(OrderStore(database, lambda: "key"))


async def test_sums_follow_orders_from_begin_to_end(keeper: Keeper, database: Tables) -> None:
    first, second = numbered(1), numbered(2, Direction.USDC_TO_XMR)
    await keeper.open(first, Admission(ONE))
    await keeper.open(second, Admission(TOKEN))
    history: list[tuple[str, ev.Event]] = [
        ("ord_1", ev.DepositSeen(key(1), first.terms.deposit_amount // 2, None, NOW)),
        ("ord_1", ev.DepositSeen(key(2), first.terms.deposit_amount, None, NOW)),
        ("ord_1", ev.DepositRemoved(key(2))),
        ("ord_1", ev.DepositRemoved(key(1))),
        ("ord_1", ev.DepositSeen(key(3), first.terms.deposit_amount, None, NOW)),
        ("ord_1", ev.DepositConfirmed(key(3))),
        ("ord_2", ev.Cancelled()),
        ("ord_1", ev.TransferPrepared("ord_1/payout/1", "id", "00")),
        ("ord_1", ev.TransferSettled("ord_1/payout/1")),
    ]
    for order_id, event in history:
        assert await keeper.reserved() == keeper.recount()
        assert await wrong_sums(database) == []
        await keeper.apply(order_id, event)
    assert await keeper.reserved() == keeper.recount() == {"monero": 0, "arbitrum": 0}
    for client in (ONE, TOKEN, ""):
        assert (await keeper.store.reserved("arbitrum", client)).orders == 0
    assert await wrong_sums(database) == []


@pytest.mark.parametrize(("ahead", "kept"), [(1, 1), (2, 0)])
async def test_counts_of_today_outlive_an_order_of_a_clock_a_day_ahead(
    keeper: Keeper, ahead: int, kept: int
) -> None:
    """Replicas whose clocks disagree about the day must not reset each other's counts."""
    await keeper.open(numbered(1), Admission(ONE))
    later = numbered(2)
    dated = replace(later.terms, created_at=NOW + ahead * 24 * HOUR)
    await keeper.open(replace(later, terms=dated), Admission(OTHER))
    assert await keeper.store.orders_made(ONE, DAY) == kept
    assert await keeper.store.orders_made(OTHER, DAY + ahead) == 1


async def test_sums_are_by_client_and_by_how_it_is_known(keeper: Keeper) -> None:
    for number, client in enumerate((ONE, ONE, OTHER, TOKEN)):
        await keeper.open(numbered(number), Admission(client))
    assert await keeper.store.reserved("arbitrum", ONE) == Reserved(
        4 * NEEDED, {ALL: 4 * NEEDED, BY_ADDRESS: 3 * NEEDED, ONE: 2 * NEEDED}, 2
    )
    assert await keeper.store.reserved("monero", TOKEN) == Reserved(0, {}, 1)
    assert [each.units for each in await keeper.store.unfunded(9, OTHER)] == [NEEDED]
    assert (len(await keeper.store.unfunded(9)), len(await keeper.store.unfunded(3))) == (4, 3)
    assert await keeper.store.reserved_by("ord_3", "arbitrum") == NEEDED
    assert await keeper.store.orders_made(ONE, DAY) == 2


async def test_claims_leave_out_what_is_signed(keeper: Keeper) -> None:
    for number, way in enumerate([*Direction] * 2):
        await keeper.open(numbered(number, way), Admission(ONE))
    deposit = numbered(1, Direction.USDC_TO_XMR).terms
    history: list[tuple[str, ev.Event]] = [
        ("ord_0", ev.DepositSeen(key(0), numbered(0).terms.deposit_amount, None, NOW)),
        ("ord_0", ev.DepositConfirmed(key(0))),
        ("ord_1", ev.DepositSeen(key(1), deposit.deposit_amount, "sender", NOW)),
        ("ord_3", ev.DepositSeen(key(3), deposit.max_deposit + 1, "sender", NOW)),
        ("ord_3", ev.DepositConfirmed(key(3))),
    ]
    for order_id, event in history:
        await keeper.apply(order_id, event)
    returnable = deposit.deposit_amount + deposit.max_deposit + 1
    assert await keeper.store.claims("arbitrum") == Claims(2 * NEEDED + returnable, returnable, 0)
    await keeper.apply("ord_0", ev.TransferPrepared("ord_0/payout/1", "id", "00"))
    assert await keeper.store.claims("arbitrum") == Claims(NEEDED + returnable, returnable, 0)
    await keeper.apply("ord_3", ev.TransferPrepared("ord_3/refund/1", "other", "00"))
    returnable = deposit.deposit_amount
    assert await keeper.store.claims("arbitrum") == Claims(NEEDED + returnable, returnable, 0)
    assert await keeper.store.claims("base") == Claims(0, 0, 0)


async def test_claims_tell_what_is_above_the_quotes_and_not_signed(keeper: Keeper) -> None:
    for number in range(2):
        order = numbered(number)
        await keeper.open(order, Admission(ONE))
        seen = ev.DepositSeen(key(number), 3 * order.terms.deposit_amount, None, NOW)
        await keeper.apply(f"ord_{number}", seen)
    reserved = reservations_of(keeper.orders["ord_0"])["arbitrum"]
    above = reserved - NEEDED
    assert await keeper.store.claims("arbitrum") == Claims(2 * reserved, 0, 2 * above)
    await keeper.apply("ord_1", ev.DepositConfirmed(key(1)))
    assert await keeper.store.claims("arbitrum") == Claims(2 * reserved, 0, 2 * above)
    await keeper.apply("ord_1", ev.TransferPrepared("ord_1/payout/1", "id", "00"))
    assert await keeper.store.claims("arbitrum") == Claims(reserved, 0, above)


@pytest.mark.parametrize(
    ("most", "admission"),
    [
        (3, Admission(ONE, ((TOTAL, 3 * NEEDED),))),
        (2, Admission(ONE, ((TOTAL, 9 * NEEDED), (BY_ADDRESS, 3 * NEEDED - 1)))),
        (1, Admission(ONE, ((ONE, NEEDED),))),
        (4, Admission(ONE, (), orders=4)),
        (2, Admission(ONE, (), orders_today=2)),
    ],
)
async def test_orders_at_once_never_break_a_bound(
    keeper: Keeper, database: Tables, most: int, admission: Admission
) -> None:
    """Also if many share a commit; refused ones leave no rows."""
    orders = [numbered(number) for number in range(8)]
    made = await asyncio.gather(
        *(keeper.open(order, admission) for order in orders), return_exceptions=True
    )
    assert made.count(None) == most
    assert all(isinstance(each, StaleWrite) for each in made if each is not None)
    assert (await keeper.store.reserved("arbitrum", ONE)).orders == most
    assert await keeper.store.orders_made(ONE, DAY) == most
    assert await keeper.reserved() == keeper.recount()
    assert await wrong_sums(database) == []


async def test_replicas_never_reserve_the_same_money_twice(
    keeper: Keeper, database: Tables
) -> None:
    if not isinstance(database, PostgresqlDatabase):
        pytest.skip("one process at a time writes an SQLite file")
    other = await PostgresqlDatabase.open(database.url)
    try:
        keepers = [keeper, Keeper(OrderStore(other, lambda: "key"))]
        admission = Admission(ONE, ((TOTAL, 7 * NEEDED),), orders_today=20)
        made = await asyncio.gather(
            *(keepers[number % 2].open(numbered(number), admission) for number in range(20)),
            return_exceptions=True,
        )
        assert made.count(None) == 7
        assert (await keeper.store.reserved("arbitrum")).total == 7 * NEEDED
        assert await keeper.store.orders_made(ONE, DAY) == 7
        assert await wrong_sums(database) == []
    finally:
        await other.close()


async def test_replicas_that_reserve_at_once_add_up(keeper: Keeper, database: Tables) -> None:
    """Groups of orders add to the sums of two wallets and two clients, in different orders."""
    if not isinstance(database, PostgresqlDatabase):
        pytest.skip("one process at a time writes an SQLite file")
    other = await PostgresqlDatabase.open(database.url)
    both = list(Direction)
    try:
        keepers = [keeper, Keeper(OrderStore(other, lambda: "key"))]

        async def reserve(number: int) -> None:
            order = numbered(number, both[(number // 2 + number) % 2])
            client = (ONE, OTHER)[(number // 4 + number) % 2]
            await keepers[number % 2].open(order, Admission(client))

        for turn in range(5):
            await asyncio.gather(*(reserve(20 * turn + number) for number in range(20)))
        assert len(await keeper.store.unfunded(999)) == 100
        assert (await keeper.store.reserved("arbitrum")).total == 50 * NEEDED
        assert await wrong_sums(database) == []
    finally:
        await other.close()


async def test_a_reservation_ends_when_its_order_expires(keeper: Keeper) -> None:
    for number in (1, 2):
        await keeper.open(numbered(number), Admission(ONE))
    sent = ev.DepositSeen(key(1), numbered(1).terms.deposit_amount // 20, None, NOW)
    await keeper.apply("ord_2", sent)
    end = NOW + HOUR
    store = keeper.store
    assert await store.expired_reservations(end - 1, 9, {}) == []
    assert await store.expired_reservations(end, 9, {"monero": end - 1}) == []
    assert set(await store.expired_reservations(end, 9, {"monero": end})) == {"ord_1", "ord_2"}
    await store.end_reservations(["ord_1", "ord_2"], end - 1)
    assert await keeper.reserved() == keeper.recount(), "it is not over yet"
    await keeper.expire(end)
    assert (await store.reserved("arbitrum", ONE)).orders == 0
    assert await keeper.reserved() == keeper.recount()
    # A late deposit is reserved, and renews no reservation for the rest of the amount.
    late = ev.DepositSeen(key(2), numbered(1).terms.deposit_amount // 20, None, end)
    await keeper.apply("ord_1", late, end)
    assert await keeper.reserved() == keeper.recount()
    assert await store.unfunded(9) == []


async def test_recount_finds_wrong_reservations(keeper: Keeper, database: Tables) -> None:
    for number in (1, 2):
        await keeper.open(numbered(number), Admission(ONE))
    await keeper.apply("ord_1", ev.DepositSeen(key(1), numbered(1).terms.deposit_amount, None, NOW))
    assert await reservation_problems(database, NOW) == []
    more = Statement("UPDATE reservations SET units = units + 1 WHERE network = 'monero'")
    await database.write([more])
    (problem,) = await reservation_problems(database, NOW)
    sent = numbered(1).terms.deposit_amount
    assert problem == (
        f"what an order reserves (funded, on monero) is {sent + 1} units"
        f" and has to be {sent}: ord_1"
    )
    await keeper.expire(NOW + HOUR)
    assert len(await reservation_problems(database, NOW + HOUR)) == 1


@pytest.mark.parametrize("state", [RelayState.REFUSED, RelayState.RECONCILING])
async def test_a_claim_reserves_until_its_outcome_is_written(
    keeper: Keeper, state: RelayState
) -> None:
    reservation = Reservation(UPSTREAM, 100, ONE, "monero", NOW + HOUR)
    admission = Admission(ONE, ((TOTAL, 100),), orders=1)
    for order_id in ("ord_1", "ord_2"):
        claim = RelayRecord(order_id, RelayState.CLAIMED, NOW, "s")
        reserves = ReservationChange(order_id, {}, reservation, begins=True)
        asking = Change(relay=claim, reservation=reserves, admission=admission)
        await keeper.store.commit(asking)
        with pytest.raises(StaleWrite):
            await keeper.store.commit(
                asking,
                Change(reservation=replace(reserves, order_id="more"), admission=admission),
            )
        assert (await keeper.store.reserved(UPSTREAM, ONE)).unfunded[ONE] == 100
        ended = RelayRecord(order_id, state, NOW, "s", reason="said so")
        await keeper.store.commit(Change(relay=ended))
        assert await keeper.store.reserved(UPSTREAM, ONE) == Reserved(0, {ALL: 0, BY_ADDRESS: 0}, 0)


async def test_interleaved_groups_keep_their_sums(keeper: Keeper, database: Tables) -> None:
    """Orders are made, funded, cancelled and expire in the same commits."""
    chance = random.Random(7)
    pick: Callable[[list[ev.Event]], ev.Event] = chance.choice
    for turn in range(12):
        number = 10 * turn
        made = [keeper.open(numbered(number + n), Admission(ONE)) for n in range(4)]
        waiting = [each for each in keeper.orders.values() if each.version == 1]
        chance.shuffle(waiting)
        events = [
            keeper.apply(
                order.order_id,
                pick(
                    [
                        ev.Cancelled(),
                        ev.DepositSeen(key(number + n), order.terms.deposit_amount, None, NOW),
                    ]
                ),
            )
            for n, order in enumerate(waiting[:3])
        ]
        expiring = [keeper.expire(NOW + HOUR)] if turn == 8 else []
        await asyncio.gather(*made, *events, *expiring)
        assert await wrong_sums(database) == []
    assert (await keeper.store.reserved("arbitrum")).total == sum(
        [await keeper.store.reserved_by(order_id, "arbitrum") for order_id in keeper.orders]
    )
