"""Public tickers of XMR in US dollars: by name or given, and reading a price from their JSON.

A JSON pointer (RFC 6901) leads to the price. The number is read digit by digit, never as a float.
Size, time and form of an answer are bounded; a faulty one raises RateUnreadable.
Sources: the exchanges' public API documentation.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from aiohttp import ClientSession

from rpcsvc.domain.money import USDC
from rpcsvc.http_client import HttpRequest, NoReply, ReplyTooLarge, exchange

LONGEST_ANSWER: Final = 256 * 1024
TIMEOUT_SECONDS: Final = 10
# Beyond any price that XMR has had or could have while amounts fit 64 bits.
_HIGHEST: Final = Decimal(10_000_000)
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,18})?", re.ASCII)
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)
_SHOWN: Final = 60


class RateUnreadable(Exception):
    """A source gave no price; the message says why, for the log."""


@dataclass(frozen=True, slots=True)
class HttpSource:
    """Where a price is read: ``pointer`` leads to USD or USDC per XMR in the JSON at ``url``."""

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
    """An array index as RFC 6901 has it. Raises IndexError for anything else."""
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
