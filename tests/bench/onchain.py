"""The engine ``onchain`` on real daemons: taking orders, against the sandbox.

monerod, monero-wallet-rpc and Anvil run where the driver runs, the service has its core to itself.
Making an XMR address takes the wallet some 10 ms, so addresses are made ahead, once: each measured
period begins with the same store, in which all of them are free, and is so short that they suffice.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

from rpcsvc.bootstrap import Running, running
from rpcsvc.errors import Unavailable
from rpcsvc.settings import Settings, SettingsError, load_settings
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.engine import OnchainEngine
from rpcsvc.settlement.onchain.evm.node import EvmClient
from tests.bench import driver, seeding
from tests.bench.driver import HOST, Measurement, Server
from tests.bench.report import Ratio, Report, Scenario
from tests.e2e.processes import until
from tests.regtest.daemons import Anvil, Miner, Monerod, WalletRpc, missing, new_wallet
from tests.regtest.exchange import USDC, XMR, Exchange, exchange
from tests.regtest.token import Token, compiled, deploy
from tests.rows import one_row

CREATE, SANDBOX, WATCHING = "create-onchain", "create-x2u", "watching"
NAMES: Final = (SANDBOX, CREATE, WATCHING)
FAILURES: Final = (AssertionError, RpcFailure, SettingsError)
# The pool is refilled when so few are left; this many are kept ready, as by default.
LEAST_POOL: Final = 256
_SPARE: Final = 1.25  # a period is planned for a rate higher by so much than was measured
_SHORTEST_SECONDS: Final = 0.2
_START_SECONDS: Final = 60.0
_FILL_SECONDS: Final = 300.0
_VARIETY: Final = 512
_SIDES: Final = ("XMR", "USDC")
_USDC_HELD: Final = 20_000_000 * USDC
SOME_XMR: Final = 20 * XMR
MUCH_XMR: Final = 300 * XMR

Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How large a run is: XMR addresses made ahead; open orders, few and many; blocks a round."""

    addresses: int
    few: int
    many: int
    blocks: int


FULL: Final = Size(addresses=4_000, few=100, many=10_000, blocks=25)
QUICK: Final = Size(addresses=1_500, few=50, many=1_000, blocks=5)


@dataclass(frozen=True)
class Periods:
    """How load is put on: at which numbers of connections, in how many rounds, for how long."""

    connections: Sequence[int]
    rounds: int
    seconds: float
    warm_up: float


def scenarios() -> list[Scenario]:
    """The rows: an order of XMR for USDC, whose payout is reserved, on each engine."""
    return [
        Scenario(
            SANDBOX,
            "swap.create, x2u, sandbox, new store",
            SANDBOX,
            lambda _: create_requests(),
            (),
            "swap.create",
            unique_orders=True,
        ),
        Scenario(
            CREATE,
            "swap.create, x2u, onchain, new store",
            CREATE,
            lambda _: create_requests(),
            (Ratio(SANDBOX, 0.50),),
            "swap.create",
            unique_orders=True,
        ),
    ]


def why_not() -> str | None:
    """Why these rows can't be measured on this machine; None: they can."""
    lacking = missing()
    if not lacking:
        return None
    return f"not installed: {', '.join(lacking)}; run tools/regtest/install"


# --- the chains ------------------------------------------------------------------------------


@dataclass
class Chains:
    """Daemons with money on both chains, and operators with wallets on them."""

    directory: Path
    opened: AsyncExitStack
    miner: Miner
    anvil: Anvil
    token: Token

    async def operator(self, name: str, addresses: int, *, xmr: int) -> Exchange:
        """An operator with its own wallet and store, and ``addresses`` free XMR addresses."""
        directory = self.directory / name
        wallet = self.opened.enter_context(WalletRpc(directory / "wallets", self.miner.monerod))
        await new_wallet(wallet)
        made = await self.opened.enter_async_context(
            exchange(
                directory, self.miner, wallet, self.anvil, self.token, xmr=xmr, usdc=_USDC_HELD
            )
        )
        await _make_addresses(made, addresses)
        return made


@asynccontextmanager
async def chains(directory: Path) -> AsyncIterator[Chains]:
    """monerod, the miners' wallet, Anvil and the token, on free ports."""
    async with AsyncExitStack() as opened:
        monerod = opened.enter_context(Monerod(directory / "monerod"))
        bank = opened.enter_context(WalletRpc(directory / "bank", monerod))
        miner = Miner(monerod, bank)
        code, _ = await asyncio.gather(asyncio.to_thread(compiled), miner.begin())
        anvil = opened.enter_context(Anvil(directory / "anvil"))
        client = await opened.enter_async_context(EvmClient(anvil.endpoint))
        token = await deploy(client, code)
        yield Chains(directory, opened, miner, anvil, token)


async def _make_addresses(operator: Exchange, count: int) -> None:
    """Have the service make XMR addresses and stop it, so that all of them are free."""
    # It makes more as long as fewer than three quarters of the target are left.
    target = count * 4 // 3 + 2
    async with (
        in_process(operator, operator.data_dir, xmr_addresses=target) as up,
        looked_after(up),
    ):

        async def full() -> bool:
            row = one_row(up.database, "SELECT count(*) FROM monero_addresses")
            return row is not None and int(row[0]) >= count

        await until(full, seconds=_FILL_SECONDS)


@asynccontextmanager
async def in_process(operator: Exchange, data_dir: Path, **onchain: int) -> AsyncIterator[Running]:
    """The service in this process, without its background loops."""
    async with running(_settings(operator, data_dir, onchain)) as up:
        yield up


