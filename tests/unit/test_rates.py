"""Prices: parsed from arbitrary documents, agreed on by several sources, never stale."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.errors import Unavailable
from rpcsvc.rates import sources as rate_sources
from rpcsvc.rates.sources import (
    ClockReading,
    FixedRate,
    HttpSource,
    MedianRate,
    RateUnreadable,
    Sample,
    agree,
    price_in,
)
from rpcsvc.settings_onchain import RatesSettings
from tests.sandbox import ManualClock

NOW = ManualClock().now
RULE = RatesSettings(max_age_seconds=60, quorum=2, max_spread_bps=200)


def at(ms: int = 0) -> ClockReading:
    """A reading ``ms`` after NOW, or before it."""
    return ClockReading(NOW + ms, 7_000_000 + ms)


def samples(*prices: int, age_ms: int = 0) -> dict[str, Sample]:
    return {f"s{n}": Sample(price, at(-age_ms)) for n, price in enumerate(prices)}


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "pointer", "units"),
    [
        ('{"price": 165.25}', "/price", 165_250_000),
        ('{"price": "165.25"}', "/price", 165_250_000),
        ('{"r": {"XXMRZUSD": {"c": ["164.990000"]}}}', "/r/XXMRZUSD/c/0", 164_990_000),
        ('{"a/b": {"m~n": 1}}', "/a~1b/m~0n", 1_000_000),
        ("165", "", 165_000_000),
        ('{"p": 165.1234567899}', "/p", 165_123_456),
        ('{"p": 9007199254740.993}', "/p", None),
    ],
)  # fmt: skip
def test_a_price_is_read_digit_by_digit_where_the_pointer_leads(
    document: str, pointer: str, units: int | None
) -> None:
    if units is None:
        with pytest.raises(RateUnreadable):
            price_in(document.encode(), pointer)
    else:
        assert price_in(document.encode(), pointer) == units


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ("", "/p"),
        ("{", "/p"),
        ('{"p": 0}', "/p"),
        ('{"p": -1}', "/p"),
        ('{"p": 1e3}', "/p"),
        ('{"p": NaN}', "/p"),
        ('{"p": Infinity}', "/p"),
        ('{"p": 0.0000001}', "/p"),
        ('{"p": 10000001}', "/p"),
        ('{"p": "\uff11\uff16\uff15"}', "/p"),
        ('{"p": " 165"}', "/p"),
        ('{"p": "165,0"}', "/p"),
        ('{"p": null}', "/p"),
        ('{"p": true}', "/p"),
        ('{"p": [165]}', "/p"),
        ('{"p": {"q": 165}}', "/p"),
        ('{"p": 165}', "/q"),
        ('{"p": 165}', "/p/0"),
        ("[165]", "/-1"),
        ("[165]", "/1"),
        ("[165]", "/00"),
        ("[" * 100_000, "/0"),
        ('{"p": %s}' % ("9" * 5_000), "/p"),
    ],
)
def test_what_is_no_price_is_unreadable(document: str, pointer: str) -> None:
    with pytest.raises(RateUnreadable):
        price_in(document.encode(), pointer)


@given(st.binary(max_size=200), st.text(max_size=20))
def test_nothing_but_unreadable_is_raised_whatever_comes(body: bytes, pointer: str) -> None:
    try:
        assert price_in(body, pointer) > 0
    except RateUnreadable:
        return


@asynccontextmanager
async def answering(handler: Any) -> AsyncIterator[tuple[HttpSource, ClientSession]]:
    app = web.Application()
    app.router.add_get("/ticker", handler)
    async with TestServer(app) as server, ClientSession() as session:
        yield HttpSource("test", str(server.make_url("/ticker")), "/p"), session


async def test_a_source_is_read_over_http() -> None:
    async def ticker(_: web.Request) -> web.Response:
        return web.json_response({"p": "165.5"})

    async with answering(ticker) as (source, session):
        assert await source.fetch(session) == 165_500_000


@pytest.mark.parametrize(
    "response",
    [
        web.HTTPInternalServerError,
        web.HTTPTooManyRequests,
        lambda: web.HTTPFound("/elsewhere"),
        lambda: web.Response(body=b" " * (rate_sources.LONGEST_ANSWER + 1)),
        lambda: web.Response(text="<html>"),
    ],
)
async def test_a_source_that_answers_something_else_is_unreadable(response: Any) -> None:
    async def ticker(_: web.Request) -> web.StreamResponse:
        made = response()
        if isinstance(made, web.HTTPException):
            raise made
        assert isinstance(made, web.Response)
        return made

    async with answering(ticker) as (source, session):
        with pytest.raises(RateUnreadable):
            await source.fetch(session)


async def test_a_source_that_never_answers_is_unreadable_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_sources, "TIMEOUT_SECONDS", 0.05)

    async def ticker(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await request.content.wait_eof()
        return response

    async with answering(ticker) as (source, session):
        with pytest.raises(RateUnreadable):
            await source.fetch(session)


async def test_a_source_that_is_not_there_is_unreadable() -> None:
    async with ClientSession() as session:
        with pytest.raises(RateUnreadable):
            await HttpSource("gone", "http://127.0.0.1:9/ticker", "/p").fetch(session)


# --- agreeing --------------------------------------------------------------------------------


def test_the_median_is_the_price_as_of_the_oldest_fresh_sample() -> None:
    given_samples = {**samples(165_000_000, 166_000_000), "s9": Sample(165_500_000, at(-5_000))}

    rate = agree(given_samples, at(), RULE)

    assert (rate.usdc_per_xmr, rate.as_of, rate.source) == (
        165_500_000, NOW - 5_000, "median of s0,s1,s9",
    )  # fmt: skip


def test_of_two_the_lower_one_counts() -> None:
    assert agree(samples(166_000_000, 165_000_000), at(), RULE).usdc_per_xmr == 165_000_000


def test_a_stale_sample_does_not_count() -> None:
    old = samples(165_000_000, 165_000_000, age_ms=60_001)
    with pytest.raises(Unavailable, match="0 of 2"):
        agree(old, at(), RULE)
    assert agree(samples(165_000_000, 165_000_000, age_ms=60_000), at(), RULE).as_of == NOW - 60_000


def test_too_few_sources_make_no_price() -> None:
    with pytest.raises(Unavailable, match="1 of 2"):
        agree(samples(165_000_000), at(), RULE)


def test_sources_that_contradict_each_other_make_no_price() -> None:
    assert agree(samples(100_000_000, 102_000_000), at(), RULE).usdc_per_xmr == 100_000_000
    with pytest.raises(Unavailable, match="contradict"):
        agree(samples(100_000_000, 102_000_001), at(), RULE)


@given(st.lists(st.integers(1, 10**13), max_size=7), st.integers(0, 120_000))
def test_a_price_is_always_one_that_a_fresh_source_gave(prices: list[int], age_ms: int) -> None:
    try:
        rate = agree(samples(*prices, age_ms=age_ms), at(), RULE)
    except Unavailable:
        return
    assert rate.usdc_per_xmr in prices
    assert age_ms <= RULE.max_age_ms
    assert (max(prices) - min(prices)) * 10_000 <= rate.usdc_per_xmr * RULE.max_spread_bps


class Scripted:
    """A source with scripted answers."""

    def __init__(self, name: str, *answers: int | None) -> None:
        self.name = name
        self._answers = list(answers)

    async def fetch(self, session: ClientSession) -> int:
        answer = self._answers.pop(0)
        if answer is None:
            raise RateUnreadable("nothing")
        return answer


class Log:
    """Keeps the names of logged events, independent of the process's logging setup."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_: str) -> None:
        self.events.append(event)

    info = warning


