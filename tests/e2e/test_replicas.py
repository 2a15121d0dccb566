"""Replicas on one PostgreSQL: all take orders, one settles, the others take over from it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from rpcsvc.bootstrap import running
from rpcsvc.settings import load_settings
from rpcsvc.store.database import DatabaseInUse
from tests.contract.paying import signed
from tests.contract.sidecar import STAGENET
from tests.contract.store.cutting import COMMIT, Proxy, proxied
from tests.e2e.audit import count
from tests.e2e.bad_line import bad_line
from tests.e2e.cluster import TOKEN, Replicas, replicas
from tests.e2e.histories import History, violations
from tests.e2e.patched import LEASING, POLLING, environ_of
from tests.e2e.processes import (
    TIMEOUT_SECONDS,
    Gone,
    Server,
    admin,
    call,
    call_for_data,
    message,
    send,
    server,
    until,
    until_over,
)
from tests.e2e.sidecar import environ
from tests.e2e.swaps import MONERO, SWAPS
from tests.postgres import new_database, own_server

# docs/operate/cluster.md. A busy machine may be late: one of so many take-overs has to keep it.
TAKE_OVER_SECONDS = 15
TAKE_OVERS = 3


async def order(at: Server, key: str) -> tuple[str, bytes]:
    """Make an order, and have it funded; its id and the answer. Raises Gone."""
    data, body = await call_for_data(at, "swap.execute", {**SWAPS["u2x"], "idempotency-key": key})
    order_id = data["order"]["orderId"]
    status = await call(at, "swap.status", {"orderId": order_id})
    if status["state"] == "waiting_for_funding":
        with suppress(AssertionError):  # the deposit is pending: no amount is due
            await call_for_data(at, "sandbox.fund", {"orderId": order_id})
    return str(order_id), body


# The orders are paid out in XMR; a transfer on another network is a refund.
_PAYOUTS = (
    "SELECT count(*) FROM sandbox_transactions WHERE kind = 'transfer' AND network = 'monero'"
)
_DEPOSITS = "SELECT count(*) FROM sandbox_transactions WHERE kind = 'deposit'"


async def test_standby_takes_over_from_a_process_that_was_killed(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        first = await up.start_ready()
        second = await up.start_ready()
        order_id, answer = await order(first, "a key of sixteen or more")
        first.kill()
        await up.end_lease()
        assert await up.holder() is second
        assert await order(second, "a key of sixteen or more") == (order_id, answer)
        assert (await until_over(second, order_id))["state"] == "completed"
        assert await up.value(_PAYOUTS) == 1
        third = up.start()
        await until(lambda: said(third, "lease_awaited"))
        assert third.stop() == 0, "a standby ends when it is told to"
        fourth = up.start()
        await until(lambda: said(fourth, "lease_awaited"))
        assert second.stop() == 0
        assert await up.holder() is fourth, "what was released is free at once"


@pytest.mark.slow
async def test_standby_settles_soon_after_the_settler_was_killed(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    took: list[float] = []
    async with replicas(postgres(), tmp_path) as up:
        settler = await up.start_ready()
        while len(took) < TAKE_OVERS:
            standby = await up.start_ready()
            settler.kill()
            began = time.monotonic()
            assert await up.holder() is standby
            took.append(time.monotonic() - began)
            if took[-1] <= TAKE_OVER_SECONDS:
                return
            settler = standby
    pytest.fail(f"took {took} seconds")


async def test_standby_notifies_systemd_that_it_is_ready(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(TIMEOUT_SECONDS)

        async def heard(text: str) -> None:
            while text not in (await asyncio.to_thread(manager.recv, 4096)).decode():
                pass

        async with replicas(postgres(), tmp_path) as up:
            first = await up.start_ready()
            second = up.start(NOTIFY_SOCKET=address, WATCHDOG_USEC="600000")
            await heard("READY=1\nSTATUS=Standing by on ")
            await heard("WATCHDOG=1")
            first.kill()
            await up.end_lease()
            await heard("READY=1\nSTATUS=Serving ")
            await heard("WATCHDOG=1")
            assert second.stop() == 0
            await heard("STOPPING=1")


async def said(at: Server, event: str) -> bool:
    return event in at.log.read_text()


async def test_replica_reads_what_the_other_has_committed(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        first = await up.start_ready()
        second = await up.start_ready()
        swap = {**SWAPS["u2x"], "idempotency-key": "a key of sixteen or more"}
        data, body = await call_for_data(first, "swap.execute", swap)
        made = {"orderId": data["order"]["orderId"]}
        asked = [await call_for_data(at, "swap.status", made) for at in (first, second)]
        assert asked[0] == asked[1], "it is there as soon as its creator was answered"
        assert await call_for_data(second, "swap.execute", swap) == (data, body), "a retry"
        waiting = asyncio.create_task(
            call(second, "swap.events", {**made, "after": 1, "waitSec": 25})
        )
        await call_for_data(first, "sandbox.fund", made)
        events = (await waiting)["data"]["events"]
        assert events[0]["type"] == "deposit.seen", "a long poll hears of the other's commits"
        assert (await until_over(second, made["orderId"]))["state"] == "completed"


async def paid_by(at: Server, params: dict[str, Any]) -> Any:
    """The data of a payment, sent again as the answer says: the order may change meanwhile."""
    for _ in range(10):
        answer = await call(at, "swap.fund", params)
        if answer["ok"] or not answer["error"]["retryable"]:
            break
    assert answer["ok"], answer
    return answer["data"]


async def test_payment_signed_at_a_standby_is_answered_once_it_is_made(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        await up.start_ready()
        standby = await up.start_ready()
        made, _ = await call_for_data(standby, "swap.execute", SWAPS["u2x"])
        to = {"orderId": made["order"]["orderId"]}
        asked = await call(standby, "swap.fund", to)
        required = asked["error"]["details"]["paymentRequired"]
        payment = await signed(required)
        paid = await paid_by(standby, {**to, "payment": payment})
        assert paid["paymentResponse"]["success"], "the settler has sent it meanwhile"
        assert (await until_over(standby, to["orderId"]))["state"] == "completed"
        assert await up.value(_DEPOSITS) == 1


async def test_every_replica_takes_orders_and_the_settler_settles_them(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        first = await up.start_ready()
        second, third = await up.start_ready(), await up.start_ready()
        data, _ = await call_for_data(second, "swap.execute", SWAPS["x2u"])
        made = {"orderId": data["order"]["orderId"], "sessionId": data["sessionId"]}
        polled = [await call(at, "swap.status", {"orderId": made["orderId"]}) for at in up.all]
        assert [answer["state"] for answer in polled] == ["waiting_for_funding"] * 3
        await call_for_data(third, "sandbox.fault", {"fault": "set_rate", "rate": "100"})
        await until(lambda: quotes_at(second, "100"))
        funded = {"orderId": made["orderId"], "amount": "0.7"}
        await call_for_data(second, "sandbox.fault", {"fault": "advance_clock", "seconds": 4_000})
        await until(lambda: has_state(third, made["orderId"], "waiting_for_funding"))
        await call_for_data(third, "sandbox.fund", funded)
        refund = await until(lambda: waits_for_address(second, made["orderId"]))
        assert refund["state"] == "refunding", "late, and the rate has moved: sent back"
        named = {**made, "walletAddress": MONERO, "message": "Send it back."}
        await call_for_data(third, "support.create", named)
        assert (await until_over(second, made["orderId"]))["data"]["outcome"] == "refunded"
        cancelled, _ = await call_for_data(third, "swap.execute", SWAPS["u2x"])
        order_id = cancelled["order"]["orderId"]
        ending = {"orderId": order_id, "sessionId": cancelled["sessionId"]}
        await call_for_data(second, "swap.cancel", ending)
        assert (await call(first, "swap.status", {"orderId": order_id}))["data"]["outcome"] == (
            "expired"
        )
        assert not await said(second, "lease_taken")
        assert not await said(third, "lease_taken")


async def test_transfer_is_retried_at_a_replica_that_does_not_settle(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        await up.start_ready()
        standby = await up.start_ready()
        data, _ = await call_for_data(standby, "swap.execute", SWAPS["u2x"])
        made = {"orderId": data["order"]["orderId"]}
        await call_for_data(standby, "sandbox.fault", {"fault": "engine_down"})
        await call_for_data(standby, "sandbox.fund", made)

        async def is_pending() -> bool:
            return bool(await up.value("SELECT count(*) FROM effects WHERE hurried = 0"))

        await until(is_pending)
        transfer = {"transferId": f"{made['orderId']}/payout/1"}
        await admin(standby.data_dir, "payouts.retry", transfer)
        await until(is_pending)
        await call_for_data(standby, "sandbox.fault", {"fault": "engine_up"})
        assert (await until_over(standby, made["orderId"]))["state"] == "completed"


async def quotes_at(at: Server, rate: str) -> bool:
    terms = {name: SWAPS["x2u"][name] for name in ("direction", "chain", "amount")}
    quote = await call(at, "swap.quote", terms)
    return bool(quote["ok"]) and quote["data"]["quote"]["rate"] == rate


async def has_state(at: Server, order_id: str, state: str) -> bool:
    return bool((await call(at, "swap.status", {"orderId": order_id}))["state"] == state)


async def waits_for_address(at: Server, order_id: str) -> dict[str, Any] | None:
    status = await call(at, "swap.status", {"orderId": order_id})
    return status if status["data"].get("actionRequired") else None


async def test_one_deposit_is_sent_by_many_calls_for_what_is_due(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        first = await up.start_ready()
        await up.start_ready()
        data, _ = await call_for_data(first, "swap.execute", SWAPS["u2x"])
        made = {"orderId": data["order"]["orderId"]}
        calls = (call(at, "sandbox.fund", made) for at in up.all * 10)
        answers = await asyncio.gather(*calls)
        assert sum(answer["ok"] for answer in answers) == 1
        assert await up.value(_DEPOSITS) == 1


@asynccontextmanager
async def behind(
    postgres: Callable[[], str], folder: Path
) -> AsyncIterator[tuple[Replicas, Server]]:
    """Replicas of the engine upstream, and the exchange that settles their orders."""
    async with (
        server(folder / "exchange") as exchange,
        replicas(postgres(), folder, environ(exchange.port) | environ_of(POLLING)) as up,
    ):
        await up.start_ready()
        yield up, exchange


async def test_orders_of_an_address_are_counted_over_all_replicas(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with server(tmp_path / "exchange") as exchange:
        limits = {"RPCSVC_ORDERS__ADDRESS_ORDERS_A_DAY": "2", "AGENT_RPC_TOKEN": TOKEN}
        environment = {**environ(exchange.port), **limits}
        async with (
            replicas(postgres(), tmp_path, environment) as up,
            aiohttp.ClientSession() as session,
        ):
            answers = []
            for at in [await up.start_ready(), await up.start_ready()] * 2:
                url = f"{at.url}/api/v1/agent/swap/execute"
                async with session.post(url, json=SWAPS["x2u"]) as response:
                    answers.append((response.status, await response.json()))
    assert [status for status, _ in answers] == [200, 200, 429, 429]
    assert all("2 orders today" in body["error"]["message"] for _, body in answers[2:])


async def test_every_replica_orders_at_the_upstream_and_one_follows(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with behind(postgres, tmp_path) as (up, exchange):
        second, third = await up.start_ready(), await up.start_ready()
        data, _ = await call_for_data(second, "swap.execute", SWAPS["x2u"])
        made = {"orderId": data["order"]["orderId"]}
        theirs = await up.value("SELECT upstream_id FROM orders")
        await call_for_data(exchange, "sandbox.fund", {"orderId": theirs})
        seen, _ = await call_for_data(third, "swap.status", made)
        assert seen["order"]["checkoutUrl"] == data["order"]["checkoutUrl"]
        assert (await until_over(third, made["orderId"]))["state"] == "completed"
        cancelled, _ = await call_for_data(third, "swap.execute", SWAPS["x2u"])
        ending = {"orderId": cancelled["order"]["orderId"], "sessionId": cancelled["sessionId"]}
        await call_for_data(second, "swap.cancel", ending)
        ended = await call(up.all[0], "swap.status", {"orderId": ending["orderId"]})
        assert ended["data"]["outcome"] == "expired"
        for each in (second, third):
            assert not await said(each, "lease_taken")


async def test_any_replica_of_a_sidecar_takes_payments_and_refunds(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with behind(postgres, tmp_path) as (up, exchange):
        second = await up.start_ready()
        made, _ = await call_for_data(second, "swap.execute", {**SWAPS["u2x"], "to": STAGENET})
        to = {"orderId": made["order"]["orderId"]}
        asked = await call(second, "swap.fund", to)
        payment = await signed(asked["error"]["details"]["paymentRequired"])
        await paid_by(second, {**to, "payment": payment})
        assert (await until_over(second, to["orderId"]))["state"] == "completed"
        assert count(exchange.data_dir, "funding_authorizations") == 1
        failing, _ = await call_for_data(second, "swap.execute", SWAPS["x2u"])
        order_id = failing["order"]["orderId"]
        theirs = await up.value("SELECT upstream_id FROM orders WHERE direction = 'x2u'")
        fault = {"fault": "payout_fails", "orderId": theirs}
        await call_for_data(exchange, "sandbox.fault", fault)
        await call_for_data(exchange, "sandbox.fund", {"orderId": theirs})
        await until(partial(waits_for_address, second, order_id))
        owner = {"orderId": order_id, "sessionId": failing["sessionId"]}
        ticket = {**owner, "walletAddress": STAGENET, "message": "Send it back."}
        answer, _ = await call_for_data(second, "support.create", ticket)
        assert answer["refundAddress"]["accepted"]
        assert (await until_over(second, order_id))["data"]["outcome"] == "refunded"
        assert not await said(second, "lease_taken")


async def test_one_key_on_all_replicas_asks_the_upstream_once(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with behind(postgres, tmp_path) as (up, exchange):
        for _ in range(2):
            await up.start_ready()
        answers = await asyncio.gather(*(answered(up.all[n % 3], "x2u") for n in range(200)))
        assert len(set(answers)) == 1
        assert await up.value("SELECT count(*) FROM orders") == 1
        assert await up.value("SELECT count(*) FROM relays") == 1
        assert count(exchange.data_dir, "orders") == 1


async def test_order_made_for_a_caller_that_was_killed_is_found_again(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with behind(postgres, tmp_path) as (up, exchange):
        caller = await up.start_ready()
        async with locked(up.url, "orders"):
            asking = asyncio.create_task(keyed(caller, "x2u"))
            await until(partial(has_made, exchange))
            caller.kill()  # the upstream has made the order, and nothing is recorded of it
            with pytest.raises(Gone):
                await asking
        assert await up.value("SELECT state FROM relays") == "claimed"
        await let_claims_end(up, claimed_until=int(time.time() * 1000))
        await until(lambda: up.value("SELECT 1 FROM relays WHERE state = 'reconciling'"))
        await keyed(up.all[0], "x2u")
        assert await up.value("SELECT count(*) FROM orders") == 1
        assert count(exchange.data_dir, "orders") == 1


@asynccontextmanager
async def locked(url: str, table: str) -> AsyncIterator[None]:
    """Lock the table against inserts within the block; reads pass."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"BEGIN; LOCK TABLE {table} IN SHARE MODE")
        yield
    finally:
        await connection.close()


