"""kill -9 between the steps of a swap; afterwards the books balance and a retry is safe."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.audit import audit, count, deposits_on_chain, orders_of
from tests.e2e.processes import (
    Crash,
    Gone,
    Server,
    both_sides,
    call,
    call_for_data,
    cpu_seconds,
    crash_name,
    message,
    send,
    server,
    until,
    until_over,
)
from tests.e2e.swaps import MONERO, SWAPS

OVER_THE_MAXIMUM = {"x2u": "400", "u2x": "60000"}
A_WEEK = 7 * 86_400


@dataclass
class Client:
    """The calls of one order's client; repeated from the start after a crash."""

    data_dir: Path
    direction: str
    amount: str | None = None  # of the deposit; the order's amount unless set
    data: bytes = b""  # the first answer to create
    end: dict[str, Any] = field(default_factory=dict)

    async def run(self, at: Server) -> None:
        """Order, fund once, follow to the end. Raises Gone."""
        made = await self.create(at)
        order_id = made["order"]["orderId"]
        await self.fund(at, order_id)
        if self.direction == "x2u" and self.amount == OVER_THE_MAXIMUM["x2u"]:
            await self.give_refund_address(at, order_id, made["sessionId"])
        self.end = await until_over(at, order_id)

    async def create(self, at: Server) -> dict[str, Any]:
        keyed = {**SWAPS[self.direction], "idempotency-key": "the key-01234567"}
        made, data = await call_for_data(at, "swap.execute", keyed)
        self.data = self.data or data
        assert data == self.data, "a retry got another answer"
        return dict(made)

    async def fund(self, at: Server, order_id: str) -> None:
        # A call without an answer may have been carried out: look at the chain.
        if not deposits_on_chain(self.data_dir, order_id):
            amount = {"amount": self.amount} if self.amount else {}
            await call_for_data(at, "sandbox.fund", {"orderId": order_id, **amount})

    async def give_refund_address(self, at: Server, order_id: str, session_id: str) -> None:
        async def waits_or_is_over() -> str | None:
            data = (await call(at, "swap.status", {"orderId": order_id}))["data"]
            return "waits" if data["actionRequired"] else data["outcome"]

        # The address from an earlier run may be in use already: then none is asked for.
        if not count(self.data_dir, "orders WHERE refund_address IS NOT NULL"):
            assert await until(waits_or_is_over) == "waits"
            asked = {"orderId": order_id, "sessionId": session_id, "walletAddress": MONERO}
            await call_for_data(at, "support.create", {"message": "refund, please", **asked})


@dataclass
class Swapped(Client):
    """The exact amount, in time: paid out."""

    outcome = "completed"


@dataclass
class Refunded(Client):
    """More than the maximum: all of it is refunded."""

    outcome = "refunded"

    def __post_init__(self) -> None:
        self.amount = OVER_THE_MAXIMUM[self.direction]


@dataclass
class Expired(Client):
    """No deposit until the deadline."""

    outcome = "expired"

    async def fund(self, at: Server, order_id: str) -> None:
        assert order_id
        await call_for_data(at, "sandbox.fault", {"fault": "advance_clock", "seconds": A_WEEK})


@dataclass
class PartlyPaid(Client):
    """Underpaid but above the minimum at the deadline."""

    outcome = "completed"

    def __post_init__(self) -> None:
        self.amount = "0.5" if self.direction == "x2u" else "100"

    async def fund(self, at: Server, order_id: str) -> None:
        await super().fund(at, order_id)

        async def confirmed() -> bool:
            if at.is_dead:
                raise Gone
            return count(self.data_dir, "deposits WHERE state = 'confirmed'") == 1

        await until(confirmed)
        # Only once: otherwise a week would pass between the decision to swap and the signature.
        if not count(self.data_dir, "sandbox_settings WHERE name = 'clock_offset_ms'"):
            await call_for_data(at, "sandbox.fault", {"fault": "advance_clock", "seconds": A_WEEK})


AnyClient = Swapped | Refunded | Expired | PartlyPaid


async def run_through_crash(client: AnyClient, crash: Crash) -> None:
    """Run the client on a server that is killed at ``crash``, then on one that is not."""
    async with server(client.data_dir, crash=crash) as first:
        with suppress(Gone):
            await client.run(first)
        await first.death()  # a point that is never reached would time out here
    async with server(client.data_dir) as second:
        await client.run(second)
        await client.create(second)
        assert second.stop() == 0
    assert list(orders_of(client.data_dir).values()) == [client.outcome]
    assert count(client.data_dir, "idempotency_keys") == 1
    assert audit(client.data_dir) == []