async def test_a_source_that_fails_leaves_the_price_until_it_is_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, clock = Log(), ManualClock()
    monkeypatch.setattr("rpcsvc.rates.sources.log", log)
    sources = [Scripted("a", 165, None, None, 170), Scripted("b", 165, None, None, 170)]
    rates = MedianRate(sources, clock, RULE)
    async with ClientSession() as session:
        with pytest.raises(Unavailable):
            rates.rate()
        await rates.refresh(session)
        assert (rates.rate().usdc_per_xmr, rates.rate().as_of) == (165, NOW)
        for _ in range(2):
            clock.now += 60_000
            await rates.refresh(session)
        with pytest.raises(Unavailable):
            rates.rate()
        await rates.refresh(session)
    assert rates.rate().usdc_per_xmr == 170
    assert log.events == ["rate_source_failed"] * 2 + ["rate_source_recovered"] * 2


class Rising:
    """A source whose price rises by 1 at each call; ``third`` is set at the third call."""

    name = "rising"

    def __init__(self) -> None:
        self.price, self.third = 164, asyncio.Event()

    async def fetch(self, session: ClientSession) -> int:
        self.price += 1
        if self.price == 167:
            self.third.set()
        return self.price


async def test_the_sources_are_asked_again_and_again() -> None:
    async def pause(seconds: float) -> None:
        assert seconds == RULE.every_seconds
        await asyncio.sleep(0)

    source = Rising()
    rates = MedianRate([source], ManualClock(), RatesSettings(quorum=1))
    asking = asyncio.create_task(rates.run(pause))
    await asyncio.wait_for(source.third.wait(), 10)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert rates.rate().usdc_per_xmr >= 166


