"""A circuit breaker: after repeated failures the upstream is left alone for a while.

closed     calls go through; so many failures in a row open it
open       calls are refused at once, until its time is over
half-open  one call may try; its success closes the breaker, its failure opens it for longer

What does not live here: what counts as a failure (client.py). A refusal does not: an upstream that
says no is up. Times are milliseconds of any clock that never goes back, passed in.
"""

from __future__ import annotations

from enum import StrEnum

from rpcsvc.orders.ports.health import Health
from rpcsvc.settlement.upstream.models import BreakerOpen


class BreakerState(StrEnum):
    """What the breaker does with the next call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Permit:
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
        """The call was given up before it told anything; another may be the probe."""
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

    def admit(self, now_ms: int, *, may_probe: bool = True) -> Permit:
        """Leave for one call. ``may_probe``: it may be the one that tries a half-open upstream.

        Raises BreakerOpen, which says when to come back.
        """
        self.check(now_ms, may_probe=may_probe)
        self._probing = self._open_until is not None
        return Permit(self, self._era)

    def health(self, now_ms: int) -> Health:
        """Well while closed; otherwise the last failure, in words for the operator."""
        state = self.state(now_ms)
        if state is BreakerState.CLOSED:
            return Health(ok=True)
        return Health(ok=False, detail=f"The upstream is {_WORDS[state]}: {self._reason}")

    def _refusal(self, wait_ms: int) -> BreakerOpen:
        return BreakerOpen(
            f"The upstream is left alone for now, after: {self._reason}",
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