# A server's first transaction creates the simulated chains; the second is the order with its
# history and the answer under its key.
CREATE = [
    *both_sides(("once", 1), ("open", 1), ("write", 2), ("rows", 3)),
    *[("BEGIN", "after", 2), ("rows", "after", 2), ("rows", "after", 4), ("COMMIT", "after", 2)],
]
DEPOSIT = both_sides(("acknowledge", 1), ("DepositSeen", 1), ("DepositConfirmed", 1))
PAYMENT = both_sides(
    ("prepare", 1),
    ("TransferPrepared", 1),
    ("look_up", 1),
    ("publish", 1),
    ("TransferPublished", 1),
    ("look_up", 2),
    ("TransferSettled", 1),
)
PAYMENT_IN_SHORT = [
    pytest.param(("prepare", "after", 1), marks=pytest.mark.slow),
    ("TransferPrepared", "after", 1),
    pytest.param(("publish", "after", 1), marks=pytest.mark.slow),
]
DEADLINE = both_sides(("DeadlinePassed", 1))
# The deposit's transaction is the fourth; each later one is a step of settlement or of the chains.
COMMITS = [(seam, "after", n) for n in range(4, 13) for seam in ("BEGIN", "COMMIT")]


@pytest.mark.slow
@pytest.mark.parametrize("crash", CREATE, ids=crash_name)
async def test_a_crash_in_create_leaves_all_of_the_order_or_nothing(
    tmp_path: Path, crash: Crash
) -> None:
    data_dir = tmp_path / "data"
    client = Swapped(data_dir, "x2u")
    async with server(data_dir, crash=crash) as first:
        with pytest.raises(Gone):
            await client.create(first)
        await first.death()
        orders, keys = (count(data_dir, table) for table in ("orders", "idempotency_keys"))
        assert orders == keys <= 1
    async with server(data_dir) as second:
        for _ in range(2):
            await client.create(second)
        if orders:
            with_key = count(data_dir, "order_events WHERE version = 1")
            assert with_key == 1, "the retry made another order"
        assert second.stop() == 0
    assert count(data_dir, "orders") == count(data_dir, "idempotency_keys") == 1
    assert audit(data_dir) == []


@pytest.mark.parametrize("crash", PAYMENT_IN_SHORT, ids=crash_name)
async def test_a_crash_in_settlement_ends_in_exactly_one_payout(
    tmp_path: Path, crash: Crash
) -> None:
    await run_through_crash(Swapped(tmp_path / "data", "x2u"), crash)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "direction", "crash"),
    [
        (Refunded, "u2x", ("TransferPrepared", "after", 1)),
        (Refunded, "x2u", ("publish", "after", 1)),
        (Expired, "x2u", ("DeadlinePassed", "before", 1)),
        (PartlyPaid, "u2x", ("DeadlinePassed", "after", 1)),
    ],
    ids=["u2x refund", "x2u refund", "expiry", "part"],
)
async def test_crash_in_a_refund_or_at_a_deadline_keeps_the_outcome(
    tmp_path: Path, client: type[AnyClient], direction: str, crash: Crash
) -> None:
    await run_through_crash(client(tmp_path / "data", direction), crash)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["x2u", "u2x"])
@pytest.mark.parametrize(
    ("client", "crash"),
    [
        *[(Swapped, crash) for crash in (*DEPOSIT, *PAYMENT)],
        *[(Refunded, crash) for crash in PAYMENT],
        *[(Expired, crash) for crash in DEADLINE],
        *[(PartlyPaid, crash) for crash in DEADLINE],
    ],
    ids=crash_name,
)
async def test_a_crash_at_any_step_ends_as_if_there_had_been_none(
    tmp_path: Path, client: type[AnyClient], direction: str, crash: Crash
) -> None:
    await run_through_crash(client(tmp_path / "data", direction), crash)


@pytest.mark.slow
@pytest.mark.parametrize("crash", COMMITS, ids=crash_name)
async def test_a_crash_in_any_transaction_ends_in_exactly_one_payout(
    tmp_path: Path, crash: Crash
) -> None:
    await run_through_crash(Swapped(tmp_path / "data", "u2x"), crash)


# --- under load ------------------------------------------------------------------------------


