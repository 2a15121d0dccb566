"""The worker loop: scans for deposits, applies deadlines, runs effects.

``tick`` is one pass and may be called by hand (tests do); ``run`` repeats it until it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from rpcsvc.clock import steady_ms
from rpcsvc.errors import ServiceError
from rpcsvc.health import Health
from rpcsvc.orders.processor import Quarantine
from rpcsvc.orders.scheduler.effects import EffectRunner

log = structlog.get_logger(__name__)

TICK_MS = 200
RESTART_SECONDS = 1
# A pass takes milliseconds, or seconds where there is much to catch up on.
LONG_PASS_MS = 60_000

# One step of a pass; returns how much there was to do.
Step = Callable[[], Awaitable[int]]
# An endless loop.
Loop = Callable[[], Coroutine[Any, Any, None]]


class Worker:
    """Runs the service's periodic work on orders.

    A pass takes ``steps`` in turn, then starts the effects of ``runners`` that are due. ``loops``
    run as long as the worker does, each begun again if it breaks.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        quarantine: Quarantine,
        *,
        runners: Sequence[EffectRunner] = (),
        loops: Sequence[Loop] = (),
    ) -> None:
        self._steps = tuple(steps)
        self._quarantine = quarantine
        self._runners = tuple(runners)
        self._loops = tuple(loops)
        self._pass_began: int | None = None
        self._wake = asyncio.Event()
        self._failure: str | None = None
        self._stopping = False

    def beside(self, loop: Loop) -> None:
        """Have one more loop run as long as the worker does."""
        self._loops += (loop,)

    async def recover(self) -> int:
        """Schedule the effects that an earlier process left; returns how many."""
        return sum([await runner.recover() for runner in self._runners])

    async def drain(self) -> None:
        """Wait until no effect is running."""
        for runner in self._runners:
            await runner.drain()

    async def hurry(self, transfer_id: str) -> bool:
        """Move a transfer to the next pass instead of after its pause; whether it waited."""
        return any(runner.hurry(transfer_id) for runner in self._runners)

    def wake(self) -> None:
        """Start the next pass now instead of at the end of the interval."""
        self._wake.set()

    def health(self) -> Health:
        """Whether the last pass succeeded for every order and no pass hangs."""
        stall = self.stall()
        if not stall.ok:
            return stall
        if self._failure is not None:
            return Health(False, self._failure)
        return self._quarantine.health()

    def stall(self) -> Health:
        """Not ok while one pass lasts too long."""
        lasts = 0 if self._pass_began is None else steady_ms() - self._pass_began
        if lasts < LONG_PASS_MS:
            return Health(True)
        return Health(
            False,
            f"One pass of the worker loop has lasted {lasts // 1000} s so far. Check the disk"
            " and the daemons, then restart the service.",
        )

    async def run(self) -> None:
        """Repeat passes until ``stop``. ``health`` shows a failed one until the next is done."""
        recovered = await self.recover()
        log.info("worker_started", recovered_effects=recovered)
        loops = [asyncio.create_task(_kept_up(run)) for run in self._loops]
        try:
            while not self._stopping:
                await self._pass_once()
                await self._pause()
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        # The last pass may have been under way when stop() was called.
        await self._stop_runners()

    async def stop(self) -> None:
        """Let running work end with a commit, or leave it to the next start."""
        self._stopping = True
        self._wake.set()
        await self._stop_runners()

    async def _stop_runners(self) -> None:
        for runner in self._runners:
            await runner.stop()

    async def tick(self) -> int:
        """Make one pass; return how much there was to do. Effects are started, not awaited.

        A step that fails delays none of the others; the first failure is raised in the end.
        """
        done = 0
        failures: list[Exception] = []
        for step in (*self._steps, self._start_effects):
            try:
                done += await step()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        for further in failures[1:]:
            if repr(further) != repr(failures[0]):  # a database that is down stops all of them
                _log_failure(further)
        if failures:
            raise failures[0]
        return done

    async def _pass_once(self) -> None:
        self._pass_began = steady_ms()
        try:
            await self.tick()
            self._failure = None
        except Exception as error:  # noqa: BLE001 - logged, and in health
            self._failure = _log_failure(error)
        finally:
            self._pass_began = None

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(TICK_MS / 1000):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _start_effects(self) -> int:
        return sum([await runner.start_due() for runner in self._runners])


def _log_failure(error: Exception) -> str:
    """Log why a step of a pass failed; returns what health says of it."""
    if isinstance(error, ServiceError):
        log.warning("worker_pass_failed", reason=error.message)
        return error.message
    log.error("worker_pass_failed", exc_info=error)
    return "The worker loop fails; the log has the cause."


async def _kept_up(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Restart a loop that an exception has ended: nobody else would notice."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("background_work_failed")
            await asyncio.sleep(RESTART_SECONDS)
