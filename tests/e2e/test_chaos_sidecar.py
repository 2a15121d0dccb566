"""A sidecar and its upstream, each killed at random; then the databases of both are audited.

Orders, deposits, faults of the upstream's chains and requested refunds are drawn from a seed, and
the connection between the two is faulty.
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
from tests.e2e.chaos import (
    Caller,
    KillableService,
    PlacedOrder,
    Refused,
    fault_schedule,
    killable_service,
    seeded,
)
from tests.e2e.chaos_orders import AMOUNTS, inconsistencies_of, pass_deadlines, stored
from tests.e2e.processes import Gone, until
from tests.e2e.sidecar import environ
from tests.sandbox import ORDER_FAULTS

# The least duration and number of crashes of each: a busy machine starts slowly.
SECONDS: Final = 25.0
CRASHES: Final = 2
CALLERS: Final = 4
# Errors that are logged for a call that was cut off and may be repeated.
IN_DOUBT: Final = "upstream_order_in_doubt"
FAULT_SCHEDULE: Final = [
    {"fault": fault}
    for fault in (
        *("engine_down", "rates_down", "pause_blocks"),
        *("engine_up", "rates_up", "resume_blocks") * 3,
    )
]


class SidecarUser(Caller):
    """Orders at the sidecar and pays at the exchange, drawn from its own random numbers."""

    def __init__(self, sidecar: KillableService, exchange: KillableService, name: str) -> None:
        super().__init__(sidecar, name)
        self._exchange = exchange

    async def run(self, over: asyncio.Event) -> None:
        """Draw one action after the other until ``over`` is set."""
        actions = {
            self.order: 5, self.retry: 4, self.fund: 6, self.inject_fault: 2, self.replay: 2,
            self.reuse_a_key: 1, self.ask_for_refund: 2, self.poll: 2,
        }  # fmt: skip
        while not over.is_set():
            await asyncio.gather(self.service.up.wait(), self._exchange.up.wait())
            (action,) = self.random.choices(list(actions), list(actions.values()))
            with suppress(Gone):
                await action()

    async def fund(self) -> None:
        """A deposit for one of the latest orders. Raises Gone."""
        if self.placed:
            placed = self.random.choice(self.placed[-8:])
            amount = self.random.choice(AMOUNTS[placed.request.direction])
            params = {} if amount is None else {"amount": amount}
            await self._at_exchange("sandbox.fund", placed, params)

    async def inject_fault(self) -> None:
        """Inject a fault into one of the latest orders. Raises Gone."""
        if self.placed:
            placed = self.random.choice(self.placed[-12:])
            await self._at_exchange(
                "sandbox.fault", placed, {"fault": self.random.choice(ORDER_FAULTS)}
            )

    async def _at_exchange(self, method: str, placed: PlacedOrder, params: dict[str, Any]) -> None:
        theirs = upstream_order(self.service.data_dir, placed.order_id)
        with suppress(Refused):  # no amount is due any more, or it has no such deposit
            await self._exchange.rpc(method, orderId=theirs, **params)


def upstream_order(data_dir: Path, order_id: str) -> str:
    """The exchange's id of a sidecar's order."""
    return next(theirs for ours, theirs in relayed(data_dir) if ours == order_id)


def relayed(data_dir: Path) -> list[tuple[str, str]]:
    """Every order of a sidecar: its own id and the exchange's."""
    return _rows(data_dir, "SELECT order_id, upstream_id FROM orders")


def statuses(data_dir: Path) -> dict[str, str]:
    """The status that a service reports of each of its orders; bridge orders have fewer."""
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


async def crash_in_turn(
    services: Sequence[KillableService], line: BadLine, seed: int, over: asyncio.Event
) -> None:
    """Kill one service or the other at random moments, sometimes both; then set ``over``."""
    drawn, end = random.Random(f"{seed} crashes"), time.monotonic() + SECONDS
    exchange = services[0]
    while time.monotonic() < end or min(each.crashes for each in services) < CRASHES:
        await asyncio.sleep(drawn.uniform(0.2, 3.0))
        for service in drawn.choice([*([each] for each in services), services]):
            service.crash()
            line.target = exchange.server.port
        while drawn.random() < 0.2:
            await asyncio.sleep(drawn.uniform(0.1, 1.5))
            services[-1].crash()
        for service in services:
            await service.start()
    over.set()


async def recover(exchange: KillableService, users: Sequence[SidecarUser]) -> None:
    """End every fault, answer every call, pass every deadline, and name refund addresses."""
    for fault in ("engine_up", "rates_up", "resume_blocks"):
        await exchange.rpc("sandbox.fault", fault=fault)
    await asyncio.gather(*(_retry_all(user) for user in users))
    await pass_deadlines(exchange)


async def _retry_all(user: SidecarUser) -> None:
    async def is_done() -> bool:
        await user.retry()
        return not user.unanswered

    await until(is_done)


async def until_statuses_agree(sidecar: KillableService, exchange: KillableService) -> None:
    """Wait until the sidecar reports the exchange's status of every order."""
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


async def check(there: Path, here: Path, placed: Sequence[PlacedOrder], in_doubt: int) -> list[str]:
    """All inconsistencies; each call ``in_doubt`` may have placed an order unknown to callers."""
    found = [*audit(there), *check_database(here)]
    found += [fault for order in await stored(there) for fault in inconsistencies_of(order)]
    reported, ours = [each.order_id for each in placed], relayed(here)
    if len(set(reported)) < len(reported) or not set(reported) <= {
        order_id for order_id, _ in ours
    }:
        found.append("a reported order is missing, or was reported twice")
    theirs = {upstream_id for _, upstream_id in ours}
    if not theirs <= set(orders_of(there)):
        found.append("the exchange does not know an order")
    if len(orders_of(there)) > len(placed) + in_doubt:
        found.append(f"{len(orders_of(there))} orders at the exchange, {len(placed)} were reported")
    if (doubts := count(here, "relays WHERE state IN ('claimed', 'reconciling')")) > in_doubt:
        found.append(f"{doubts} calls are in doubt, and only {in_doubt} were not repeated")
    return found


@pytest.mark.slow
async def test_chaos_sidecar_makes_no_order_twice_and_loses_none(
    tmp_path: Path,
) -> None:
    with seeded() as seed:
        async with killable_service(tmp_path / "exchange" / "data") as exchange:
            async with (
                bad_line(exchange.server.port, seed=seed, rate=0.1) as line,
                killable_service(tmp_path / "sidecar" / "data", environ(line.port)) as sidecar,
            ):
                users = [SidecarUser(sidecar, exchange, f"{seed} {n}") for n in range(CALLERS)]
                over = asyncio.Event()
                async with asyncio.TaskGroup() as tasks:
                    for user in users:
                        tasks.create_task(user.run(over))
                    tasks.create_task(fault_schedule(exchange, FAULT_SCHEDULE, seed, over))
                    tasks.create_task(crash_in_turn((exchange, sidecar), line, seed, over))
                line.rate = 0
                await recover(exchange, users)
                await until_statuses_agree(sidecar, exchange)
                for user in users:
                    await user.repeat_all()
                assert sidecar.server.stop() == 0
            assert exchange.server.stop() == 0
        placed = [each for user in users for each in user.placed]
        in_doubt = sum(user.in_doubt for user in users)
        assert placed
        assert exchange.alarms() == []
        assert [line for line in sidecar.alarms() if IN_DOUBT not in line] == []
        assert await check(exchange.data_dir, sidecar.data_dir, placed, in_doubt) == []
