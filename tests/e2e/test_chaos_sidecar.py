"""A sidecar in front of an exchange of our own, each of them killed in turn at random moments.

Orders, deposits, faults of the exchange's chains and refunds asked for are drawn from a seed, and
the line between the two is bad. Afterwards the books of both are read from outside.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from rpcsvc.domain.bridge import STATUS_OF
from rpcsvc.domain.order import PERPS, OrderStatus
from rpcsvc.store.backends.sqlite.maintenance import check_database
from tests.e2e.audit import audit, count, orders_of
from tests.e2e.bad_line import BadLine, bad_line
from tests.e2e.chaos import Caller, Made, Mortal, Refused, fault_schedule, mortal, seeded
from tests.e2e.chaos_orders import AMOUNTS, faults_of, let_time_pass, stored
from tests.e2e.processes import Gone, until
from tests.e2e.sidecar import environ
from tests.sandbox import ORDER_FAULTS

SECONDS: Final = 25.0
CALLERS: Final = 4
# What the log says of a call that was cut off, and that its caller may repeat.
IN_DOUBT: Final = "upstream_order_in_doubt"
FAULT_SCHEDULE: Final = [
    {"fault": fault}
    for fault in (
        *("engine_down", "rates_down", "pause_blocks"),
        *("engine_up", "rates_up", "resume_blocks") * 3,
    )
]


class Patron(Caller):
    """Orders at the sidecar and pays at the exchange, as its own random numbers say."""

    def __init__(self, sidecar: Mortal, exchange: Mortal, name: str) -> None:
        super().__init__(sidecar, name)
        self._exchange = exchange

    async def live(self, end: float) -> None:
        """One deed after the other."""
        deeds = {
            self.order: 5, self.insist: 4, self.fund: 6, self.suffer: 2, self.replay: 2,
            self.reuse_a_key: 1, self.ask_for_refund: 2, self.poll: 2,
        }  # fmt: skip
        while time.monotonic() < end:
            await asyncio.gather(self.service.up.wait(), self._exchange.up.wait())
            (deed,) = self.random.choices(list(deeds), list(deeds.values()))
            with suppress(Gone):
                await deed()

    async def fund(self) -> None:
        """A deposit for one of the latest orders. Raises Gone."""
        if self.made:
            made = self.random.choice(self.made[-8:])
            amount = self.random.choice(AMOUNTS[made.wish.direction])
            params = {} if amount is None else {"amount": amount}
            await self._there("sandbox.fund", made, params)

    async def suffer(self) -> None:
        """A fault of one of the latest orders. Raises Gone."""
        if self.made:
            made = self.random.choice(self.made[-12:])
            await self._there("sandbox.fault", made, {"fault": self.random.choice(ORDER_FAULTS)})

    async def _there(self, method: str, made: Made, params: dict[str, Any]) -> None:
        theirs = order_there(self.service.data_dir, made.order_id)
        with suppress(Refused):  # nothing is due any more, or it has no such deposit
            await self._exchange.rpc(method, orderId=theirs, **params)


def order_there(data_dir: Path, order_id: str) -> str:
    """The exchange's id of a sidecar's order."""
    return next(theirs for ours, theirs in relayed(data_dir) if ours == order_id)


def relayed(data_dir: Path) -> list[tuple[str, str]]:
    """Every order of a sidecar: its id here and there."""
    return _rows(data_dir, "SELECT order_id, upstream_id FROM orders")


def statuses(data_dir: Path) -> dict[str, str]:
    """What a service tells of each of its orders: the bridge has fewer words for it."""
    rows = _rows(data_dir, "SELECT order_id, status, chain FROM orders")
    reported = {order_id: OrderStatus(status) for order_id, status, _ in rows}
    bridged = {order_id for order_id, _, chain in rows if chain == PERPS}
    return {
        each: STATUS_OF[reported[each]] if each in bridged else reported[each] for each in reported
    }


def _rows(data_dir: Path, query: str) -> list[Any]:
    path = f"{(data_dir / 'rpcsvc.db').as_uri()}?mode=ro"
    with closing(sqlite3.connect(path, uri=True)) as books:
        return books.execute(query).fetchall()


async def die_in_turn(services: Sequence[Mortal], line: BadLine, seed: int, end: float) -> None:
    """Kill one service or the other at random moments, now and then both."""
    drawn = random.Random(f"{seed} deaths")
    exchange = services[0]
    while time.monotonic() < end:
        await asyncio.sleep(drawn.uniform(0.2, 3.0))
        for service in drawn.choice([*([each] for each in services), services]):
            service.die()
            line.target = exchange.server.port
        while drawn.random() < 0.2:
            await asyncio.sleep(drawn.uniform(0.1, 1.5))
            services[-1].die()
        for service in services:
            await service.start()


async def heal(exchange: Mortal, patrons: Sequence[Patron]) -> None:
    """End every fault, have every call answered, let every deadline pass, and refund what waits."""
    for fault in ("engine_up", "rates_up", "resume_blocks"):
        await exchange.rpc("sandbox.fault", fault=fault)
    await asyncio.gather(*(_settle(patron) for patron in patrons))
    await let_time_pass(exchange)


async def _settle(patron: Patron) -> None:
    async def is_done() -> bool:
        await patron.insist()
        return not patron.unanswered

    await until(is_done)


async def agree(sidecar: Mortal, exchange: Mortal) -> None:
    """Wait until the sidecar tells of every order what the exchange tells."""
    there = statuses(exchange.data_dir)

    def differ() -> list[Any]:
        here = statuses(sidecar.data_dir)
        return [
            (ours, here[ours], theirs, there[theirs])
            for ours, theirs in relayed(sidecar.data_dir)
            if here[ours] != there[theirs]
        ]

    async def is_same() -> bool:
        return not differ()

    try:
        await until(is_same)
    except TimeoutError:
        raise AssertionError(f"the sidecar has not heard of {differ()}") from None


async def check(there: Path, here: Path, made: Sequence[Made], forlorn: int) -> list[str]:
    """All that does not add up; ``forlorn`` calls may have made an order that nobody knows."""
    found = [*audit(there), *check_database(here)]
    found += [fault for order in await stored(there) for fault in faults_of(order)]
    reported, ours = [each.order_id for each in made], relayed(here)
    if len(set(reported)) < len(reported) or not set(reported) <= {
        order_id for order_id, _ in ours
    }:
        found.append("an order that was told of is not there, or was told of twice")
    theirs = {upstream_id for _, upstream_id in ours}
    if not theirs <= set(orders_of(there)):
        found.append("the exchange does not know an order")
    if len(orders_of(there)) > len(made) + forlorn:
        found.append(f"{len(orders_of(there))} orders at the exchange, {len(made)} were told of")
    if (doubts := count(here, "relays WHERE state IN ('claimed', 'reconciling')")) > forlorn:
        found.append(f"{doubts} calls are in doubt, and only {forlorn} were not repeated")
    return found


@pytest.mark.slow
async def test_chaos_sidecar_makes_no_order_twice_and_loses_none(
    tmp_path: Path,
) -> None:
    with seeded() as seed:
        async with mortal(tmp_path / "exchange" / "data") as exchange:
            async with (
                bad_line(exchange.server.port, seed=seed, rate=0.1) as line,
                mortal(tmp_path / "sidecar" / "data", environ(line.port)) as sidecar,
            ):
                patrons = [Patron(sidecar, exchange, f"{seed} {n}") for n in range(CALLERS)]
                end = time.monotonic() + SECONDS
                async with asyncio.TaskGroup() as life:
                    for patron in patrons:
                        life.create_task(patron.live(end))
                    life.create_task(fault_schedule(exchange, FAULT_SCHEDULE, seed, end))
                    life.create_task(die_in_turn((exchange, sidecar), line, seed, end))
                line.rate = 0
                await heal(exchange, patrons)
                await agree(sidecar, exchange)
                for patron in patrons:
                    await patron.repeat_all()
                assert sidecar.server.stop() == 0
            assert exchange.server.stop() == 0
        made = [each for patron in patrons for each in patron.made]
        forlorn = sum(patron.forlorn for patron in patrons)
        assert min(sidecar.deaths, exchange.deaths) >= 2
        assert made
        assert exchange.alarms() == []
        assert [line for line in sidecar.alarms() if IN_DOUBT not in line] == []
        assert await check(exchange.data_dir, sidecar.data_dir, made, forlorn) == []
