"""Replicas on one PostgreSQL: one serves and settles, the others take over from it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from rpcsvc.app import running
from rpcsvc.settings import load_settings
from rpcsvc.store.database import DatabaseInUse
from tests.e2e.processes import Gone, Server, call, call_for_data, until, until_over
from tests.e2e.swaps import SWAPS
from tests.postgres import new_database

# docs/cluster.md says 15 for a quiet machine; the one of the tests is not quiet.
LATE_SECONDS = 45


class Replicas:
    """Server processes on one database, each with a data directory of its own.

    A supervisor starts another for each that ends below ``supervised``.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.all: list[Server] = []
        self.supervised = 0

    def start(self) -> Server:
        data_dir = self.folder / f"replica{len(self.all)}"
        environ = {"RPCSVC_DATABASE_URL": self.url}
        made = Server(data_dir, environ=environ, log_dir=self.folder)
        self.all.append(made)
        return made

    async def holder(self, besides: tuple[Server, ...] = ()) -> Server:
        """The replica that takes orders, once one does."""

        async def ready() -> Server | None:
            for _ in range(self.supervised - sum(not each.is_dead for each in self.all)):
                self.start()
            for each in self.all:
                if each not in besides and not each.is_dead and await is_ready(each):
                    return each
            return None

        try:
            return await until(ready)
        except TimeoutError:
            logs = [f"{each.pid}: {each.log.read_text()[-2000:]}" for each in self.all]
            raise AssertionError("no replica is ready:\n" + "\n".join(logs)) from None

    async def value(self, sql: str) -> Any:
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    def kill(self) -> None:
        for each in self.all:
            if not each.is_dead:
                os.kill(each.pid, signal.SIGCONT)
                each.kill()


@asynccontextmanager
async def replicas(server: str, folder: Path) -> AsyncIterator[Replicas]:
    async with new_database(server) as url:
        made = Replicas(url, folder)
        try:
            yield made
        finally:
            made.kill()


async def is_ready(at: Server) -> bool:
    """One that is paused is not: it takes the question, and does not answer."""
    try:
        async with asyncio.timeout(2):
            return (await at.health("/readyz")).get("http") == 200
    except TimeoutError:
        return False


async def order(at: Server, key: str) -> tuple[str, bytes]:
    """Make an order, and have it funded; its id and the answer. Raises Gone."""
    data, body = await call_for_data(at, "swap.execute", {**SWAPS["u2x"], "idempotency-key": key})
    order_id = data["order"]["orderId"]
    status = await call(at, "swap.status", {"orderId": order_id})
    if status["state"] == "waiting_for_funding":
        with suppress(AssertionError):  # it is on its way: nothing is due
            await call_for_data(at, "sandbox.fund", {"orderId": order_id})
    return str(order_id), body


# The orders are paid in XMR; what goes out on another network is a refund.
_PAYOUTS = (
    "SELECT count(*) FROM sandbox_transactions WHERE kind = 'transfer' AND network = 'monero'"
)
_DEPOSITS = "SELECT count(*) FROM sandbox_transactions WHERE kind = 'deposit'"


async def test_standby_takes_over_from_a_process_that_was_killed(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        first = up.start()
        assert await first.ready()
        second = up.start()
        order_id, answer = await order(first, "a key of sixteen or more")
        await until(lambda: said(second, "lease_awaited"))
        assert await second.health() == {}, "a standby does not listen"
        first.kill()
        began = time.monotonic()
        assert await up.holder() is second
        assert time.monotonic() - began < LATE_SECONDS
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


async def said(at: Server, event: str) -> bool:
    return event in at.log.read_text()


async def test_process_paused_past_its_lease_writes_nothing_and_ends(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with replicas(postgres(), tmp_path) as up:
        first = up.start()
        assert await first.ready()
        order_id, _ = await order(first, "a key of sixteen or more")
        second = up.start()
        await until(lambda: said(second, "lease_awaited"))
        os.kill(first.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert await up.holder(besides=(first,)) is second
        assert time.monotonic() - began < LATE_SECONDS
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
@pytest.mark.parametrize("seed", range(3))
async def test_replicas_killed_at_random_lose_and_double_nothing(
    postgres: Callable[[], str], tmp_path: Path, seed: int
) -> None:
    """Three replicas, clients that repeat until they are answered, and faults between."""
    dice = random.Random(seed)
    async with replicas(postgres(), tmp_path) as up:
        up.supervised = 3
        clients = [asyncio.create_task(client(up, f"client {n} of sixteen")) for n in range(12)]
        for _ in range(4):
            await asyncio.sleep(dice.uniform(0, 2))
            struck = await up.holder()
            if dice.random() < 0.5:
                struck.kill()
                continue
            os.kill(struck.pid, signal.SIGSTOP)
            await up.holder(besides=(struck,))
            os.kill(struck.pid, signal.SIGCONT)
            assert await struck.death() == 1
        orders = await asyncio.gather(*clients)
        assert len(set(orders)) == len(clients)
        assert await up.value("SELECT count(*) FROM orders") == len(clients)
        assert await up.value(_PAYOUTS) == len(clients)
        assert await up.value(_DEPOSITS) == len(clients)
        assert await up.value("SELECT count(*) FROM orders WHERE status <> 'completed'") == 0


async def client(up: Replicas, key: str) -> str:
    """Repeat everything until it is done, wherever it is answered; one order comes of it."""
    known: set[tuple[str, bytes]] = set()
    while True:
        at = await up.holder()
        try:
            async with asyncio.timeout(10):
                known.add(await order(at, key))
                ((order_id, _),) = known  # each answer the same, byte for byte
                status = await call(at, "swap.status", {"orderId": order_id})
            if status["state"] == "completed":
                return order_id
        except (Gone, AssertionError, TimeoutError):
            pass  # killed, or unavailable: once more
        await asyncio.sleep(0.1)
