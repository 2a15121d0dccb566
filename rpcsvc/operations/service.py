"""What a table declares of an operation, what handlers work with, and what they return.

``Service`` is the running service, ``Call`` one call. Handlers branch on no engine: they ask the
venue. ``attester`` vouches for the terms of orders (docs/signing.md).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import BaseModel

from rpcsvc.clock import Clock, day_of, iso8601, ms_to_next_day
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.order import Terms
from rpcsvc.errors import Unavailable
from rpcsvc.ids import RandomBytes
from rpcsvc.operations.envelope import Answer, Json
from rpcsvc.operations.params import Params
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.policy import Policy
from rpcsvc.orders.ports.store import OrderStore, Ticket, TicketCharge
from rpcsvc.orders.ports.venue import SandboxControls, Venue, VenueProfile
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.unfunded import SOCKET, Client
from rpcsvc.verify import BY_ADDRESS, BY_SESSION, OrderTerms, session_sha256

Handler: TypeAlias = "Callable[[Any, Any, Call], Awaitable[Answer | Flat | Stored]]"


class Effect(StrEnum):
    """What an operation does to the world."""

    READ = "read"
    WRITE = "write"
    MOVES_MONEY = "moves_money"


def option_of(wire_name: str) -> str:
    """The CLI's option for an input: ``--refund-address`` for ``refundAddress``."""
    return "--" + re.sub(r"([A-Z])", r"-\1", wire_name).lower()


@dataclass(frozen=True, slots=True)
class Example:
    """Params that work as they stand.

    ``"$orderId"`` stands for an order made just before, ``"$sessionId"`` for its session, and
    ``"$usdc"`` for the USDC contract of a chain.
    """

    name: str
    params: Json


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. ``path`` is under the root of its surface, empty when HTTP does not offer it.

    The agent API, the BFF and the admin methods are tables of it. Dispatcher, routes, command line
    and documents are loops over them.
    ``errors`` are the codes that it can answer besides those of its transport.
    ``creates``: the answer tells what was made, so it does not run as a notification.
    """

    name: str
    summary: str
    params: type[Params]
    result: type[BaseModel]
    handler: Handler
    effect: Effect
    method: str = "POST"
    path: str = ""
    examples: tuple[Example, ...] = ()
    errors: tuple[str, ...] = ()
    idempotent: bool = False
    creates: bool = False
    sandbox_only: bool = False

    @property
    def command(self) -> str:
        """The CLI command (spec 1): ``agent:swap:plan``; sandbox commands have no prefix."""
        name = self.name.replace(".", ":")
        return name if self.sandbox_only else f"agent:{name}"


# What a ticket takes beside its texts: numbers, ids, its row and its client's count.
_ROW_BYTES: Final = 200


class TicketBudget:
    """At most ``per_client`` tickets of a client and ``size`` bytes in all per day of UTC.

    The size bounds what a day adds to the database. ``taken`` are the charges of the day so far, by
    client: they are stored with the tickets, so they hold over a restart.
    """

    def __init__(self, per_client: int, size: int, now: int, taken: Mapping[str, tuple[int, int]]):
        self._per_client = per_client
        self._size = size
        self._day = day_of(now)
        self._of_client = Counter({client: tickets for client, (tickets, _) in taken.items()})
        self._taken = sum(size for _, size in taken.values())

    def charge(self, client: str, ticket: Ticket) -> TicketCharge:
        """Take a ticket of a client, named as it is stored. Raises Unavailable."""
        now, size = ticket.created_at, _size(ticket)
        if day_of(now) != self._day:
            self._day = day_of(now)
            self._of_client.clear()
            self._taken = 0
        if self._of_client[client] >= self._per_client:
            raise _refusal(f"More than {self._per_client} tickets a day.", now)
        if self._taken + size > self._size:
            raise _refusal("No more tickets can be taken today.", now)
        self._of_client[client] += 1
        self._taken += size
        return TicketCharge(self._day, client, size)


def _size(ticket: Ticket) -> int:
    texts = (ticket.message, ticket.category, ticket.wallet_address or "")
    return _ROW_BYTES + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _refusal(message: str, now: int) -> Unavailable:
    return Unavailable(
        f"{message} Write again tomorrow, or to the contact that the service publishes.",
        retry_after=-(-ms_to_next_day(now) // 1_000),
    )


# The terms of an order as a signed text that can be passed on; None where signing is off.
Attest = Callable[[Terms], str]


@dataclass(frozen=True, slots=True)
class ViewContext:
    """What the views of orders need to know: the venue's names, and who vouches for terms."""

    profile: VenueProfile
    attest: Attest | None = None

    @property
    def network(self) -> str:
        """The network that every answer states."""
        return self.profile.network


