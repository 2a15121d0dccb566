"""The cost of a new block for a service with few and with many open orders, on real daemons.

Two operators on the same chains, each with its own wallet and store, run in this process, on the
server's core. After each new block, each in turn runs one pass of its worker: both chain adapters
scan for deposits, these are acknowledged, deadlines are checked, due effects are started.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import orjson
from monero.seed import Seed

from rpcsvc.bootstrap import Running
from rpcsvc.domain import usdc
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settlement.onchain.daemon_rpc import DaemonRpc
from tests.bench import driver, seeding
from tests.bench.onchain import (
    LEAST_POOL,
    WATCHING,
    Say,
    Size,
    copy_store,
    in_process,
    looked_after,
    swap_params,
)
from tests.bench.report import Reading, Report
from tests.regtest.daemons import AnvilControls
from tests.regtest.exchange import USDC, XMR, Exchange

ROUNDS: Final = 4
WARM_UP_BLOCKS: Final = 3
STRANGERS: Final = 2  # USDC transfers of others in each block
_X2U_IN_TEN: Final = 3  # of ten open orders; an XMR address takes long to make
_PAYEE: Final = str(Seed("1" * 64).public_address())  # regtest has the addresses of mainnet
_AT_A_TIME: Final = 64
_WITHIN: Final = 1.20
_CREATE: Final = next(item for item in OPERATIONS if item.name == "swap.create")
_MINT: Final = usdc.selector("mint(address,uint256)")


def x2u_orders(count: int) -> int:
    """The number of open orders of ``count`` that wait for XMR."""
    return count * _X2U_IN_TEN // 10


@dataclass
class Watcher:
    """A service with open orders, and the cost of its passes: CPU and elapsed seconds, node calls.

    ``paid``: two of the orders, each waiting for another asset.
    """

    stack: Exchange
    up: Running
    paid: Sequence[dict[str, str]]
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    async def beat(self, calls: Counter[str]) -> None:
        """Run one pass of the worker, and record its cost."""
        before = calls.total()
        cpu, wall = time.process_time(), time.perf_counter()
        await self.up.worker.tick()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        self.calls.append(calls.total() - before)

    def described(self) -> str:
        """The median cost of a block."""
        cpu, wall = median(self.cpu) * 1000, median(self.wall) * 1000
        return f"{cpu:.2f} ms of CPU, {wall:.1f} ms in all, {median(self.calls):g} calls to nodes"


class Watching:
    """Few open orders against many."""

    def __init__(self, few: Exchange, many: Exchange, size: Size, found: Report, say: Say) -> None:
        self._operators = ((few, size.few), (many, size.many))
        self._size = size
        self._report = found
        self._say = say
        self._controls = AnvilControls(few.token.client)

    async def run(self) -> None:
        """Measure both."""
        driver.pin(driver.cores().server)
        try:
            async with AsyncExitStack() as opened:
                watchers = [await self._watcher(opened, *item) for item in self._operators]
                await self._measure(watchers)
                for watcher in watchers:
                    await _require_watched(watcher)
        finally:
            driver.pin(driver.cores().driver)
        self._print(*watchers)

    async def _watcher(self, opened: AsyncExitStack, stack: Exchange, count: int) -> Watcher:
        self._say(f"making {count:,} open orders with the engine onchain")
        data_dir = stack.data_dir.with_name("watching")
        copy_store(stack, data_dir)
        many = max(2 * LEAST_POOL, count)
        async with (
            in_process(stack, data_dir, xmr_addresses=LEAST_POOL, usdc_addresses=many) as up,
            looked_after(up),
        ):
            orders = await _open_orders(up, count)
        # Opened again, as after a restart. No background loop runs between the passes.
        up = await opened.enter_async_context(in_process(stack, data_dir, xmr_addresses=LEAST_POOL))
        return Watcher(stack, up, (orders[0], orders[-1]))

    async def _measure(self, watchers: Sequence[Watcher]) -> None:
        self._say("new blocks for both, one after the other")
        gc.collect()
        gc.freeze()  # as the service does when it has started
        await self._controls.automine(enabled=False)
        with _counted_calls() as calls:
            for number in range(WARM_UP_BLOCKS + ROUNDS * self._size.blocks):
                await self._next_block(watchers[0].stack)
                for watcher in watchers[:: -1 if number % 2 else 1]:
                    await watcher.beat(calls)
        await self._controls.automine(enabled=True)
        gc.unfreeze()

    async def _next_block(self, stack: Exchange) -> None:
        """Mine one block on each chain, with USDC transfers of others on the EVM chain."""
        token = stack.token
        for number in range(STRANGERS):
            to = "0x" + f"{number + 1:040x}"
            words = usdc.address_word(to) + usdc.uint_word(USDC)
            await self._controls.send_from(token.owner, token.address, _MINT + words)
        await stack.mine()

    def _print(self, few: Watcher, many: Watcher) -> None:
        counts = f"{self._size.many:,} open orders over {self._size.few:,}"
        for watcher in (few, many):
            for figures in (watcher.cpu, watcher.wall, watcher.calls):
                del figures[:WARM_UP_BLOCKS]
        apart = tuple(float(abs(a - b)) for a, b in zip(few.calls, many.calls, strict=True))
        self._report.readings += [
            Reading(
                WATCHING,
                f"a new block with {counts}: CPU",
                "x",
                self._ratios(few.cpu, many.cpu),
                under=_WITHIN,
            ),
            Reading(
                "watching-time",
                f"a new block with {counts}: time",
                "x",
                self._ratios(few.wall, many.wall),
                under=_WITHIN,
            ),
            Reading(
                "watching-calls",
                f"a new block with {counts}: difference in calls to the nodes",
                "",
                apart,
                under=0.5,
            ),
        ]
        self._report.remarks += [
            f"a new block with {count:,} open orders: {watcher.described()}"
            for watcher, count in ((few, self._size.few), (many, self._size.many))
        ]

    def _ratios(self, few: list[float], many: list[float]) -> tuple[float, ...]:
        """The ratio of the medians, by round."""
        size = self._size.blocks
        return tuple(
            median(many[first : first + size]) / median(few[first : first + size])
            for first in range(0, len(few), size)
        )


async def _open_orders(up: Running, count: int) -> list[dict[str, str]]:
    """Make orders through the service: the first wait for XMR, the last for USDC."""
    made: list[dict[str, str]] = []
    for first in range(0, count, _AT_A_TIME):
        numbers = range(first, min(first + _AT_A_TIME, count))
        made += await asyncio.gather(*(_open_order(up, n, n < x2u_orders(count)) for n in numbers))
    return made


async def _open_order(up: Running, number: int, is_x2u: bool) -> dict[str, str]:
    params = swap_params(number) | {"amount": "0.01"}
    if not is_x2u:
        params |= {"direction": "u2x", "amount": "5", "to": _PAYEE}
    reply = await up.dispatcher.run(_CREATE, params, Call(f"bench-{number}"))
    envelope = orjson.loads(reply.body)
    if not envelope.get("ok"):
        raise seeding.SeedingFailed(f"no order was made: {envelope}")
    return dict(envelope["data"]["order"])


async def _require_watched(watcher: Watcher) -> None:
    """Pay an order on each chain, and require that the measured service sees the deposits."""
    xmr, other = watcher.paid
    await watcher.stack.pay_xmr(xmr["depositAddress"], XMR // 100)
    await watcher.stack.pay_usdc(other["depositAddress"], USDC)
    await watcher.stack.mine()
    await watcher.up.worker.tick()
    for order in watcher.paid:
        found = await watcher.up.service.store.order(order["orderId"])
        if found is None or not found.deposits:
            raise seeding.SeedingFailed(f"the deposit of {order['orderId']} was not seen")


@contextmanager
def _counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls to daemons from this process by method, repetitions included."""
    calls: Counter[str] = Counter()
    send = DaemonRpc._send

    async def counted(self: DaemonRpc, path: str, method: str, body: Any, *rest: Any) -> Any:
        calls.update(
            each.get("method", method) for each in (body if isinstance(body, list) else [body])
        )
        return await send(self, path, method, body, *rest)

    with patch.object(DaemonRpc, "_send", counted):
        yield calls
