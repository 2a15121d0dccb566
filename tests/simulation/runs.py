"""Runs universes, each in a process of its own, which may fork."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from asyncio import events
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
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
    ``struck``: the effects at which a scenario was struck.
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
    struck: tuple[int, ...] = ()


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
    (outcome,) = runs_made([make], orders, engine, is_over)
    return outcome


def runs_made(
    makes: Sequence[Callable[[Path], Universe]],
    orders: int,
    engine: str = "onchain",
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Run universes as ``run_made`` does, all at once; yield their outcomes and their forks'.

    When nobody waits for more outcomes, each process ends with its next one.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rpcsvc-simulation-", dir=_MEMORY) as root:
        children, open_ends = [], list[Connection]()
        for number, make in enumerate(makes):
            receiving, sending = context.Pipe(duplex=False)
            open_ends.append(receiving)
            folder = Path(root, str(number))
            folder.mkdir()
            arguments = (make, folder, orders, engine, tuple(open_ends), sending)
            child = context.Process(target=_run_here, args=arguments)
            child.start()
            sending.close()
            children.append(child)
        try:
            while open_ends:
                ready = wait(open_ends, timeout=1)
                for end in [each for each in open_ends if each in ready]:
                    try:
                        outcome: Outcome = end.recv()
                    except EOFError:
                        open_ends.remove(end)
                        continue
                    yield outcome
                if not ready and is_over():
                    for child in children:
                        child.kill()
                    raise CutShort
        finally:
            for end in open_ends:
                end.close()
            for child in children:
                child.join()
        if any(child.exitcode for child in children):
            raise RuntimeError("a run has ended without an outcome")


def forked(universe: Universe) -> bool:
    """Go on from here twice: return True in a fork, then False when that has ended.

    The fork's changes to the universe's files are undone.
    """
    folder = universe.folder
    before = {
        path: (path.stat().st_ino, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }
    if (pid := os.fork()) == 0:
        events._set_running_loop(universe.loop)  # asyncio has forgotten it in a new process
        return True
    _, status = os.waitpid(pid, 0)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path not in before:
            path.rmdir() if path.is_dir() else path.unlink()
    if status:
        os._exit(1)  # it has said why, or nobody waits for more
    for path, (file, content) in before.items():
        if path.stat().st_ino != file:
            raise RuntimeError(f"a fork has replaced {path}, which may be open here")
        if path.is_file():
            path.write_bytes(content)
    return False


def _run_here(
    make: Callable[[Path], Universe],
    folder: Path,
    orders: int,
    engine: str,
    inherited: Sequence[Connection],
    outcome: Connection,
) -> None:
    for end in inherited:
        end.close()  # as long as it is open here, it is not seen that nobody reads
    # The clock of the log is the machine's, and thousands of lines tell nothing that is wrong.
    structlog.configure(
        processors=[lambda _logger, _name, _event: ""],
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    gc.disable()  # the process ends soon, and looking for cycles takes 5 to 8 % of its CPU
    universe = make(folder)
    try:
        universe.run(orders)
    except Violated:
        pass
    except Exception:  # noqa: BLE001 - reported as a violation, with its seed
        universe.violations.append(traceback.format_exc())
    loop = universe.loop
    try:
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
                universe.struck,
            )
        )
    except BrokenPipeError:
        os._exit(1)  # nobody waits for it, nor for those of which this is a fork
    os._exit(0)  # collecting the tasks of killed replicas would run their finally blocks
