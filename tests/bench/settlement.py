"""Seconds from the last confirmation of a deposit to its payout, and what the daemons are asked.

The service is a process of its own on monerod, monero-wallet-rpc and Anvil, with a proxy before
each, which counts, and delays the nodes. A payout is in its pool once its daemon has said so. Calls
in sequence: the longest chain of exchanges of which each begins after the one before has ended.
Rows with many open orders are of a store, a wallet and a list of addresses that have so many.

The wallet waits for no delayed acknowledgements (``tools/regtest/quick.c``), as with the route of
``docs/operate/onchain.md``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import aiohttp
import orjson
from aiohttp import web
from monero.seed import Seed
from typing_extensions import override

from tests.bench import seeding
from tests.bench.driver import HOST, Server
from tests.bench.onchain import MUCH_XMR, Chains, Say
from tests.bench.report import Reading, Report
from tests.e2e.processes import cpu_seconds, until
from tests.regtest.daemon_proxy import DaemonProxy
from tests.regtest.exchange import CONFIRMATIONS, USDC, XMR, Exchange

SETTLEMENT: Final = "settlement"
BEFORE: Final = "before"
_FAR_SECONDS: Final = 0.025
_MOST_MS: Final = {0.0: 300.0, _FAR_SECONDS: 600.0}
_MOST_IN_SEQUENCE: Final = 15
# A day on six networks: 0.2 million calls without open orders. With some, ``node_calls.py`` counts
# each chain at its own pace.
_MOST_IDLE: Final = 0.2e6 / 6 / 1440
_BLOCK_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 120.0
_START_SECONDS: Final = 60.0
_UNLOCKED_AFTER: Final = 10
_MANY: Final = 1_000
_ADDRESSES: Final = 64 + _MANY
_MOST_PER_SWAP: Final = 25
_PAID: Final = {"u2x": ("wallet", "relay_tx"), "x2u": ("evm", "eth_sendRawTransaction")}
_NODE: Final = "evm"
# Looks for blocks and deposits: all orders of a network share them, as the watched rows show.
_LOOKS: Final = {"eth_getBlockByNumber", "eth_getLogs"}


@dataclass(frozen=True)
class Size:
    """Swaps of each row; seconds of watching without orders, and with one."""

    swaps: int
    idle_seconds: float
    open_seconds: float


FULL: Final = Size(swaps=9, idle_seconds=60.0, open_seconds=30.0)
QUICK: Final = Size(swaps=5, idle_seconds=60.0, open_seconds=20.0)


class Exchanged(NamedTuple):
    """An exchange with a daemon: its calls, when it began and was answered (s), and its bytes."""

    daemon: str
    methods: tuple[str, ...]
    began: float
    ended: float
    size: int


class Line(DaemonProxy):
    """A proxy that records exchanges."""

    def __init__(self, daemon: str, target: str, record: list[Exchanged]) -> None:
        super().__init__(target)
        self._daemon = daemon
        self._record = record

    @override
    async def _asked(
        self, request: web.BaseRequest, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        began = time.perf_counter()
        status, headers, answer = await super()._asked(request, body)
        if status != web.HTTPUnauthorized.status_code:  # HTTP digest asks twice
            asked = orjson.loads(body)
            calls = asked if isinstance(asked, list) else [asked]
            methods = tuple(each.get("method", request.path) for each in calls)
            size = len(body) + len(answer)
            self._record.append(Exchanged(self._daemon, methods, began, time.perf_counter(), size))
        return status, headers, answer


class Swap(NamedTuple):
    """Milliseconds from the block to the pool, and the exchanges with daemons in that time.

    ``calls``: of the EVM node from the order to its end, without exchanges that only look for
    blocks and deposits; ``with_looks``: all; ``seconds``: how long that took.
    """

    milliseconds: float
    exchanged: list[Exchanged]
    calls: int
    with_looks: int
    seconds: float


class Row(NamedTuple):
    """Swaps of a direction, with the nodes so many seconds away, beside so many open orders."""

    direction: str
    seconds: float
    beside: int


@dataclass
class Watched:
    """Exchanges with daemons in some seconds, and the share of a core that the wallet took."""

    seconds: float
    exchanged: list[Exchanged]
    wallet_share: float

    def calls(self, *daemons: str) -> float:
        """Calls a minute of these daemons."""
        return _calls(self.exchanged, *daemons).total() * 60 / self.seconds

    def described(self) -> str:
        """Calls and bytes a minute of each daemon."""
        parts = []
        for name in ("evm", "monerod", "wallet"):
            size = sum(each.size for each in self.exchanged if each.daemon == name)
            kilobytes = size * 60 / self.seconds / 1000
            parts.append(f"{name} {self.calls(name):.0f} calls and {kilobytes:.0f} kB")
        return f"{', '.join(parts)} a minute; the wallet {self.wallet_share:.0%} busy"


@dataclass
class Found:
    """Results for one checkout of the service."""

    swaps: dict[Row, list[Swap]] = field(default_factory=dict)
    idle: Watched | None = None
    open: Watched | None = None


class Settling:
    """Swaps on a service of a checkout. It has a wallet and a store of its own."""

    def __init__(self, stack: Exchange, server: Server, lines: Sequence[Line], say: Say) -> None:
        self._stack = stack
        self._server = server
        self._lines = lines
        self._record = lines[0]._record
        self._say = say
        self._draw = random.Random(1)
        self._number = 0

    async def run(self, size: Size) -> Found:
        """Measure everything."""
        found = Found()
        await until(self._takes_orders, seconds=_START_SECONDS)
        self._say("nothing under way")
        found.idle = await self._watch(size.idle_seconds)
        for seconds in _MOST_MS:
            for line in self._lines:
                if line._daemon != "wallet":
                    line.delay = seconds
            await self._rows(found, size, seconds, 0)
        await self._create("x2u")
        await self._create("u2x")
        self._say("orders open")
        found.open = await self._watch(size.open_seconds)
        for _ in range(_MANY // 2):
            await self._create("x2u")
            await self._create("u2x")
        await self._rows(found, size, seconds, _MANY)
        return found

    async def _rows(self, found: Found, size: Size, seconds: float, beside: int) -> None:
        for direction in _PAID:
            row = Row(direction, seconds, beside)
            self._say(f"{direction}, {_title(row)}")
            found.swaps[row] = [await self._swap(direction) for _ in range(size.swaps)]

    async def _watch(self, seconds: float) -> Watched:
        """Count while a block comes each second on the EVM chain."""
        self._record.clear()
        pid, began = self._stack.wallet_rpc.pid, time.perf_counter()
        busy = cpu_seconds(pid)
        while (now := time.perf_counter()) - began < seconds:
            await self._stack.controls.mine()
            await asyncio.sleep(max(0.0, _BLOCK_SECONDS - (time.perf_counter() - now)))
        took = time.perf_counter() - began
        return Watched(took, list(self._record), (cpu_seconds(pid) - busy) / took)

    async def _swap(self, direction: str) -> Swap:
        """Swap once; the blocks of the deposit come at any moment of the service's rounds."""
        self._record.clear()
        ordered = time.perf_counter()
        order_id = await self._paid(direction)
        # The service's own transactions make no block.
        await self._stack.controls.automine(enabled=False)
        for _ in range(CONFIRMATIONS - 2):
            await self._mine(direction)
        await asyncio.sleep(1 + self._draw.random())
        before = len(self._record)
        await self._mine(direction)
        began = time.perf_counter()
        ended = await until(lambda: self._handed_over(direction), seconds=_SETTLE_SECONDS)
        late = self._record[before:]
        within = [each for each in late if began <= each.began and each.ended <= ended]
        await self._completed(order_id)
        took = time.perf_counter() - ordered
        own = _calls((each for each in self._record if not _LOOKS.issuperset(each.methods)), _NODE)
        with_looks = _calls(self._record, _NODE)
        await self._stack.miner.mine(_UNLOCKED_AFTER)
        return Swap((ended - began) * 1000, within, own.total(), with_looks.total(), took)

    async def _paid(self, direction: str) -> str:
        """Return an order whose deposit is in a block, and was seen by the service."""
        order = await self._create(direction)
        if direction == "x2u":
            await self._stack.pay_xmr(order["depositAddress"], XMR // 10)
            await self._stack.miner.mine()
        else:
            await self._stack.pay_usdc(order["depositAddress"], 20 * USDC)

        async def is_seen() -> bool:
            data = await self._call("swap.status", {"orderId": order["orderId"]})
            return bool(data["deposits"])

        await until(is_seen, seconds=_SETTLE_SECONDS)
        return str(order["orderId"])

    async def _create(self, direction: str) -> dict[str, Any]:
        self._number += 1
        amount = "0.1" if direction == "x2u" else "20"
        to = f"0x{self._number:040x}" if direction == "x2u" else _payee(self._number)
        asked = {"direction": direction, "chain": "arbitrum", "amount": amount, "to": to}
        return dict((await self._call("swap.create", asked))["order"])

    async def _mine(self, direction: str) -> None:
        await (self._stack.miner if direction == "x2u" else self._stack.controls).mine()

    async def _handed_over(self, direction: str) -> float | None:
        """Return when a daemon took the payout; None: it has not."""
        daemon, method = _PAID[direction]
        ends = (
            each.ended for each in self._record if each.daemon == daemon and method in each.methods
        )
        return next(ends, None)

    async def _completed(self, order_id: str) -> None:
        """Mine until an order is completed."""
        await self._stack.controls.automine(enabled=True)

        async def is_completed() -> bool:
            data = await self._call("swap.status", {"orderId": order_id})
            if data["order"]["status"] == "completed":
                return True
            await asyncio.sleep(_BLOCK_SECONDS / 2)
            await self._stack.mine()
            return False

        await until(is_completed, seconds=_SETTLE_SECONDS)

    async def _takes_orders(self) -> bool:
        asked = {"chain": "arbitrum", "amount": "20"}
        answers = [await self._ask("swap.quote", asked | {"direction": each}) for each in _PAID]
        return all(answer.get("ok") for answer in answers)

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        envelope = await self._ask(method, params)
        if not envelope.get("ok"):
            raise seeding.SeedingFailed(f"{method}: {envelope}")
        return dict(envelope["data"])

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        call = {"jsonrpc": "2.0", "id": "1", "method": f"service.{method}", "params": params}
        url, headers = (
            f"http://{HOST}:{self._server.port}/rpc",
            {"x-agent-rpc-token": seeding.TOKEN},
        )
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=call, headers=headers) as response,
        ):
            return dict(orjson.loads(await response.read()).get("result", {}))


