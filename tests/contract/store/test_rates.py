"""Published rates: who publishes when, and that orders are made only at an agreeing rate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rpcsvc.clock import SystemClock
from rpcsvc.domain.order import Order
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.venue import Rate
from rpcsvc.orders.published_rates import EVERY_MS, PublishedRates, RateRule
from rpcsvc.store.changes import Change, HistoryEntry, RateBounds
from rpcsvc.store.database import StaleWrite, StoreConflict, Tables
from rpcsvc.store.leases import SETTLER, Lease
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.replicas import KEPT_MS, RateRows
from tests.rows import statement
from tests.unit.orders import NOW, VIEW
from tests.unit.reserving import numbered

RATE = 165_000_000
RULE = RateRule(max_apart_bps=150, max_age_ms=60_000)
APART = RATE * 150 // 10_000
MINUTE, HOUR = 60_000, 3_600_000


class Source:
    """A rate source with a price set by the test; None: it has none."""

    def __init__(self, price: int | None = RATE) -> None:
        self.price = price

    def rate(self) -> Rate:
        if self.price is None:
            raise Unavailable("no source answers")
        return Rate(self.price, NOW, "test")


class Replica:
    """A process with its own source, which has a lease (token), waits for it (0), or is alone."""

    def __init__(self, database: Tables, token: int, *, is_alone: bool = False) -> None:
        self.source, self.now, self.ahead = Source(), 1, 0
        lease = Lease(SETTLER, token, None if is_alone else 2**62, lambda: 0)
        self.rates = PublishedRates(
            RateRows(database), self.source, RULE, lease, steady=lambda: self.now, wall=self
        )

    def now_ms(self) -> int:
        """The machine's clock."""
        return SystemClock().now_ms() + self.ahead

    async def publish(self, price: int | None = RATE) -> None:
        self.source.price = price
        assert await self.rates.publish() == 0


async def published(database: Tables) -> list[tuple[int, int]]:
    rows = await database.fetch("SELECT usdc_per_xmr, token FROM rates ORDER BY seq")
    return [(row["usdc_per_xmr"], row["token"]) for row in rows]


async def add(database: Tables, price: int, *, age_ms: int = 0, token: int = 1) -> None:
    """Write a row as an earlier publication would."""
    sql = "INSERT INTO rates (published_at, usdc_per_xmr, token) VALUES (now_ms() - ?, ?, ?)"
    await database.write([statement(sql, (age_ms, price, token))])


async def make(database: Tables, order: Order, bounds: RateBounds | None) -> None:
    entry = HistoryEntry(1, NOW, "OrderCreated", order.status.value, {})
    change = Change(order=order, view=VIEW, is_new=True, history=entry, rates=bounds)
    await OrderStore(database, lambda: "key").commit(change)


