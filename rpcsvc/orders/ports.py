"""What the order layer asks of a store, a settlement engine and a rate source.

The protocols are declared by their user; ``store`` and ``settlement`` implement them and
``orders`` imports neither. What does not live here: any implementation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from rpcsvc.domain.effects import Effect
from rpcsvc.domain.money import Asset
from rpcsvc.domain.order import DepositKey, Order, Transfer
from rpcsvc.domain.states import DepositState, Direction, OnDeadline


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One line of an order's append-only history. ``version`` is the order's after the event."""

    version: int
    at: int
    event: str
    status: str
    details: dict[str, Any]


class PendingEffect(NamedTuple):
    """An effect that is committed and not yet done."""

    order_id: str
    effect: Effect


@dataclass(frozen=True, slots=True)
class StoredResponse:
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


@dataclass(frozen=True, slots=True)
class Ticket:
    """A support ticket."""

    ticket_id: str
    created_at: int
    category: str
    message: str
    order_id: str | None
    session_id: str | None
    wallet_address: str | None


class TicketCharge(NamedTuple):
    """What a ticket took of a day's budget: the day of UTC, the client as stored, and bytes."""

    day: int
    client: str
    size: int


class StatusView(NamedTuple):
    """An order's status answer, written when the order last changed (operations/projection.py).

    ``body`` is the envelope without its request id; it holds until ``valid_until`` (ms), if set.
    """

    body: bytes
    valid_until: int | None


class RelayState(StrEnum):
    """What became of a claim. CLAIMED: the call was about to be made, or is being made.

    REFUSED: there is no order, or none that anybody was told of; its ``reason`` says which.
    """

    CLAIMED = "claimed"
    CREATED = "created"
    REFUSED = "refused"
    RECONCILING = "reconciling"


@dataclass(frozen=True, slots=True)
class RelayRecord:
    """A claim on an order at the upstream. ``raw`` is its answer, for audit.

    ``operation`` and ``params`` are what its idempotency key was used for, as in StoredResponse;
    None without a key, and of a claim from before they were kept.
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


Projection = Callable[[Order], StatusView | None]


@dataclass(frozen=True, slots=True)
class Change:
    """Everything that one event changes: committed whole or not at all.

    ``is_new`` tells an insert from an update of ``order``, which comes with its line of history.
    ``done`` are effects that the event finished. ``evidence`` is what the order's report was read
    from. ``client`` is who asked for a new order (orders/unfunded.py), kept until
    ``forgets_client``. Raises ValueError for a change of which a part could not be written.
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
    client: str | None = None
    forgets_client: bool = False

    def __post_init__(self) -> None:
        order = self.order
        if (order is None) is not (self.history is None):
            raise ValueError("an order and a line of its history are written together")
        if order is None:
            if self.effects or self.view or self.is_new or self.evidence:
                raise ValueError("effects, view, is_new and evidence belong to an order")
            return
        if self.evidence and order.report is None:
            raise ValueError("evidence belongs to the report of an order")
        if self.is_new and (order.deposits or order.transfers or order.fills or order.report):
            raise ValueError("a new order has no deposits, transfers, fills or report yet")


# Writes that a store has made ready; what they are is known to the store alone.
Rows = Sequence[Any]
# Commits rows together with those of who is asked, in one transaction.
Commit = Callable[[Rows], Awaitable[None]]