@asynccontextmanager
async def _settling(
    chains: Chains, name: str, checkout: Path | None, say: Say
) -> AsyncIterator[Settling]:
    """The service of a checkout behind proxies; None: of this one."""
    stack = await chains.operator(name, _ADDRESSES, xmr=MUCH_XMR)
    record: list[Exchanged] = []
    async with AsyncExitStack() as opened:
        lines = [
            Line("evm", stack.anvil.url, record),
            Line("monerod", stack.monerod.url, record),
            Line("wallet", stack.wallet_rpc.url, record),
        ]
        for line in lines:
            await opened.enter_async_context(line.open(1 if line._daemon == "wallet" else 16))
        evm, monerod, wallet = (line.url for line in lines)
        more = stack.environ() | {
            "RPCSVC_ONCHAIN__NODES": f"arbitrum={evm}",
            "RPCSVC_ONCHAIN__MONEROD_URL": monerod,
            "RPCSVC_ONCHAIN__WALLET_URL": wallet,
            "RPCSVC_ONCHAIN__POLL_MS": "1000",
            "RPCSVC_ONCHAIN__AUDIT_SECONDS": "0",
            "RPCSVC_ONCHAIN__XMR_ADDRESSES": str(_ADDRESSES),
        }
        log = stack.data_dir.with_suffix(".log")
        server = seeding.service(
            name, stack.data_dir, log, signs=False, more=more, checkout=checkout
        )
        try:
            # Its first probe is answered by this process's proxies.
            await asyncio.to_thread(server.wait_for, "/readyz", _START_SECONDS)
            yield Settling(stack, server, lines, say)
        finally:
            await asyncio.to_thread(server.stop)


