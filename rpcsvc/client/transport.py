"""Requests, replies, and the protocol of the transports that send them.

A transport does not verify, retry or follow redirects: ``Calls`` verifies and retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from rpcsvc.client.endpoint import ROOT_URLS
from rpcsvc.client.errors import Unreachable

CALL_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 10.0
# The longest answer, the status of an order with thousands of deposits, has some hundred KB.
LARGEST_ANSWER: Final = 16 * 2**20
MAYBE_DONE: Final = (
    "The call may have been carried out: repeat it with the same idempotency key, or ask for the"
    " status."
)


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """A request. ``target``: path and query below the service's root URL.

    ``seconds`` limits the whole exchange, or each pause of a stream.
    """

    method: str
    target: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = CALL_SECONDS


@dataclass(frozen=True, slots=True)
class ServiceReply:
    """A whole answer, unverified. ``target``: path and query of the request as sent."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    target: str

    def header(self, name: str) -> str | None:
        """The first value of a header; its name in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)


class Stream(Protocol):
    """An answer that is read as it comes. Reading raises Unreachable, and ValueError."""

    status: int
    content_type: str

    def lines(self) -> AsyncIterator[bytes]:
        """Its lines."""
        ...

    async def read(self, most: int) -> bytes:
        """At most so many bytes of it."""
        ...


class Transport(Protocol):
    """Sends requests to one service."""

    @property
    def name(self) -> str:
        """The name of the service in messages."""
        ...

    async def exchange(self, sent: ServiceRequest) -> ServiceReply:
        """Send a request and read its whole answer. Raises Unreachable."""
        ...

    def stream(self, sent: ServiceRequest) -> AbstractAsyncContextManager[Stream]:
        """Send a request, and read its answer as it comes. Raises Unreachable."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def not_reached(name: str, why: object) -> Unreachable:
    """The error if no connection was made: nothing was sent."""
    return Unreachable(f"No service answers at {name}: {why}.")


def lost(name: str, sent: ServiceRequest, why: object) -> Unreachable:
    """The error if the request was sent at least in part, and no whole answer came."""
    advice = "" if sent.method == "GET" else f" {MAYBE_DONE}"
    return Unreachable(f"The connection to {name} broke ({why}).{advice}", may_be_done=True)


def not_this_service(name: str, what: str, status: int) -> Unreachable:
    """The error if another server answered instead of the service."""
    advice = ""
    if status in (404, 405) or 300 <= status < 400:
        advice = f" Give the service's root URL, {ROOT_URLS}."
    elif not 400 <= status < 500 or status == 408:  # 408 means only that something took too long
        advice = f" {MAYBE_DONE}"
    # A proxy may also have replaced the answer: whatever the status, the call may be done.
    return Unreachable(
        f"What answers at {name} (HTTP {status}) is not this service's {what}.{advice}",
        may_be_done=True,
    )
