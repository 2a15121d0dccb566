"""The rate that the service stands by, as rows: an order is made only at a rate that agrees.

The process that settles publishes its rate. Where several processes share a database, each compares
its own rate with the last row before it quotes, and again in the transaction that makes an order.
The row tells the database's time, too: a replica whose clock differs much makes no orders, since
price lock and deposit window of an order are times of its maker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog
from typing_extensions import override

from rpcsvc.clock import Clock, SystemClock, steady_ms
from rpcsvc.domain.money import USDC, format_units
from rpcsvc.domain.pricing import BPS
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.venue import Rate, RateSource
from rpcsvc.store.changes import RateBounds
from rpcsvc.store.leases import Lease
from rpcsvc.store.replicas import RateRow, RateRows

log = structlog.get_logger(__name__)

# A rate is published this often, and before that when it has moved by this share of the limit.
EVERY_MS: Final = 60_000
_MOVED_SHARE: Final = 4
_RETRY_SECONDS: Final = 10
_RETRY_MS: Final = 1_000
MOST_APART_MS: Final = 10_000


class RateRule(NamedTuple):
    """How far apart the rates of two processes may be (1/10,000), and how old the last row."""

    max_apart_bps: int
    max_age_ms: int

    def bounds(self, rate: int) -> RateBounds:
        """Between which the last row has to be for an order at this rate."""
        apart = rate * self.max_apart_bps // BPS
        return RateBounds(rate - apart, rate + apart, self.max_age_ms)


class PublishedRates(RateSource):
    """Publishes the rate of the process that settles, and refuses a rate that contradicts it.

    Implements RateSource (orders/ports/venue.py). A new settler publishes nothing while the fresh
    row of the one before contradicts its source: nobody can tell which of the two is wrong.
    ``steady`` gives ms of a clock that only runs forward, ``wall`` is the machine's clock.
    """

    def __init__(
        self,
        rows: RateRows,
        source: RateSource,
        rule: RateRule,
        lease: Lease,
        steady: Callable[[], int] = steady_ms,
        wall: Clock | None = None,
    ) -> None:
        self._rows = rows
        self._source = source
        self._rule = rule
        self._lease = lease
        self._steady = steady
        self._wall = wall or SystemClock()
        self._is_clock_off = False
        self._every_ms = min(EVERY_MS, rule.max_age_ms // 2)
        self._publishing = asyncio.Lock()
        self._own: int | None = None  # published last, and not contradicted
        self._next_at = 0

    @override
    def rate(self) -> Rate:
        return self._source.rate()

    async def publish(self) -> int:
        """Publish the current rate if that is due; returns 0, because no work follows from it."""
        try:
            rate = self._source.rate().usdc_per_xmr
        except Unavailable:
            return 0
        await self._publish(rate)
        return 0

    async def require(self, rate: int) -> RateBounds | None:
        """Return the bounds that an order at this rate has to find in its transaction, or None
        where one process is alone.

        Raises Unavailable for a rate that the last row contradicts, and while this machine's clock
        is far from the database's.
        """
        if self._lease.is_alone:
            return None
        if self._lease.is_held:
            await self._publish(rate)
        bounds = self._rule.bounds(rate)
        if self._own is None:
            last = await self._rows.last()
            self._compare_clocks(last)
            _require_agreement(last, rate, bounds)
        if self._is_clock_off:
            raise Unavailable(
                "The clock of this replica is wrong, so it makes no orders. Try again; another"
                " replica may answer.",
                retry_after=_RETRY_SECONDS,
            )
        return bounds

    async def _publish(self, rate: int) -> None:
        if not self._is_due(rate):
            return
        async with self._publishing:
            if self._is_due(rate):  # others may have waited for the same row
                await self._add(rate)

    async def _add(self, rate: int) -> None:
        now = self._steady()
        bounds = self._rule.bounds(rate)
        if self._lease.is_alone:
            bounds = bounds._replace(max_age_ms=0)  # what its last process published is no evidence
        if await self._rows.publish(rate, self._lease.token, bounds):
            self._own, self._next_at = rate, now + self._every_ms
            if not self._lease.is_alone:
                self._compare_clocks(await self._rows.last())
            return
        if self._own is not None or not self._next_at:
            log.warning("rate_contradicted", usdc_per_xmr=rate)
        self._own, self._next_at = None, now + _RETRY_MS

    def _compare_clocks(self, row: RateRow | None) -> None:
        """Note whether the machine's clock is far from the database's, which the row tells."""
        if row is None:
            return
        apart = self._wall.now_ms() - (row.at + row.age_ms)
        is_off = abs(apart) > MOST_APART_MS
        if is_off and not self._is_clock_off:
            log.critical("clock_wrong", ahead_ms=apart)
        elif self._is_clock_off and not is_off:
            log.info("clock_right", ahead_ms=apart)
        self._is_clock_off = is_off

    def _is_due(self, rate: int) -> bool:
        if self._steady() >= self._next_at:
            return True
        if self._own is None:
            return False
        moved = abs(rate - self._own) * BPS * _MOVED_SHARE
        return moved > self._own * self._rule.max_apart_bps


def _require_agreement(last: RateRow | None, rate: int, bounds: RateBounds) -> None:
    if last is None or last.age_ms >= bounds.max_age_ms:
        raise Unavailable(
            "The replica that settles has published no fresh rate. Try again later.",
            retry_after=_RETRY_SECONDS,
        )
    if not bounds.least <= last.usdc_per_xmr <= bounds.most:
        ours, theirs = format_units(rate, USDC), format_units(last.usdc_per_xmr, USDC)
        raise Unavailable(
            f"Replicas disagree on the rate: {ours} and {theirs} USDC per XMR. Try again later.",
            retry_after=_RETRY_SECONDS,
        )
