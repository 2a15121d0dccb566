"""A change of an order, with everything that the same commit writes."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.clients import ApprovalUse, Spending
from rpcsvc.domain.events import Effect
from rpcsvc.domain.finality import FinalityChange
from rpcsvc.domain.order import Order
from rpcsvc.domain.reservations import Admission, ReservationChange
from rpcsvc.domain.settle_times import SettleTime, SwapKind
from rpcsvc.domain.webhooks import Webhook


class RateBounds(NamedTuple):
    """The bounds of a published rate, which is no evidence once it is ``max_age_ms`` old."""

    least: int
    most: int
    max_age_ms: int


class HistoryEntry(Struct, frozen=True):
    """A line of an order's history. ``version`` is the order's after the event."""

    version: int
    at: int
    event: str
    status: str
    details: dict[str, Any]


class PendingEffect(NamedTuple):
    """An effect that is committed and not yet done."""

    order_id: str
    effect: Effect


class StoredResponse(Struct, frozen=True):
    """The first answer to an idempotent call, kept so that a retry gets the same bytes.

    ``params`` are the normalised params (JSON values) that the key was first used with;
    ``body`` is the envelope without its request id, as JSON bytes.
    """

    namespace: str
    key: str
    operation: str
    params: dict[str, Any]
    body: bytes
    created_at: int


class Ticket(Struct, frozen=True):
    """A support ticket. ``secret_hash`` is the SHA-256, as hex, of the secret that opens it; empty
    where nobody has one.
    """

    ticket_id: str
    created_at: int
    category: str
    message: str
    order_id: str | None
    session_id: str | None
    wallet_address: str | None
    secret_hash: str = ""


class TicketMessage(Struct, frozen=True):
    """A message of a ticket: by the person where ``answered_by`` is None, else by that operator."""

    ticket_id: str
    at: int
    answered_by: str | None
    message: str


class TicketCharge(NamedTuple):
    """The share of a day that a ticket or a message takes: day of UTC, client as stored, and bytes.

    ``client`` is the order's id for the owner of an order with money in it. With the ticket counted
    the client may have ``most_tickets``, and all together ``most_bytes``.
    """

    day: int
    client: str
    size: int
    most_tickets: int
    most_bytes: int


class TicketsTaken(NamedTuple):
    """The part of a day's budget that is taken: tickets of one client, and bytes of all."""

    tickets: int
    size: int


class PooledOrder(NamedTuple):
    """The conditions that an order is made under while another replica has the wallets.

    Its transaction takes ``address`` from the pool, and has to find the state of ``network``, which
    pays: published at ``since`` or later, less than ``max_age_ms`` ago, and with enough for all
    reservations.
    """

    address: str
    network: str
    since: int
    max_age_ms: int


class OrderBounds(Struct, frozen=True):
    """Conditions that the transaction of a new order checks beside its admission; None: none.

    ``rates``: what the last published rate has to be. ``pooled``: what it has to find where another
    replica has the wallets. ``spending``: what it takes of its client's day. ``approval``: the one
    that it uses up.
    """

    rates: RateBounds | None = None
    pooled: PooledOrder | None = None
    spending: Spending | None = None
    approval: ApprovalUse | None = None


UNBOUNDED: Final = OrderBounds()


class StatusView(Struct, frozen=True):
    """An order's status answer, written when the order last changed (operations/ordering.py).

    ``body`` is the envelope without its request id; it holds until ``valid_until`` (ms), if set.
    ``kind`` is that of the swap, whose observed time is added when it is sent; None: none is.
    """

    body: bytes
    valid_until: int | None
    kind: SwapKind | None = None


class RelayState(StrEnum):
    """The state of a claim. CLAIMED: the call was about to be made, or is being made.

    REFUSED: there is no order, or none whose address anybody has; its ``reason`` says which.
    """

    CLAIMED = "claimed"
    CREATED = "created"
    REFUSED = "refused"
    RECONCILING = "reconciling"


class RelayRecord(Struct, frozen=True):
    """A claim on an order at the upstream. ``raw`` is its answer, for audit.

    ``operation`` and ``params`` are what its idempotency key was used for, as in StoredResponse;
    None without a key, and of a claim from before they were kept. ``attempt``: how often the
    upstream was called for it; it says whose call a CLAIMED one is.
    """

    order_id: str
    state: RelayState
    created_at: int
    session_id: str
    namespace: str | None = None
    key: str | None = None
    upstream_id: str | None = None
    reason: str | None = None
    raw: bytes = b""
    operation: str | None = None
    params: dict[str, Any] | None = None
    attempt: int = 1

    @property
    def is_open(self) -> bool:
        """Whether its outcome is not known."""
        return self.state in (RelayState.CLAIMED, RelayState.RECONCILING)


Projection = Callable[[Order], StatusView | None]


class Change(Struct, frozen=True):
    """All changes of one event, committed together or not at all.

    ``is_new`` tells an insert from an update of ``order``, which comes with its line of history.
    ``done`` are effects that the event finished. ``evidence`` is what the order's report was read
    from. ``admission`` is who asked for a new order, and the bounds that it is made within.
    ``webhook``: where the events of a new order are sent. ``rates``: what the last published rate
    has to be for a new order. ``pooled``: what a new order has to find where another
    replica has the wallets. ``settled``: the time of an order that the event completed.
    ``message`` goes to the ticket that it names.
    ``spending``: what a new order takes of its client's day, and ``approval`` what it uses up.
    ``returns``: what a refused ``relay`` gives back of both.
    Raises ValueError for a change of which a part could not be written.
    """

    order: Order | None = None
    view: StatusView | None = None
    is_new: bool = False
    history: HistoryEntry | None = None
    effects: tuple[Effect, ...] = ()
    done: tuple[PendingEffect, ...] = ()
    response: StoredResponse | None = None
    ticket: Ticket | None = None
    message: TicketMessage | None = None
    charge: TicketCharge | None = None
    relay: RelayRecord | None = None
    evidence: bytes = b""
    reservation: ReservationChange | None = None
    finality: FinalityChange | None = None
    admission: Admission | None = None
    webhook: Webhook | None = None
    rates: RateBounds | None = None
    pooled: PooledOrder | None = None
    settled: SettleTime | None = None
    spending: Spending | None = None
    approval: ApprovalUse | None = None
    returns: OrderBounds = UNBOUNDED

    def __post_init__(self) -> None:
        order = self.order
        if (order is None) is not (self.history is None):
            raise ValueError("an order and a line of its history are written together")
        if order is None and (self.effects or self.view or self.is_new or self.evidence):
            raise ValueError("effects, view, is_new and evidence belong to an order")
        if self.webhook is not None and not self.is_new:
            raise ValueError("a webhook comes with its new order")
        if self.rates is not None and not self.is_new:
            raise ValueError("a rate is agreed with a new order")
        if self.pooled is not None and not self.is_new:
            raise ValueError("an address of the pool is for a new order")
        if order is None:
            return
        if self.evidence and order.report is None:
            raise ValueError("evidence belongs to the report of an order")
        if self.is_new and (order.deposits or order.transfers or order.fills or order.report):
            raise ValueError("a new order has no deposits, transfers, fills or report yet")
