"""A client of the service: ``SwapClient`` for asyncio, ``SyncSwapClient`` without.

It verifies the service's signatures, and imports no code of the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpcsvc.client.calls import Retries
    from rpcsvc.client.errors import (
        ClientError,
        IdempotencyConflict,
        InputRefused,
        OrderNotFound,
        OutcomeUnknown,
        PaymentRefused,
        PaymentUnknown,
        QuoteChanged,
        RateLimited,
        Refused,
        Unavailable,
        Unreachable,
        Unverified,
    )
    from rpcsvc.client.models import (
        Deliveries,
        Event,
        Funded,
        Order,
        Placed,
        Quote,
        Restored,
        Status,
        Swap,
    )
    from rpcsvc.client.sessions import BadSecret, new_secret
    from rpcsvc.client.swap_client import SwapClient, SyncSwapClient

__all__ = [
    "BadSecret",
    "ClientError",
    "Deliveries",
    "Event",
    "Funded",
    "IdempotencyConflict",
    "InputRefused",
    "Order",
    "OrderNotFound",
    "OutcomeUnknown",
    "PaymentRefused",
    "PaymentUnknown",
    "Placed",
    "Quote",
    "QuoteChanged",
    "RateLimited",
    "Refused",
    "Restored",
    "Retries",
    "Status",
    "Swap",
    "SwapClient",
    "SyncSwapClient",
    "Unavailable",
    "Unreachable",
    "Unverified",
    "new_secret",
]

_MODELS = (
    "Deliveries",
    "Event",
    "Funded",
    "Order",
    "Placed",
    "Quote",
    "Restored",
    "Status",
    "Swap",
)
_MODULE_OF = {
    **dict.fromkeys(__all__, "errors"),
    **dict.fromkeys(_MODELS, "models"),
    "BadSecret": "sessions",
    "new_secret": "sessions",
    "Retries": "calls",
    "SwapClient": "swap_client",
    "SyncSwapClient": "swap_client",
}


def __getattr__(name: str) -> Any:
    """Load the module of a name on first use: commands need neither client."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