class Load:
    """Clients that order and fund while the server is killed and restarted."""

    def __init__(self, data_dir: Path, seed: int) -> None:
        self.server = Server(data_dir)
        self.acknowledged: dict[str, tuple[str, str, bytes]] = {}  # key: direction, order id, data
        self.deaths = 0
        self.is_stopping = False
        self._random = random.Random(seed)
        self._started = 0

    async def kill_after(self, more: int) -> None:
        """Kill the server once so many more orders are acknowledged, and start it again."""
        target = len(self.acknowledged) + more

        async def reached() -> bool:
            return len(self.acknowledged) >= target

        await until(reached)
        self.server.kill()
        self.deaths += 1
        self.server = Server(self.server.data_dir)
        assert await self.server.ready()

    async def client(self) -> None:
        while not self.is_stopping:
            self._started += 1
            key, direction = f"key-{self._started:012}", self._random.choice(["x2u", "u2x"])
            keyed = {**SWAPS[direction], "idempotency-key": key}
            made, data = await until(partial(self._order, keyed))
            order_id = made["order"]["orderId"]
            self.acknowledged[key] = (direction, order_id, data)
            with suppress(Gone):
                await call(self.server, "sandbox.fund", {"orderId": order_id})

    async def _order(self, keyed: dict[str, Any]) -> tuple[Any, bytes] | None:
        with suppress(Gone):
            return await call_for_data(self.server, "swap.execute", keyed)
        return None

    async def settle(self) -> None:
        """Repeat deposits that a killed server may have lost, and follow every order to its end."""
        for _, order_id, _ in self.acknowledged.values():
            if not deposits_on_chain(self.server.data_dir, order_id):
                await call_for_data(self.server, "sandbox.fund", {"orderId": order_id})
        for _, order_id, _ in self.acknowledged.values():
            assert (await until_over(self.server, order_id))["state"] == "completed"

    async def replay(self) -> None:
        """Every key still gives the first answer, byte for byte."""
        for key, (direction, _, data) in self.acknowledged.items():
            keyed = {**SWAPS[direction], "idempotency-key": key}
            assert (await call_for_data(self.server, "swap.execute", keyed))[1] == data


@pytest.mark.slow(seconds=55)
async def test_many_kills_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    data_dir, kills = tmp_path / "data", 25
    load = Load(data_dir, seed=7)
    pauses = random.Random(11)
    assert await load.server.ready()
    clients = asyncio.gather(*(load.client() for _ in range(6)))
    try:
        for _ in range(kills):
            await load.kill_after(pauses.randint(1, 60))
        load.is_stopping = True
        await clients
        await load.settle()
        await load.replay()
        assert load.server.stop() == 0
    finally:
        clients.cancel()
        if not load.server.is_dead:
            load.server.kill()
    acknowledged = [order_id for _, order_id, _ in load.acknowledged.values()]
    assert len(set(acknowledged)) == len(acknowledged) > kills == load.deaths
    assert set(acknowledged) == set(orders_of(data_dir)), "an order was lost or made twice"
    assert set(orders_of(data_dir).values()) == {"completed"}
    assert audit(data_dir) == []


# --- starting --------------------------------------------------------------------------------


async def test_a_second_server_on_the_same_data_directory_is_refused(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    async with server(data_dir) as first:
        second = Server(data_dir)
        assert await second.death() == 2
        reported = second.log.read_text()
        assert "Another process already serves the data directory" in reported
        assert "Traceback" not in reported
        assert (await call(first, "swap.execute", SWAPS["x2u"]))["ok"]


async def batched(at: Server, method: str, each: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The data of many calls, fifty to a batch."""
    data = []
    for start in range(0, len(each), 50):
        batch = [message(method, params, n) for n, params in enumerate(each[start : start + 50])]
        answers = json.loads(await send(at, batch))
        assert all(answer["result"]["ok"] for answer in answers), answers
        data += [answer["result"]["data"] for answer in answers]
    return data


async def crash_with_payouts_pending(data_dir: Path, orders: int) -> float:
    """Kill a server with ``orders`` open orders, each with a payout pending.

    Returns the CPU seconds of its start without orders, for comparison.
    """
    async with server(data_dir) as first:
        usual = cpu_seconds(first.pid)
        made = await batched(first, "swap.execute", [SWAPS["u2x"]] * orders)
        await call_for_data(first, "sandbox.fault", {"fault": "engine_down"})
        await batched(first, "sandbox.fund", [{"orderId": m["order"]["orderId"]} for m in made])

        async def pending() -> bool:
            return count(data_dir, "effects") == orders

        await until(pending)
        first.kill()
    return usual


@pytest.mark.slow(seconds=50)
@pytest.mark.parametrize("orders", [200, 1_000])
async def test_restart_with_open_orders_is_quick_and_finishes_them(
    tmp_path: Path, orders: int
) -> None:
    data_dir = tmp_path / "data"
    usual = await crash_with_payouts_pending(data_dir, orders)
    again = Server(data_dir)
    try:

        async def answers() -> bool:
            return (await again.health("/livez")).get("http") == 200

        await until(answers)
        assert cpu_seconds(again.pid) <= 10 * usual
        await call_for_data(again, "sandbox.fault", {"fault": "engine_up"})
        await until(again.is_well)

        async def all_over() -> bool:
            return set(orders_of(data_dir).values()) == {"completed"}

        await until(all_over, seconds=600)
        assert again.stop() == 0
    finally:
        if not again.is_dead:
            again.kill()
    assert len(orders_of(data_dir)) == orders
    assert audit(data_dir) == []
