"""Clocks: wall time is passed in, ``steady_ms`` measures durations.

Wall-clock times are integers of milliseconds since the Unix epoch, everywhere inside the service;
they become RFC 3339 strings at the edges only. Time zones do not exist here: all is UTC. The
wall clock can be set back or ahead; use the monotonic ``steady_ms()`` for durations.
"""

from __future__ import annotations

import time
from datetime import date
from functools import lru_cache
from typing import Protocol

from typing_extensions import override

DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1).toordinal()


class Clock(Protocol):
    """Tells the wall-clock time."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...


class SystemClock(Clock):
    """The machine's clock."""

    @override
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def day_of(now: int) -> int:
    """The day of UTC that a time (ms) is in, counted from the epoch."""
    return now // DAY_MS


def ms_to_next_day(now: int) -> int:
    """Return how long (ms) the day of UTC lasts that a time (ms) is in."""
    return DAY_MS - now % DAY_MS


def steady_ms() -> int:
    """Milliseconds since some moment before the start; nobody can set this clock.

    It may stand still while the machine sleeps.
    """
    return time.monotonic_ns() // 1_000_000


def boot_ms() -> int:
    """Return milliseconds since some moment before the start, the time that the machine slept
    included.

    Nobody can set this clock. A system without one (macOS) gives ``steady_ms``.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    return steady_ms()


class OffsetClock(Clock):
    """A clock that runs ``offset_ms`` ahead of another one: the sandbox's time machine."""

    def __init__(self, base: Clock, offset_ms: int = 0) -> None:
        self._base = base
        self.offset_ms = offset_ms

    @override
    def now_ms(self) -> int:
        return self._base.now_ms() + self.offset_ms


@lru_cache(maxsize=1024)
def iso8601(at_ms: int) -> str:
    """``at_ms`` as RFC 3339 UTC with milliseconds, such as ``2026-01-02T03:04:05.678Z``.

    An answer names each of its few times repeatedly; the text depends on nothing else.
    """
    days, rest = divmod(at_ms, DAY_MS)
    seconds, millis = divmod(rest, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{_date(days)}T{hours:02d}:{minutes:02d}:{seconds:02d}.{millis:03d}Z"


@lru_cache(maxsize=64)
def _date(days: int) -> str:
    """Return the date of a day after the epoch. strftime costs ten times the rest of iso8601."""
    return date.fromordinal(_EPOCH + days).isoformat()


def iso8601_second(second: int) -> str:
    """A second since the epoch, such as ``2026-01-02T03:04:05Z``."""
    return iso8601(second * 1000).removesuffix(".000Z") + "Z"