async def has_made(exchange: Server) -> bool:
    return count(exchange.data_dir, "orders") == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_replicas_killed_while_they_ask_make_no_order_twice(
    postgres: Callable[[], str], tmp_path: Path, seed: int
) -> None:
    """Callers and the settler are killed between a claim and its outcome; connections fail."""
    dice = random.Random(seed)
    over = asyncio.Event()
    async with (
        server(tmp_path / "exchange") as exchange,
        bad_line(exchange.port, seed=seed, rate=0.2) as line,
        replicas(postgres(), tmp_path, environ(line.port)) as up,
    ):
        up.start()
        up.supervised = 3
        async with asyncio.TaskGroup() as clients:
            asking = [clients.create_task(placed_until(over, up, n)) for n in range(6)]
            for _ in range(4):
                holder = await up.holder()
                await until(lambda: up.value(_UNDER_WAY))
                dice.choice([holder, *up.alive]).kill()
                await asyncio.sleep(dice.uniform(0, 2))
            await until(lambda: up.value(f"SELECT count(*) > {len(asking)} FROM orders"))
            over.set()
            line.rate = 0
            up.kill()
            await let_claims_end(up, claimed_until=int(time.time() * 1000))
        orders = [order_id for each in asking for order_id in each.result()]
        assert len(set(orders)) == len(orders) > len(asking)
        assert await up.value("SELECT count(*) FROM orders") == len(orders)
        assert await up.value("SELECT count(*) FROM relays WHERE state = 'created'") == len(orders)
        assert count(exchange.data_dir, "orders") == len(orders)