@pytest.mark.parametrize(
    ("wall_ms", "steady_ms"),
    [
        pytest.param(-3_600_000, 60_001, id="set back by an hour"),
        pytest.param(0, 3_600_000, id="an hour after it was set back by one"),
        pytest.param(60_001, 0, id="slept"),
    ],
)
async def test_a_clock_that_is_set_makes_no_old_price_fresh(wall_ms: int, steady_ms: int) -> None:
    clock, steady = ManualClock(), ManualClock()
    sources = [Scripted("a", 165, None, 170), Scripted("b", 165, None, 170)]
    rates = MedianRate(sources, clock, RULE, steady=steady.now_ms)
    async with ClientSession() as session:
        await rates.refresh(session)
        clock.now += wall_ms
        steady.now += steady_ms
        await rates.refresh(session)
        with pytest.raises(Unavailable, match="0 of 2"):
            rates.rate()
        await rates.refresh(session)
    assert rates.rate().usdc_per_xmr == 170
    assert rates.rate().as_of == clock.now


async def test_spread_is_of_fresh_prices_though_they_contradict() -> None:
    clock, steady = ManualClock(), ManualClock()
    sources = [Scripted("a", 100, None), Scripted("b", 110, 105)]
    rates = MedianRate(sources, clock, RULE, steady=steady.now_ms)
    assert rates.spread_bps() is None
    async with ClientSession() as session:
        await rates.refresh(session)
        assert rates.spread_bps() == 1000
        with pytest.raises(Unavailable, match="contradict"):
            rates.rate()
        steady.now += RULE.max_age_ms + 1
        await rates.refresh(session)
    assert rates.spread_bps() is None


def test_a_quorum_that_can_never_be_met_is_refused() -> None:
    with pytest.raises(ValueError, match="quorum of 2 among 1"):
        MedianRate([Scripted("a")], ManualClock(), RULE)


def test_a_fixed_price_is_as_of_now() -> None:
    clock = ManualClock()
    rates = FixedRate(165_000_000, clock)
    clock.now += 1_000
    assert (rates.rate().usdc_per_xmr, rates.rate().as_of) == (165_000_000, NOW + 1_000)
    with pytest.raises(ValueError, match="above 0"):
        FixedRate(0, clock)


def test_the_number_of_a_document_is_not_rounded_by_a_float() -> None:
    # As a float this is 165.12345600000001.
    assert price_in(json.dumps({"p": "165.123456"}).encode(), "/p") == 165_123_456
