"""Cost that the check of the lease in each write adds to settling on PostgreSQL.

    python -m tests.bench.settling checked|unchecked --data-dir DIR

The instructions of single writes with and without the check, times the writes of an order, as a
share of what settling an order in the sandbox takes. They are counted by callgrind: the difference
of two whole settlements would be smaller than their noise. A write that shares its transaction, as
under load, shares the check. The server's own share is of its CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from rpcsvc.bootstrap import running
from rpcsvc.settings import load_settings
from rpcsvc.store.database import Statement
from rpcsvc.store.leases import Fenced
from tests.bench.profile import Tracing
from tests.bench.report import Reading
from tests.postgres import DURABLE, PostgresqlServer, own_server
from tests.sandbox import ManualClock, Sandbox

LEASE: Final = "lease"
MOST_PERCENT: Final = 5.0
CHECKED, UNCHECKED = "checked", "unchecked"
# Single writes, one after another.
WRITES: Final = 100
_URL: Final = "RPCSVC_DATABASE_URL"
# Blocks come every second or faster, and a payout needs two: in so many all are settled.
_STEPS_SECONDS: Final = 6
_OPEN: Final = "SELECT order_id FROM orders WHERE deadline_at IS NOT NULL LIMIT 1"
_NO_ROW: Final = "DELETE FROM reservations WHERE order_id = :order_id"


class SettlingFailed(Exception):
    """A worker ended, or left orders open; the message has what it said."""


# --- the worker, in a process of its own -------------------------------------------------------


async def _work(data_dir: Path) -> None:
    """On stdin: ``order`` makes one, ``settle`` settles it, ``write`` writes so many times.

    Each is answered by the number of writes that it took.
    """
    environ = {key: os.environ[key] for key in (_URL,)}
    flags = {"data_dir": str(data_dir)}
    settings = load_settings(config_file=None, environ=environ, flags=flags).settings
    clock = ManualClock()
    async with running(settings, clock=clock) as up:
        await up.worker.recover()
        box, tables, writes = Sandbox(up, clock), Fenced(up.database, up.lease), _counted()
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            before = next(writes)
            if line == "order":
                # Orders are taken only by a clock that is close to the database's.
                clock.now = max(clock.now, time.time_ns() // 1_000_000)
                await (await box.order("u2x")).fund()
            elif line == "settle":
                await box.settle(_STEPS_SECONDS)
                if await up.database.fetch_one(_OPEN) is not None:
                    raise SettlingFailed("an order is still open")
            else:
                for _ in range(WRITES):
                    await tables.write([Statement(_NO_ROW, {"order_id": ""})])
            print(next(writes) - before, flush=True)


def _counted() -> Iterator[int]:
    """How many writes of the settler there were."""
    write, count = Fenced.write, 0

    async def counted(self: Fenced, statements: Sequence[Statement]) -> None:
        nonlocal count
        count += 1
        await write(self, statements)

    setattr(Fenced, "write", counted)  # noqa: B010 - mypy refuses to assign to a method
    while True:
        yield count


async def _write(self: Fenced, statements: Sequence[Statement]) -> None:
    await self._db.write(statements)


def main() -> None:
    """Run a worker."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.settling", description=__doc__)
    parser.add_argument("which", choices=(CHECKED, UNCHECKED))
    parser.add_argument("--data-dir", type=Path, required=True)
    args = parser.parse_args()
    if args.which == UNCHECKED:
        setattr(Fenced, "write", _write)  # noqa: B010 - mypy refuses to assign to a method
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(_work(args.data_dir))


# --- measuring ---------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Instructions of the worker, nanoseconds of CPU of the server, and how many writes it took."""

    instructions: int
    server_ns: int
    writes: int


class Settler:
    """A worker under callgrind, on a PostgreSQL server of its own."""

    def __init__(self, process: subprocess.Popen[str], out: Path, server: PostgresqlServer) -> None:
        self._process = process
        self._tracing = Tracing(process.pid, out)
        self._server = server
        self.ask("order")
        self.ask("settle")  # connections, prepared statements

    def cost(self, line: str) -> Cost:
        """Measure what a request takes. Raises SettlingFailed."""
        answers: list[int] = []
        before = self._server.backend_cpu_ns()
        used, _ = self._tracing.counted(lambda: answers.append(self.ask(line)))
        return Cost(used, self._server.backend_cpu_ns() - before, answers[0])

    def ask(self, line: str) -> int:
        """One request; the number of writes. Raises SettlingFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer.isdigit():
            raise SettlingFailed(f"a worker said {answer!r} to {line!r}")
        return int(answer)


@contextmanager
def settler(directory: Path, which: str) -> Iterator[Settler]:
    """A worker that checks the lease, or one that does not."""
    data_dir = directory / which
    data_dir.mkdir(mode=0o700, parents=True)
    out = directory / f"{which}.callgrind"
    tracer = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    worker = ["-m", "tests.bench.settling", which, "--data-dir", str(data_dir)]
    with own_server(**DURABLE) as postgres, data_dir.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [*tracer, sys.executable, *worker],
            env={**os.environ, _URL: postgres.url, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield Settler(process, out, postgres)
        finally:
            process.kill()
            process.wait()


def why_not() -> str | None:
    """Why it can't be measured; None: it can."""
    return None if shutil.which("valgrind") else "valgrind is not installed"


def lease_check(directory: Path, rounds: int, say: Callable[[str], None]) -> list[Reading]:
    """The shares of the check in settling one order, by round, in per cent."""
    in_worker: list[float] = []
    in_server: list[float] = []
    with ExitStack() as stack:
        checked, unchecked = (
            stack.enter_context(settler(directory, which)) for which in (CHECKED, UNCHECKED)
        )
        for each in (checked, unchecked):
            each.ask("write")
        idle = unchecked.cost("settle")
        for number in range(rounds):
            say(f"what a check of the lease adds to settling, round {number + 1} of {rounds}")
            unchecked.ask("order")
            order = unchecked.cost("settle")
            with_check, without = checked.cost("write"), unchecked.cost("write")
            for shares, field in ((in_worker, "instructions"), (in_server, "server_ns")):
                check = (getattr(with_check, field) - getattr(without, field)) / WRITES
                whole = getattr(order, field) - getattr(idle, field)
                say(f"{field}: a check {check:,.0f}, {order.writes} writes, an order {whole:,}")
                shares.append(100 * check * order.writes / whole)
    title = "checks of the lease while an order is settled alone, of"
    return [
        Reading(LEASE, f"{title} its instructions", "%", tuple(in_worker), under=MOST_PERCENT),
        Reading(
            f"{LEASE}-server",
            f"{title} PostgreSQL's CPU",
            "%",
            tuple(in_server),
            under=MOST_PERCENT,
        ),
    ]


if __name__ == "__main__":
    main()
