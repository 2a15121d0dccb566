"""Random ids: orders, tickets, withdrawals, sessions, requests. Randomness is passed in.

``ord_`` + 26 characters of Crockford base32 (128 random bits): an order id is half of its owner's
secret, so it can't be guessed or counted.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from typing import Final, TypeGuard

RandomBytes = Callable[[int], bytes]
system_random: RandomBytes = os.urandom

# Of the characters that need no escaping in JSON, in a header and in a log.
REQUEST_ID_PATTERN: Final = "[A-Za-z0-9._:-]{1,128}"
_REQUEST_ID: Final = re.compile(REQUEST_ID_PATTERN)
_TICKET_ID: Final = re.compile("tkt_[0-9A-HJKMNP-TV-Z]{26}")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = tuple(a + b for a in _CROCKFORD for b in _CROCKFORD)


def _base32(value: int, pairs: int) -> str:
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(10 * pairs - 10, -1, -10)])


def order_id(random: RandomBytes) -> str:
    """A new order id."""
    return "ord_" + _base32(int.from_bytes(random(16)), 13)


def ticket_id(random: RandomBytes) -> str:
    """A new support ticket id."""
    return "tkt_" + _base32(int.from_bytes(random(16)), 13)


def is_ticket_id(text: str) -> bool:
    """Return whether a text has the form of a support ticket's id."""
    return _TICKET_ID.fullmatch(text) is not None


def ticket_secret(random: RandomBytes) -> str:
    """A new secret that opens the conversation of a ticket: 128 random bits."""
    return "tks_" + _base32(int.from_bytes(random(16)), 13)


def withdrawal_id(random: RandomBytes) -> str:
    """A new id of a withdrawal."""
    return "wd_" + _base32(int.from_bytes(random(16)), 13)


def approval_id(random: RandomBytes) -> str:
    """A new id of an approval."""
    return "apr_" + _base32(int.from_bytes(random(16)), 13)


def request_id(random: RandomBytes) -> str:
    """A new request id."""
    return "req_" + _base32(int.from_bytes(random(10)), 8)


def is_request_id(text: str | None) -> TypeGuard[str]:
    """Return whether a text is a valid request id."""
    return text is not None and _REQUEST_ID.fullmatch(text) is not None


def session_id(random: RandomBytes) -> str:
    """A new session id: a UUID v4 (RFC 9562)."""
    return str(uuid.UUID(bytes=random(16), version=4))
