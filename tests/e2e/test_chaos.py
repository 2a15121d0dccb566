"""Random calls and faults while the service is killed at random; then its database is audited.

Orders over every surface, deposits of every size, every fault of the sandbox, requested refunds and
replays are drawn from a seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.audit import audit, count, orders_of
from tests.e2e.chaos import (
    Caller,
    KillableService,
    PlacedOrder,
    Refused,
    fault_schedule,
    killable_service,
    seeded,
)
from tests.e2e.chaos_orders import AMOUNTS, inconsistencies_of, pass_deadlines, settle, stored
from tests.e2e.processes import Gone
from tests.sandbox import ORDER_FAULTS

API_KEY: Final = "the key of a shop"
ENVIRON: Final = {
    "RPCSVC_INTEGRATORS": f"shop:1.5:{hashlib.sha256(API_KEY.encode()).hexdigest()}",
    "RPCSVC_SANDBOX__RATE_PATH_BPS": "0,12,-7,31,-20,5,25,-33",
    "RPCSVC_SANDBOX__RATE_STEP_SECONDS": "1",
}
# The least duration and number of crashes: a busy machine starts slowly.
SECONDS: Final = 25.0
CRASHES: Final = 3
CALLERS: Final = 6
# Faults end more often than they begin; otherwise orders would be stuck most of the time.
FAULT_SCHEDULE: Final[list[dict[str, Any]]] = [
    *[{"fault": fault} for fault in ("engine_down", "rates_down", "pause_blocks")],
    *[{"fault": fault} for fault in ("engine_up", "rates_up", "resume_blocks") for _ in range(3)],
    *[{"fault": "set_rate", "rate": rate} for rate in ("120", "165", "166", "190")],
    *[{"fault": "advance_clock", "seconds": seconds} for seconds in (60, 900, 900, 4_000)],
]


class User(Caller):
    """Pays its orders and injects faults into them, drawn from its own random numbers."""

    async def run(self, over: asyncio.Event) -> None:
        """Draw one action after the other until ``over`` is set."""
        actions = {
            self.order: 5, self.retry: 2, self.fund: 6, self.inject_fault: 3, self.replay: 2,
            self.reuse_a_key: 1, self.ask_for_refund: 3, self.poll: 2,
        }  # fmt: skip
        while not over.is_set():
            await self.service.up.wait()
            (action,) = self.random.choices(list(actions), list(actions.values()))
            with suppress(Gone):
                await action()

    async def fund(self) -> None:
        """A deposit for one of the latest orders; sometimes two at once. Raises Gone."""
        if not self.placed:
            return
        placed = self.random.choice(self.placed[-8:])
        amount = self.random.choice(AMOUNTS[placed.request.direction])
        params = {} if amount is None else {"amount": amount}
        deposits = 2 if self.random.random() < 0.15 else 1
        sent = (
            self.service.rpc("sandbox.fund", orderId=placed.order_id, **params)
            for _ in range(deposits)
        )
        with suppress(Refused):  # no amount is due any more
            await asyncio.gather(*sent)

    async def inject_fault(self) -> None:
        """Inject a fault into one of the latest orders. Raises Gone."""
        if self.placed:
            order_id = self.random.choice(self.placed[-12:]).order_id
            fault = self.random.choice(ORDER_FAULTS)
            with suppress(Refused):  # it has no such deposit
                await self.service.rpc("sandbox.fault", fault=fault, orderId=order_id)


async def crash_repeatedly(service: KillableService, seed: int, over: asyncio.Event) -> None:
    """Kill the service at random moments, also during its start; then set ``over``."""
    drawn, end = random.Random(f"{seed} crashes"), time.monotonic() + SECONDS
    while time.monotonic() < end or service.crashes < CRASHES:
        await asyncio.sleep(drawn.uniform(0.2, 4.0))
        service.crash()
        while drawn.random() < 0.25:
            await asyncio.sleep(drawn.uniform(0.1, 1.5))
            service.crash()
        await service.start()
    over.set()


# --- recovery --------------------------------------------------------------------------------


async def recover(service: KillableService, users: Sequence[User]) -> None:
    """End every fault, have every call answered, and let every deadline pass."""
    for fault in ("engine_up", "rates_up", "resume_blocks"):
        await service.rpc("sandbox.fault", fault=fault)
    for user in users:
        await user.retry_all()
    await pass_deadlines(service)
    for attempt in range(3):
        for user in users:
            for placed in user.placed:
                await user.name_refund_address(placed, attempt)
        await settle(service, 1)


# --- the audit afterwards --------------------------------------------------------------------


async def check(data_dir: Path, placed: Sequence[PlacedOrder], in_doubt: int) -> list[str]:
    """All inconsistencies; each call ``in_doubt`` may have placed an order unknown to callers."""
    found = [*audit(data_dir), *_db_check(data_dir)]
    found += [fault for order in await stored(data_dir) for fault in inconsistencies_of(order)]
    reported, there = [each.order_id for each in placed], orders_of(data_dir)
    if len(set(reported)) < len(reported):
        found.append("two calls got one order")
    if lost := set(reported) - set(there):
        found.append(f"acknowledged, and not there: {lost}")
    if len(there) > len(reported) + in_doubt:
        found.append(f"{len(there)} orders, of which {len(reported)} were reported")
    if count(data_dir, "idempotency_keys") != sum(each.request.has_key for each in placed):
        found.append("a key has an order that its caller did not get")
    if count(data_dir, "effects"):
        found.append("work is left over")
    return found


def _db_check(data_dir: Path) -> list[str]:
    command = [sys.executable, "-m", "rpcsvc", "db", "check", "--data-dir", str(data_dir)]
    said = subprocess.run(command, capture_output=True, check=False, text=True)
    return [] if said.returncode == 0 else [said.stdout, said.stderr]


@pytest.mark.slow(seconds=60)
async def test_chaos_loses_no_money_and_pays_nothing_twice(
    tmp_path: Path,
) -> None:
    data_dir = tmp_path / "data"
    with seeded() as seed:
        async with killable_service(data_dir, ENVIRON) as service:
            users = [User(service, f"{seed} {n}", API_KEY) for n in range(CALLERS)]
            over = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for user in users:
                    tasks.create_task(user.run(over))
                tasks.create_task(fault_schedule(service, FAULT_SCHEDULE, seed, over))
                tasks.create_task(crash_repeatedly(service, seed, over))
            await recover(service, users)
            for user in users:
                await user.repeat_all()
            assert service.server.stop() == 0
        placed = [each for user in users for each in user.placed]
        assert placed
        assert service.alarms() == []
        assert await check(data_dir, placed, sum(user.in_doubt for user in users)) == []
