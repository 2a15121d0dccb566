"""The rate source: the median of several tickers, or a fixed price that the operator has set.

A price that is old, or that the others contradict, is never quoted: then there is none, and
quoting answers ``unavailable``.

A ticker is an HTTP source of which a JSON pointer (RFC 6901) leads to the price. The number is read
digit by digit, never as a float. Size, time and form of an answer are bounded.
Sources: the exchanges' public API documentation.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple, Protocol

import structlog
from aiohttp import ClientSession
from msgspec import Struct
from typing_extensions import override

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.domain.money import USDC, parse_amount
from rpcsvc.errors import Unavailable
from rpcsvc.http_client import HttpRequest, NoReply, ReplyTooLarge, exchange
from rpcsvc.orders.ports.venue import Rate, RateSource
from rpcsvc.settings import SettingsError
from rpcsvc.settings_onchain import RatesSettings

log = structlog.get_logger(__name__)

LONGEST_ANSWER: Final = 256 * 1024
TIMEOUT_SECONDS: Final = 10
# Beyond any price that XMR has had or could have while amounts fit 64 bits.
_HIGHEST: Final = Decimal(10_000_000)
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,18})?", re.ASCII)
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)
_SHOWN: Final = 60
_RETRY_SECONDS: Final = 10


# --- one price: sources and tickers --------------------------------------------------------------

_GIVEN: Final = re.compile(r"([a-z][a-z0-9_-]{0,30})=(https?://[!-\"$-~]{1,290})#(/[!-~]{0,100})")


class PriceSource(Protocol):
    """A place that a price is read from."""

    @property
    def name(self) -> str:
        """Its name in the log."""
        ...

    async def fetch(self, session: ClientSession) -> int:
        """USDC units per whole XMR now. Raises RateUnreadable."""
        ...


class RateUnreadable(Exception):
    """A source gave no price; the message says why, for the log."""


class HttpSource(Struct, frozen=True):
    """A ticker: ``pointer`` leads to USD or USDC per XMR in the JSON at ``url``."""

    name: str
    url: str
    pointer: str

    async def fetch(self, session: ClientSession) -> int:
        """The price in USDC units per whole XMR, rounded down. Raises RateUnreadable."""
        request = HttpRequest("GET", self.url, TIMEOUT_SECONDS, LONGEST_ANSWER)
        try:
            reply = await exchange(session, request)
        except ReplyTooLarge as error:
            raise RateUnreadable(f"an answer of more than {LONGEST_ANSWER} bytes") from error
        except NoReply as error:
            why = str(error.cause) or type(error.cause).__name__
            raise RateUnreadable(f"no answer ({why})") from error
        if reply.status != 200:
            raise RateUnreadable(f"HTTP {reply.status}")
        return price_in(reply.body, self.pointer)


def price_in(body: bytes, pointer: str) -> int:
    """The price that ``pointer`` leads to, in USDC units per whole XMR, rounded down.

    Raises RateUnreadable.
    """
    try:
        document = json.loads(body, parse_float=str, parse_int=str, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise RateUnreadable(f"not JSON ({type(error).__name__})") from error
    return _units(_member(document, pointer))


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _member(document: Any, pointer: str) -> Any:
    found = document
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        try:
            found = found[_index(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, TypeError) as error:
            raise RateUnreadable(f"nothing at {pointer}") from error
    return found


def _index(token: str) -> int:
    """Return an array index as RFC 6901 defines it. Raises IndexError for anything else."""
    if not _INDEX.fullmatch(token):
        raise IndexError(token)
    return int(token)


def _units(value: Any) -> int:
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        raise RateUnreadable(f"not a plain decimal number: {str(value)[:_SHOWN]!r}")
    price = Decimal(value)
    if not 0 < price <= _HIGHEST:
        raise RateUnreadable(f"not a possible price: {value}")
    units = int(price.scaleb(USDC.decimals))
    if units == 0:
        raise RateUnreadable(f"not a possible price: {value}")
    return units


TICKERS: Final = {
    source.name: source
    for source in (
        HttpSource(
            "kraken",
            "https://api.kraken.com/0/public/Ticker?pair=XMRUSD",
            "/result/XXMRZUSD/c/0",
        ),
        HttpSource(
            "coingecko",
            "https://api.coingecko.com/api/v3/simple/price?ids=monero&vs_currencies=usd",
            "/monero/usd",
        ),
        HttpSource(
            "kucoin",
            "https://api.kucoin.com/api/v1/market/orderbook/level1?symbol=XMR-USDT",
            "/data/price",
        ),
        HttpSource("bitfinex", "https://api-pub.bitfinex.com/v2/ticker/tXMRUSD", "/6"),
    )
}


def ticker(text: str) -> HttpSource:
    """The ticker of a name, or of ``name=URL#pointer``. Raises ValueError."""
    if text in TICKERS:
        return TICKERS[text]
    given = _GIVEN.fullmatch(text)
    if given is None:
        raise ValueError(
            f"{text[:100]!r} is none of {', '.join(TICKERS)}, nor name=URL#pointer such as"
            " mine=https://example.com/ticker#/last"
        )
    return HttpSource(*given.groups())


# --- the median of several -----------------------------------------------------------------------


