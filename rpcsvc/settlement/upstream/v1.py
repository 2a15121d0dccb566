"""The dialect of the public cross-chain API: ``/v1/...``, errors ``{"error": "text"}``, no keys.

An order is created at most once here: there is no idempotency key, so that a creation of unknown
outcome is never sent again. Errors are free text; only what certainly names something that the
caller can mend is passed on, in our own words. What does not live here: the calls themselves
(calls.py) and their answers (reading.py).
"""

from __future__ import annotations

import re
from typing import Any, Final

from yarl import URL

from rpcsvc.settlement.upstream.calls import Dialect
from rpcsvc.settlement.upstream.models import Refused, RemoteError

_BELOW: Final = (
    r"\b(?:below|under|less than|lower than|smaller than)\b.*\bmin|\btoo (?:small|low)\b"
    r"|\bminimum (?:amount|swap|deposit|order)\b"
)
_ABOVE: Final = (
    r"\b(?:above|over|more than|greater than|larger than|exceeds?)\b.*\bmax"
    r"|\btoo (?:large|high|big)\b|\bmaximum (?:amount|swap|deposit|order)\b"
)
_NOT_SUPPORTED: Final = r"\b(?:unsupported|not supported|unknown)\b"
_PHRASES: Final = tuple(
    (re.compile(pattern, re.ASCII | re.IGNORECASE | re.DOTALL), code)
    for pattern, code in (
        (_BELOW, "amount_below_minimum"),
        (_ABOVE, "amount_above_maximum"),
        (rf"(?=.*{_NOT_SUPPORTED}).*\b(?:chain|network)", "unsupported_chain"),
        (rf"(?=.*{_NOT_SUPPORTED}).*\b(?:token|asset|coin)\b", "unsupported_token"),
        (r"\binvalid\b.*\b(?:to ?address|destination|recipient)", "invalid_destination"),
    )
)
_NO_ORDER: Final = re.compile(r"\border\b.*\bnot found\b|\bno such order\b", re.ASCII | re.I)


def read_error(value: Any) -> RemoteError | None:
    """``{"error": "text"}``, or None for anything else."""
    text = value.get("error") if isinstance(value, dict) else None
    return RemoteError(None, text) if isinstance(text, str) and text else None


def code_of(refusal: Refused) -> str | None:
    """Our code for a refusal, when its text says one thing that a caller can mend, and no other."""
    if refusal.status == 404:
        return "order_not_found" if _NO_ORDER.search(refusal.message) else None
    if refusal.status not in (400, 422):
        return None
    found = {code for phrase, code in _PHRASES if phrase.search(refusal.message)}
    return found.pop() if len(found) == 1 else None


def base_url(url: str) -> str:
    """``url``, with /v1 where it has no path."""
    parsed = URL(url)
    # with_path would drop a query, which the check of the options refuses.
    is_bare = parsed.path in ("", "/") and not (parsed.query_string or parsed.fragment)
    return str(parsed.with_path("/v1")) if is_bare else url


V1: Final = Dialect(
    name="v1",
    base_url=base_url,
    paths={
        "chains": "/chains",
        "quote": "/quote",
        "create_order": "/order",
        "order": "/order/{id}",
        "bridge_rates": "/bridge/rates",
        "bridge_deposit": "/bridge/deposit",
        "bridge_withdraw": "/bridge/withdraw",
        "bridge_order": "/bridge/order/{id}",
    },
    keys=False,
    cuts_usdc=False,
    refund_addresses=False,
    read_error=read_error,
    code_of=code_of,
    messages_for_users=False,
    times_ends=False,
)
