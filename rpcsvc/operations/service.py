"""``Operation``: a row of a table; ``Service``: what its handler works with; and the handlers'
results.

``Service`` is the running service, ``Call`` one call. Handlers know no engine by name: they ask the
venue. ``attester`` signs the terms of orders (docs/use/signing.md).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import orjson
from msgspec import Struct
from msgspec.structs import asdict

from rpcsvc.clock import Clock, day_of, iso8601, ms_to_next_day
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.clients import SOCKET, Client, Clients, KnownClient, Scope
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.order import AgentState, Terms
from rpcsvc.domain.reservations import TICKETS_REASON
from rpcsvc.domain.webhooks import Targets
from rpcsvc.errors import RateLimited, ServiceError, Unavailable
from rpcsvc.ids import RandomBytes
from rpcsvc.operations.models import EventView, PaymentResponse, Result
from rpcsvc.operations.params import Params
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.policy import Policy
from rpcsvc.orders.ports.venue import SandboxControls, Venue, VenueProfile
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.waits import Waits
from rpcsvc.store.approvals import ApprovalStore
from rpcsvc.store.changes import TicketCharge, TicketsTaken
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.replicas import RateRows
from rpcsvc.store.settle_times import ObservedTimes
from rpcsvc.store.webhooks import WebhookStore
from rpcsvc.strict_json import Json
from rpcsvc.verify import BY_ADDRESS, BY_SESSION, session_sha256

# Parts of a log as they arrive; an empty list after a silent while.
Parts: TypeAlias = "AsyncGenerator[list[EventView], None]"
Follow: TypeAlias = "Callable[[Any, Any, Call], Awaitable[Parts | None]]"
Handler: TypeAlias = "Callable[[Any, Any, Call], Awaitable[Answer[Any] | Flat | Stored]]"

D = TypeVar("D", bound=Result)

# The bytes of a day by this are kept for tickets of orders with money in them.
_KEPT_FOR_MONEY: Final = 4
_LATER: Final = "Write again tomorrow, or to the contact that the service publishes."


class Effect(StrEnum):
    """The effect of a call: whether it reads, writes, or moves money."""

    READ = "read"
    WRITE = "write"
    MOVES_MONEY = "moves_money"


def option_of(wire_name: str) -> str:
    """The CLI's option for an input: ``--refund-address`` for ``refundAddress``."""
    return f"--{kebab(wire_name)}"


def kebab(name: str) -> str:
    """``refund-address`` for ``refundAddress``."""
    return re.sub(r"([A-Z])", r"-\1", name).lower()


class Example(Struct, frozen=True):
    """Params that work as they stand.

    ``"$orderId"`` stands for an order made just before, ``"$sessionId"`` for its session,
    ``"$ticketId"`` and ``"$ticketSecret"`` for a ticket, and ``"$usdc"`` for the USDC contract of a
    chain.
    """

    name: str
    params: Json


class Tool(Struct, frozen=True):
    """An operation as agents see it over MCP.

    ``description`` is for a model that chooses; ``rules`` say what the call changes, what it needs,
    its limits, what a second call does and what to do on failure. ``destructive``: it ends
    something. ``repeatable``: a second call with the same arguments changes nothing more.
    ``has_app``: its result is an order, which hosts can show.
    """

    name: str
    title: str
    description: str
    rules: str
    destructive: bool = False
    repeatable: bool = True
    has_app: bool = False


class Confirmation(Struct, frozen=True):
    """The question that the operator answers with yes, from the answer of the method ``preview``.

    ``text`` says what the call does; ``short`` says it where there is no terminal to ask on.
    """

    preview: str
    text: str
    short: str


class Cli(Struct, frozen=True):
    """The command of an admin method.

    ``help`` is its line in the list of commands, to which ``more`` adds in its own description.
    ``arguments`` says how each input is written: ``ORDER`` by position, ``--to ADDR`` as an option,
    ``--full`` as a flag. Texts are templates over inputs and answer: ``done`` is printed after
    success, ``refused`` before the reason of a refusal. ``columns`` are templates over each item of
    the answer's list ``rows``. ``prints`` names what is printed unless ``--json`` is given; empty
    means that JSON is printed always. ``engine``: the command is for that engine only.
    """

    command: str
    help: str
    arguments: Mapping[str, str] = {}
    more: str = ""
    prints: str = ""
    rows: str = ""
    columns: Mapping[str, str] = {}
    done: str = ""
    refused: str = "{refused}"
    confirmation: Confirmation | None = None
    engine: str = ""