class ClockReading(NamedTuple):
    """A time by two clocks, ms: since the epoch, which is shown; and by one that can't be set."""

    wall: int
    steady: int

    def age(self, now: ClockReading) -> int:
        """Time (ms) since then, by the clock that shows more.

        The first may have been set back meanwhile; the other may have stood still in a machine
        that slept.
        """
        return max(now.wall - self.wall, now.steady - self.steady)


class Sample(NamedTuple):
    """A price with the time at which it was asked for."""

    usdc_per_xmr: int
    as_of: ClockReading


def agree(samples: Mapping[str, Sample], now: ClockReading, rule: RatesSettings) -> Rate:
    """The median of the fresh samples, as of the oldest of them. Raises errors.Unavailable.

    Of an even number it is the lower of the two in the middle: nothing is made up between them.
    """
    fresh = {name: s for name, s in samples.items() if s.as_of.age(now) <= rule.max_age_ms}
    if len(fresh) < rule.quorum:
        raise Unavailable(
            f"There is no fresh rate: {len(fresh)} of {rule.quorum} sources answered in the last"
            f" {rule.max_age_seconds} s. Try again later.",
            retry_after=_RETRY_SECONDS,
        )
    prices = sorted(s.usdc_per_xmr for s in fresh.values())
    median = prices[(len(prices) - 1) // 2]
    if (prices[-1] - prices[0]) * 10_000 > median * rule.max_spread_bps:
        raise Unavailable(
            "The sources of the rate contradict each other. Try again later.",
            retry_after=_RETRY_SECONDS,
        )
    names = ",".join(sorted(fresh))
    return Rate(median, min(s.as_of.wall for s in fresh.values()), f"median of {names}")


def spread_bps(prices: Sequence[int]) -> int | None:
    """The spread of prices (1/10,000 of the median); None for fewer than two."""
    if len(prices) < 2:
        return None
    return (max(prices) - min(prices)) * 10_000 // sorted(prices)[(len(prices) - 1) // 2]


class MedianRate(RateSource):
    """Implements RateSource (orders/ports/); ``run`` keeps it fresh.

    ``steady`` gives ms of a clock that only runs forward.
    """

    def __init__(
        self,
        sources: Sequence[PriceSource],
        clock: Clock,
        rule: RatesSettings,
        *,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        if not 1 <= rule.quorum <= len(sources):
            raise ValueError(f"a quorum of {rule.quorum} among {len(sources)} sources")
        names = [source.name for source in sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are called {twice[0]}: they would count as one")
        self._sources = tuple(sources)
        self._clock = clock
        self._rule = rule
        self._steady = steady
        self._samples: dict[str, Sample] = {}
        self._failing: set[str] = set()

    @override
    def rate(self) -> Rate:
        return agree(self._samples, self._now(), self._rule)

    def spread_bps(self) -> int | None:
        """The spread of the fresh prices, even where they contradict each other."""
        now, oldest = self._now(), self._rule.max_age_ms
        return spread_bps(
            [s.usdc_per_xmr for s in self._samples.values() if s.as_of.age(now) <= oldest]
        )

    def _now(self) -> ClockReading:
        return ClockReading(self._clock.now_ms(), self._steady())

    async def run(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Ask every source, again and again, until cancelled."""
        async with ClientSession() as session:
            while True:
                await self.refresh(session)
                await pause(self._rule.every_seconds)

    async def refresh(self, session: ClientSession) -> None:
        """Ask every source once, all at the same time."""
        await asyncio.gather(*(self._ask(source, session) for source in self._sources))

    async def _ask(self, source: PriceSource, session: ClientSession) -> None:
        # As of the question: the answer can't be younger than that.
        asked_at = self._now()
        try:
            price = await source.fetch(session)
        except RateUnreadable as error:
            self._report(source.name, str(error))
            return
        self._samples[source.name] = Sample(price, asked_at)
        if source.name in self._failing:
            self._failing.discard(source.name)
            log.info("rate_source_recovered", source=source.name)

    def _report(self, name: str, reason: str) -> None:
        """Say it once; a source that fails every ten seconds would fill the log."""
        if name not in self._failing:
            self._failing.add(name)
            log.warning("rate_source_failed", source=name, reason=reason)


class FixedRate(RateSource):
    """Implements RateSource (orders/ports/). ``usdc_per_xmr``: USDC units per whole XMR."""

    def __init__(self, usdc_per_xmr: int, clock: Clock) -> None:
        if usdc_per_xmr <= 0:
            raise ValueError(f"a price is above 0, not {usdc_per_xmr}")
        self._usdc_per_xmr = usdc_per_xmr
        self._clock = clock

    @override
    def rate(self) -> Rate:
        return Rate(self._usdc_per_xmr, self._clock.now_ms(), "fixed")


class Rates(NamedTuple):
    """A rate source, and what has to run to keep it fresh; None: nothing.

    ``spread_bps``: how far apart several sources are now (1/10,000 of the median).
    """

    source: RateSource
    run: Callable[[], Coroutine[Any, Any, None]] | None
    spread_bps: Callable[[], int | None] = lambda: None


def rate_source(settings: RatesSettings, clock: Clock) -> Rates:
    """The source. Raises SettingsError."""
    if settings.fixed_usdc_per_xmr is not None:
        return Rates(FixedRate(parse_amount(settings.fixed_usdc_per_xmr, USDC).units, clock), None)
    try:
        median = MedianRate([ticker(text) for text in settings.sources], clock, settings)
    except ValueError as error:
        raise SettingsError([f"rates: {error}"]) from error
    return Rates(median, median.run, median.spread_bps)
