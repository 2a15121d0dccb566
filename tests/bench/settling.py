"""What the check of the lease in each write adds to settling orders on PostgreSQL.

    python -m tests.bench.settling checked|unchecked --data-dir DIR

The sandbox's worker settles the same orders with and without the check. Its user instructions are
counted by callgrind, which the load of the machine does not change; PostgreSQL's CPU is measured.
Orders come one at a time, when each write has a transaction of its own, or many at once.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from rpcsvc.app import running
from rpcsvc.settings import load_settings
from rpcsvc.store.database import Statement
from rpcsvc.store.leases import Fenced
from tests.bench.profile import Tracing
from tests.bench.report import Reading
from tests.postgres import DURABLE, own_server
from tests.postgres import Server as Postgres
from tests.sandbox import ManualClock, Sandbox

LEASE: Final = "lease"
MOST_PERCENT: Final = 5.0
CHECKED, UNCHECKED = "checked", "unchecked"
SIZES: Final = (1, 4)
_URL: Final = "RPCSVC_DATABASE_URL"
# Blocks come every second or faster, and a payout needs two: in so many all are settled.
_STEPS_SECONDS: Final = 6
_IDLE_SECONDS: Final = 5
_OPEN: Final = "SELECT count(*) AS orders FROM orders WHERE deadline_at IS NOT NULL"


class SettlingFailed(Exception):
    """A worker ended, or left orders open; the message has what it said."""


# --- the worker, in a process of its own -------------------------------------------------------


async def _work(data_dir: Path) -> None:
    """For each number on stdin: make so many orders, say so; after another line, settle them."""
    environ = {key: os.environ[key] for key in (_URL,)}
    flags = {"data_dir": str(data_dir)}
    settings = load_settings(config_file=None, environ=environ, flags=flags).settings
    clock = ManualClock()
    async with running(settings, clock=clock) as up:
        await up.worker.recover()
        box = Sandbox(up, clock)
        while line := await asyncio.to_thread(sys.stdin.readline):
            # Orders are taken only by a clock that is close to the database's.
            clock.now = max(clock.now, time.time_ns() // 1_000_000)
            for number in range(int(line)):
                await (await box.order("x2u" if number % 2 else "u2x")).fund()
            print("made", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await box.settle(_STEPS_SECONDS)
            row = await up.database.fetch_one(_OPEN)
            print(0 if row is None else row["orders"], flush=True)


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


@dataclass(frozen=True)
class Cost:
    """Of settling: the worker's user instructions, and CPU seconds of its PostgreSQL server."""

    instructions: float
    server_seconds: float


class Settler:
    """A worker under callgrind, on a PostgreSQL server of its own."""

    def __init__(self, process: subprocess.Popen[str], postgres: Postgres, out: Path) -> None:
        self._process = process
        self._postgres = postgres
        self._tracing = Tracing(process.pid, out)
        self._background = 0.0

    def begin(self) -> None:
        """Settle one order, and count what runs meanwhile that has nothing to do with orders."""
        self.settle(1)
        used, seconds = self._tracing.counted(lambda: time.sleep(_IDLE_SECONDS))
        self._background = used / seconds

    def settle(self, orders: int) -> Cost:
        """Settle so many new orders. Raises SettlingFailed."""
        self._ask(str(orders), "made")
        before = self._server_seconds()
        used, seconds = self._tracing.counted(lambda: self._ask("", "0"))
        return Cost(used - self._background * seconds, self._server_seconds() - before)

    def _ask(self, line: str, expected: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != expected:
            raise SettlingFailed(f"a worker said {answer!r}, not {expected!r}")

    def _server_seconds(self) -> float:
        postmaster = int((self._postgres.folder / "data/postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        schedules = [Path(f"/proc/{pid}/schedstat") for pid in (postmaster, *children)]
        return sum(int(each.read_text().split()[0]) for each in schedules) / 1e9


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
            yield Settler(process, postgres, out)
        finally:
            process.kill()
            process.wait()


def why_not() -> str | None:
    """Why it can't be measured; None: it can."""
    return None if shutil.which("valgrind") else "valgrind is not installed"


def lease_check(directory: Path, rounds: int, say: Callable[[str], None]) -> list[Reading]:
    """By how many per cent the check raises the costs of settling, by pair of rounds."""
    readings = []
    with ExitStack() as stack:
        checked, unchecked = (
            stack.enter_context(settler(directory, which)) for which in (CHECKED, UNCHECKED)
        )
        for each in (checked, unchecked):
            each.begin()
        # Passes that find nothing to do: there are as many with the check as without.
        idle = unchecked.settle(0)
        for orders in SIZES:
            say(f"settling {orders} at once, with and without a check of the lease")
            pairs = [(checked.settle(orders), unchecked.settle(orders)) for _ in range(rounds)]
            title = f"a check of the lease in each write, settling {orders} at once"
            worker = tuple(
                _more(own.instructions, other.instructions, idle.instructions)
                for own, other in pairs
            )
            server = tuple(
                _more(own.server_seconds, other.server_seconds, idle.server_seconds)
                for own, other in pairs
            )
            readings += [
                Reading(LEASE, f"{title}: instructions", "%", worker, under=MOST_PERCENT),
                Reading(LEASE, f"{title}: CPU of PostgreSQL", "%", server, under=MOST_PERCENT),
            ]
    return readings


def _more(own: float, other: float, idle: float) -> float:
    return 100 * ((own - idle) / (other - idle) - 1)


if __name__ == "__main__":
    main()
