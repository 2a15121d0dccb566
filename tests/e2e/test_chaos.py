"""A server that is killed at random moments, while callers and chains do whatever they like.

Orders over every surface, deposits of every size, every fault of the sandbox, refunds asked for
and replays are drawn from a seed. Afterwards the books are read from outside. What does not live
here: crashes at chosen steps (test_crash.py), a service in front of another
(test_chaos_sidecar.py).
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
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest

from rpcsvc.domain.order import Order, OrderStatus, Transfer, TransferKind, TransferState
from rpcsvc.domain.pricing import keeps_proportion
from rpcsvc.store.backends.sqlite.database import Database
from rpcsvc.store.orders import SqliteOrderStore
from tests.e2e.audit import audit, count, orders_of
from tests.e2e.chaos import Caller, Made, Mortal, Refused, mortal, seeded, weather
from tests.e2e.processes import Gone, until
from tests.sandbox import ORDER_FAULTS

API_KEY: Final = "the key of a shop"
ENVIRON: Final = {
    "RPCSVC_INTEGRATORS": f"shop:1.5:{hashlib.sha256(API_KEY.encode()).hexdigest()}",
    "RPCSVC_SANDBOX__RATE_PATH_BPS": "0,12,-7,31,-20,5,25,-33",
    "RPCSVC_SANDBOX__RATE_STEP_SECONDS": "1",
}
SECONDS: Final = 25.0
CALLERS: Final = 6
# What is due, dust, too little, enough but less, more, and above the maximum.
AMOUNTS: Final = {
    "x2u": [None, None, None, "0.00005", "0.01", "0.3", "1", "7", "1000"],
    "u2x": [None, None, None, "0.01", "2", "60", "200", "1100", "60000"],
}
# A fault is ended more often than it is made: else nothing would move for most of the time.
WEATHER: Final[list[dict[str, Any]]] = [
    *[{"fault": fault} for fault in ("engine_down", "rates_down", "pause_blocks")],
    *[{"fault": fault} for fault in ("engine_up", "rates_up", "resume_blocks") for _ in range(3)],
    *[{"fault": "set_rate", "rate": rate} for rate in ("120", "165", "166", "190")],
    *[{"fault": "advance_clock", "seconds": seconds} for seconds in (60, 900, 900, 4_000)],
]
HOUR: Final = 3_600
# More than any order of these has.
MOST_CHUNKS: Final = 200
GONE: Final = (TransferState.FAILED, TransferState.CANCELLED)


class User(Caller):
    """Pays its orders, and has misfortunes with them, as its own random numbers say."""

    async def live(self, end: float) -> None:
        """One deed after the other."""
        deeds = {
            self.order: 5, self.insist: 2, self.fund: 6, self.suffer: 3, self.replay: 2,
            self.reuse_a_key: 1, self.ask_for_refund: 3, self.look: 2,
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


async def let_time_pass(service: Mortal) -> None:
    """Until every deadline has passed, and every chunk was swapped or given up."""
    for seconds in (1, 2 * HOUR, 2 * HOUR, 25 * HOUR, HOUR):
        await come_to_rest(service, seconds)
    for _ in range(MOST_CHUNKS):
        if count(service.data_dir, "effects"):
            await come_to_rest(service, HOUR)


async def come_to_rest(service: Mortal, seconds: int) -> None:
    """Let time pass, and wait until all that is due then is done."""
    answer = await service.rpc("sandbox.fault", fault="advance_clock", seconds=seconds)
    now = int(datetime.fromisoformat(answer["now"]).timestamp() * 1000)
    due = (
        "effects WHERE kind <> 'fill_chunk'",  # a chunk may wait for a fair rate
        "sandbox_transactions WHERE state = 'mempool'",
        "sandbox_transactions WHERE state = 'dropped' AND watched = 1",
        "deposits WHERE state = 'seen'",
        f"orders WHERE deadline_at <= {now}",
    )

    async def is_done() -> bool:
        return not any(count(service.data_dir, table) for table in due)

    try:
        await until(is_done)
    except TimeoutError:
        left = [table for table in due if count(service.data_dir, table)]
        raise AssertionError(f"it does not come to rest: {left}") from None


# --- the books afterwards --------------------------------------------------------------------


async def check(data_dir: Path, made: Sequence[Made], forlorn: int) -> list[str]:
    """All that does not add up; ``forlorn`` calls may have made an order that nobody knows."""
    found = [*audit(data_dir), *_db_check(data_dir)]
    found += [fault for order in await stored(data_dir) for fault in faults_of(order)]
    told, there = [each.order_id for each in made], orders_of(data_dir)
    if len(set(told)) < len(told):
        found.append("two calls were told of one order")
    if lost := set(told) - set(there):
        found.append(f"acknowledged, and not there: {lost}")
    if len(there) > len(told) + forlorn:
        found.append(f"{len(there)} orders, of which {len(told)} were told of")
    if count(data_dir, "idempotency_keys") != sum(each.wish.has_key for each in made):
        found.append("a key stands for an order that its caller was not told of")
    if count(data_dir, "effects"):
        found.append("work is left over")
    return found


def _db_check(data_dir: Path) -> list[str]:
    command = [sys.executable, "-m", "rpcsvc", "db", "check", "--data-dir", str(data_dir)]
    said = subprocess.run(command, capture_output=True, check=False, text=True)
    return [] if said.returncode == 0 else [said.stdout, said.stderr]


async def stored(data_dir: Path) -> list[Order]:
    """All orders, as the books have them."""
    database = await Database.open(data_dir)
    try:
        store = SqliteOrderStore(database, str)
        found = [await store.order(order_id) for order_id in orders_of(data_dir)]
        return [order for order in found if order is not None]
    finally:
        await database.close()


def faults_of(order: Order) -> list[str]:
    """What is wrong with an order that is at rest, by its own terms."""
    found = []
    if not order.status.is_terminal and order.action_required is None:
        found.append(f"is {order.status}, and waits for nobody")
    sent = [transfer for transfer in order.transfers if transfer.state not in GONE]
    if any(transfer.state is not TransferState.SETTLED for transfer in sent):
        found.append("has a transfer that is not at its end")
    payouts = [transfer for transfer in sent if transfer.kind is TransferKind.PAYOUT]
    if len(payouts) != (order.status is OrderStatus.COMPLETED):
        found.append(f"is {order.status} with {len(payouts)} payouts")
    found += [fault for payout in payouts for fault in _payout_faults(order, payout)]
    beside = sum(_beside_deposits(order, t) for t in sent if t.kind is TransferKind.REFUND)
    if not 0 <= beside <= sum(_unswapped(order, payout) for payout in payouts):
        found.append(f"was sent {beside} back beside its deposits")
    return [f"{order.order_id} {each}" for each in found]


def _payout_faults(order: Order, payout: Transfer) -> list[str]:
    terms = order.terms
    taken = [d for d in order.deposits if d.transfer_id == payout.transfer_id]
    total = sum(d.units for d in taken)
    if order.fills:
        brought = sum(fill.output for fill in order.fills)
        is_right = payout.units == brought and _unswapped(order, payout) >= 0
    elif any(d.first_seen_at > order.price_locked_until for d in taken):
        is_right = keeps_proportion(
            output=payout.units,
            deposited=total,
            min_received=terms.min_received,
            deposit_amount=terms.deposit_amount,
        )
    else:
        is_right = payout.units == terms.price.output(terms.direction, total)
    return [] if is_right else [f"was paid {payout.units} for {total}"]


def _unswapped(order: Order, payout: Transfer) -> int:
    """What the chunks left of the deposits that were paid out, in deposit units."""
    if not order.fills:
        return 0
    taken = sum(d.units for d in order.deposits if d.transfer_id == payout.transfer_id)
    return taken - sum(fill.units for fill in order.fills)


def _beside_deposits(order: Order, refund: Transfer) -> int:
    """What a refund sends beside whole deposits, in deposit units."""
    taken = sum(d.units for d in order.deposits if d.transfer_id == refund.transfer_id)
    return refund.units + refund.fee - taken


@pytest.mark.slow
async def test_whatever_happens_and_whenever_it_dies_no_money_is_lost_or_paid_twice(
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
                life.create_task(weather(service, WEATHER, seed, end))
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
