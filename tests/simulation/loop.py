"""An event loop whose time, order and crashes come from a seed.

Time jumps to the next timer when nothing is ready. Which ready callback runs next is drawn from the
seed. Each callback belongs to the actor in whose context it was scheduled; those of an actor that
was killed never run, and those of one that is paused wait until it is woken. What the code gives
to a thread is one step, after a delay that is drawn: the product needs no port for threads. Sockets
and processes are refused: what is simulated reaches the outside through models only.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple, Unpack
from weakref import WeakSet

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LONGEST_THREAD_SECONDS: Final = 0.01
_NOTES: Final = 60

# Whose code runs: every task inherits it from the one that made it.
ACTOR: ContextVar[Actor | None] = ContextVar("actor", default=None)


class Actor:
    """A process of the simulation: it can be killed or paused between any two callbacks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_killed = False
        self.is_paused = False
        self.woke_at = -math.inf
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._remains: list[asyncio.Task[Any]] = []

    def kill(self) -> None:
        """Run nothing more of it.

        Its tasks are kept: one that is collected would run its finally blocks, and the code of a
        killed process runs none.
        """
        self._remains = list(self.tasks)
        self.is_killed = True


class OutsideRefused(RuntimeError):
    """The code under simulation wanted a socket, which no seed can order."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer runs, and the simulation has not ended."""


class _Callback(asyncio.TimerHandle):
    """A scheduled callback, the actor that it belongs to, and the context that it runs in."""

    __slots__ = ("actor", "args", "at_ns", "call", "context", "is_cancelled")

    def __init__(  # the base's own fields are not used: there are millions of these
        self, at_ns: int, call: Callable[..., Any], args: tuple[Any, ...], context: Context
    ) -> None:
        self.at_ns = at_ns
        self.call = call
        self.args = args
        self.context = context
        self.actor = context.get(ACTOR)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.at_ns / 1e9


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs coroutines in virtual time; see the module.

    ``trace`` is a hash over every step: equal seeds give equal traces. ``last_notes``: what has
    happened of late, a line each.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now_ns = 0
        self._ready: list[_Callback] = []
        self._timers: list[tuple[int, int, _Callback]] = []
        self._held: list[_Callback] = []
        self._scheduled = 0
        self._is_running = False
        self._is_closed = False
        self._trace = hashlib.sha256()
        self.last_notes = deque[str](maxlen=_NOTES)
        self.steps = 0
        self.failures: list[dict[str, Any]] = []
        # Called before each callback; it may kill or pause actors.
        self.before_step: Callable[[], None] | None = None

    # --- time and order ----------------------------------------------------------------------

    def time(self) -> float:
        return self._now_ns / 1e9

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the simulation began."""
        return self._now_ns

    @property
    def trace(self) -> str:
        """The hash of all steps so far."""
        return self._trace.hexdigest()

    def note(self, text: str) -> None:
        """Add something that happened to the trace, and keep its line among the last ones."""
        self._hash(text)
        self.last_notes.append(f"{self.time():12.3f} s  {text}")

    def _hash(self, text: str) -> None:
        self._trace.update(f"{self._now_ns} {text}\n".encode())

    def run_simulation(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end and return its result. Raises Deadlock."""
        events._set_running_loop(self)
        self._is_running = True
        try:
            task = self.create_task(main)
            while not task.done():
                self._step()
            result: T = task.result()
            return result
        finally:
            self._is_running = False
            events._set_running_loop(None)

    def _step(self) -> None:
        if not self._ready:
            self._advance()
        callback = self._ready.pop(self._random.randrange(len(self._ready)))
        if callback.is_cancelled:
            return
        if self.before_step is not None:
            self.before_step()
        actor = callback.actor
        if actor is not None and actor.is_killed:
            return
        if actor is not None and actor.is_paused:
            self._held.append(callback)
            return
        self.steps += 1
        self._hash(actor.name if actor is not None else "-")
        callback.context.run(callback.call, *callback.args)

    def _advance(self) -> None:
        """Move time to the next timer, and make ready all that are due."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock(f"nothing is ready or timed at {self.time():.3f} s")
        self._now_ns = max(self._now_ns, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now_ns:
            self._ready.append(heapq.heappop(self._timers)[2])

    def skip(self, seconds: float) -> None:
        """Let time pass in which nothing runs, as on a machine that slept."""
        self._now_ns += round(seconds * 1e9)

    def wake(self, actor: Actor) -> None:
        """Let a paused actor go on."""
        actor.is_paused = False
        actor.woke_at = self.time()
        self._ready += [each for each in self._held if each.actor is actor]
        self._held = [each for each in self._held if each.actor is not actor]

    # --- what asyncio asks of a loop -----------------------------------------------------------

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = self._handle(self._now_ns, callback, args, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._at(self._now_ns + max(0, round(delay * 1e9)), callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._at(round(when * 1e9), callback, args, context)

    def _at(
        self,
        at_ns: int,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> asyncio.TimerHandle:
        handle = self._handle(at_ns, callback, args, context)
        self._scheduled += 1
        heapq.heappush(self._timers, (at_ns, self._scheduled, handle))
        return handle

    def _handle(
        self,
        at_ns: int,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> _Callback:
        return _Callback(at_ns, callback, args, copy_context() if context is None else context)

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        context: Context | None = options.get("context")
        if (actor := ACTOR.get() if context is None else context.get(ACTOR)) is not None:
            actor.tasks.add(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        self._held.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run it as one step of its actor, a while from now.

        A thread that has begun is not stopped when its caller is cancelled: this one always begins.
        """
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._random.random() * _LONGEST_THREAD_SECONDS, run)
        return future

    async def getaddrinfo(self, host: Any, *args: Any, **options: Any) -> NoReturn:
        raise OutsideRefused(f"a look-up of {host!r}")

    async def create_connection(self, *args: Any, **options: Any) -> NoReturn:
        raise OutsideRefused("a connection")

    async def create_server(self, *args: Any, **options: Any) -> NoReturn:
        raise OutsideRefused("a server")

    async def shutdown_asyncgens(self) -> None:
        return None


def new_loop(seed: int) -> SimulatedLoop:
    """A loop at time 0. All that it does not define raises NotImplementedError."""
    return SimulatedLoop(seed)  # type: ignore[abstract]