async def settlement(
    chains: Chains, size: Size, against: Path | None, found: Report, say: Say
) -> None:
    """Measure this checkout, and before it another one, if there is one."""
    if against is not None:
        async with _settling(chains, BEFORE, against, say) as settling:
            _report(await settling.run(size), f", {BEFORE}", found)
    async with _settling(chains, SETTLEMENT, None, say) as settling:
        _report(await settling.run(size), "", found)


def _report(measured: Found, when: str, found: Report) -> None:
    for row, swaps in measured.swaps.items():
        parts = (SETTLEMENT, row.direction, f"{row.seconds * 1000:g}", str(row.beside or ""))
        name = "-".join(filter(None, parts)) + when.replace(", ", "-")
        title = f"{row.direction}: last block to payout, {_title(row)}{when}"
        chains = tuple(float(_in_sequence(each.exchanged)) for each in swaps)
        found.readings += [
            Reading(
                name, title, "ms", tuple(each.milliseconds for each in swaps), _MOST_MS[row.seconds]
            ),
            Reading(
                f"{name}-sequence", f"{title}: calls in sequence", "", chains, _MOST_IN_SEQUENCE
            ),
            Reading(
                f"{name}-calls",
                f"{row.direction}: calls of an EVM node for a swap, {_title(row)}{when}",
                "",
                tuple(float(each.calls) for each in swaps),
                _MOST_PER_SWAP,
            ),
        ]
        calls = [_calls(each.exchanged) for each in swaps]
        middle = sorted(swaps, key=lambda each: each.milliseconds)[len(swaps) // 2]
        found.remarks.append(
            f"{title}: {median(each.total() for each in calls):g} calls; a swap took"
            f" {median(each.seconds for each in swaps):.1f} s, and"
            f" {median(each.with_looks for each in swaps):g} calls of an EVM node with the looks"
            f" for blocks and deposits; of the middle one:"
            f" {_listed(middle.exchanged)}"
        )
    if measured.idle is not None:
        name = f"{SETTLEMENT}-idle{when.replace(', ', '-')}"
        title = f"calls of an EVM node, service, idle{when}"
        found.readings.append(
            Reading(name, title, "/min", (measured.idle.calls(_NODE),), _MOST_IDLE)
        )
    for which, watched in (("idle", measured.idle), ("orders open", measured.open)):
        if watched is not None:
            found.remarks.append(f"{which}{when}: {watched.described()}")
            found.remarks.append(f"{which}{when}: {_by_method(watched)}")


def _title(row: Row) -> str:
    beside = f", {row.beside} open orders" if row.beside else ""
    return f"nodes {row.seconds * 1000:g} ms away{beside}"


def _by_method(watched: Watched) -> str:
    calls = Counter(
        f"{each.daemon} {method}" for each in watched.exchanged for method in each.methods
    )
    minutes = watched.seconds / 60
    return ", ".join(f"{name} {count / minutes:.0f}" for name, count in calls.most_common())


def _calls(exchanged: Iterable[Exchanged], *daemons: str) -> Counter[str]:
    """The calls by method, of some daemons or of all."""
    return Counter(
        method
        for each in exchanged
        if not daemons or each.daemon in daemons
        for method in each.methods
    )


def _in_sequence(exchanged: Iterable[Exchanged]) -> int:
    """Return the length of the longest chain of exchanges, each after the end of the one before."""
    count, ended = 0, 0.0
    for each in sorted(exchanged, key=lambda item: item.ended):
        if each.began >= ended:
            count, ended = count + 1, each.ended
    return count


def _listed(exchanged: Sequence[Exchanged]) -> str:
    """Return the exchanges in order, with the ms at which each began."""
    ordered = sorted(exchanged, key=lambda each: each.began)
    first = ordered[0].began if ordered else 0.0
    return "; ".join(
        f"{(each.began - first) * 1000:.0f}+{(each.ended - each.began) * 1000:.0f}"
        f" {each.daemon} {'+'.join(each.methods)}"
        for each in ordered
    )


def _payee(number: int) -> str:
    """An XMR address of its own for each order (regtest has the addresses of mainnet)."""
    return str(Seed(f"{number:064x}").public_address())