@asynccontextmanager
async def looked_after(up: Running) -> AsyncIterator[None]:
    """Run the engine's maintenance for a service in this process within the block.

    It ends between two rounds of each adapter: addresses that the wallet is still making and that
    are not in the store would make the next start discard the pool.
    """
    engine = up.engine
    assert isinstance(engine, OnchainEngine)
    stopping, parked = asyncio.Event(), asyncio.Semaphore(0)

    async def pause(seconds: float) -> None:
        if stopping.is_set():
            parked.release()
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)

    upkeep = asyncio.create_task(engine.run(pause))
    try:
        await until(lambda: _knows_its_money(up), seconds=_START_SECONDS)
        yield
        stopping.set()
        for _ in _SIDES:
            await parked.acquire()
    finally:
        upkeep.cancel()
        await asyncio.gather(upkeep, return_exceptions=True)


async def _knows_its_money(up: Running) -> bool:
    await up.worker.tick()
    try:
        engine = up.engine
        engine.require_ready()
        return all(engine.holdings(network) for network in ("monero", "arbitrum"))
    except Unavailable:
        return False


def environ(operator: Exchange, onchain: dict[str, int]) -> dict[str, str]:
    """The service's settings; nodes are polled as often as by default."""
    more = {f"RPCSVC_ONCHAIN__{name.upper()}": str(value) for name, value in onchain.items()}
    return operator.environ() | {"RPCSVC_ONCHAIN__POLL_MS": "1000"} | more


def _settings(operator: Exchange, data_dir: Path, onchain: dict[str, int]) -> Settings:
    given = environ(operator, {"poll_ms": 50} | onchain) | seeding.UNBOUNDED
    given |= {"RPCSVC_SIGNING__ENABLED": "false"}
    flags = {"data_dir": str(data_dir)}
    return load_settings(config_file=None, environ=given, flags=flags).settings


def copy_store(operator: Exchange, to: Path) -> None:
    """Make a temporary copy of an operator's store."""
    shutil.copytree(operator.data_dir, to, ignore=shutil.ignore_patterns("*.sock", "*.lock"))


def log_to(path: Path) -> None:
    """Where a service in this process logs warnings to: stdout is the report's."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.WriteLoggerFactory(path.open("a", buffering=1)),
    )


# --- taking orders ---------------------------------------------------------------------------


def swap_params(number: int) -> seeding.Params:
    """A swap of XMR for USDC on the chain that has a node; amount and destination vary."""
    return seeding.swap_params(2 * number) | {"chain": "arbitrum"}


def create_requests() -> Iterator[bytes]:
    """Creates of one direction, for ever, each with an idempotency key never used before."""
    mark, run = secrets.token_hex(16), secrets.token_hex(10)
    halves = [
        seeding.http_request(
            "service.swap.create", swap_params(n) | {"idempotency-key": mark}, f"c{n}"
        ).split(mark.encode())
        for n in range(_VARIETY)
    ]
    for number, (before, after) in enumerate(itertools.cycle(halves)):
        yield b"%b%b%012d%b" % (before, run.encode(), number, after)


class Creates:
    """The two rows in alternation; each period has a server of its own on a new store."""

    def __init__(
        self, operator: Exchange, addresses: int, periods: Periods, found: Report, say: Say
    ) -> None:
        self._operator = operator
        self._usable = addresses - LEAST_POOL
        self._periods = periods
        self._report = found
        self._say = say
        self._dir = operator.data_dir.parent / "periods"
        self._number = itertools.count(1)

    async def run(self) -> None:
        """Measure both, at each number of connections."""
        self._dir.mkdir(mode=0o700)
        rows = scenarios()
        for connections in self._periods.connections:
            for number in range(self._periods.rounds):
                for row in rows[:: -1 if number % 2 else 1]:
                    await self._period(row, connections)

    async def _period(self, row: Scenario, connections: int) -> None:
        self._say(f"{row.title}, {connections} connections")
        data_dir = self._dir / f"{row.name}-{next(self._number)}"
        server = self._start(row, data_dir)
        try:
            server.wait_for("/readyz", _START_SECONDS)
            await until(lambda: _takes_orders(server.port), seconds=_START_SECONDS)
            period = await driver.drive(
                [server.port],
                row.requests([]),
                connections=connections,
                seconds=self._seconds(connections),
                warm_up=self._periods.warm_up,
                server_cpu=server.cpu_seconds,
            )
        finally:
            server.stop()
            shutil.rmtree(data_dir)
        self._report.add(row, connections, period)

    def _start(self, row: Scenario, data_dir: Path) -> Server:
        more: dict[str, str] = {}
        if row.name == CREATE:
            copy_store(self._operator, data_dir)
            more = environ(self._operator, {"xmr_addresses": LEAST_POOL})
        return seeding.service(
            row.name, data_dir, data_dir.with_suffix(".log"), signs=False, more=more
        )

    def _seconds(self, connections: int) -> float:
        """The planned length of a period; less if addresses would run out at the sandbox's rate."""
        rate = self._report.measured.get((SANDBOX, connections), Measurement()).rate
        if not rate:
            return self._periods.seconds
        most = self._usable / (rate * _SPARE) - self._periods.warm_up
        return max(_SHORTEST_SECONDS, min(self._periods.seconds, most))


async def _takes_orders(port: int) -> bool:
    """Whether an order is accepted: the service may be ready before it has read its balances."""
    return await asyncio.to_thread(_one_order_is_taken, port)


def _one_order_is_taken(port: int) -> bool:
    call = {
        "jsonrpc": "2.0",
        "id": "1",
        "method": "service.swap.create",
        "params": swap_params(0),
    }
    headers = {"Content-Type": "application/json", "x-agent-rpc-token": seeding.TOKEN}
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("POST", "/rpc", orjson.dumps(call), headers)
        answer: dict[str, Any] = orjson.loads(connection.getresponse().read())
    return bool(answer.get("result", {}).get("ok"))
