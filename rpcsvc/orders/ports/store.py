"""The store port and its records.

A ``Change`` is committed completely or not at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from rpcsvc.domain.events import Effect
from rpcsvc.domain.order import OnDeadline, Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.webhooks import Webhook
from rpcsvc.orders.unfunded import Admission, Reservation, Reserved


class RateBounds(NamedTuple):
    """Where a published rate has to be; it is no evidence once it is ``max_age_ms`` old."""

    least: int
    most: int
    max_age_ms: int


class RateRow(NamedTuple):
    """A published rate: when, how long ago, and the token of the lease it was published under."""

    usdc_per_xmr: int
    at: int
    age_ms: int
    token: int


class RateRows(Protocol):
    """Keeps published rates for a week. Everything may raise errors.Unavailable."""

    async def publish(self, rate: int, token: int, bounds: RateBounds) -> bool:
        """Add a rate; False where a fresh row of another token is out of the bounds."""
        ...

    async def last(self) -> RateRow | None:
        """The newest row."""
        ...

    async def recent(self, span_ms: int, step_ms: int) -> Sequence[RateRow]:
        """The last row of each step of the span that ends now, oldest first."""
        ...


class Health(Struct, frozen=True):
    """The result of a check; ``detail`` says what is wrong and what to do."""

    ok: bool
    detail: str | None = None


class HistoryEntry(Struct, frozen=True):
    """One line of an order's history. ``version`` is the order's after the event."""

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
    """A support ticket."""

    ticket_id: str
    created_at: int
    category: str
    message: str
    order_id: str | None
    session_id: str | None
    wallet_address: str | None


class TicketCharge(NamedTuple):
    """What a ticket takes of a day's budget: the day of UTC, the client as stored, and bytes.

    ``client`` is the order's id for the owner of an order with money in it. With the ticket counted
    the client may have ``most_tickets``, and all together ``most_bytes``.
    """

    day: int
    client: str
    size: int
    most_tickets: int
    most_bytes: int


class TicketsTaken(NamedTuple):
    """What was taken of a day's budget: tickets of one client, and bytes of all."""

    tickets: int
    size: int


class ReservationChange(NamedTuple):
    """How the reservations of an order change with it (orders/reservations.py).

    ``funded``: units by network, of those that change; 0: none any more. ``unfunded``: what is
    reserved for deposits that have not come; None: nothing any more. One that does not begin now
    changes its units only where it has not ended.
    """

    order_id: str
    funded: Mapping[str, int]
    unfunded: Reservation | None
    begins: bool


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


