"""Calls an upstream with retries where they are safe, and reports whether a call may have acted.

A read is repeated with growing, random pauses until it succeeds or its time is up. A call that
creates something is sent once; it is sent again only with an idempotency key that the upstream
honours, and once an attempt may have acted, no later refusal can take that back.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from random import SystemRandom
from types import TracebackType
from typing import Final, TypeVar

import structlog
from msgspec import Struct

from rpcsvc.clock import steady_ms
from rpcsvc.health import Health
from rpcsvc.settlement.upstream.limits import Breaker, Budget, CallPermit, Demand, Slot
from rpcsvc.settlement.upstream.transport import (
    ClientOptions,
    NeverSent,
    NoAnswer,
    ReadError,
    UpstreamAnswer,
    UpstreamBroken,
    UpstreamCall,
    UpstreamError,
    UpstreamOutcomeUnknown,
    UpstreamRefused,
    UpstreamTransport,
)

T = TypeVar("T")
Parse = Callable[[UpstreamAnswer], T]
log = structlog.get_logger(__name__)
_ID: Final = re.compile(r'"orderId"\s*:\s*"([A-Za-z0-9_][A-Za-z0-9._:-]{0,127})"', re.ASCII)
_IDEMPOTENCY_KEY: Final = re.compile(r"[ -~]{1,255}", re.ASCII)
_KEY_CODES: Final = frozenset({None, "unauthorized"})


class Timing(Struct, frozen=True):
    """The sources of time, waiting and chance. ``random`` gives numbers in [0, 1)."""

    now_ms: Callable[[], int]
    sleep_ms: Callable[[int], Awaitable[None]]
    random: Callable[[], float]


def system_timing() -> Timing:
    """The machine's monotonic clock and chance."""

    async def sleep_ms(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    return Timing(steady_ms, sleep_ms, SystemRandom().random)


class UpstreamClient:
    """Sends calls to one upstream. Used as a context manager.

    ``read_error`` understands the dialect's error bodies. ``creations``, ``prices`` and ``calls``
    are the budgets of calls that create something, that ask for a price, and of all others.
    """

    def __init__(
        self,
        options: ClientOptions,
        *,
        read_error: ReadError,
        creations: Budget,
        calls: Budget,
        prices: Budget,
        breaker: Breaker,
        timing: Timing,
    ) -> None:
        self._options = options
        self._transport = UpstreamTransport(options, read_error)
        self._creations = creations
        self._calls = calls
        self._prices = prices
        self._breaker = breaker
        self._timing = timing
        self._key_refused: int | None = None

    async def __aenter__(self) -> UpstreamClient:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._transport.__aexit__(kind, error, trace)

    def health(self) -> Health:
        """Return whether the upstream answers us, and if not, why."""
        if self._key_refused is not None:
            detail = f"The upstream refuses our API key (HTTP {self._key_refused})."
            return Health(ok=False, detail=detail)
        return self._breaker.health(self._timing.now_ms())

    # --- the two kinds of calls ---

    async def read(
        self, call: UpstreamCall, parse: Parse[T], *, demand: Demand, total_ms: int | None = None
    ) -> T:
        """Send a call that changes nothing, as often as it takes within ``total_ms``.

        Just once if ``demand`` says so.
        Raises NeverSent, UpstreamRefused, NoAnswer or UpstreamBroken.
        """
        deadline = self._deadline(total_ms, self._options.read_total_ms)
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = await self._admitted(call, demand, deadline, creates=False)
                break
            except UpstreamError as error:
                if not (demand.is_repeated and await self._repeats(call, attempt, error, deadline)):
                    raise
        return _parsed(answer, parse)

    async def create(
        self,
        call: UpstreamCall,
        parse: Parse[T],
        *,
        key: str | None,
        demand: Demand,
        resumed: bool = False,
        total_ms: int | None = None,
    ) -> T:
        """Send a call that creates something: once, or with ``key`` until its outcome is known.

        ``key`` is the idempotency key; None for an upstream that has none. ``resumed``: an earlier
        call with this key ended in UpstreamOutcomeUnknown, so that a refusal now proves nothing.

        Raises NeverSent or UpstreamRefused when nothing was created, and UpstreamOutcomeUnknown
        otherwise, for an answer that can't be understood too. Any other exception, a cancellation
        included, leaves the outcome as unknown.
        """
        if resumed and key is None:
            raise ValueError("without an idempotency key a creation can't be sent again")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise ValueError("an idempotency key is 1 to 255 printable ASCII characters")
        unknown = _unknown_before() if resumed else None
        deadline = self._deadline(total_ms, self._options.create_total_ms)
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = await self._admitted(call, demand, deadline, creates=True, key=key)
                return _parsed(answer, parse)
            except (NoAnswer, UpstreamBroken) as error:
                failure: UpstreamError = error
                unknown = _unknown(error, unknown, safe_to_repeat=key is not None)
            except (NeverSent, UpstreamRefused) as error:
                if unknown is None:
                    raise
                failure = error
            if key is None or not await self._repeats(call, attempt, failure, deadline):
                raise unknown from failure

    # --- one attempt ---

    async def _admitted(
        self,
        call: UpstreamCall,
        demand: Demand,
        deadline: int,
        *,
        creates: bool,
        key: str | None = None,
    ) -> UpstreamAnswer:
        """One attempt, once breaker and budget let it through."""
        # A creation that can't be repeated does not find out whether the upstream is back.
        may_probe = not creates or key is not None
        reads = self._prices if demand.is_price else self._calls
        budget = self._creations if creates else reads
        now = self._timing.now_ms()
        self._breaker.check(now, may_probe=may_probe)
        with await budget.slot(demand, max_wait_ms=max(0, deadline - now)) as slot:
            permit = self._permit(slot, may_probe=may_probe)
            return await self._reported(call, key, creates=creates, permit=permit, budget=budget)

    def _permit(self, slot: Slot, *, may_probe: bool) -> CallPermit:
        try:
            return self._breaker.admit(self._timing.now_ms(), may_probe=may_probe)
        except NeverSent:
            slot.give_back()
            raise

    async def _reported(
        self,
        call: UpstreamCall,
        key: str | None,
        *,
        creates: bool,
        permit: CallPermit,
        budget: Budget,
    ) -> UpstreamAnswer:
        """One attempt, with its outcome reported to breaker, budget and health."""
        try:
            reply = await self._transport.send(call, key, creates=creates)
            # One about unfunded orders or tickets leaves room for other calls.
            if reply.retry_after_ms and self._transport.is_call_limit(reply):
                budget.pause(reply.retry_after_ms)
            answer = self._transport.judge(reply)
        except UpstreamRefused as error:
            permit.succeeded()
            about_key = error.status in (401, 403) and error.code in _KEY_CODES
            self._key_refused = error.status if about_key else None
            log.warning("upstream_refused", call=call.name, reason=error.reason)
            raise
        except UpstreamError as error:
            permit.failed(error.reason, self._timing.now_ms())
            raise
        except BaseException:
            permit.abandoned()
            raise
        permit.succeeded()
        if call.takes_key:
            self._key_refused = None
        return answer

    # --- small things ---

    def _deadline(self, total_ms: int | None, usual_ms: int) -> int:
        return self._timing.now_ms() + (usual_ms if total_ms is None else total_ms)

    def _pause_ms(self, attempt: int, error: UpstreamError) -> int:
        """Exponential backoff with full jitter, after what the upstream asked for."""
        options = self._options
        most = min(options.longest_backoff_ms, options.backoff_ms << (attempt - 1))
        return (error.retry_after_ms or 0) + int(self._timing.random() * most)

    async def _repeats(
        self, call: UpstreamCall, attempt: int, error: UpstreamError, deadline: int
    ) -> bool:
        """Return whether to try again: waits first if so."""
        pause = self._pause_ms(attempt, error)
        in_time = self._timing.now_ms() + pause <= deadline
        if not (error.retryable and in_time and attempt < self._options.attempts):
            return False
        log.warning(
            "upstream_call_retried",
            call=call.name,
            attempt=attempt,
            in_ms=pause,
            reason=error.reason,
        )
        await self._timing.sleep_ms(pause)
        return True


def _parsed(answer: UpstreamAnswer, parse: Parse[T]) -> T:
    """Return the answer as its type; an UpstreamBroken from it keeps the bytes."""
    try:
        return parse(answer)
    except UpstreamBroken as error:
        error.raw = answer.kept
        raise


def _unknown_before() -> UpstreamOutcomeUnknown:
    return UpstreamOutcomeUnknown("An earlier attempt had no known outcome.", safe_to_repeat=True)


def _unknown(
    error: UpstreamError, earlier: UpstreamOutcomeUnknown | None, *, safe_to_repeat: bool
) -> UpstreamOutcomeUnknown:
    found = _ID.search(error.raw.decode("utf-8", "replace"))
    known = earlier.upstream_id if earlier else None
    return UpstreamOutcomeUnknown(
        f"It was sent, and may have been done: {error.reason}",
        safe_to_repeat=safe_to_repeat,
        upstream_id=found[1] if found else known,
        retry_after_ms=error.retry_after_ms,
        raw=error.raw,
    )