class OrderStore(Protocol):
    """Holds orders, their history, pending effects, idempotency keys and tickets.

    Reads are synchronous point look-ups of committed state; ``commit`` returns once the change
    is durable. Both raise ``errors.Unavailable`` when the database can't serve them.
    """

    def order(self, order_id: str) -> Order | None:
        """The order as last committed."""
        ...

    def order_id_of_deposit_address(self, network: str, address: str) -> str | None:
        """Which order an address was given to."""
        ...

    def status_view(self, order_id: str, now: int) -> tuple[str, bytes] | None:
        """The destination and the status answer of an order.

        None when there is no such order, or its answer is from another version of the service
        or has run out: then it has to be made from the order.
        """
        ...

    def is_deposit_address(self, address: str) -> bool:
        """Whether the address was given to an order to pay to, on whatever network."""
        ...

    def orders_of_session(self, session_id: str, limit: int) -> list[Order]:
        """The session's orders, newest first."""
        ...

    def open_orders(self) -> list[str]:
        """Ids of all orders that are not over, and of those that wait for a refund address."""
        ...

    def overdue(
        self, now: int, limit: int, known: Mapping[str, int], *, but: OnDeadline | None = None
    ) -> list[str]:
        """Ids of orders whose deadline is at or before ``now``, oldest deadline first.

        Left out are those with ``but`` to be done at their deadline, and those that are decided by
        deposits on a network whose scan (``known``: complete until then) has not passed it.
        """
        ...

    def locked_beyond(self, direction: Direction, rate: int, now: int, limit: int) -> list[str]:
        """Ids of orders that await money and whose price lock, not over at ``now``, breaks.

        ``rate`` is that of ``price_lock.breaking_rate`` for the direction.
        """
        ...

    def unfunded_clients(self) -> dict[str, str]:
        """Who asked for each order that awaits its deposit, by order id."""
        ...

    def pending_effects(self) -> list[PendingEffect]:
        """Every effect that is committed and not done; prepared transfers first."""
        ...

    def planned_transfers(self, network: str, limit: int) -> list[tuple[str, str]]:
        """Order and transfer ids of what is due on a network and not signed, oldest first."""
        ...

    def response(self, namespace: str, key: str) -> StoredResponse | None:
        """The stored answer under an idempotency key."""
        ...

    def relay_of_key(self, namespace: str, key: str) -> RelayRecord | None:
        """The latest claim on an upstream order that an idempotency key stands for."""
        ...

    def relays_in(self, state: RelayState) -> list[RelayRecord]:
        """All claims in a state, oldest first."""
        ...

    def relays_since(self, at: int) -> list[int]:
        """When each claim was made that is younger than ``at``."""
        ...

    def open_relayed(self) -> list[str]:
        """Ids of the orders that an upstream settles and that are not over, oldest first."""
        ...

    async def commit(self, *changes: Change) -> None:
        """Make the changes durable, all of them whole or nothing at all."""
        ...

    def rows(self, *changes: Change) -> Rows:
        """What ``commit`` writes for these changes, for a transaction that holds more."""
        ...

    async def settle(self) -> None:
        """Wait until every commit begun so far is on disk or refused."""
        ...

    def orders_made(self, day: int) -> dict[str, int]:
        """How many orders each client made on a day of UTC."""
        ...

    def tickets_taken(self, day: int) -> dict[str, tuple[int, int]]:
        """Tickets and bytes that each client was charged on a day of UTC."""
        ...

    async def forget_tickets(self, before: int) -> int:
        """Drop tickets made before that time, the oldest first and so many at once.

        Returns how many.
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


@dataclass(frozen=True, slots=True)
class DepositSighting:
    """A deposit as the chain shows it at this moment. ``state`` REMOVED: it is gone."""

    key: DepositKey
    address: str
    units: int
    sender: str | None
    first_seen_at: int
    state: DepositState


@dataclass(frozen=True, slots=True)
class Observation:
    """What one look at the deposits has found.

    ``complete_until``: when (ms) the scan of each network began that was scanned completely. Every
    deposit until then is in ``sightings``, or was acknowledged as it is.
    """

    sightings: Sequence[DepositSighting] = ()
    complete_until: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparedTransfer:
    """A signed transaction: its id, its bytes (hex), and the ids of the transfers that it pays."""

    txid: str
    raw: str
    transfer_ids: tuple[str, ...]


class Record(Protocol):
    """Puts a signed transaction on record, with its orders and with its wallet, in one commit."""

    async def __call__(self, signed: PreparedTransfer, commit: Commit | None = None) -> None:
        """Commit the events of the orders; ``commit`` writes them with the wallet's rows.

        Raises ImpossibleTransition when an order no longer waits for its transfer, and
        errors.Unavailable: nothing is on record then, and nothing may be published.
        """
        ...


class Outcome(StrEnum):
    """What the network says of a transfer.

    ABSENT: it does not know it now, which proves nothing about later. FAILED is said only when
    the transfer can never be carried out. An exception is UNKNOWN.
    """

    SETTLED = "settled"
    PENDING = "pending"
    FAILED = "failed"
    UNKNOWN = "unknown"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with the reason, in words for the operator.

    ``receipt`` (JSON) comes with SETTLED, where there is something that proves it.
    """

    outcome: Outcome
    reason: str = ""
    receipt: str | None = None