class StatusView(NamedTuple):
    """An order's status answer, written when the order last changed (operations/ordering.py).

    ``body`` is the envelope without its request id; it holds until ``valid_until`` (ms), if set.
    """

    body: bytes
    valid_until: int | None


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
    replica has the wallets. Raises ValueError for a change of which a part could not be written.
    """

    order: Order | None = None
    view: StatusView | None = None
    is_new: bool = False
    history: HistoryEntry | None = None
    effects: tuple[Effect, ...] = ()
    done: tuple[PendingEffect, ...] = ()
    response: StoredResponse | None = None
    ticket: Ticket | None = None
    charge: TicketCharge | None = None
    relay: RelayRecord | None = None
    evidence: bytes = b""
    reservation: ReservationChange | None = None
    admission: Admission | None = None
    webhook: Webhook | None = None
    rates: RateBounds | None = None
    pooled: PooledOrder | None = None

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


# Writes that a store has made ready; what they are is known to the store alone.
Rows = Sequence[Any]
# Commits rows together with those of who is asked, in one transaction.
Commit = Callable[[Rows], Awaitable[None]]


class StaleWrite(Exception):
    """What a write was decided on changed since it was read. Nothing was written: read again."""


class OrderStore(Protocol):
    """Holds orders, their history, pending effects, idempotency keys and tickets.

    Reads are of committed state; ``commit`` returns once the change is durable. Every method raises
    ``errors.Unavailable`` when the database can't serve it.
    """

    async def order(self, order_id: str) -> Order | None:
        """The order as last committed."""
        ...

    async def order_id_of_deposit_address(self, network: str, address: str) -> str | None:
        """The order that has this deposit address."""
        ...

    async def status_view(self, order_id: str, now: int) -> tuple[str, bytes] | None:
        """The destination and the status answer of an order.

        None when there is no such order, or its answer is from another version of the service
        or has run out: then it has to be made from the order.
        """
        ...

    async def is_deposit_address(self, address: str) -> bool:
        """Whether the address was given to an order to pay to, on any network."""
        ...

    async def orders_of_session(
        self, session_id: str, limit: int, after: str | None = None
    ) -> list[Order]:
        """The session's orders, newest first; those made before the one with the id ``after``.

        None at all where ``after`` is no order of the session.
        """
        ...

    async def history(self, order_id: str, after: int, limit: int) -> list[HistoryEntry]:
        """The order's history after a version, oldest first."""
        ...

    async def versions(self, order_ids: Sequence[str]) -> dict[str, int]:
        """The version of each of these orders."""
        ...

    async def open_orders(self) -> list[str]:
        """Ids of all orders that are not over, and of those that wait for a refund address."""
        ...

    async def overdue(
        self, now: int, limit: int, known: Mapping[str, int], *, but: OnDeadline | None = None
    ) -> list[str]:
        """Ids of orders whose deadline is at or before ``now``, oldest deadline first.

        Left out are those with ``but`` to be done at their deadline, and those that are decided by
        deposits on a network whose scan (``known``: complete until then) has not passed it.
        """
        ...

    async def locked_beyond(
        self, direction: Direction, rate: int, now: int, limit: int
    ) -> list[str]:
        """Ids of orders that await money and whose price lock, not over at ``now``, breaks.

        ``rate`` is that of ``price_lock.breaking_rate`` for the direction.
        """
        ...

    async def reserved(self, network: str, client: str = "") -> Reserved:
        """What is reserved on a network, and by the unfunded orders of a client."""
        ...

    async def reserved_by(self, order_id: str, network: str) -> int:
        """What one order reserves on a network."""
        ...

    async def unfunded(self, limit: int, client: str | None = None) -> list[Reservation]:
        """What is reserved without a deposit, by one client or by all, soonest to expire first."""
        ...

    async def expired_reservations(
        self, now: int, limit: int, known: Mapping[str, int]
    ) -> list[str]:
        """Orders whose reservation without a deposit is over, oldest first: all that was sent to
        them in time is on record (``known``: by network, complete until then).
        """
        ...

    async def end_reservations(self, order_ids: Sequence[str], now: int) -> None:
        """End what these orders reserve without a deposit, if it is over by now."""
        ...

    async def pending_effects(self) -> list[PendingEffect]:
        """Every effect that is committed and not done; prepared transfers first."""
        ...

    async def hurry(self, transfer_id: str) -> bool:
        """Have the replica that settles run a transfer now; whether it was pending."""
        ...

    async def take_hurried(self) -> list[str]:
        """The ids of the transfers that ``hurry`` named since the last call."""
        ...

    async def planned_transfers(self, network: str, limit: int) -> list[tuple[str, str]]:
        """Order and transfer ids of what is due on a network and not signed, oldest first."""
        ...

    async def response(self, namespace: str, key: str) -> StoredResponse | None:
        """The stored answer under an idempotency key."""
        ...

    async def relay_of_key(self, namespace: str, key: str) -> RelayRecord | None:
        """The claim on an upstream order that an idempotency key stands for: the one whose outcome
        is not known, or else the latest.
        """
        ...

    async def relays_in(self, state: RelayState) -> list[RelayRecord]:
        """All claims in a state, oldest first."""
        ...

    async def doubt_abandoned(self, older_ms: int, reason: str) -> list[str]:
        """Make RECONCILING what has been CLAIMED for so long by the database's clock, or longer.

        Returns the ids of those orders.
        """
        ...

    async def relays_since(self, at: int) -> list[int]:
        """When each claim was made that is younger than ``at``."""
        ...

    async def open_relayed(self) -> list[str]:
        """Ids of the orders that an upstream settles and that are not over, oldest first."""
        ...

    async def commit(self, *changes: Change) -> None:
        """Commit all of the changes, or none.

        Raises StaleWrite when an order is not at the version before that of its change, does not
        hold its admission, or has a key that is taken: what it was decided on has changed.
        """
        ...

    def rows(self, *changes: Change) -> Rows:
        """What ``commit`` writes for these changes, for a transaction that holds more."""
        ...

    async def settle(self) -> None:
        """Wait until every commit begun so far is on disk or refused."""
        ...

    async def orders_made(self, client: str, day: int) -> int:
        """How many orders a client made on a day of UTC."""
        ...

    async def tickets_taken(self, day: int, client: str) -> TicketsTaken:
        """What was charged on a day of UTC."""
        ...

    async def forget_tickets(self, before: int) -> int:
        """Drop tickets made before that time, the oldest first and so many at once.

        Returns how many.
        """
        ...

    async def forget_webhooks(self, before: int) -> int:
        """Delete webhooks, secrets included, of orders that ended before that time; some at once.

        One with a pending message stays. Returns how many.
        """
        ...

    async def forget_responses(self, before: int) -> int:
        """Drop idempotency keys made before that time, a few hours' worth; returns how many."""
        ...

    async def prune_unpaid(self, before: int, most: int, limit: int) -> int:
        """Delete the stored answers of orders that ended unpaid: of those that ended before that
        time, and of the oldest of those beyond ``most``. ``limit`` at once; returns how many.
        """
        ...

    async def reduce_history(self, before: int, limit: int) -> int:
        """Reduce the history of orders that are over, and whose last event is from before that
        time, to what must stay; delete their stored status answers. ``limit`` at once; returns how
        many.
        """
        ...
