"""``make profile``: where a create, a status and a plan spend their CPU.

    python -m tests.bench.profile [--only NAME]... [--requests N] [--seconds S] [--against CHECKOUT]

Prints user instructions per request, counted by callgrind, which the load of the machine does not
change; the share of a status that counting for /metrics takes; and shares of the CPU time by part
of the service, sampled by py-spy. Needs valgrind and permission to trace processes of the same
user. Answers are signed and orders attested, as by default; ``--against`` counts the code of
another checkout besides, with signatures and without.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from rpcsvc.store.backends.copying import to_server
from tests.bench import seeding
from tests.bench.driver import HOST, Server, drive, python_of
from tests.postgres import DURABLE, own_server

CONNECTIONS: Final = 16
WARM_UP: Final = 256
ORDERS: Final = 1_000
START_SECONDS: Final = 120.0
RATE: Final = 1_000
COUNTED: Final = 20_000
MOST_OF_STATUS: Final = 0.02
MOST_OF_REPLICAS: Final = 0.10
MOST_OF_LIMITS: Final = 0.03
LIMITED, UNLIMITED = "create-limited", "create-refundable"
# The works are counted in turn in so many rounds, so that the machine's load falls on all alike.
ROUNDS: Final = 8
MOST_MILLIONS: Final = {"create-x2u": 2.4, "create-u2x": 2.4}
Requests = Callable[[list[str]], Iterator[bytes]]
WORK: Final[dict[str, Requests]] = {
    "create-x2u": lambda _: itertools.islice(seeding.create_requests(), 0, None, 2),
    "create-u2x": lambda _: itertools.islice(seeding.create_requests(), 1, None, 2),
    UNLIMITED: lambda _: seeding.refundable_requests(seeding.TOKEN),
    LIMITED: lambda _: seeding.refundable_requests(seeding.LIMITED_TOKEN),
    "status": seeding.status_requests,
    "plan": lambda _: seeding.plan_requests(),
}
# A sample belongs to the innermost frame "function (file:line)" that a pattern is found in.
PARTS: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("commit: writer's thread", r"GroupConnection|_connection_worker_thread"),
        ("checkpoints", r"^(_move|_pass|restart) .*sqlite/database"),
        ("log line", r"structlog|rpcsvc/logs|^_log .*operations/dispatch"),
        ("attestation", r"attest"),
        ("response signature", r"response_signer|rpcsvc/verify|^BatchSigner"),
        ("deposit address", r"deposit_address |stagenet_subaddress|evm_address_from_seed"),
        ("HTTP (aiohttp)", r"aiohttp/|yarl/|multidict/|rpcsvc/http/(http_server|connection)"),
        ("edge", r"rpcsvc/http/edge|^require_framing|rpcsvc/serving"),
        ("gate, body, response", r"rpcsvc/http/(gate|messages|operation_routes)"),
        ("JSON", r"rpcsvc/strict_json"),
        ("JSON-RPC", r"rpcsvc/http/jsonrpc|jsonrpcserver/|returns/|oslash/"),
        ("inputs", r"operations/inputs|domain/addresses"),
        ("idempotency", r"orders/idempotency"),
        (
            "reads",
            r"^(fetch|fetch_one|compiled|_hold_snapshot) |is_deposit_address|status_view",
        ),
        ("group commit", r"store/group_commit|sqlite/database|aiosqlite/"),
        ("rows", r"rpcsvc/store/"),
        ("answers", r"operations/(views|ordering|swap|service)|^(head|finish) .*dispatch"),
        ("quote and terms", r"local_venue|orders/(policy|inventory|ports)|rpcsvc/domain/|sandbox"),
        ("reservations", r"orders/(reservations|unfunded|processor)"),
        ("dispatch", r"operations/dispatch|http/metrics"),
        ("worker", r"orders/scheduler"),
        ("event loop", r"asyncio/|selectors\.py"),
    )
)

OTHER: Final = "other"
_WAITING: Final = re.compile(r"^(_connection_worker_thread|_worker|.*wait|.*select) ")


class Tracing:
    """A process under callgrind, with counting off until ``counted``."""

    def __init__(self, pid: int, out: Path) -> None:
        self._pid = pid
        self._out = out
        self._dumps = 0

    def control(self, *arguments: str) -> None:
        """Send a command to callgrind."""
        command = ["callgrind_control", *arguments, str(self._pid)]
        subprocess.run(command, check=True, capture_output=True)

    def counted(self, work: Callable[[], object]) -> tuple[int, float]:
        """The instructions and the seconds that some work takes."""
        self.control("--zero")
        self.control("--instr=on")
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        self.control("--dump")
        self.control("--instr=off")
        self._dumps += 1
        return _total(self._out.with_name(f"{self._out.name}.{self._dumps}")), seconds


def _total(dump: Path) -> int:
    found = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("callgrind's dump has no totals")
    return int(found[1])


def _load(port: int, requests: Iterator[bytes], count: int) -> None:
    asyncio.run(_answers(port, requests, count))


async def _answers(port: int, requests: Iterator[bytes], count: int) -> None:
    """Have so many requests answered, one after another. Raises for a failure.

    One after another: how many concurrent requests share a commit depends on the machine.
    """
    reader, writer = await asyncio.open_connection(HOST, port)
    for request in itertools.islice(requests, count):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"\r\ncontent-length: *([0-9]+)\r\n", head, re.IGNORECASE)
        body = await reader.readexactly(int(size[1]) if size else 0)
        if b'"result"' not in body or b'"error"' in body:
            raise seeding.SeedingFailed(f"a request failed: {head!r} {body!r}")
    writer.close()


def instructions(
    directory: Path,
    names: list[str],
    count: int,
    *,
    signs: bool = True,
    checkout: Path | None = None,
) -> dict[str, float]:
    """User instructions per request of each work, an idle service's own subtracted."""
    directory = Path(tempfile.mkdtemp(dir=directory))
    data, order_ids = _store(directory, "counted", signs=signs, checkout=checkout)
    out = directory / "callgrind.out"
    tracer = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}")
    log = directory / "log"
    server = seeding.service("counted", data, log, signs=signs, checkout=checkout, under=tracer)
    found = dict.fromkeys(names, 0.0)
    each = count // ROUNDS
    try:
        server.wait_for("/readyz", START_SECONDS)
        tracing = Tracing(server.pid, out)
        loads = {name: partial(_load, server.port, WORK[name](order_ids)) for name in names}
        for load in loads.values():
            load(WARM_UP)
        idle, seconds = tracing.counted(lambda: time.sleep(3))
        for number in range(ROUNDS):
            for name in names[:: -1 if number % 2 else 1]:
                used, took = tracing.counted(partial(loads[name], each))
                found[name] += (used - idle * took / seconds) / each / ROUNDS
    finally:
        server.stop()
    return found


