"""Public tickers of XMR in US dollars, by name; and how another one is given.

Each is a URL and where in its answer the last price is; nothing else is particular to any.
What does not live here: asking them (http.py), what several together say (median.py).
Sources: the exchanges' public API documentation.
"""

from __future__ import annotations

import re
from typing import Final

from rpcsvc.rates.http import HttpSource

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

_GIVEN: Final = re.compile(r"([a-z][a-z0-9_-]{0,30})=(https?://[!-\"$-~]{1,290})#(/[!-~]{0,100})")


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
