"""kill -9 between the steps that matter; afterwards the books balance and a retry is safe."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.audit import audit, deposits_on_chain, orders_of
from tests.e2e.processes import Gone, Server, call, server, until_over

EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
SWAPS = {
    "x2u": {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM},
    "u2x": {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO},
}
WHEN = ("before", "after")
# The first write of a server makes the simulated chains; the second is the order itself.
CREATE = [
    (seam, when, n) for seam, n in (("open", 1), ("write", 2), ("transaction", 2)) for when in WHEN
]
# Deposit seen and confirmed, payout prepared, published and settled.
STEPS = [("apply", when, n) for n in (1, 2, 3, 4, 5) for when in WHEN]
ENGINE = [
    (seam, when, n)
    for seam, n in (("acknowledge", 1), ("prepare", 1), ("publish", 1), ("look_up", 2))
    for when in WHEN
]
WRITES = [("transaction", when, n) for n in range(3, 12) for when in WHEN]


@asynccontextmanager
async def after_crash(first: Server, data_dir: Path) -> AsyncIterator[Server]:
    """A clean server once the first one has died."""
    await first.death()
    async with server(data_dir) as second:
        yield second


async def run_swap(at: Server, data_dir: Path, direction: str, seen: dict[str, Any]) -> None:
    """Order, fund once, follow to the end; ``seen`` keeps what was answered. Raises Gone."""
    keyed = {**SWAPS[direction], "idempotency-key": "the key"}
    made = await call(at, "swap.execute", keyed)
    order_id = made["data"]["order"]["orderId"]
    assert seen.setdefault("made", made["data"]) == made["data"], "a retry got another answer"
    # A funding call that died may have been carried out: the chain knows.
    if not deposits_on_chain(data_dir, order_id):
        await call(at, "sandbox.fund", {"orderId": order_id})
    seen["end"] = await until_over(at, order_id)


async def crash_and_recover(data_dir: Path, direction: str, crash: tuple[str, str, int]) -> None:
    seen: dict[str, Any] = {}
    async with server(data_dir, crash=crash) as first:
        with suppress(Gone):
            await run_swap(first, data_dir, direction, seen)
        async with after_crash(first, data_dir) as second:
            await run_swap(second, data_dir, direction, seen)
            assert second.stop() == 0
    assert seen["end"]["state"] == "completed"
    assert list(orders_of(data_dir).values()) == ["completed"]
    assert audit(data_dir) == []


@pytest.mark.parametrize("crash", CREATE, ids=str)
async def test_a_crash_in_create_leaves_all_of_the_order_or_nothing(
    tmp_path: Path, crash: tuple[str, str, int]
) -> None:
    await crash_and_recover(tmp_path / "data", "x2u", crash)


@pytest.mark.parametrize("crash", [*STEPS[::2], *ENGINE[2:6]], ids=str)
async def test_a_crash_in_settlement_ends_in_exactly_one_payout(
    tmp_path: Path, crash: tuple[str, str, int]
) -> None:
    await crash_and_recover(tmp_path / "data", "x2u", crash)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["x2u", "u2x"])
@pytest.mark.parametrize("crash", [*CREATE, *STEPS, *ENGINE, *WRITES], ids=str)
async def test_a_crash_at_any_step_ends_in_exactly_one_payout(
    tmp_path: Path, direction: str, crash: tuple[str, str, int]
) -> None:
    await crash_and_recover(tmp_path / "data", direction, crash)


class Load:
    """Clients that order, fund and follow, whatever happens to the server."""

    def __init__(self, seed: int) -> None:
        self.acknowledged: dict[str, str] = {}
        self._random = random.Random(seed)
        self._count = 0
        self.stopping = False

    async def run(self, servers: list[Server], clients: int) -> None:
        await asyncio.gather(*(self._client(servers) for _ in range(clients)))

    async def _client(self, servers: list[Server]) -> None:
        while not self.stopping:
            self._count += 1
            key = f"key-{self._count}"
            swap = SWAPS[self._random.choice(["x2u", "u2x"])]
            order_id = await self._insist(servers, "swap.execute", {**swap, "idempotency-key": key})
            self.acknowledged[key] = order_id
            # A deposit that is sent twice is an over-payment: its surplus comes back.
            with suppress(Gone):
                await call(servers[-1], "sandbox.fund", {"orderId": order_id})

    async def _insist(self, servers: list[Server], method: str, params: dict[str, Any]) -> str:
        while True:
            try:
                answer = await call(servers[-1], method, params)
            except Gone:
                await asyncio.sleep(0.02)
                continue
            assert answer["ok"], answer
            return str(answer["data"]["order"]["orderId"])


async def kill_under_load(data_dir: Path, kills: int) -> None:
    load = Load(seed=7)
    pause = random.Random(11)
    servers = [Server(data_dir)]
    await servers[-1].ready()
    clients = asyncio.create_task(load.run(servers, clients=6))
    try:
        for _ in range(kills):
            await asyncio.sleep(pause.uniform(0.1, 0.8))
            servers[-1].kill()
            fresh = Server(data_dir)
            await fresh.ready()
            servers.append(fresh)
        load.stopping = True
        await clients
        await settled(servers[-1], data_dir, load)
        assert servers[-1].stop() == 0
    finally:
        clients.cancel()
        for each in servers:
            if not each.is_dead:
                each.kill()
    assert_nothing_lost(data_dir, load)


async def settled(at: Server, data_dir: Path, load: Load) -> None:
    """Fund what a dead server may have swallowed, and follow every order to its end."""
    for order_id in load.acknowledged.values():
        if not deposits_on_chain(data_dir, order_id):
            await call(at, "sandbox.fund", {"orderId": order_id})
    for order_id in load.acknowledged.values():
        await until_over(at, order_id, seconds=60)


def assert_nothing_lost(data_dir: Path, load: Load) -> None:
    statuses = orders_of(data_dir)
    assert len(set(load.acknowledged.values())) == len(load.acknowledged) > 0
    assert set(load.acknowledged.values()) == set(statuses), "an order was lost or made twice"
    assert set(statuses.values()) == {"completed"}
    assert audit(data_dir) == []


async def test_kill_9_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    await kill_under_load(tmp_path / "data", kills=4)


@pytest.mark.slow
async def test_many_kills_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    await kill_under_load(tmp_path / "data", kills=40)