async def let_claims_end(up: Replicas, *, claimed_until: int) -> None:
    """Have the claims of callers that are dead be old enough to be in doubt."""
    await up.value(
        "UPDATE relays SET written_at = written_at - 150000"
        f" WHERE state = 'claimed' AND written_at <= {claimed_until}"
    )


async def placed_until(over: asyncio.Event, up: Replicas, client: int) -> list[str]:
    """Create one order after the other; the ids of all that were made."""
    orders: list[str] = []
    while not over.is_set():
        orders.append(await placed(up, f"client {client}, its order {len(orders)}"))
    return orders


_UNDER_WAY = "SELECT count(*) FROM relays WHERE state = 'claimed'"


async def placed(up: Replicas, key: str) -> str:
    """Repeat one create at any replica until it succeeds; the order's id."""
    dice = random.Random(key)
    swap = {**SWAPS["x2u"], "idempotency-key": key}
    while True:
        with suppress(Gone, AssertionError, TimeoutError):
            async with asyncio.timeout(15):
                data, _ = await call_for_data(dice.choice(up.alive), "swap.execute", swap)
                return str(data["order"]["orderId"])
        await asyncio.sleep(0.2)


async def test_process_paused_past_its_lease_writes_nothing_and_ends(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path, environ_of(LEASING)) as up:
        first = await up.start_ready()
        order_id, _ = await order(first, "a key of sixteen or more")
        second = up.start()
        await until(lambda: said(second, "lease_awaited"))
        os.kill(first.pid, signal.SIGSTOP)
        assert await up.holder(besides=(first,)) is second
        os.kill(first.pid, signal.SIGCONT)
        assert await first.death() == 1
        assert await said(first, "lease_lost")
        assert (await until_over(second, order_id))["state"] == "completed"
        assert await up.value(_PAYOUTS) == 1
        assert await up.value("SELECT token FROM leases") == 2