def replica_instructions(
    directory: Path, names: list[str], count: int
) -> dict[str, tuple[float, float]]:
    """The same on PostgreSQL: of one replica, and of two that get half of the requests each."""
    data, order_ids = _store(directory, "one")
    shutil.copytree(data, directory / "two", ignore=shutil.ignore_patterns("*.sock"))
    with own_server(**DURABLE) as postgres, ExitStack() as stack:
        asyncio.run(to_server(data, postgres.url, lambda _what, _rows, _total: None))
        one = stack.enter_context(_replica(directory, "one", postgres.url))
        alone = _per_request([one], names, order_ids, count)
        two = stack.enter_context(_replica(directory, "two", postgres.url))
        both = _per_request([one, two], names, order_ids, count)
    return {name: (alone[name], both[name]) for name in names}


@contextmanager
def _replica(directory: Path, name: str, url: str) -> Iterator[tuple[Server, Tracing]]:
    out = directory / f"{name}.callgrind"
    tracer = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}")
    more = {"RPCSVC_DATABASE_URL": url}
    log = directory / f"{name}.log"
    server = seeding.service(name, directory / name, log, signs=True, more=more, under=tracer)
    try:
        server.wait_for("/readyz", START_SECONDS)
        yield server, Tracing(server.pid, out)
    finally:
        server.stop()


