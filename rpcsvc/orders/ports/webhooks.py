"""The port of webhooks: which messages are due, what came of them, and who sends them.

Times are ms since the epoch, by the machine's clock: a sandbox's time machine moves no pause.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from rpcsvc.domain.webhooks import DeliveryAttempt, DeliveryVerdict, Standing, Webhook


class DueDelivery(Struct, frozen=True):
    """The oldest message of an order that is not delivered, to be sent now.

    ``is_known``: its receiver answered the last message that it was sent, of any order.
    """

    order_id: str
    sequence: int
    webhook: Webhook
    standing: Standing
    is_known: bool


class BookedDelivery(NamedTuple):
    """A message on record. ``event`` and ``at`` are those of the order's history.

    ``due_at``: when a pending one is tried next; 0: at once.
    """

    order_id: str
    sequence: int
    event: str
    at: int
    url: str
    state: str
    attempts: int
    tried_at: int | None
    status: int | None
    error: str | None
    due_at: int


class BookedWebhook(NamedTuple):
    """A webhook on record, without its secret."""

    url: str
    has_secret: bool
    failing_since: int | None
    ended_at: int | None


class Backlog(NamedTuple):
    """How many messages are pending, and when the oldest event of them was; None: there is none."""

    pending: int
    oldest_at: int | None


class WebhookStore(Protocol):
    """Messages that are due and on record. Everything may raise errors.Unavailable."""

    async def due(
        self, now: int, busy: Sequence[str], *, is_known: bool, most_of_client: int, limit: int
    ) -> list[DueDelivery]:
        """The oldest pending message of each order that is due, not of the receivers ``busy``.

        Only those of receivers that answered last time, or only others. The first of each client
        come first, then the second of each, and so on.
        """
        ...

    async def record(
        self, delivery: DueDelivery, attempt: DeliveryAttempt, verdict: DeliveryVerdict, now: int
    ) -> None:
        """Record the outcome of an attempt."""
        ...

    async def hurry(self, beyond: int) -> None:
        """Have what is due later than ``beyond`` be due at once: the clock was set back."""
        ...

    async def webhook(self, order_id: str) -> BookedWebhook | None:
        """The webhook of an order."""
        ...

    async def deliveries(self, order_id: str, limit: int) -> list[BookedDelivery]:
        """The newest messages of an order, oldest first."""
        ...

    async def listed(self, states: Sequence[str], limit: int) -> list[BookedDelivery]:
        """The newest messages in these states, newest first."""
        ...

    async def replay(self, order_id: str, sequence: int | None) -> int:
        """Have a message, or all dead ones of the order, sent again; returns how many.

        A webhook that the receiver had ended goes on.
        """
        ...

    async def backlog(self) -> Backlog:
        """What is pending."""
        ...


# Sends one message: to whom, its id, its body.
Send = Callable[[Webhook, str, bytes], Awaitable[DeliveryAttempt]]
# The body of an event's message, by order id and sequence.
Render = Callable[[str, int], Awaitable[bytes]]
