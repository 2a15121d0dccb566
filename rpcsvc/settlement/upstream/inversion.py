"""Finds the deposit for an exact payout at an upstream that prices deposits only, by its quotes.

A payout is nearly linear in its deposit: a few quotes come within one unit, as long as the rate
stays. No answer is below the wanted payout.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from rpcsvc.domain.money import MAX_UNITS
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.upstream.answers import UpstreamQuote

MOST_QUOTES: Final = 6
# Outputs that differ by fewer units say more about rounding than about the price.
_LEAST_SPAN: Final = 1_000
_RETRY_SECONDS: Final = 5


async def exact_quote(
    wanted: int, deposit: int, output: int, quote: Callable[[int], Awaitable[UpstreamQuote]]
) -> UpstreamQuote:
    """A quote whose payout is ``wanted`` units, or more by what one unit more or less brings.

    ``deposit`` and ``output`` are a price of before, which may be old. Raises Unavailable while the
    rate does not stay for as long as it takes, and what ``quote`` raises.
    """
    gained, spent = output, deposit
    for _ in range(MOST_QUOTES):
        units = deposit - (output - wanted) * spent // gained
        found = await quote(min(max(1, units), MAX_UNITS))
        more = found.to_amount - wanted
        gained, spent = _slope(found, deposit, output)
        if more >= 0 and more * spent < gained + spent:
            return found
        deposit, output = found.from_amount, found.to_amount
    raise Unavailable(
        "The rate moves too fast to say what to send for exactly this amount. Try again, or name"
        " the amount that is sent.",
        retry_after=_RETRY_SECONDS,
    )


def _slope(found: UpstreamQuote, deposit: int, output: int) -> tuple[int, int]:
    """Payout units, and the deposit units that bring them: by two prices, if they can be of one
    rate, else by the last one. A fixed fee makes a part of a deposit bring more than its share.
    """
    gained, spent = found.to_amount - output, found.from_amount - deposit
    if spent < 0:
        gained, spent = -gained, -spent
    share = found.to_amount * spent
    if gained >= _LEAST_SPAN and share <= gained * found.from_amount <= 2 * share:
        return gained, spent
    return found.to_amount, found.from_amount
