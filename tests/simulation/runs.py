"""Runs one universe in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from tests.simulation.onchain import OnchainUniverse
from tests.simulation.sandbox import SandboxUniverse
from tests.simulation.universe import Faults, Universe, Violated

ENGINES: Final[Mapping[str, type[Universe]]] = {
    "sandbox": SandboxUniverse,
    "onchain": OnchainUniverse,
}
# Syncing a file takes no time there.
_MEMORY: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Outcome(NamedTuple):
    """How a run ended: its trace, the steps of the loop, what struck, and what did not hold.

    ``asked``: how many people it was made for. ``orders``: how many have ordered. ``strikes``: how
    many have a number by which they can be left out. ``last_notes``: what happened before the end.
    """

    engine: str
    seed: int
    asked: int
    trace: str
    steps: int
    orders: int
    counts: dict[str, int]
    violations: list[str]
    strikes: int
    last_notes: list[str]


class CutShort(Exception):
    """A run was ended before it was over, and says nothing."""


def run(
    seed: int,
    orders: int,
    faults: Faults | None = None,
    engine: str = "sandbox",
    is_over: Callable[[], bool] = lambda: False,
    left_out: Collection[str] = (),
) -> Outcome:
    """Run a universe with new faults, or with these; ``left_out`` as there. Raises CutShort."""
    universe = ENGINES[engine]
    return run_made(
        lambda folder: universe(seed, folder, faults, left_out), orders, engine, is_over
    )


def run_made(
    make: Callable[[Path], Universe],
    orders: int,
    engine: str = "onchain",
    is_over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a universe in a process of its own, whose killed replicas end with it.

    ``is_over`` is asked once a second; when it says so, the process is killed. Raises CutShort.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="rpcsvc-simulation-", dir=_MEMORY) as folder:
        arguments = (make, Path(folder), orders, engine, sending)
        child = context.Process(target=_run_here, args=arguments)
        child.start()
        sending.close()
        try:
            while not receiving.poll(1):
                if is_over():
                    child.kill()
                    raise CutShort
            outcome: Outcome = receiving.recv()
        except EOFError:
            raise RuntimeError("the run has ended without an outcome") from None
        finally:
            child.join()
    return outcome


def _run_here(
    make: Callable[[Path], Universe], folder: Path, orders: int, engine: str, outcome: Connection
) -> None:
    # The clock of the log is the machine's, and thousands of lines tell nothing that is wrong.
    structlog.configure(
        processors=[lambda _logger, _name, _event: ""],
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    universe = make(folder)
    try:
        universe.run(orders)
    except Violated:
        pass
    except Exception:  # noqa: BLE001 - reported as a violation, with its seed
        universe.violations.append(traceback.format_exc())
    loop = universe.loop
    outcome.send(
        Outcome(
            engine,
            universe.seed,
            orders,
            loop.trace,
            loop.steps,
            len(universe.orders),
            universe.counts,
            universe.violations,
            universe.strikes,
            list(loop.last_notes),
        )
    )
    outcome.close()
    os._exit(0)  # collecting the tasks of killed replicas would run their finally blocks
