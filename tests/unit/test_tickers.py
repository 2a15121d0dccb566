"""The public tickers, against a local server with documented answers; and wiring of rates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.rates.sources import TICKERS, MedianRate, rate_source, ticker
from rpcsvc.settings import SettingsError
from rpcsvc.settings_onchain import RatesSettings
from tests.sandbox import ManualClock

# Each ticker's documented answer, and its request.
ANSWERS: dict[str, tuple[dict[str, str], Any, int]] = {
    "kraken": (
        {"pair": "XMRUSD"},
        {
            "error": [],
            "result": {
                "XXMRZUSD": {
                    "a": ["165.36000000", "3", "3.000"],
                    "b": ["165.20000000", "12", "12.000"],
                    "c": ["165.31000000", "0.45203000"],
                    "v": ["1820.75", "2514.11"],
                    "p": ["164.90", "164.77"],
                    "t": [812, 1190],
                    "l": ["162.10", "161.90"],
                    "h": ["167.00", "167.00"],
                    "o": "163.25000000",
                }
            },
        },
        165_310_000,
    ),
    "coingecko": (
        {"ids": "monero", "vs_currencies": "usd"},
        {"monero": {"usd": 165.27}},
        165_270_000,
    ),
    "kucoin": (
        {"symbol": "XMR-USDT"},
        {
            "code": "200000",
            "data": {
                "time": 1_760_000_000_000,
                "sequence": "1545896669145",
                "price": "165.4",
                "size": "0.0121",
                "bestBid": "165.3",
                "bestBidSize": "1.1",
                "bestAsk": "165.5",
                "bestAskSize": "2.2",
            },
        },
        165_400_000,
    ),
    "bitfinex": (
        {},
        [165.1, 22.5, 165.6, 30.1, 1.2, 0.0073, 165.35, 911.4, 167.2, 161.8],
        165_350_000,
    ),
}


@asynccontextmanager
async def exchange(path: str, answer: Any, asked: list[dict[str, str]]) -> AsyncIterator[str]:
    async def tell(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get(path, tell)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("/"))[:-1]
    finally:
        await server.close()


@pytest.mark.parametrize("name", TICKERS)
async def test_each_ticker_reads_its_recorded_answer(name: str) -> None:
    query, answer, units = ANSWERS[name]
    parts, asked = urlsplit(TICKERS[name].url), list[dict[str, str]]()
    assert parts.scheme == "https"
    async with exchange(parts.path, answer, asked) as root, ClientSession() as session:
        there = replace(TICKERS[name], url=f"{root}{parts.path}?{parts.query}")
        assert await there.fetch(session) == units
    assert asked == [query]


def test_another_ticker_is_given_by_url_and_pointer() -> None:
    mine = ticker("mine=https://example.com/t?pair=XMR#/last/0")
    assert (mine.name, mine.url, mine.pointer) == (
        "mine",
        "https://example.com/t?pair=XMR",
        "/last/0",
    )


@pytest.mark.parametrize("text", ["krakn", "mine=ftp://x#/p", "mine=https://x", "=https://x#/"])
def test_unknown_ticker_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(SettingsError, match="kraken, coingecko, kucoin, bitfinex"):
        rate_source(RatesSettings(sources=("kraken", text), quorum=1), ManualClock())


def test_quorum_above_the_number_of_sources_is_refused_at_start() -> None:
    with pytest.raises(SettingsError, match="quorum"):
        rate_source(RatesSettings(sources=("kraken",), quorum=2), ManualClock())


@pytest.mark.parametrize("again", ["kraken", "kraken=https://example.com/t#/last"])
def test_two_sources_of_one_name_are_refused_at_start(again: str) -> None:
    """They would count as one: the quorum would never be met, or the later answer would count."""
    with pytest.raises(SettingsError, match="two sources are called kraken"):
        rate_source(RatesSettings(sources=("kraken", again, "kucoin"), quorum=2), ManualClock())


def test_fixed_price_needs_no_source_and_the_median_does() -> None:
    clock = ManualClock()
    fixed = rate_source(RatesSettings(fixed_usdc_per_xmr="165.5"), clock)
    assert (fixed.source.rate().usdc_per_xmr, fixed.run) == (165_500_000, None)
    asked = rate_source(RatesSettings(), clock)
    assert isinstance(asked.source, MedianRate)
    with pytest.raises(Unavailable, match="no fresh rate"):
        asked.source.rate()
