"""The upstream port: requests, reported orders and failures in the order layer's terms."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rpcsvc.domain.authorizations import SignedAuthorization
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Money
from rpcsvc.domain.order import OrderStatus, Report, Terms, TwapPlan
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.usdc import Domain
from rpcsvc.health import Health
from rpcsvc.orders.ports.authorizations import Carried
from rpcsvc.orders.ports.venue import ExchangeRates
from rpcsvc.redacted import Redacted
from rpcsvc.store.changes import Ticket


class UpstreamRequest(Redacted, frozen=True):
    """A swap to be quoted or ordered; ``twap`` None: at once. ``refund_address``: refunds of the
    order go there and nowhere else. ``pays_gas``: the order bears the gas of a signed payment.
    """

    HIDDEN = frozenset({"to", "session_id", "refund_address"})

    direction: Direction
    chain: Chain
    amount: Money
    to: str = ""
    session_id: str = ""
    twap: TwapPlan | None = None
    refund_address: str | None = None
    pays_gas: bool = False


class Offer(NamedTuple):
    """A price, in payout units, and how long the swap takes.

    ``funding_gas``: USDC units of gas for a signed payment, which the output is after.
    """

    expected_output: int
    min_received: int
    seconds: int
    funding_gas: int = 0


class Created(NamedTuple):
    """The order that the upstream made.

    ``expires_at``: ms since the epoch. ``expected_output``: payout units; None of a bridge order,
    which takes any deposit. ``is_over``: it was over in the answer already. ``funding_gas`` as in
    an offer.
    """

    upstream_id: str
    deposit_address: str
    expires_at: int
    raw: bytes
    expected_output: int | None = None
    is_over: bool = False
    funding_gas: int = 0


class CreationUnknown(Exception):
    """The upstream may have made the order, or not. ``raw`` is what it answered, if it did."""

    def __init__(self, reason: str, *, upstream_id: str | None = None, raw: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.upstream_id = upstream_id
        self.raw = raw


class UpstreamResting(Exception):
    """The upstream takes no calls now; try again in ``wait_ms``."""

    def __init__(self, reason: str, wait_ms: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_ms = wait_ms


class UpstreamStatus(NamedTuple):
    """An order as the upstream reports it; ``raw`` is its answer, for audit."""

    status: OrderStatus
    report: Report
    raw: bytes


class UpstreamPort(Protocol):
    """An upstream service. Raises errors.ServiceError when nothing was done."""

    @property
    def honours_keys(self) -> bool:
        """Whether a creation may be repeated with its key."""
        ...

    @property
    def fixes_refund_addresses(self) -> bool:
        """Whether an order may be created with a refund address that is final."""
        ...

    @property
    def takes_authorizations(self) -> bool:
        """Whether it said last that its USDC orders can be paid by a signed authorization."""
        ...

    def contract(self, network: str) -> str:
        """The contract of USDC on a network."""
        ...

    async def signing_domain(self, terms: Terms, due: int) -> Domain:
        """What an authorization of ``due`` USDC units to the order of these terms is signed for.

        Raises OrderNotFundable, also for an offer that is of something else than this order.
        """
        ...

    async def pay_signed(
        self, terms: Terms, signed: SignedAuthorization, domain: Domain | None
    ) -> Carried:
        """Pass a signed authorization on; how far it came. May be repeated.

        ``domain``: what it is signed for; None: not known any more.
        """
        ...

    async def start(self) -> None:
        """Ask for chains and network; the upstream may be down while this service starts."""
        ...

    def require_ready(self) -> None:
        """Raise errors.Unavailable until the upstream's chains and network are known."""
        ...

    async def health(self) -> Health:
        """Whether the upstream answers, its chains are known, and it is on our network."""
        ...

    def remember(self, ages_ms: list[int]) -> None:
        """Count orders of an earlier process, by their age, for the limit of creations."""
        ...

    async def quote(self, request: UpstreamRequest) -> Offer:
        """The price of a swap; a bridge order has none."""
        ...

    async def create(self, request: UpstreamRequest, key: str, *, resumed: bool) -> Created:
        """Make the order. Raises CreationUnknown when it may have been made."""
        ...

    async def cancel(self, terms: Terms) -> UpstreamStatus | None:
        """End the order of these terms there; how it stands then, as ``status`` reports it.

        Raises OrderNotCancellable, also where the upstream has no cancellation. May be repeated.
        """
        ...

    async def bridge_rates(self) -> ExchangeRates:
        """The bridge's rates."""
        ...

    async def pass_on(self, upstream_id: str, ticket: Ticket) -> None:
        """Open a ticket about an order there, the owner's refund address with it."""
        ...

    async def status(self, terms: Terms, *, is_watched: bool) -> UpstreamStatus | None:
        """The order of these terms as it stands, waited for as long as the budget asks; asked for
        once. A report of another order is an error.

        None when its status is not known. Raises UpstreamResting when it was not asked.
        """
        ...