@dataclass(frozen=True, slots=True)
class Service:
    """The running service as operations see it. ``client_secret`` keys hashes of clients' names."""

    operations: tuple[Operation, ...]
    venue: Venue
    views: ViewContext
    store: OrderStore
    processor: OrderProcessor
    idempotency: Idempotency
    policy: Policy
    clock: Clock
    random: RandomBytes
    wake: Callable[[], None]
    ticket_budget: TicketBudget
    client_secret: bytes

    @property
    def chains(self) -> ChainRegistry:
        """The chains of the venue."""
        return self.venue.profile.chains

    @property
    def monero_networks(self) -> frozenset[MoneroNetwork]:
        """The Monero networks whose addresses the venue takes."""
        return self.venue.profile.monero_networks


@dataclass(frozen=True, slots=True)
class SandboxService(Service):
    """The service while the sandbox engine runs, with the controls of its simulated chains."""

    controls: SandboxControls


def with_sandbox(
    service: Service, operations: Sequence[Operation], controls: SandboxControls
) -> SandboxService:
    """The service with the sandbox's controls, and the operations that use them beside its own."""
    parts = {field.name: getattr(service, field.name) for field in fields(service)}
    parts["operations"] = (*service.operations, *operations)
    return SandboxService(**parts, controls=controls)


class Call(NamedTuple):
    """One call: who asks, under which idempotency key, and which integrator brings it.

    ``local_session`` is the session that the CLI remembers. It stands in for a sessionId that the
    caller did not send, and is no part of what an idempotency key stands for.
    ``client`` is whose unfunded orders a new one is counted with; by default this process.
    """

    request_id: str
    namespace: str = "public"
    idempotency_key: str | None = None
    integrator: Integrator | None = None
    local_session: str | None = None
    client: Client = SOCKET


NO_SESSION = (None, "none")


class Flat(NamedTuple):
    """An answer without an envelope, as the BFF has them (spec 2.4)."""

    body: Json


class Stored(NamedTuple):
    """The head of an envelope, or a flat answer, as committed; ``replayed`` answers a retry."""

    head: bytes
    replayed: bool = False


def session_source(call: Call) -> str:
    """Where the session of a call that has one came from."""
    return "local" if call.local_session else "request"


def with_session(views: ViewContext, data: Json, session: tuple[str | None, str]) -> Json:
    """``data`` with the fields that every result has: network, sessionId, sessionSource."""
    session_id, source = session
    return {
        "network": views.network,
        "sessionId": session_id,
        "sessionSource": source,
        **data,
    }


def attester(
    sign: Callable[[OrderTerms], str], chains: ChainRegistry, *, network: str, issuer: str
) -> Attest:
    """What vouches for orders: ``sign`` over their terms, in the name of ``issuer``."""

    def attest(terms: Terms) -> str:
        return sign(attested_terms(terms, chains, network=network, issuer=issuer))

    return attest


def attested_terms(terms: Terms, chains: ChainRegistry, *, network: str, issuer: str) -> OrderTerms:
    """The terms as the user can check them against what was ordered."""
    lock_end = terms.price_locked_until
    return OrderTerms(
        order_id=terms.order_id,
        direction=terms.direction.value,
        chain_id=terms.chain_id,
        token=chains.resolve(terms.chain).usdc_contract,
        deposit_address=terms.deposit_address,
        deposit_amount=terms.deposit_amount,
        to_address=terms.to_address,
        expected_output=terms.expected_output,
        min_received=terms.min_received,
        expires_at=iso8601(terms.expires_at),
        issued_at=iso8601(terms.created_at),
        network=network,
        issuer=issuer,
        refund_control=BY_SESSION if terms.refund_address is None else BY_ADDRESS,
        refund_address=terms.refund_address,
        session_sha256=session_sha256(terms.session_id),
        price_locked_until=None if lock_end is None else iso8601(lock_end),
    )
