"""The dialect of another rpcsvc's BFF: paths of spec 4.4, errors of spec 7, idempotency keys.

Its network is in the capabilities of its agent API, at the same site.

What does not live here: the calls themselves (calls.py) and their answers (reading.py).
"""

from __future__ import annotations

from typing import Any, Final

from rpcsvc.settlement.upstream.calls import CALLER_CODES, Dialect
from rpcsvc.settlement.upstream.models import Refused, RemoteError

_MOST_DETAILS: Final = 16
_MOST_ALLOWED: Final = 50
_LONGEST_DETAIL: Final = 128


def read_error(value: Any) -> RemoteError | None:
    """``{"error": {code, message, details?}}``, or None for anything else."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return None
    code, message, details = error.get("code"), error.get("message"), error.get("details")
    if not isinstance(code, str) or not code or not isinstance(message, str):
        return None
    return RemoteError(code, message, _plain_details(details))


def _plain_details(details: Any) -> dict[str, Any]:
    """The details that are short texts, whole numbers, or lists of such: limits, allowed values."""
    if not isinstance(details, dict):
        return {}
    kept = {k: v for k, v in details.items() if len(k) <= 64 and (_is_plain(v) or _is_list(v))}
    return dict(list(kept.items())[:_MOST_DETAILS])


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_DETAIL and value.isprintable()
    return isinstance(value, bool | int)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ALLOWED and all(map(_is_plain, value))


def code_of(refusal: Refused) -> str | None:
    """The refusal's code, if it is one that a caller can mend."""
    return refusal.code if refusal.code in CALLER_CODES else None


def base_url(url: str) -> str:
    """The site's root, of that or of its BFF."""
    return url.rstrip("/").removesuffix("/bff/v1")


BFF: Final = Dialect(
    name="bff",
    base_url=base_url,
    paths={
        "capabilities": "/api/v1/agent/capabilities",
        "health": "/bff/v1/health",
        "chains": "/bff/v1/chains",
        "quote": "/bff/v1/quote",
        "create_order": "/bff/v1/orders",
        "order": "/bff/v1/orders/{id}",
        "cancel_order": "/bff/v1/orders/{id}/cancel",
        "orders": "/bff/v1/orders",
        "create_ticket": "/bff/v1/support/tickets",
        "bridge_rates": "/bff/v1/bridge/rates",
        "bridge_deposit": "/bff/v1/bridge/deposit",
        "bridge_withdraw": "/bff/v1/bridge/withdraw",
        "bridge_order": "/bff/v1/bridge/order/{id}",
    },
    keys=True,
    cuts_usdc=True,
    refund_addresses=True,
    read_error=read_error,
    code_of=code_of,
    messages_for_users=True,
    times_ends=True,
)
