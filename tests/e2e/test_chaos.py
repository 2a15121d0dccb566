"""A server that is killed at random moments, while callers and chains do whatever they like.

Orders over every surface, deposits of every size, every fault of the sandbox, refunds asked for and
replays are drawn from a seed. Afterwards the books are read from outside.
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
from tests.e2e.chaos import Caller, Made, Mortal, Refused, fault_schedule, mortal, seeded
from tests.e2e.chaos_orders import AMOUNTS, come_to_rest, faults_of, let_time_pass, stored
from tests.e2e.processes import Gone
from tests.sandbox import ORDER_FAULTS

API_KEY: Final = "the key of a shop"
ENVIRON: Final = {
    "RPCSVC_INTEGRATORS": f"shop:1.5:{hashlib.sha256(API_KEY.encode()).hexdigest()}",
    "RPCSVC_SANDBOX__RATE_PATH_BPS": "0,12,-7,31,-20,5,25,-33",
    "RPCSVC_SANDBOX__RATE_STEP_SECONDS": "1",
}
SECONDS: Final = 25.0
CALLERS: Final = 6
# A fault is ended more often than it is made: else nothing would move for most of the time.
FAULT_SCHEDULE: Final[list[dict[str, Any]]] = [
    *[{"fault": fault} for fault in ("engine_down", "rates_down", "pause_blocks")],
    *[{"fault": fault} for fault in ("engine_up", "rates_up", "resume_blocks") for _ in range(3)],
    *[{"fault": "set_rate", "rate": rate} for rate in ("120", "165", "166", "190")],
    *[{"fault": "advance_clock", "seconds": seconds} for seconds in (60, 900, 900, 4_000)],
]


class User(Caller):
    """Pays its orders, and has misfortunes with them, as its own random numbers say."""

    async def live(self, end: float) -> None:
        """One deed after the other."""
        deeds = {
            self.order: 5, self.insist: 2, self.fund: 6, self.suffer: 3, self.replay: 2,
            self.reuse_a_key: 1, self.ask_for_refund: 3, self.poll: 2,
        }  # fmt: skip
        while time.monotonic() < end:
            await self.service.up.wait()
            (deed,) = self.random.choices(list(deeds), list(deeds.values()))
            with suppress(Gone):
                await deed()

    async def fund(self) -> None:
        """A deposit for one of the latest orders; two at once now and then. Raises Gone."""
        if not self.made:
            return
        made = self.random.choice(self.made[-8:])
        amount = self.random.choice(AMOUNTS[made.wish.direction])
        params = {} if amount is None else {"amount": amount}
        deposits = 2 if self.random.random() < 0.15 else 1
        sent = (
            self.service.rpc("sandbox.fund", orderId=made.order_id, **params)
            for _ in range(deposits)
        )
        with suppress(Refused):  # nothing is due any more
            await asyncio.gather(*sent)

    async def suffer(self) -> None:
        """A fault of one of the latest orders. Raises Gone."""
        if self.made:
            order_id = self.random.choice(self.made[-12:]).order_id
            fault = self.random.choice(ORDER_FAULTS)
            with suppress(Refused):  # it has no such deposit
                await self.service.rpc("sandbox.fault", fault=fault, orderId=order_id)


async def die_again_and_again(service: Mortal, seed: int, end: float) -> None:
    """Kill the service at random moments, while it starts included."""
    drawn = random.Random(f"{seed} deaths")
    while time.monotonic() < end:
        await asyncio.sleep(drawn.uniform(0.2, 4.0))
        service.die()
        while drawn.random() < 0.25:
            await asyncio.sleep(drawn.uniform(0.1, 1.5))
            service.die()
        await service.start()


# --- coming to rest --------------------------------------------------------------------------


async def heal(service: Mortal, users: Sequence[User]) -> None:
    """End every fault, have every call answered, and let every deadline pass."""
    for fault in ("engine_up", "rates_up", "resume_blocks"):
        await service.rpc("sandbox.fault", fault=fault)
    for user in users:
        await user.settle_calls()
    await let_time_pass(service)
    for attempt in range(3):
        for user in users:
            for made in user.made:
                await user.name_refund_address(made, attempt)
        await come_to_rest(service, 1)


# --- the books afterwards --------------------------------------------------------------------


async def check(data_dir: Path, made: Sequence[Made], forlorn: int) -> list[str]:
    """All that does not add up; ``forlorn`` calls may have made an order that nobody knows."""
    found = [*audit(data_dir), *_db_check(data_dir)]
    found += [fault for order in await stored(data_dir) for fault in faults_of(order)]
    reported, there = [each.order_id for each in made], orders_of(data_dir)
    if len(set(reported)) < len(reported):
        found.append("two calls were told of one order")
    if lost := set(reported) - set(there):
        found.append(f"acknowledged, and not there: {lost}")
    if len(there) > len(reported) + forlorn:
        found.append(f"{len(there)} orders, of which {len(reported)} were told of")
    if count(data_dir, "idempotency_keys") != sum(each.wish.has_key for each in made):
        found.append("a key stands for an order that its caller was not told of")
    if count(data_dir, "effects"):
        found.append("work is left over")
    return found


def _db_check(data_dir: Path) -> list[str]:
    command = [sys.executable, "-m", "rpcsvc", "db", "check", "--data-dir", str(data_dir)]
    said = subprocess.run(command, capture_output=True, check=False, text=True)
    return [] if said.returncode == 0 else [said.stdout, said.stderr]


@pytest.mark.slow
async def test_chaos_loses_no_money_and_pays_nothing_twice(
    tmp_path: Path,
) -> None:
    data_dir = tmp_path / "data"
    with seeded() as seed:
        async with mortal(data_dir, ENVIRON) as service:
            users = [User(service, f"{seed} {n}", API_KEY) for n in range(CALLERS)]
            end = time.monotonic() + SECONDS
            async with asyncio.TaskGroup() as life:
                for user in users:
                    life.create_task(user.live(end))
                life.create_task(fault_schedule(service, FAULT_SCHEDULE, seed, end))
                life.create_task(die_again_and_again(service, seed, end))
            await heal(service, users)
            for user in users:
                await user.repeat_all()
            assert service.server.stop() == 0
        made = [each for user in users for each in user.made]
        assert service.deaths >= 3
        assert made
        assert service.alarms() == []
        assert await check(data_dir, made, sum(user.forlorn for user in users)) == []
