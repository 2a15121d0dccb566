"""An upstream's statuses, read as an open set.

A status that is not known here is UNKNOWN: the order keeps the state it has. It is never guessed
from its likeness to a known one, because a wrong guess would tell a user that money has arrived.
What does not live here: what an order does with a status (domain/machine.py).
Sources: spec 3.2 and 3.3 (the names), and the spellings that the public API is known to use.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from rpcsvc.domain.bridge import BridgeStatus
from rpcsvc.domain.order import OrderStatus


class Unknown(Enum):
    """The type of UNKNOWN, so that a type checker knows it from a status."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN


OrderReading = OrderStatus | Literal[Unknown.UNKNOWN]
BridgeReading = BridgeStatus | Literal[Unknown.UNKNOWN]

_ORDER: Final[dict[str, OrderStatus]] = {
    **{status.value: status for status in OrderStatus},
    "confirming": OrderStatus.DEPOSIT_DETECTED,
    "swapping": OrderStatus.EXECUTING_SWAP,
    "complete": OrderStatus.COMPLETED,
    "success": OrderStatus.COMPLETED,
}
_BRIDGE: Final[dict[str, BridgeStatus]] = {
    **{status.value: status for status in BridgeStatus},
    "confirming": BridgeStatus.PENDING_CONFIRMATIONS,
    "complete": BridgeStatus.COMPLETED,
    "success": BridgeStatus.COMPLETED,
}
_WHITESPACE: Final = " \t\r\n"


def order_status(text: str) -> OrderReading:
    """The order status that ``text`` spells, without regard to case and outer spaces."""
    return _ORDER.get(_plain(text), UNKNOWN)


def bridge_status(text: str) -> BridgeReading:
    """The bridge status that ``text`` spells, without regard to case and outer spaces."""
    return _BRIDGE.get(_plain(text), UNKNOWN)


def _plain(text: str) -> str:
    # Lower-casing turns some other scripts' letters into ASCII ones (U+212A becomes k).
    return text.strip(_WHITESPACE).lower() if text.isascii() else ""