def _per_request(
    replicas: list[tuple[Server, Tracing]], names: list[str], order_ids: list[str], count: int
) -> dict[str, float]:
    """The instructions of each replica during its share of the requests, without an idle one's."""
    found = dict.fromkeys(names, 0.0)
    for server, tracing in replicas:
        idle, seconds = tracing.counted(lambda: time.sleep(3))
        for name in names:
            load = partial(_load, server.port, WORK[name](order_ids))
            load(WARM_UP // len(replicas))
            used, took = tracing.counted(partial(load, count // len(replicas)))
            found[name] += (used - idle * took / seconds) / count
    return found


def metrics_instructions(directory: Path) -> float:
    """User instructions per call for /metrics: two clock readings and the counts."""

    def used(calls: int) -> int:
        out = directory / f"counting.{calls}"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        command += [sys.executable, "-m", "tests.bench.counting", str(calls)]
        # Set and dictionary orders, and with them the cost of the imports, would differ.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return _total(out)

    return (used(COUNTED) - used(0)) / COUNTED


def shares(directory: Path, names: list[str], seconds: float) -> dict[str, Counter[str]]:
    """The number of samples by part, for each kind of request."""
    data, order_ids = _store(directory, "sampled")
    server = seeding.service("sampled", data, directory / "log", signs=True)
    try:
        server.wait_for("/readyz", START_SECONDS)
        return {name: _sampled(server, WORK[name](order_ids), directory, seconds) for name in names}
    finally:
        server.stop()


def _sampled(
    server: Server, requests: Iterator[bytes], directory: Path, seconds: float
) -> Counter[str]:
    raw = directory / "stacks"
    spy = str(Path(sys.executable).with_name("py-spy"))
    command = [spy, "record", "--format", "raw", "--output", str(raw)]
    command += ["--rate", str(RATE), "--duration", str(int(seconds)), "--pid", str(server.pid)]
    sampler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    load = drive(
        server.ports,
        requests,
        connections=CONNECTIONS,
        seconds=seconds + 1,
        warm_up=0.5,
        server_cpu=server.cpu_seconds,
    )
    measured = asyncio.run(load)
    if sampler.wait() or measured.failures:
        raise RuntimeError(f"py-spy ended with {sampler.returncode}; {measured.failure_samples}")
    found: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack, _, samples = line.rpartition(" ")
        frames = stack.split(";")
        if not _waits(frames):
            found[_part_of(frames)] += int(samples)
    return found


def _part_of(frames: list[str]) -> str:
    for frame in reversed(frames):
        for name, pattern in PARTS:
            if pattern.search(frame):
                return name
    return OTHER


def _waits(frames: list[str]) -> bool:
    """Whether a thread is idle, which py-spy can't detect in one that it has stopped."""
    return _WAITING.search(frames[-1]) is not None


def _store(
    directory: Path, name: str, *, signs: bool = True, checkout: Path | None = None
) -> tuple[Path, list[str]]:
    data = directory / name
    if checkout is not None:
        return data, seeding.seed_with(checkout, data, ORDERS, signs=signs)
    seeding.make_template(data, signs=signs)
    return data, seeding.clone_orders(data, ORDERS)


def _print_limits(counted: dict[str, float]) -> None:
    if {LIMITED, UNLIMITED} <= counted.keys():
        more = counted[LIMITED] / counted[UNLIMITED] - 1
        met = "met" if more <= MOST_OF_LIMITS else "NOT MET"
        target = f"target <= {MOST_OF_LIMITS:.0%}: {met}"
        print(f"  {'limits of a client':26}{more:+8.2%} of a create  {target}", flush=True)


def _verdict(name: str, each: float) -> str:
    if name not in MOST_MILLIONS:
        return ""
    met = "met" if each <= MOST_MILLIONS[name] * 1e6 else "NOT MET"
    return f"  target <= {MOST_MILLIONS[name]} M: {met}"


def _print_replicas(found: dict[str, tuple[float, float]]) -> None:
    print("on PostgreSQL: one replica, and two that get half of the requests each")
    for name, (alone, both) in found.items():
        more = both / alone - 1
        met = "met" if abs(more) <= MOST_OF_REPLICAS else "NOT MET"
        target = f"target within {MOST_OF_REPLICAS:.0%}: {met}"
        print(f"  {name:26}{alone / 1e6:8.3f} M{both / 1e6:8.3f} M{more:+8.1%}  {target}")


def _print_against(checkout: Path, directory: Path, names: list[str], count: int) -> None:
    for signs in (True, False):
        print(f"beside {checkout}, {'signed' if signs else 'unsigned'}: before, now")
        before = instructions(directory, names, count, signs=signs, checkout=checkout)
        for name, now in instructions(directory, names, count, signs=signs).items():
            more = now / before[name] - 1
            print(
                f"  {name:26}{before[name] / 1e6:8.3f} M{now / 1e6:8.3f} M{more:+8.1%}", flush=True
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=__doc__)
    parser.add_argument("--only", action="append", choices=WORK, help="work to look at")
    parser.add_argument("--requests", type=int, default=512, help="how many callgrind counts")
    parser.add_argument("--replicas", action="store_true", help="compare two replicas with one")
    parser.add_argument("--seconds", type=float, default=5, help="how long py-spy samples")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="count that code, too")
    args = parser.parse_args()
    if args.against is not None and not Path(python_of(args.against)).exists():
        parser.error(f"{args.against} has no .venv: run make install there")
    names = args.only or list(WORK)
    if args.against is not None:  # older code may know no clients
        names = [name for name in names if name != LIMITED]
    directory = Path(tempfile.mkdtemp(prefix="rpcsvc-profile-"))
    try:
        if shutil.which("valgrind"):
            print("user instructions per request, one at a time (callgrind)")
            counted = instructions(directory, names, args.requests)
            for name, each in counted.items():
                print(f"  {name:26}{each / 1e6:8.3f} M{_verdict(name, each)}", flush=True)
            _print_limits(counted)
            if args.against is not None:
                _print_against(args.against.resolve(), directory, names, args.requests)
            if args.replicas:
                _print_replicas(replica_instructions(directory, names, args.requests))
            if status := counted.get("status"):
                each = metrics_instructions(directory)
                share = f"{each / status:.1%} of a status (bound: {MOST_OF_STATUS:.0%})"
                print(f"  {'metrics':26}{each / 1e6:8.3f} M, {share}", flush=True)
        else:
            print("valgrind is not installed: instructions are not counted")
        if args.seconds:
            found = shares(directory, names, args.seconds)
            print("\n" + f"{'share of CPU samples':28}" + "".join(f"{n:>12}" for n in names))
            for part in [*dict(PARTS), OTHER]:
                row = (found[name][part] / found[name].total() for name in names)
                print(f"  {part:26}" + "".join(f"{share:12.1%}" for share in row))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