async def test_process_that_does_not_wait_is_refused_beside_another(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with new_database(postgres()) as url:
        one, other = (
            load_settings(
                config_file=None,
                environ={"RPCSVC_DATABASE_URL": url},
                flags={"data_dir": str(tmp_path / name)},
            )
            for name in ("one", "other")
        )
        async with running(one.settings):
            with pytest.raises(DatabaseInUse, match=str(os.getpid())):
                async with running(other.settings):
                    pass
        async with running(other.settings):
            pass


@pytest.mark.slow
async def test_replicas_killed_at_random_lose_and_double_nothing(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    """Three replicas, clients that repeat until they are answered, and faults meanwhile."""
    dice = random.Random(0)
    async with replicas(postgres(), tmp_path) as up:
        up.module = "tests.e2e.stepping"
        up.start()
        await up.holder()  # it created the keys that the others copy
        up.supervised = 3
        clients = Clients(up)
        for fault in dice.sample(["kill", "pause", "step", "kill", "pause", "step"], 6):
            await asyncio.sleep(dice.uniform(0, 2))
            holder = await up.holder()
            struck = dice.choice([holder, *up.alive])
            if fault == "kill":
                struck.kill()
                continue
            if fault == "step":
                for _ in range(2):  # away, and back to the true time
                    os.kill(struck.pid, signal.SIGUSR2)
                    await asyncio.sleep(dice.uniform(0, 2))
                continue
            os.kill(struck.pid, signal.SIGSTOP)
            if struck is holder:
                await up.holder(besides=(struck,))
            else:
                await asyncio.sleep(dice.uniform(0, 2))
            os.kill(struck.pid, signal.SIGCONT)
            if struck is holder:
                assert await struck.death() == 1
        await clients.require_one_order_each()


class Clients:
    """Clients with an order each, which they ask for at any replica; ``history``: what they saw."""

    def __init__(self, up: Replicas, count: int = 12) -> None:
        self._up = up
        self.history = History()
        keys = [f"client {number} of sixteen" for number in range(count)]
        self._clients = [asyncio.create_task(self._client(key)) for key in keys]

    async def require_one_order_each(self) -> None:
        """Each has one of its own, with one deposit and one payout, and saw it in order."""
        up, orders = self._up, await asyncio.gather(*self._clients)
        assert len(set(orders)) == len(orders)
        assert await up.value("SELECT count(*) FROM orders") == len(orders)
        assert await up.value(_PAYOUTS) == len(orders)
        assert await up.value(_DEPOSITS) == len(orders)
        assert await up.value("SELECT count(*) FROM orders WHERE status <> 'completed'") == 0
        assert len(self.history.seen) > 2 * len(orders)
        assert violations(self.history.seen) == []

    async def _client(self, key: str) -> str:
        """Order, fund and poll, with repeats, until the one order is over."""
        known: set[tuple[str, bytes]] = set()
        dice = random.Random(key)
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(10):
                    known.add(await order(dice.choice(self._up.alive), key))
                    ((order_id, _),) = known  # each answer the same, byte for byte
                    self.history.saw(key, order_id, None, began)
                    if await self._polled(key, order_id, dice) == "completed":
                        return order_id
            except (Gone, AssertionError, TimeoutError):
                pass  # killed, or unavailable: once more
            await asyncio.sleep(0.1)

    async def _polled(self, key: str, order_id: str, dice: random.Random) -> str | None:
        """Ask several replicas at once for the order; a state that one of them shows."""

        async def poll() -> str | None:
            began = time.monotonic()
            answer = await call(dice.choice(self._up.alive), "swap.status", {"orderId": order_id})
            if answer["ok"]:
                version, state = int(answer["data"]["cursor"]), str(answer["state"])
            elif answer["error"]["code"] == "order_not_found":
                version, state = 0, None
            else:
                return None  # unavailable
            self.history.saw(key, order_id, version, began)
            return state

        return (await asyncio.gather(*(poll() for _ in range(3))))[0]


@pytest.mark.slow(seconds=100)
async def test_replicas_outlive_faults_of_the_database(tmp_path: Path) -> None:
    """PostgreSQL crashes, connections are cut, and COMMITs lose their answers.

    It shows that a real server does so too; ``tests/simulation`` draws when.
    """
    dice = random.Random(0)
    with own_server() as server:
        async with (
            proxied(server.url) as (proxy, url),
            replicas(url, tmp_path, is_own=True) as up,
        ):
            up.supervised = 3
            clients = Clients(up)
            for fault in ("lost", "cut", "crash", "slow", "lost", "crash", "lost"):
                await up.holder()
                await asyncio.sleep(dice.uniform(0, 1))
                if fault == "lost":
                    happened = partial(has_cut, proxy, proxy.cuts + 1)
                    proxy.cut_after = COMMIT
                    await until(happened)
                elif fault == "cut":
                    proxy.cut_all()
                elif fault == "slow":
                    proxy.delay = 0.02
                else:
                    await asyncio.to_thread(server.stop)
                    await asyncio.to_thread(server.start)
            await clients.require_one_order_each()


async def has_cut(proxy: Proxy, times: int) -> bool:
    return proxy.cuts >= times


async def test_one_key_on_all_replicas_makes_one_order(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        await up.start_ready()
        for _ in range(2):
            await up.start_ready()
        answers = await asyncio.gather(*(keyed(up.all[n % 3]) for n in range(200)))
        assert len(answers) == 200
        assert len(set(answers)) == 1
        assert await up.value("SELECT count(*) FROM orders") == 1


async def keyed(at: Server, direction: str = "u2x") -> bytes:
    """The answer to the same call with the same key."""
    body = await send(at, _keyed(direction))
    assert json.loads(body)["result"]["ok"], body
    return body.rpartition(b'"requestId"')[0]


async def answered(at: Server, direction: str) -> bytes:
    """The same, sent again while another call's outcome is awaited for too long."""
    while not (result := json.loads(body := await send(at, _keyed(direction)))["result"])["ok"]:
        assert result["error"]["retryable"], body
    return body.rpartition(b'"requestId"')[0]


def _keyed(direction: str) -> dict[str, Any]:
    swap = {**SWAPS[direction], "idempotency-key": "a key of sixteen or more"}
    return message("swap.execute", swap)