class Operation(Struct, frozen=True, eq=False):
    """An operation. ``path`` is under the root of its surface, empty when HTTP does not offer it.

    The agent API, the BFF and the admin methods are tables of it. Dispatcher, routes, command line
    and documents are loops over them.
    ``errors`` are the codes that it can answer besides those of its transport.
    ``creates``: only the answer names what was made, so it does not run as a notification.
    ``payable``: it takes a payment of x402, over HTTP in a header.
    ``pays``: it sends the deposit of an order.
    ``tool``: the operation is an MCP tool; None where it is not.
    ``cli``: the command of an admin method; None where it has none.
    ``follow``: what HTTP sends as a stream of events to who asks for that; it takes ``after``.
    """

    name: str
    summary: str
    params: type[Params]
    result: type[Struct]
    handler: Handler
    effect: Effect
    method: str = "POST"
    path: str = ""
    examples: tuple[Example, ...] = ()
    errors: tuple[str, ...] = ()
    idempotent: bool = False
    creates: bool = False
    sandbox_only: bool = False
    payable: bool = False
    pays: bool = False
    tool: Tool | None = None
    cli: Cli | None = None
    follow: Follow | None = None

    @property
    def scope(self) -> Scope:
        """The group that a client's scopes name it by."""
        if self.effect is Effect.READ:
            return Scope.READ
        return Scope.FUND if self.pays else Scope.ORDER

    @property
    def command(self) -> str:
        """The CLI command (spec 1): ``agent:swap:plan``; sandbox commands have no prefix."""
        name = kebab(self.name).replace(".", ":")
        return name if self.sandbox_only else f"agent:{name}"