@dataclass(frozen=True, slots=True)
class Fees:
    """Network fees in atomic units of the asset that is sent."""

    payout: int
    refund: int


@dataclass(frozen=True, slots=True)
class NetworkNames:
    """How the deposit side of an order is named to the one who funds it.

    ``chain_id`` and ``token`` are those that a wallet must use: in the sandbox, a test network's.
    """

    network: str
    chain_id: int
    token: str | None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether something works; ``detail`` says what is wrong when it does not."""

    ok: bool
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the operator's own wallet can pay out, in atomic units.

    ``free`` can be paid now, fee included; ``locked`` comes back within ``seconds_to_unlock``.
    """

    free: int
    locked: int
    seconds_to_unlock: int


class TransferRejected(Exception):
    """The engine can never prepare this transfer: the network refuses it for good."""


class SettlementEngine(Protocol):
    """Moves money: makes deposit addresses, sees deposits, sends transfers.

    Any exception other than TransferRejected means that the outcome is not known.
    """

    name: str
    poll_ms: int
    # The exchanges that it can pay to and take from, by the name of their network.
    bridges: frozenset[str]
    # The networks whose deposits it watches.
    networks: frozenset[str]

    async def start(self) -> None:
        """Connect, load, catch up."""
        ...

    def is_paused(self) -> bool:
        """Whether the operator has stopped all outgoing money."""
        ...

    def require_ready(self) -> None:
        """Raise errors.Unavailable when orders can't be taken now."""
        ...

    def deposit_address(self, asset: Asset) -> str:
        """A fresh deposit address that no other order has or will have."""
        ...

    def fees(self, deposit: Asset, payout: Asset, chain: str) -> Fees:
        """Network fees: of the payout in payout units, of a refund in deposit units.

        ``chain`` is the USDC side. Raises errors.Unavailable while they are not known.
        """
        ...

    def holdings(self, network: str) -> Holdings | None:
        """What can be paid out on a network; None where the engine has no wallet of its own.

        Raises errors.Unavailable while it is not known.
        """
        ...

    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        """Raise errors.InvalidDestination for an address that is known not to be payable on a
        network; ``field`` is the input that named it. Takes no more than a second.
        """
        ...

    def names(self, asset: Asset, chain: str) -> NetworkNames:
        """What to call the network that a deposit of ``asset`` is made on."""
        ...

    def estimated_seconds(self, deposit: Asset, chain: str) -> int:
        """How long a swap takes from deposit to settled payout, typically, in seconds."""
        ...

    async def observe(self) -> Observation:
        """Deposits that may have changed since they were last acknowledged, recomputed."""
        ...

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """These are committed: final ones need not be shown again."""
        ...

    def transfers_per_payment(self, network: str) -> int:
        """How many transfers one transaction of a network may carry out."""
        ...

    async def prepare(
        self, transfer: Transfer, companions: Sequence[Transfer], record: Record
    ) -> None:
        """Sign without publishing, and ``record`` it. ``companions`` are due on the same network
        and may be paid by the same transaction.

        Raises TransferRejected; after anything else nothing is on record, and it may be retried.
        """
        ...

    async def publish(self, transfer: Transfer) -> Verdict:
        """Hand the transfer's own bytes to the network; the same bytes may be handed over again."""
        ...

    async def look_up(self, transfer: Transfer) -> Verdict:
        """What the network says of the transfer's transaction id."""
        ...

    def confirmations(self, key: DepositKey) -> int:
        """How many confirmations a deposit has now; 0 while it is in the pool or gone."""
        ...

    def required_confirmations(self, network: str) -> int:
        """How many confirmations make a deposit on this network final."""
        ...

    def health(self) -> Health:
        """Whether the engine can settle now."""
        ...


@dataclass(frozen=True, slots=True)
class Rate:
    """A price: USDC units (10^-6) per whole XMR, as of a time, from a named source."""

    usdc_per_xmr: int
    as_of: int
    source: str


class RateSource(Protocol):
    """Gives the current rate. Raises errors.Unavailable when there is no fresh one."""

    def rate(self) -> Rate:
        """The current rate."""
        ...
