"""Quote digests: a quote's terms as text, which a caller sends back to get no worse ones.

The text carries the terms, so nothing is stored, and any replica can read it. It is not signed: a
caller who changes it changes only what they accept.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated, Final, Literal, NamedTuple

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import MAX_UNITS, Money, format_units
from rpcsvc.domain.pricing import Direction, payout_asset
from rpcsvc.errors import InvalidInput, QuoteChanged
from rpcsvc.orders.ports.venue import VenueQuote

FIELD: Final = "quoteDigest"
PATTERN: Final = "^[A-Za-z0-9_-]{24,512}$"
_FORM: Final = 4
_CHECK_BYTES: Final = 9
_Units = Annotated[int, Field(ge=0, le=MAX_UNITS)]
_Time = Annotated[int, Field(ge=0, le=253_402_300_799_999)]  # to the end of the year 9999
# The check is no signature: anybody can write a digest with any body.
# Form 1 is of before quotes could have gas in them, form 2 of before they could be exact, form 3 of
# before they had their rate.
_WRITTEN: Final = TypeAdapter(
    tuple[Literal[1], str, int, _Units, _Units, _Units, _Units, _Time]
    | tuple[Literal[2], str, int, _Units, _Units, _Units, _Units, _Time, _Units]
    | tuple[Literal[3], str, int, _Units, _Units, _Units, _Units, _Time, _Units, _Units]
    | tuple[Literal[4], str, int, _Units, _Units, _Units, _Units, _Time, _Units, _Units, _Units],
    config=ConfigDict(strict=True),
)


class QuotedTerms(NamedTuple):
    """The terms of a quote: the swap, its output, and the time of the quote (ms).

    ``amount`` and ``refund_fee`` in deposit units; ``expected_output`` and ``min_received`` in
    payout units. ``funding_gas`` in USDC units: 0 for a quote without gas of a signed payment.
    ``receive_amount`` in payout units, of a quote that was asked for by it; else 0. ``rate`` in
    USDC units per XMR; 0 in a digest of before it had one.
    """

    direction: str
    chain_id: int
    amount: int
    expected_output: int
    min_received: int
    refund_fee: int
    at: int
    funding_gas: int = 0
    receive_amount: int = 0
    rate: int = 0

    def require_for(
        self,
        direction: Direction,
        chain_id: int,
        amount: Money,
        *,
        pays_gas: bool = False,
        field: str = FIELD,
    ) -> None:
        """Raise InvalidInput unless the quote was for this swap, named by the same amount."""
        named = self.receive_amount or self.amount
        quoted = (
            self.direction,
            self.chain_id,
            self.funding_gas > 0,
            self.receive_amount > 0,
            named,
        )
        is_exact = amount.asset is payout_asset(direction)
        if quoted != (direction, chain_id, pays_gas, is_exact, amount.units):
            raise InvalidInput(
                f"{field} is of a quote for another direction, chain, amount or funding. Send the"
                " inputs that were quoted, or get a quote for these.",
                field=field,
            )

    def require_kept(self, quote: VenueQuote) -> None:
        """Raise QuoteChanged unless the quote is at least as good as these terms."""
        payout, deposit = quote.payout_asset, quote.deposit_asset
        now = quote_terms(quote, self.at)
        worse = [
            {"field": field, "quoted": format_units(before, asset), "now": format_units(new, asset)}
            for field, before, new, asset, is_worse in (
                ("depositAmount", self.amount, now.amount, deposit, now.amount > self.amount),
                ("expectedOutput", self.expected_output, now.expected_output, payout,
                 now.expected_output < self.expected_output),
                ("minReceived", self.min_received, now.min_received, payout,
                 now.min_received < self.min_received),
                ("fees.refundNetwork", self.refund_fee, now.refund_fee, deposit,
                 now.refund_fee > self.refund_fee),
            )
            if is_worse
        ]  # fmt: skip
        if worse:
            reported = ", ".join(f"{w['field']} {w['now']} instead of {w['quoted']}" for w in worse)
            raise QuoteChanged(
                f"The terms are worse than those quoted at {iso8601(self.at)}: {reported}. No order"
                " was made. Get a new quote, and let the user decide.",
                details={"worse": worse},
            )


def quote_terms(quote: VenueQuote, at: int) -> QuotedTerms:
    """The terms of a quote that was given at a time (ms)."""
    return QuotedTerms(
        quote.direction.value,
        quote.chain.chain_id,
        quote.deposit.units,
        quote.expected_output,
        quote.min_received,
        quote.fees.refund,
        at,
        quote.funding_gas,
        quote.receive_amount or 0,
        quote.rate.usdc_per_xmr,
    )


def write_digest(terms: QuotedTerms) -> str:
    """The terms as text: base64url of JSON, after a part of its SHA-256, which finds a bad copy."""
    body = orjson.dumps([_FORM, *terms])
    return base64.urlsafe_b64encode(_check(body) + body).decode().rstrip("=")


def read_digest(text: str, *, field: str = FIELD) -> QuotedTerms:
    """The terms that ``write_digest`` wrote. Raises InvalidInput."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    check, body = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
    if not body or check != _check(body):
        raise _unknown(field)
    try:
        written = _WRITTEN.validate_json(body)
    except ValidationError:
        raise _unknown(field) from None
    return QuotedTerms(*written[1:])


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]


def percent_change(before: int, after: int) -> str | None:
    """The change in percent with at most four decimals; None from 0, which stands for unknown."""
    if before == 0:
        return None
    size, sign = abs(after - before), "-" if after < before else ""
    whole, rest = divmod((2 * size * 1_000_000 + before) // (2 * before), 10_000)
    text = f"{whole}.{rest:04}".rstrip("0").rstrip(".")
    return text if text == "0" else sign + text


def _unknown(field: str) -> InvalidInput:
    return InvalidInput(
        f"{field} is not whole, or none of this service. Send the quoteDigest that quote answered,"
        " or leave it out.",
        field=field,
    )
