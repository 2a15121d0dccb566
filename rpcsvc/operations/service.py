"""What handlers work with, and what they return.

``Service`` is the running service, ``Call`` one call. Handlers branch on no engine: they ask the
venue. ``attester`` vouches for the terms of orders (docs/signing.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from rpcsvc.clock import Clock, iso8601
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.order import Terms
from rpcsvc.ids import RandomBytes
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.operation import Operation
from rpcsvc.operations.ticket_budget import TicketBudget
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.policy import Policy
from rpcsvc.orders.ports.sandbox import SandboxControls
from rpcsvc.orders.ports.store import OrderStore
from rpcsvc.orders.ports.venue import Venue, VenueProfile
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.unfunded import SOCKET, Client
from rpcsvc.verify import BY_ADDRESS, BY_SESSION, OrderTerms, session_sha256

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
