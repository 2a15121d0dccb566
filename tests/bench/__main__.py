"""``make bench``: the service against its yardsticks, in one run, side by side.

    python -m tests.bench [--quick] [--only NAME]... [--seconds N] [--work-dir DIR]

Servers run one at a time under load, each one process on one core, the driver on another; short
rounds go forth and back, so that drift of the machine shows and evens out. Prints a table and
writes ``bench-results/<time>.json``. Exit status: 0 when every request succeeded, whether or not
the targets are met; 1 when requests failed or a server did not start.

The stores are made on the disk that ``--work-dir`` is on: durable commits cost what that disk's
fsync costs, so a memory file system there would make the figures meaningless.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rpcsvc.store.backends.copying import to_server
from tests.bench import (
    driver,
    node_calls,
    onchain,
    overload,
    peers,
    report,
    seeding,
    settlement,
    settling,
    sidecar,
    sizes,
)
from tests.bench.memory import NotHeld, held
from tests.bench.report import NAIVE, RAW, Ratio, Reading, Report, Scenario, Tail
from tests.bench.watching import Watching
from tests.postgres import DURABLE, PostgresqlServer, own_server

RESULTS = Path("bench-results")
CONNECTIONS = (16, 64)
ROUND_SECONDS = 0.5  # about; compared rows are measured this soon after each other
CHAIN_ROUNDS = 2  # on real daemons each period begins with a new process and store
READY_SECONDS = 120.0  # a store of a million orders may take a while to open
START_SECONDS = 20.0
IDLE_SECONDS = 1.0  # after the first answer, before memory is read
STARTUP = "startup"
SIDECAR = "sidecar"
POSTGRES = "postgres"
REPLICAS = "replicas"
ON_POSTGRES = (POSTGRES, REPLICAS)
# Two replicas against one: CPU per request within 10 %.
SCALES = 0.90
BEFORE = "-before"
# With --against: no row may be slower by more than 3 %.
NOT_SLOWER = 0.97
SIDECAR_ORDERS = 1_000
# A client with limits against one without: at most 3 % more.
LIMITS_COST = 1 / 1.03
CREATE = (Ratio(RAW, 0.15), Ratio(NAIVE, 3.0))
PEERS = tuple(Ratio(name) for name in peers.SERVERS)
COMMANDS, OVERLOAD, OPEN = "commands", "overload", "open"
IDLE_CPU_SECONDS = 10.0
COMMAND_RUNS = 10


FAILURES = (settling.SettlingFailed, *onchain.FAILURES)


@dataclass(frozen=True)
class Plan:
    """How long and how large a run is."""

    seconds: float
    warm_up: float
    small: int
    base: int
    large: int
    starts: int
    overload_seconds: float
    open_orders: tuple[int, int]
    onchain: onchain.Size
    settlements: settlement.Size
    settlings: int

    @property
    def rounds(self) -> int:
        """An even number: every second round goes through the rows in reverse."""
        return max(2, 2 * round(self.seconds / ROUND_SECONDS / 2))


FULL = Plan(
    seconds=4.0,
    warm_up=0.2,
    small=1_000,
    base=100_000,
    large=1_000_000,
    starts=5,
    overload_seconds=60.0,
    open_orders=(100, 100_000),
    onchain=onchain.FULL,
    settlements=settlement.FULL,
    settlings=5,
)
QUICK = Plan(
    seconds=0.8,
    warm_up=0.2,
    small=1_000,
    base=5_000,
    large=20_000,
    starts=3,
    overload_seconds=12.0,
    open_orders=(100, 10_000),
    onchain=onchain.QUICK,
    settlements=settlement.QUICK,
    settlings=3,
)


def side_by_side(plan: Plan) -> list[Scenario]:
    """The rows that are compared with the yardsticks. New rows go here.

    Raw and naive sign nothing. Creating is held against them signed, attested and without either;
    what signing costs a status is a row of its own.
    """
    base, signing = f"ours-{plan.base}", f"signing-{plan.base}"
    return [
        Scenario(RAW, "raw: parse and answer", RAW, lambda _: seeding.plan_requests()),
        Scenario(
            "status",
            f"swap.status, random of {plan.base:,}",
            base,
            seeding.status_requests,
            (Ratio(RAW, 0.55),),
            "swap.status",
        ),
        Scenario(
            "plan",
            "swap.plan, all inputs",
            base,
            lambda _: seeding.plan_requests(),
            (Ratio(RAW, 0.45),),
            "swap.plan",
        ),
        Scenario(
            "create",
            "swap.create, durable, fresh key",
            base,
            lambda _: seeding.create_requests(),
            (*CREATE, Tail(5.0, connections=64)),
            "swap.create",
            unique_orders=True,
        ),
        Scenario(
            "status-signed",
            "swap.status, signed",
            signing,
            seeding.status_requests,
            (Ratio("status", 0.75),),
            "swap.status",
        ),
        Scenario(
            "create-signed",
            "swap.create, signed and attested",
            signing,
            lambda _: seeding.create_requests(),
            (*CREATE, *PEERS),
            "swap.create",
            unique_orders=True,
        ),
        Scenario(
            "create-refundable",
            "swap.create with a refund address",
            signing,
            lambda _: seeding.refundable_requests(seeding.TOKEN),
            (),
            "swap.create",
            unique_orders=True,
        ),
        Scenario(
            "create-limited",
            "swap.create with a refund address, client with every limit",
            signing,
            lambda _: seeding.refundable_requests(seeding.LIMITED_TOKEN),
            (Ratio("create-refundable", LIMITS_COST, by_cpu=True),),
            "swap.create",
            unique_orders=True,
        ),
        Scenario(
            "sidecar-status",
            f"swap.status of a sidecar, {SIDECAR_ORDERS:,} open orders",
            SIDECAR,
            seeding.status_requests,
            (Ratio(RAW, 0.40),),
            "swap.status",
        ),
        Scenario(
            "postgres-status",
            f"swap.status, random of {plan.base:,}, PostgreSQL",
            f"{POSTGRES}-{plan.base}",
            seeding.status_requests,
            (Ratio(RAW, 0.35),),
            "swap.status",
        ),
        Scenario(
            "postgres-create",
            "swap.create, durable, fresh key, PostgreSQL",
            f"{POSTGRES}-{plan.base}",
            lambda _: seeding.create_requests(),
            (Ratio("create", 0.80),),
            "swap.create",
            unique_orders=True,
        ),
        Scenario(
            "replicas-status",
            f"swap.status, random of {plan.base:,}, two replicas, connections at each",
            f"{REPLICAS}-{plan.base}",
            seeding.status_requests,
            (Ratio("postgres-status", SCALES, by_cpu=True),),
            "swap.status",
        ),
        Scenario(
            "replicas-create",
            "swap.create, durable, fresh key, two replicas, connections at each",
            f"{REPLICAS}-{plan.base}",
            lambda _: seeding.create_requests(),
            (Ratio("postgres-create", SCALES, by_cpu=True),),
            "swap.create",
            unique_orders=True,
        ),
        Scenario(NAIVE, "naive: create", NAIVE, lambda _: seeding.create_requests()),
        *(
            Scenario(name, f"{name}: echo", name, lambda _: seeding.echo_requests(peers.METHOD))
            for name in peers.SERVERS
        ),
    ]


def with_open_orders(plan: Plan) -> list[Scenario]:
    """Creating an order while few and while many orders wait for their deposit."""
    few, many = (f"{OPEN}-{count}" for count in plan.open_orders)
    return [
        Scenario(
            f"create-{server}",
            f"swap.create beside {count:,} open orders",
            server,
            lambda _: seeding.create_requests(),
            (Ratio(f"create-{few}", 0.95),) if server == many else (),
            "swap.create",
            unique_orders=True,
        )
        for server, count in zip((few, many), plan.open_orders, strict=True)
    ]


def compared(rows: Iterable[Scenario], *, at_least: float) -> list[Scenario]:
    """Each row of a store beside the same row run by the code of another checkout."""
    found = []
    for row in rows:
        if not row.server.startswith(("ours-", "signing-")) or row.name == "create-limited":
            found.append(row)  # older code may know no clients
            continue
        before = replace(
            row,
            name=f"{row.name}{BEFORE}",
            title=f"{row.title}, before",
            server=f"{row.server}{BEFORE}",
            targets=(),
        )
        found += [replace(row, targets=(*row.targets, Ratio(before.name, at_least))), before]
    return found


def at_scale(plan: Plan) -> list[Scenario]:
    """The same work on a small and on a large store."""
    rows = []
    for work, requests in (
        ("status", seeding.status_requests),
        ("plan", lambda _: seeding.plan_requests()),
    ):
        for size in (plan.small, plan.large):
            targets = (Ratio(f"{work}-{plan.small}", 0.90),) if size == plan.large else ()
            name, title = f"{work}-{size}", f"swap.{work} at {size:,} orders"
            rows.append(Scenario(name, title, f"ours-{size}", requests, targets, f"swap.{work}"))
    return rows


class Bench:
    """One run: its servers, its stores and its report."""

    def __init__(
        self, plan: Plan, work_dir: Path, found: Report, against: Path | None = None
    ) -> None:
        self._plan = plan
        self._against = against
        self._dir = work_dir
        self._report = found
        self._order_ids: dict[str, list[str]] = {}
        self._upstream: driver.Server
        self._postgres: PostgresqlServer

    def load(self, scenarios: Sequence[Scenario]) -> None:
        """Run the scenarios against each other, at each number of connections."""
        if not scenarios:
            return
        with self._servers({scenario.server for scenario in scenarios}) as servers:
            streams = {s.name: s.requests(self._order_ids.get(s.server, [])) for s in scenarios}
            for connections in CONNECTIONS:
                for round_number in range(self._plan.rounds):
                    for scenario in scenarios[:: -1 if round_number % 2 else 1]:
                        server = servers[scenario.server]
                        self._period(scenario, server, connections, streams[scenario.name])

    def on_chains(self, only: Sequence[str]) -> None:
        """Run the rows that need real daemons; report what is missing if they are not installed."""
        wanted = [name for name in onchain.NAMES if not only or name in only]
        if not wanted:
            return
        if (why := onchain.why_not()) is not None:
            self._report.remarks.append(f"not measured: {', '.join(wanted)} ({why})")
            return
        say("monerod, wallets and anvil; chains with money on them")
        asyncio.run(self._on_chains(wanted))

    async def _on_chains(self, wanted: Sequence[str]) -> None:
        size, plan = self._plan.onchain, self._plan
        onchain.log_to(self._dir / "onchain.log")
        async with onchain.chains(self._dir / "chains") as chains:
            say(f"making {size.addresses:,} XMR addresses")
            many = await chains.operator("many", size.addresses, xmr=onchain.MUCH_XMR)
            if set(wanted) - {onchain.WATCHING}:
                seconds = plan.seconds / CHAIN_ROUNDS
                periods = onchain.Periods(CONNECTIONS, CHAIN_ROUNDS, seconds, plan.warm_up)
                await onchain.Creates(many, size.addresses, periods, self._report, say).run()
            if onchain.WATCHING in wanted:
                few = await chains.operator("few", 2 * onchain.LEAST_POOL, xmr=onchain.SOME_XMR)
                await Watching(few, many, size, self._report, say).run()

    def _period(
        self,
        scenario: Scenario,
        server: driver.Server | driver.Replicas,
        connections: int,
        requests: Iterator[bytes],
    ) -> None:
        say(f"{scenario.title}, {connections} connections")
        load = driver.drive(
            server.ports,
            requests,
            connections=connections,
            seconds=self._plan.seconds / self._plan.rounds,
            warm_up=self._plan.warm_up,
            server_cpu=server.cpu_seconds,
        )
        self._report.add(scenario, connections, asyncio.run(load))

    def starts(self) -> None:
        """Start the service on new directories; take the time to /health and the idle memory."""
        seconds, megabytes = [], []
        for number in range(self._plan.starts):
            say(f"start {number + 1} of {self._plan.starts}")
            data_dir = self._dir / f"start-{number}"
            server = seeding.service("start", data_dir, data_dir.with_suffix(".log"), signs=True)
            try:
                seconds.append(server.wait_for("/health", START_SECONDS))
                server.wait_for("/readyz", START_SECONDS)
                time.sleep(IDLE_SECONDS)
                megabytes.append(server.resident_bytes() / 1e6)
            finally:
                server.stop()
        title = "process start to first /health, new data directory"
        self._report.readings += [
            Reading("startup", title, "s", tuple(seconds), under=0.40),
            Reading("memory", "resident memory, idle", "MB", tuple(megabytes), under=60.0),
        ]

    def commands(self) -> None:
        """Run ``rpcsvc health`` and ``rpcsvc agent:swap:plan`` over the socket of a service."""
        data_dir = self._dir / COMMANDS
        server = seeding.service(COMMANDS, data_dir, data_dir.with_suffix(".log"), signs=True)
        plan = [f"--{name}={value}" for name, value in seeding.swap_params(0).items()]
        try:
            server.wait_for("/readyz", START_SECONDS)
            say("rpcsvc health, rpcsvc agent:swap:plan")
            probes = [_command("health", data_dir) for _ in range(COMMAND_RUNS)]
            plans = [_command("agent:swap:plan", data_dir, *plan) for _ in range(COMMAND_RUNS)]
        finally:
            server.stop()
        cpu = tuple(1000 * cpu for _, cpu in probes)
        elapsed = tuple(seconds for seconds, _ in plans)
        self._report.readings += [
            Reading("health", "rpcsvc health, CPU", "ms", cpu, under=60.0),
            Reading("plan-command", "rpcsvc agent:swap:plan", "s", elapsed, under=0.3),
        ]

    def sizes(self) -> None:
        """Read the sizes of answers."""
        data_dir = self._dir / sizes.SIZES
        server = seeding.service(sizes.SIZES, data_dir, data_dir.with_suffix(".log"), signs=True)
        try:
            server.wait_for("/readyz", START_SECONDS)
            say("sizes of answers")
            self._report.readings += sizes.readings(server)
        finally:
            server.stop()

    def idle(self) -> None:
        """The CPU of services that have open orders and nothing to answer."""
        names = [f"{OPEN}-{count}" for count in self._plan.open_orders]
        with self._servers(names) as servers:
            say("idle, with few and with many open orders")
            time.sleep(IDLE_SECONDS)
            before = [servers[name].cpu_seconds() for name in names]
            time.sleep(IDLE_CPU_SECONDS)
            shares = [
                (servers[name].cpu_seconds() - used) / IDLE_CPU_SECONDS * 100
                for name, used in zip(names, before, strict=True)
            ]
        self._report.readings += [
            Reading(name, f"idle CPU, {count:,} open orders", "%", (share,), under=2.0)
            for name, count, share in zip(names, self._plan.open_orders, shares, strict=True)
        ]

    def lease_check(self) -> None:
        """Settle orders with and without the check of the lease in each write."""
        if (why := settling.why_not()) is not None:
            self._report.remarks.append(f"not measured: {settling.LEASE} ({why})")
            return
        directory = self._dir / settling.LEASE
        self._report.readings += settling.lease_check(directory, self._plan.settlings, say)

    def node_calls(self) -> None:
        """Count the calls that one EVM network makes of its node."""
        if (why := onchain.why_not()) is not None:
            self._report.remarks.append(f"not measured: {node_calls.NODE_CALLS} ({why})")
            return
        say("calls of an EVM node")
        directory = self._dir / node_calls.NODE_CALLS
        directory.mkdir(mode=0o700)
        onchain.log_to(self._dir / "node-calls.log")
        self._report.readings += node_calls.readings(directory)

    def settlement(self) -> None:
        """Take the time from a deposit's last block to its payout, and count calls meanwhile."""
        if (why := onchain.why_not()) is not None:
            self._report.remarks.append(f"not measured: {settlement.SETTLEMENT} ({why})")
            return
        onchain.log_to(self._dir / "settlement.log")
        asyncio.run(self._settlement(self._dir / settlement.SETTLEMENT))

    async def _settlement(self, directory: Path) -> None:
        say("monerod, wallets and anvil; chains with money on them")
        async with onchain.chains(directory) as chains:
            size, against = self._plan.settlements, self._against
            await settlement.settlement(chains, size, against, self._report, say)

    def overload(self) -> None:
        """Send a signing service twice the rate that it can serve."""
        seconds = self._plan.overload_seconds
        name = f"signing-{self._plan.small}"
        with self._servers([name]) as servers:
            say(f"overload, {overload.CONNECTIONS} connections, {seconds:g} s")
            server = servers[name]
            assert isinstance(server, driver.Server)
            run = overload.Overload(server, self._order_ids[name], self._report)
            asyncio.run(run.run(seconds))

    @contextmanager
    def _servers(
        self, names: Iterable[str]
    ) -> Iterator[dict[str, driver.Server | driver.Replicas]]:
        with ExitStack() as stack:
            servers = dict[str, driver.Server | driver.Replicas]()
            for name in sorted(names):
                if name == SIDECAR:
                    self._upstream = stack.enter_context(self._counted_upstream())
                if name.startswith(ON_POSTGRES):
                    self._postgres = stack.enter_context(own_server(**DURABLE))
                servers[name] = server = self._start(name)
                stack.callback(server.stop)
                server.wait_for("/readyz", READY_SECONDS)
                if name in self._order_ids and not name.startswith(ON_POSTGRES):
                    self._hold(stack, self._dir / name)
            yield servers

    def _hold(self, stack: ExitStack, data_dir: Path) -> None:
        """Lock a store into memory; if that fails, the report says so."""
        try:
            stack.enter_context(held(seeding.find_database(data_dir)))
        except NotHeld as why:
            self._report.remarks.append(f"{data_dir.name} was not held in memory: {why}")

    @contextmanager
    def _counted_upstream(self) -> Iterator[driver.Server]:
        """The sidecar's upstream; at the end, report the calls that it received."""
        server = sidecar.upstream(self._dir / "upstream.log")
        try:
            yield server
            busiest = float(sidecar.ask(server, "/busiest")["calls"])
            title = "calls that the sidecar's upstream saw in the busiest minute"
            under = sidecar.CALLS_PER_MINUTE + 0.5
            self._report.readings.append(Reading("upstream", title, "", (busiest,), under=under))
        finally:
            server.stop()

    def _start_sidecar(self, data_dir: Path, log: Path) -> driver.Server:
        at = self._upstream
        say(f"making {SIDECAR_ORDERS:,} orders at an upstream")
        self._order_ids[SIDECAR] = sidecar.make_orders(data_dir, log, at, SIDECAR_ORDERS)
        sidecar.ask(at, "/mark")
        return sidecar.service(data_dir, log, at, calls_per_minute=sidecar.CALLS_PER_MINUTE)

    def _start(self, name: str) -> driver.Server | driver.Replicas:
        log = self._dir / f"{name}.log"
        if name in (RAW, NAIVE, *peers.SERVERS):
            arguments = ["tests.bench.yardsticks", name, "--db", str(self._dir / "naive.db")]
            return driver.Server(name, arguments, os.environ, log)
        data_dir = self._dir / name
        if name == SIDECAR:
            return self._start_sidecar(data_dir, log)
        kind, _, count = name.removesuffix(BEFORE).partition("-")
        say(f"seeding {int(count):,} orders")
        signs = kind in ("signing", OPEN)
        if name.endswith(BEFORE) and self._against is not None:
            made = seeding.seed_with(self._against, data_dir, int(count), signs=signs)
            self._order_ids[name] = made
            return seeding.service(name, data_dir, log, signs=signs, checkout=self._against)
        if data_dir.exists():  # as an earlier part of the run left it
            shutil.rmtree(data_dir)
        shutil.copytree(self._template(signs), data_dir, ignore=shutil.ignore_patterns("*.sock"))
        open_in = {"open_in": 1} if kind == OPEN else {}
        self._order_ids[name] = seeding.clone_orders(data_dir, int(count), **open_in)
        more = {}
        if kind in ON_POSTGRES:
            say("copying them to PostgreSQL")
            asyncio.run(to_server(data_dir, self._postgres.url, lambda _what, _rows, _total: None))
            more["RPCSVC_DATABASE_URL"] = self._postgres.url
        if kind == REPLICAS:
            other = data_dir.with_name(f"{name}-other")
            shutil.copytree(data_dir, other)
            folders = (data_dir, other)
            return driver.Replicas(
                *(seeding.service(name, each, log, signs=signs, more=more) for each in folders)
            )
        return seeding.service(name, data_dir, log, signs=signs, more=more)

    def _template(self, signs: bool) -> Path:
        data_dir = self._dir / ("template-signed" if signs else "template")
        if not data_dir.exists():
            say("making template orders through the service")
            seeding.make_template(data_dir, signs=signs)
        return data_dir