class TicketBudget(NamedTuple):
    """At most ``per_client`` tickets of a client and ``size`` bytes in all per day of UTC.

    ``size`` bounds the growth of the database. A quarter of it is kept for tickets of owners whose
    orders have money in them: each such order is a client of its own.
    """

    per_client: int
    size: int

    def charge(
        self, client: str, now: int, size: int, taken: TicketsTaken, *, has_money: bool
    ) -> TicketCharge:
        """The budget that ``size`` bytes of a ticket use; the client is named as it is stored.

        Raises RateLimited when the client has used its part up, and Unavailable when all together
        have.
        """
        retry_after = -(-ms_to_next_day(now) // 1_000)
        if taken.tickets >= self.per_client:
            raise RateLimited(
                f"More than {self.per_client} tickets a day are not taken. {_LATER}",
                details={"reason": TICKETS_REASON, "limit": self.per_client},
                retry_after=retry_after,
            )
        most = self.size if has_money else self.size - self.size // _KEPT_FOR_MONEY
        if taken.size + size > most:
            raise Unavailable(
                f"No more tickets can be taken today. {_LATER}", retry_after=retry_after
            )
        return TicketCharge(day_of(now), client, size, self.per_client, most)


# The terms of an order as a signed text that can be passed on; None where signing is off.
Attest = Callable[[Terms], str]


class ViewContext(Struct, frozen=True):
    """Context of the views of orders: the venue's names, and the attester of terms.

    ``site_url`` is the public site root without a trailing slash.
    """

    profile: VenueProfile
    site_url: str
    attest: Attest | None = None

    @property
    def network(self) -> str:
        """The network that every answer states."""
        return self.profile.network

    def common(
        self, session_id: str | None = None, call: Call | None = None
    ) -> tuple[str, str | None, str]:
        """The fields that every result begins with; ``call`` is the source of the session."""
        if session_id is None or call is None:
            return self.network, None, "none"
        return self.network, session_id, call.session_source

    def fund_url(self, order_id: str) -> str:
        """The URL at which an order is paid by x402."""
        return f"{self.site_url}/api/v1/agent/swap/fund/{order_id}"

    def checkout_url(self, order_id: str) -> str:
        """The URL of an order's checkout page."""
        return f"{self.site_url}/orders/{order_id}"


class Webhooks(Struct, frozen=True):
    """The webhooks of orders: allowed targets, records, and the signing key.

    ``public_key`` gives None if signing is off. ``wake``: call it when a message is due now.
    """

    targets: Targets
    store: WebhookStore
    public_key: Callable[[], str | None]
    wake: Callable[[], None]


class Service(Struct, frozen=True):
    """The running service as operations see it. ``client_secret`` keys hashes of clients' names."""

    operations: tuple[Operation, ...]
    venue: Venue
    views: ViewContext
    store: OrderStore
    rates: RateRows
    processor: OrderProcessor
    idempotency: Idempotency
    policy: Policy
    clock: Clock
    random: RandomBytes
    wake: Callable[[], None]
    ticket_budget: TicketBudget
    client_secret: bytes
    waits: Waits
    webhooks: Webhooks
    observed: ObservedTimes
    clients: Clients
    approvals: ApprovalStore

    @property
    def chains(self) -> ChainRegistry:
        """The chains of the venue."""
        return self.venue.profile.chains

    @property
    def monero_networks(self) -> frozenset[MoneroNetwork]:
        """The Monero networks whose addresses the venue takes."""
        return self.venue.profile.monero_networks


class SandboxService(Service, frozen=True):
    """The service while the sandbox engine runs, with the controls of its simulated chains."""

    controls: SandboxControls


def with_sandbox(
    service: Service, operations: Sequence[Operation], controls: SandboxControls
) -> SandboxService:
    """Add the sandbox's controls, and the operations that use them, to the service."""
    parts = asdict(service)
    parts["operations"] = (*service.operations, *operations)
    return SandboxService(**parts, controls=controls)


class Call(Struct, frozen=True):
    """A call: who asks, under which idempotency key, and which integrator brings it.

    ``local_session`` is the session that the CLI remembers. It stands in for a sessionId that the
    caller did not send, and is no part of what an idempotency key stands for.
    ``client`` is whose unfunded orders a new one is counted with; by default this process.
    ``known``: the client that a token names, whose scopes and limits hold; None without a token.
    ``keyed_by_terms``: an order needs a sessionId, and without an idempotency key its terms and
    session are the key. ``transport`` is the surface that it came over, as metrics name it.
    ``held_to`` is the digest of the quote that the user agreed to: the order
    is refused at a worse one. It is no part of what an idempotency key stands for.
    """

    request_id: str
    namespace: str = "public"
    idempotency_key: str | None = None
    integrator: Integrator | None = None
    local_session: str | None = None
    client: Client = SOCKET
    known: KnownClient | None = None
    keyed_by_terms: bool = False
    transport: str = "local"
    held_to: str | None = None

    @property
    def session_source(self) -> str:
        """The source of the session, if the call has one."""
        return "local" if self.local_session else "request"


class X402Settlement(Struct, frozen=True):
    """The SettlementResponse of an x402 payment, None while the outcome is unknown, as at ``at``
    (ms since the epoch).
    """

    response: PaymentResponse | None
    at: int


class Answer(Struct, Generic[D], frozen=True):
    """The result of an operation. ``next_actions`` hold calls that can be sent as they stand.

    ``settlement`` is set if the order is paid by x402.
    """

    state: AgentState
    data: D
    next_actions: Sequence[Json] = ()
    missing_inputs: Sequence[str] = ()
    validation_errors: Sequence[Json] = ()
    ok: bool = True
    settlement: X402Settlement | None = None


class Reply(Struct, frozen=True):
    """An answer ready to send: the envelope's JSON bytes, and what the transport adds."""

    body: bytes
    http_status: int = 200
    replayed: bool = False
    error: ServiceError | None = None
    settlement: X402Settlement | None = None


def action(
    name: str, description: str, operation: str | None = None, params: Json | None = None
) -> Json:
    """A next action; with an operation, a call that can be sent as it stands."""
    step: Json = {"action": name, "description": description}
    if operation is not None:
        step |= {"operation": operation, "params": params or {}}
    return step


class Flat(Struct, frozen=True):
    """An answer without an envelope, as the BFF has them (spec 2.4)."""

    body: Json | Struct


class Stored(Struct, frozen=True):
    """The head of an envelope, or a flat answer, as committed; ``replayed`` answers a retry."""

    head: bytes
    replayed: bool = False


def attester(
    sign: Callable[[bytes], str], chains: ChainRegistry, *, network: str, issuer: str
) -> Attest:
    """A function that signs the terms of orders in the name of ``issuer``."""

    def attest(terms: Terms) -> str:
        return sign(attested_terms(terms, chains, network=network, issuer=issuer))

    return attest


def attested_terms(terms: Terms, chains: ChainRegistry, *, network: str, issuer: str) -> bytes:
    """The terms in canonical form (RFC 8785), which users compare with what they ordered.

    The bytes are those of verify.OrderTerms.canonical(), without its checks, which are for
    untrusted input and take longer than the signature.
    """
    refund_to, lock_end = terms.refund_address, terms.price_locked_until
    members: dict[str, str | int | None] = {
        "orderId": terms.order_id,
        "direction": terms.direction.value,
        "chainId": terms.chain_id,
        "token": chains.resolve(terms.chain).usdc_contract,
        "depositAddress": terms.deposit_address,
        "depositAmount": str(terms.deposit_amount),
        "toAddress": terms.to_address,
        "expectedOutput": str(terms.expected_output),
        "minReceived": str(terms.min_received),
        "expiresAt": iso8601(terms.expires_at),
        "issuedAt": iso8601(terms.created_at),
        "network": network,
        "issuer": issuer,
        "refundControl": BY_SESSION if refund_to is None else BY_ADDRESS,
        "refundAddress": refund_to,
        "sessionSha256": session_sha256(terms.session_id),
    }
    if lock_end is not None:
        members["priceLockedUntil"] = iso8601(lock_end)
    if terms.receive_amount is not None:
        members["receiveAmount"] = str(terms.receive_amount)
    return orjson.dumps(members, option=orjson.OPT_SORT_KEYS)
