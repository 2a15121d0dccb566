"""The budget of calls to an upstream, and the circuit breaker.

The budget keeps any window of 60 seconds within the upstream's published limit. The upstream counts
when a call arrives, some time between its start and its end here; so a call holds its slot while it
runs and for a window after it. Prices and orders have a budget each within the one limit, so that
neither can use it up alone. The breaker opens after repeated failures (a refusal is none) and lets
one probe through when its pause is over. Times are ms of a clock that never goes back, passed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum, StrEnum
from types import TracebackType
from typing import Final

from msgspec import Struct

from rpcsvc.health import Health
from rpcsvc.settlement.upstream.transport import BreakerOpen, BudgetSpent

NowMs = Callable[[], int]
SleepMs = Callable[[int], Awaitable[None]]
WINDOW_MS: Final = 60_000
# The upstream's clock may run a little slower than ours.
_HELD_MS: Final = WINDOW_MS + 250
# A waiting call checks again at least this often: others may have stopped waiting.
_LOOK_AGAIN_MS: Final = 500


class Urgency(IntEnum):
    """Who goes first. ROUTINE calls leave some slots to the others."""

    CREATION = 0
    WATCHED = 1
    ROUTINE = 2


class Demand(Struct, frozen=True):
    """The urgency of a call. ``is_repeated``: a read that fails is repeated at once.

    ``is_price``: the call only asks for a price.
    """

    urgency: Urgency = Urgency.ROUTINE
    is_repeated: bool = True
    is_price: bool = False


class Slot:
    """One call's place in the budget, held until the call has ended. A context manager.

    ``outer`` is its place in the budget that its own is within.
    """

    def __init__(self, budget: Budget, outer: Slot | None = None) -> None:
        self._budget = budget
        self._outer = outer
        self._unused = False

    def give_back(self) -> None:
        """The call was not made after all: the slot is free again at once."""
        self._unused = True
        if self._outer is not None:
            self._outer.give_back()

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget._ended(unused=self._unused)
        if self._outer is not None:
            self._outer.__exit__(kind, error, trace)


class Budget:
    """At most ``per_window`` calls in any 60 seconds.

    ``reserved`` slots are kept from ROUTINE calls, so that an urgent one seldom waits. ``within``
    is a budget that they all count for too, with the calls of others.
    """

    def __init__(
        self,
        per_window: int,
        *,
        now: NowMs,
        sleep: SleepMs,
        reserved: int = 0,
        within: Budget | None = None,
    ) -> None:
        if per_window < 1 or not 0 <= reserved < per_window:
            raise ValueError("a budget needs per_window >= 1 and 0 <= reserved < per_window")
        self._limit = per_window
        self._reserved = reserved
        self._within = within
        self._now = now
        self._sleep = sleep
        self._running = 0
        self._ended_at: list[int] = []  # oldest first
        self._paused_until: int | None = None
        self._waiting: dict[int, Demand] = {}
        self._arrivals = 0

    def remember(self, ages_ms: Iterable[int]) -> None:
        """Count calls that an earlier process made, by their age: a restart resets no limit."""
        now = self._now()
        self._ended_at = sorted([*self._ended_at, *(now - max(0, age) for age in ages_ms)])

    def pause(self, for_ms: int) -> None:
        """The upstream asked to be left alone: nobody calls before that, however urgent."""
        if self._within is not None:
            self._within.pause(for_ms)
            return
        until = self._now() + for_ms
        self._paused_until = max(until, self._paused_until or until)

    async def slot(self, demand: Demand, *, max_wait_ms: int) -> Slot:
        """A slot, waited for up to ``max_wait_ms``.

        Raises BudgetSpent at once when that can't be enough; its ``retry_after_ms`` is about
        when the call could be made.
        """
        deadline = self._now() + max_wait_ms
        await self._take(demand, deadline)
        if self._within is None:
            return Slot(self)
        try:
            left = max(0, deadline - self._now())
            return Slot(self, await self._within.slot(demand, max_wait_ms=left))
        except BaseException:
            self._ended(unused=True)
            raise

    async def _take(self, demand: Demand, deadline: int) -> None:
        """Wait for a slot of this budget alone. Raises BudgetSpent."""
        place = self._arrivals
        self._arrivals += 1
        self._waiting[place] = demand
        try:
            while (wait := self._wait_ms(place)) > 0:
                if self._now() + wait > deadline:
                    raise self._spent(wait)
                await self._sleep(min(wait, _LOOK_AGAIN_MS))
            self._running += 1
        finally:
            del self._waiting[place]

    def free(self) -> int:
        """The number of calls that could be made now, apart from those of ROUTINE urgency."""
        if self._pause_left() > 0:
            return 0
        self._forget()
        return max(0, self._limit - self._running - len(self._ended_at))

    def _wait_ms(self, place: int) -> int:
        """The least time until this call's turn; 0 when it is now."""
        mine = self._waiting[place]
        rank = sum(
            (other.urgency, at) < (mine.urgency, place) for at, other in self._waiting.items()
        )
        kept = self._reserved if mine.urgency is Urgency.ROUTINE else 0
        return max(self._pause_left(), self._until_free(rank + kept))

    def _until_free(self, nth: int) -> int:
        """The time (ms) until ``nth`` other slots, and then one more, are free."""
        self._forget()
        busy = self._running + len(self._ended_at)
        to_end = nth + 1 - (self._limit - busy)
        if to_end <= 0:
            return 0
        if to_end <= len(self._ended_at):
            return self._ended_at[to_end - 1] + _HELD_MS - self._now()
        # It takes a running call to end, and a window after that; further ones a round later.
        return _HELD_MS * (1 + (to_end - 1) // self._limit)

    def _forget(self) -> None:
        gone = self._now() - _HELD_MS
        while self._ended_at and self._ended_at[0] <= gone:
            del self._ended_at[0]

    def _pause_left(self) -> int:
        return 0 if self._paused_until is None else self._paused_until - self._now()

    def _spent(self, wait_ms: int) -> BudgetSpent:
        return BudgetSpent(
            f"At most {self._limit} such calls are made a minute, by the upstream's limit; the next"
            f" may go in {-(-wait_ms // 1000)} s.",
            retry_after_ms=wait_ms,
            retryable=False,
        )

    def _ended(self, *, unused: bool) -> None:
        self._running -= 1
        if not unused:
            self._ended_at.append(self._now())


def shared(per_window: int, *, now: NowMs, sleep: SleepMs) -> tuple[Budget, Budget]:
    """Return one limit as two budgets: for the needs of orders, and for prices.

    Each may use three quarters of it, so that a quarter is always left to the other. Prices that no
    order waits for (ROUTINE) leave a quarter to prices that an order waits for.
    """
    whole = Budget(per_window, now=now, sleep=sleep)
    part = per_window - per_window // 4
    orders = Budget(part, now=now, sleep=sleep, within=whole)
    prices = Budget(part, now=now, sleep=sleep, within=whole, reserved=part // 4)
    return orders, prices


class BreakerState(StrEnum):
    """Whether the breaker lets the next call through; HALF_OPEN: as a probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CallPermit:
    """Leave for one call, which has to report what became of it.

    A report of a call that was admitted before the breaker last changed its state says nothing
    about the upstream of now, and is passed over.
    """

    def __init__(self, breaker: Breaker, era: int) -> None:
        self._breaker = breaker
        self._era = era

    def succeeded(self) -> None:
        """The upstream answered."""
        self._breaker._succeeded(self._era)

    def failed(self, reason: str, now_ms: int) -> None:
        """The upstream did not answer, or not with anything of use."""
        self._breaker._failed(self._era, reason, now_ms)

    def abandoned(self) -> None:
        """The call ended without an outcome; another may be the probe."""
        self._breaker._abandoned(self._era)


class Breaker:
    """Opens after ``failures`` failures in a row, for ``open_ms``, doubling to ``longest_ms``."""

    def __init__(
        self, *, failures: int = 5, open_ms: int = 10_000, longest_ms: int = 120_000
    ) -> None:
        if failures < 1 or not 0 < open_ms <= longest_ms:
            raise ValueError("a breaker needs failures >= 1 and 0 < open_ms <= longest_ms")
        self._limit = failures
        self._first_open_ms = open_ms
        self._longest_ms = longest_ms
        self._era = 0
        self._failures = 0
        self._open_ms = open_ms
        self._open_until: int | None = None
        self._probing = False
        self._reason = ""

    def state(self, now_ms: int) -> BreakerState:
        """Closed, open, or half-open: open, with its time over."""
        if self._open_until is None:
            return BreakerState.CLOSED
        if now_ms < self._open_until or self._probing:
            return BreakerState.OPEN if not self._probing else BreakerState.HALF_OPEN
        return BreakerState.HALF_OPEN

    def check(self, now_ms: int, *, may_probe: bool = True) -> None:
        """Raise BreakerOpen if a call would not be admitted now; takes nothing."""
        if self._open_until is None:
            return
        if now_ms < self._open_until:
            raise self._refusal(self._open_until - now_ms)
        if self._probing or not may_probe:
            raise self._refusal(self._first_open_ms)

    def admit(self, now_ms: int, *, may_probe: bool = True) -> CallPermit:
        """Leave for one call. ``may_probe``: it may be the one that tries a half-open upstream.

        Raises BreakerOpen, which says when to come back.
        """
        self.check(now_ms, may_probe=may_probe)
        self._probing = self._open_until is not None
        return CallPermit(self, self._era)

    def health(self, now_ms: int) -> Health:
        """Well while closed; otherwise the last failure, in words for the operator."""
        state = self.state(now_ms)
        if state is BreakerState.CLOSED:
            return Health(ok=True)
        return Health(ok=False, detail=f"The upstream is {_WORDS[state]}: {self._reason}")

    def _refusal(self, wait_ms: int) -> BreakerOpen:
        return BreakerOpen(
            f"Calls to the upstream are paused, after: {self._reason}",
            retry_after_ms=wait_ms,
            retryable=False,
        )

    def _succeeded(self, era: int) -> None:
        if era != self._era:
            return
        self._failures = 0
        if self._open_until is not None:
            self._era += 1
            self._open_until = None
            self._probing = False
            self._open_ms = self._first_open_ms

    def _failed(self, era: int, reason: str, now_ms: int) -> None:
        if era != self._era:
            return
        self._reason = reason
        self._failures += 1
        if self._probing:
            self._open_ms = min(2 * self._open_ms, self._longest_ms)
            self._open(now_ms)
        elif self._failures >= self._limit:
            self._open(now_ms)

    def _open(self, now_ms: int) -> None:
        self._era += 1
        self._failures = 0
        self._probing = False
        self._open_until = now_ms + self._open_ms

    def _abandoned(self, era: int) -> None:
        if era == self._era:
            self._probing = False


_WORDS = {
    BreakerState.OPEN: "down",
    BreakerState.HALF_OPEN: "being tried again",
}