def environment(work_dir: Path, plan: Plan) -> dict[str, str]:
    """The machine and software that the figures depend on."""
    chosen = driver.cores()
    return {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cores": "not pinned"
        if chosen.server is None
        else f"server {chosen.server}, driver {chosen.driver}",
        "load average at start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "fsync of 4 KiB, median": f"{_fsync_seconds(work_dir) * 1000:.3f} ms",
        "measured per row": f"{plan.seconds:g} s in {plan.rounds} rounds",
    }


def _fsync_seconds(work_dir: Path) -> float:
    times = []
    with (work_dir / "fsync").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(4096))
            started = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    return sorted(times)[25]


def _command(name: str, data_dir: Path, *options: str) -> tuple[float, float]:
    """Run a command over the socket: elapsed seconds, and seconds of CPU. Raises SeedingFailed."""
    rpcsvc = Path(sys.executable).with_name("rpcsvc")
    command = [str(rpcsvc), name, *options, "--data-dir", str(data_dir)]
    before, began = _children_cpu_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed, after = time.perf_counter() - began, _children_cpu_seconds()
    if done.returncode:
        raise seeding.SeedingFailed(f"{name} ended with {done.returncode}: {done.stderr}")
    return elapsed, after - before


def _children_cpu_seconds() -> float:
    """User and system time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(what: str) -> None:
    """Progress, apart from the report on stdout."""
    print(f"bench: {what}", file=sys.stderr, flush=True)


def chosen(scenarios: list[Scenario], only: list[str]) -> list[Scenario]:
    """The scenarios asked for, and those that they are compared with."""
    if not only:
        return scenarios
    wanted = set(only)
    for scenario in scenarios:
        if scenario.name in only:
            wanted |= {t.against for t in scenario.targets if isinstance(t, Ratio)}
    return [scenario for scenario in scenarios if scenario.name in wanted]


def run(plan: Plan, only: list[str], work_dir: Path, against: Path | None = None) -> Report:
    """The whole benchmark; a server that fails ends it and becomes a problem of the report."""
    found = Report(environment(work_dir, plan))
    bench = Bench(plan, work_dir, found, against)
    rows = side_by_side(plan)
    if against is not None:
        rows = compared(rows, at_least=NOT_SLOWER)
    if absent := peers.missing():
        found.remarks.append(f"not measured: {', '.join(absent)} (not installed, see make bench)")
        rows = [row for row in rows if row.name not in absent]
    try:
        bench.load(chosen(rows, only))
        if not only or STARTUP in only:
            bench.starts()
        if not only or COMMANDS in only:
            bench.commands()
        if not only or sizes.SIZES in only:
            bench.sizes()
        bench.load(chosen(with_open_orders(plan), only))
        if not only or OPEN in only:
            bench.idle()
        if not only or OVERLOAD in only:
            bench.overload()
        if not only or settling.LEASE in only:
            bench.lease_check()
        if not only or node_calls.NODE_CALLS in only:
            bench.node_calls()
        if not only or settlement.SETTLEMENT in only:
            bench.settlement()
        bench.load(chosen(at_scale(plan), only))
        bench.on_chains(only)
    except (driver.ServerFailed, seeding.SeedingFailed, OSError, *FAILURES) as error:
        found.problems.append(str(error) or repr(error))
    found.conclude()
    return found


def arguments() -> tuple[Plan, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("--quick", action="store_true", help="small stores, short periods")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--seconds", type=float, help="measured seconds per row, 0.2 to 30")
    parser.add_argument("--overload-seconds", type=float, help="how long overload lasts, 2 to 60")
    parser.add_argument("--work-dir", type=Path, default=RESULTS, help="where stores are made")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="compare with the code of another checkout"
    )
    args = parser.parse_args()
    if args.against is not None:
        args.against = args.against.resolve()
        if not Path(driver.python_of(args.against)).exists():
            parser.error(f"{args.against} has no .venv: run make install there")
    plan = QUICK if args.quick else FULL
    if args.seconds is not None:
        if not 0.2 <= args.seconds <= 30:
            parser.error(f"--seconds must be from 0.2 to 30, not {args.seconds:g}")
        plan = replace(plan, seconds=args.seconds)
    if args.overload_seconds is not None:
        if not 2 <= args.overload_seconds <= 60:
            parser.error(f"--overload-seconds must be from 2 to 60, not {args.overload_seconds:g}")
        plan = replace(plan, overload_seconds=args.overload_seconds)
    names = [s.name for s in side_by_side(plan) + with_open_orders(plan) + at_scale(plan)]
    names += [
        STARTUP,
        COMMANDS,
        sizes.SIZES,
        OVERLOAD,
        OPEN,
        settling.LEASE,
        node_calls.NODE_CALLS,
        settlement.SETTLEMENT,
        *onchain.NAMES,
    ]
    unknown = sorted(set(args.only) - set(names))
    if unknown:
        parser.error(f"no work is named {', '.join(unknown)}; there are {', '.join(names)}")
    return plan, args


def main() -> int:
    """Run, print the table, write the JSON; returns the exit status."""
    plan, args = arguments()
    parent: Path = args.work_dir
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped too
    driver.pin(driver.cores().driver)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stores-", dir=parent) as work_dir:
        found = run(plan, args.only, Path(work_dir).resolve(), args.against)
    path = RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    report.write_json(found, path)
    print(report.table(found))
    print(f"\nwritten to {path}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