async def test_rate_is_published_once_a_minute_or_when_it_moves(database: Tables) -> None:
    settler = Replica(database, 1)
    for _ in range(3):
        await settler.publish()
    assert await published(database) == [(RATE, 1)]
    await settler.publish(RATE + APART // 4)
    assert len(await published(database)) == 1, "less than a quarter of the limit"
    await settler.publish(RATE + APART // 4 + 1_000)
    settler.now += RULE.max_age_ms // 2 - 1
    await settler.publish(settler.source.price)
    assert len(await published(database)) == 2
    settler.now += 1
    assert RULE.max_age_ms // 2 < EVERY_MS, "a row is renewed before it is too old"
    await settler.publish(settler.source.price)
    assert len(await published(database)) == 3


async def test_no_rate_is_published_without_one(database: Tables) -> None:
    await Replica(database, 1).publish(None)
    assert await published(database) == []


async def test_rate_is_published_before_the_first_order(database: Tables) -> None:
    settler = Replica(database, 1)
    found = await asyncio.gather(*(settler.rates.require(RATE) for _ in range(8)))
    assert set(found) == {RateBounds(RATE - APART, RATE + APART, 60_000)}
    assert await published(database) == [(RATE, 1)]
    await make(database, numbered(1), found[0])


async def test_settler_makes_orders_at_once_when_its_rate_jumps(database: Tables) -> None:
    settler = Replica(database, 1)
    await settler.publish()
    await make(database, numbered(1), await settler.rates.require(2 * RATE))
    assert await published(database) == [(RATE, 1), (2 * RATE, 1)]


@pytest.mark.parametrize("price", [RATE - APART, RATE, RATE + APART])
async def test_replica_that_agrees_makes_orders(database: Tables, price: int) -> None:
    await add(database, price)
    await make(database, numbered(1), await Replica(database, 0).rates.require(RATE))
    assert await published(database) == [(price, 1)], "only who settles publishes"


@pytest.mark.parametrize("price", [RATE - APART - 1, RATE + APART + 1])
async def test_replica_that_disagrees_refuses(database: Tables, price: int) -> None:
    await add(database, price)
    with pytest.raises(Unavailable, match=r"disagree on the rate: 165 and 16[0-9.]+ USDC") as found:
        await Replica(database, 0).rates.require(RATE)
    assert found.value.retry_after is not None


@pytest.mark.parametrize("ages", [[], [60_001]])
async def test_replica_refuses_without_a_fresh_row(database: Tables, ages: list[int]) -> None:
    for age in ages:
        await add(database, RATE, age_ms=age)
    with pytest.raises(Unavailable, match="no fresh rate"):
        await Replica(database, 0).rates.require(RATE)


@pytest.mark.parametrize(
    "last", [{"price": RATE + APART + 1}, {"price": RATE, "age_ms": 60_001}, None]
)
async def test_order_is_not_made_once_the_last_row_disagrees(
    database: Tables, last: dict[str, Any] | None
) -> None:
    """The transaction checks the rate again and is rolled back, whatever was checked before it."""
    if last is not None:
        await add(database, RATE, age_ms=70_000)
        await add(database, **last)
    with pytest.raises(StaleWrite):
        await make(database, numbered(1), RULE.bounds(RATE))
    for table in ("orders", "event_log", "status_views", "reservations"):
        assert await database.fetch(f"SELECT * FROM {table}") == []


async def test_new_settler_waits_while_the_row_before_it_disagrees(database: Tables) -> None:
    await add(database, RATE + APART + 1, age_ms=59_000)
    settler = Replica(database, 2)
    await settler.publish()
    with pytest.raises(Unavailable, match="disagree"):
        await settler.rates.require(RATE)
    assert await published(database) == [(RATE + APART + 1, 1)]
    await add(database, RATE + APART + 1, age_ms=60_001)
    with pytest.raises(Unavailable):
        await settler.rates.require(RATE)
    settler.now += 1_000
    assert await settler.rates.require(RATE) == RULE.bounds(RATE)
    assert (await published(database))[-1] == (RATE, 2)


async def test_lone_process_compares_no_rates(database: Tables) -> None:
    await add(database, 2 * RATE)
    alone = Replica(database, 2, is_alone=True)
    assert await alone.rates.require(RATE) is None
    await alone.publish()
    assert (await published(database))[-1] == (RATE, 2), "the chart goes on"


@pytest.mark.parametrize("token", [0, 1], ids=["takes orders", "settles"])
@pytest.mark.parametrize("ahead", [-3_600_000, -11_000, 11_000, 3_600_000])
async def test_replica_with_a_wrong_clock_makes_no_orders(
    database: Tables, token: int, ahead: int
) -> None:
    """Until it is right again. A few seconds are no harm."""
    await add(database, RATE)
    replica = Replica(database, token)
    for replica.ahead, is_right in ((5_000, True), (ahead, False), (-5_000, True)):
        replica.now += RULE.max_age_ms
        if is_right:
            assert await replica.rates.require(RATE) == RULE.bounds(RATE)
            continue
        with pytest.raises(Unavailable, match="clock of this replica is wrong"):
            await replica.rates.require(RATE)


async def test_rates_are_kept_for_a_week(database: Tables) -> None:
    await add(database, 1, age_ms=KEPT_MS + MINUTE)
    await add(database, 2, age_ms=KEPT_MS - MINUTE)
    await Replica(database, 1).publish()
    assert await published(database) == [(2, 1), (RATE, 1)]


async def test_published_rate_never_changes(database: Tables) -> None:
    await add(database, RATE)
    with pytest.raises(StoreConflict, match="stays"):
        await database.write([statement("UPDATE rates SET usdc_per_xmr = 1")])
    for price, token in ((0, 1), (1, 0)):
        with pytest.raises(StoreConflict):
            await add(database, price, token=token)


async def test_recent_rates_are_the_last_of_each_step(database: Tables) -> None:
    for hours in (30, 20, 10, 0):
        for price in (1, 2, 3):
            await add(database, 10 * hours + price, age_ms=hours * HOUR)
    rows = await RateRows(database).recent(24 * HOUR, HOUR)
    assert [row.usdc_per_xmr for row in rows][-1] == 3
    assert {203, 103, 3} <= {row.usdc_per_xmr for row in rows}
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert all(row.age_ms < 24 * HOUR for row in rows)
    assert len(rows) <= 25
