"""The venue port: who prices orders, opens them and answers for them; rates; and the sandbox.

LocalVenue (orders/local_venue.py) runs on wallets, UpstreamVenue (settlement/upstream/venue.py) on
another service. An engine that has neither implements ``Venue`` itself. Amounts are atomic units,
times are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import Chain, ChainRegistry
from rpcsvc.domain.clients import SOCKET, Approval, ApprovalUse, Client, KnownClient
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.money import MAX_UNITS, Asset, Money
from rpcsvc.domain.order import PERPS, Order, Terms, TwapPlan
from rpcsvc.domain.pricing import Direction, Price, payout_asset
from rpcsvc.domain.reservations import Admission
from rpcsvc.domain.webhooks import Webhook
from rpcsvc.errors import InvalidInput, UnsupportedChain
from rpcsvc.health import Health
from rpcsvc.orders.authorizations import Authorizations
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.ports.wallets import Fees, NetworkNames
from rpcsvc.store.changes import UNBOUNDED, OrderBounds, RelayRecord, Ticket

# USDC per XMR, from 0.01 to 1000000, with no more decimals than USDC has.
RATE_PATTERN: Final = (
    r"^(0\.(0[1-9][0-9]{0,4}|[1-9][0-9]{0,5})|[1-9][0-9]{0,5}(\.[0-9]{1,6})?|1000000(\.0{1,6})?)$"
)


class Rate(Struct, frozen=True):
    """A price: USDC units (10^-6) per whole XMR, as of a time, from a named source."""

    usdc_per_xmr: int
    as_of: int
    source: str


class RateSource(Protocol):
    """Gives the current rate. Raises errors.Unavailable when there is no fresh one."""

    def rate(self) -> Rate:
        """The current rate."""
        ...


def _never() -> bool:
    return False


class VenueProfile(Struct, frozen=True):
    """The names of a venue and of its networks.

    ``engine`` is its name in the settings, ``network`` the one that every answer states.
    ``names`` gives the names of the network that a deposit of an asset is made on, for the USDC
    side ``chain``. ``bridges`` are the exchanges that it can pay to and take from.
    ``takes_signatures``: whether USDC orders can be funded by a signed authorization now.
    """

    engine: str
    network: str
    chains: ChainRegistry
    monero_networks: frozenset[MoneroNetwork]
    names: Callable[[Asset, str], NetworkNames]
    bridges: frozenset[str] = frozenset()
    is_simulated: bool = False
    takes_signatures: Callable[[], bool] = _never

    @property
    def takes_authorizations(self) -> bool:
        """Whether USDC orders can be funded by a signed authorization now."""
        return self.takes_signatures()

    def require_offered(self, chain: Chain) -> None:
        """Raise UnsupportedChain for a chain that is configured, and not settled on now.

        Not checked when an order is read, so that the retry of a key still gets its first answer.
        """
        offered = self.chains.all()
        if chain.name == PERPS or chain.chain_id in [other.chain_id for other in offered]:
            return
        names = [other.name for other in offered]
        raise UnsupportedChain(
            f"{chain.name} can't be used now. Send one of: {', '.join(names)}.",
            field="chain",
            received=chain.name,
            allowed=names,
        )

    def require_authorizations(self) -> None:
        """Raise InvalidInput while no signed payments are taken; checked as ``require_offered``."""
        if not self.takes_authorizations:
            raise InvalidInput(
                "This service takes no signed payments (x402). Leave funding out, and send the"
                " deposit in the ordinary way.",
                field="funding",
                received="x402",
            )


class QuoteRequest(Struct, frozen=True):
    """An amount to price: ``amount`` is what the user sends or, in the payout's asset, what is to
    arrive exactly.

    ``to``: where the payout of an order goes that waits for the quote; empty for a quote alone.
    ``most``: deposit units that an order for what is to arrive may ask for, by earlier quotes.
    ``client``: whose unfunded orders bound the amount. ``pays_gas``: gas of a signed payment of the
    deposit (x402) is part of the price. ``known``: the client whose spread and limits hold.
    """

    direction: Direction
    chain: Chain
    amount: Money
    integrator: Integrator | None = None
    to: str = ""
    client: Client = SOCKET
    pays_gas: bool = False
    most: int = MAX_UNITS
    known: KnownClient | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the amount is what is to arrive."""
        return self.amount.asset is payout_asset(self.direction)

    @property
    def amount_field(self) -> str:
        """The input that named the amount."""
        return "receiveAmount" if self.is_exact else "amount"


class OrderRequest(Struct, frozen=True):
    """A validated order request: ``amount`` as for a quote, ``to`` where the payout goes.

    ``twap``: swap it in chunks, if it is worth two or more. ``integrator``: who brought it.
    ``refund_address``: where refunds go, and nowhere else.
    ``client``: whose unfunded orders it is counted with. ``to_field``: the input that named ``to``.
    ``least``: payout units that it must bring, and ``most``: deposit units that it may ask for, of
    quotes that the caller holds it to. ``accept`` raises QuoteChanged for a quote that the
    caller does not accept. ``webhook``: where its events are sent. ``pays_gas`` and ``known`` as
    for a quote. ``approval``: a person's, which holds for the order.
    """

    direction: Direction
    chain: Chain
    amount: Money
    to: str
    session_id: str | None
    twap: TwapPlan | None = None
    integrator: Integrator | None = None
    refund_address: str | None = None
    client: Client = SOCKET
    to_field: str = "to"
    least: int = 0
    most: int = MAX_UNITS
    accept: Callable[[VenueQuote], None] | None = None
    webhook: Webhook | None = None
    pays_gas: bool = False
    known: KnownClient | None = None
    approval: Approval | None = None

    @property
    def priced(self) -> QuoteRequest:
        """The quote that the order needs."""
        return QuoteRequest(
            self.direction, self.chain, self.amount, self.integrator, self.to, self.client,
            self.pays_gas, self.most, self.known,
        )  # fmt: skip

    def uses(self, units: int, order_id: str, now: int) -> ApprovalUse | None:
        """Return the use of the approval by an order worth that many USDC units, if it needs it."""
        if self.known is None or self.approval is None or not self.known.needs_approval(units):
            return None
        return ApprovalUse(self.approval.approval_id, order_id, now)


class VenueQuote(Struct, frozen=True):
    """A price for one amount; units are of the deposit's and the payout's asset.

    ``seconds``: how long the swap takes, typically. ``price_locked_until`` (ms): how long an order
    at this quote keeps its rate; None if unknown. ``funding_gas``: USDC units of gas for a signed
    payment that are part of the price and of a refund's fee; 0 if the caller did not ask for it.
    ``receive_amount``: what the caller wants to arrive exactly; None where the deposit is named.
    """

    direction: Direction
    chain: Chain
    deposit: Money
    price: Price
    rate: Rate
    fees: Fees
    minimum: int
    maximum: int
    expected_output: int
    min_received: int
    seconds: int
    price_locked_until: int | None = None
    funding_gas: int = 0
    receive_amount: int | None = None

    @property
    def exact_output(self) -> int | None:
        """Return the payout units that the deposit pays exactly; None where less may arrive."""
        return self.receive_amount if self.receive_amount == self.min_received else None

    @property
    def deposit_asset(self) -> Asset:
        """The asset that the user sends."""
        return self.deposit.asset

    @property
    def payout_asset(self) -> Asset:
        """The asset that is paid out."""
        return payout_asset(self.direction)


class NewOrder(Struct, frozen=True):
    """An order to be committed: its terms and the quote that it locks.

    ``admission`` is who asked for it, and the bounds that it is made within; None where nothing is
    counted.
    ``relay`` is the claim that became it, of an order that an upstream settles. ``bounds``: what
    its transaction checks beside that.
    """

    terms: Terms
    quote: VenueQuote
    admission: Admission | None = None
    relay: RelayRecord | None = None
    bounds: OrderBounds = UNBOUNDED


class DirectionLimits(NamedTuple):
    """The least and the most deposit over all chains, and the most that a client can order now."""

    direction: Direction
    minimum: int
    maximum: int
    max_now: int | None


class Market(NamedTuple):
    """The current rate, and the limits that follow from it for a client."""

    rate: Rate
    limits: Sequence[DirectionLimits]


class ExchangeRate(NamedTuple):
    """USDC per XMR at an exchange, and how long a transfer takes, in words."""

    exchange: str
    rate: Decimal
    eta: str


class ExchangeRates(NamedTuple):
    """The market's rates, and what a bridge order is given now."""

    market: Sequence[ExchangeRate]
    own: ExchangeRate


class Confirmations(NamedTuple):
    """The fewest confirmations of an order's deposits, and how many make a deposit final."""

    fewest: int
    required: int


class Venue(Protocol):
    """Prices orders, opens them and answers for them. Raises errors.ServiceError."""

    profile: VenueProfile
    # How long (ms) a quote keeps its rate; None where the venue does not say.
    price_lock: int | None
    # Funds orders by signed authorizations, while the profile says ``takes_authorizations``.
    authorizations: Authorizations

    async def market(self, client: Client) -> Market | None:
        """The rate and the limits; None while no rate is known for all amounts."""
        ...

    def listed_chains(self) -> Sequence[Chain]:
        """The chains on offer. Raises errors.Unavailable until they are known."""
        ...

    async def check_amount(self, direction: Direction, chain: Chain, amount: Money) -> None:
        """Check an amount of a quote's request. Raises AmountBelowMinimum or AmountAboveMaximum,
        and Unavailable where limits are not known.
        """
        ...

    async def amounts(self, client: Client) -> Mapping[tuple[Direction, Chain], tuple[int, int]]:
        """The least and the most that a client can order now, in deposit units, by direction and
        chain. Left out are pairs whose wallet can't tell what it can pay; the most may be less than
        the least.

        Raises errors.Unavailable without a rate, or where an upstream prices each amount by itself.
        """
        ...

    async def quote(self, request: QuoteRequest) -> VenueQuote:
        """A price. Raises Unavailable, UnsupportedChain, RateLimited and the limits' errors."""
        ...

    def opening(
        self, request: OrderRequest, claim: Claim | None
    ) -> AbstractAsyncContextManager[NewOrder]:
        """A new order, which the caller commits within the block.

        Raises as ``quote`` does, InvalidDestination, IdempotencyConflict for another call under a
        key whose outcome is not known, and Unavailable when the commit fails.
        """
        ...

    def watch(self, order_id: str) -> None:
        """A caller polls this order: update it soon."""
        ...

    async def refresh(self, order_id: str) -> None:
        """Update this order now, where no worker does it."""
        ...

    async def cancel(self, order: Order) -> Order:
        """End an order that waits for its first deposit; as committed.

        Raises OrderNotCancellable and Unavailable.
        """
        ...

    async def give_refund_address(self, order: Order, address: str, ticket: Ticket) -> bool:
        """Set the refund address that the order's owner named with a ticket.

        Returns whether it was accepted.
        """
        ...

    def least_deposit(self, direction: Direction, chain: Chain) -> int:
        """The least that a bridge order takes, in deposit units. Raises errors.Unavailable."""
        ...

    async def bridge_rates(self) -> ExchangeRates:
        """The bridge's rates. Raises errors.ServiceError."""
        ...

    async def confirmations(self, order: Order) -> Confirmations | None:
        """Return how far an order's deposits are confirmed; None where the venue watches none."""
        ...

    async def health(self) -> Mapping[str, Health]:
        """The checks ``engine`` and ``rates``, for the operator."""
        ...

    async def readiness(self) -> Mapping[str, Health]:
        """The same checks, for callers: whether an order can be made now."""
        ...

    async def networks(self) -> Mapping[str, Health]:
        """Return whether orders can be settled on each network now, without details: for the
        public.

        A network is missing where nothing is known about it.
        """
        ...

    async def progress(self) -> Mapping[str, Health]:
        """Checks of existing orders; a failed one does not stop new orders."""
        ...


class FaultKind(StrEnum):
    """The faults by their wire names."""

    PAYOUT_FAILS = "payout_fails"
    PAYOUT_UNKNOWN_SENT = "payout_unknown_sent"
    PAYOUT_UNKNOWN_LOST = "payout_unknown_lost"
    REFUND_FAILS = "refund_fails"
    FUNDING_FAILS = "funding_fails"
    FUNDING_UNKNOWN = "funding_unknown"
    REORGANISE_DEPOSIT = "reorganise_deposit"
    DROP_DEPOSIT = "drop_deposit"
    RESTORE_DEPOSIT = "restore_deposit"
    PAUSE_BLOCKS = "pause_blocks"
    RESUME_BLOCKS = "resume_blocks"
    ADVANCE_CLOCK = "advance_clock"
    SET_RATE = "set_rate"
    ENGINE_DOWN = "engine_down"
    ENGINE_UP = "engine_up"
    RATES_DOWN = "rates_down"
    RATES_UP = "rates_up"


# What a fault can't do without, by its wire name.
NEEDED: Final = {
    FaultKind.PAYOUT_FAILS: "orderId",
    FaultKind.PAYOUT_UNKNOWN_SENT: "orderId",
    FaultKind.PAYOUT_UNKNOWN_LOST: "orderId",
    FaultKind.REFUND_FAILS: "orderId",
    FaultKind.FUNDING_FAILS: "orderId",
    FaultKind.FUNDING_UNKNOWN: "orderId",
    FaultKind.REORGANISE_DEPOSIT: "orderId",
    FaultKind.DROP_DEPOSIT: "orderId",
    FaultKind.RESTORE_DEPOSIT: "orderId",
    FaultKind.ADVANCE_CLOCK: "seconds",
    FaultKind.SET_RATE: "rate",
}


class SimulatedDeposit(NamedTuple):
    """A deposit on its way; ``units`` are atomic."""

    txid: str
    network: str
    recipient: str
    units: int


class SandboxControls(Protocol):
    """Controls of the simulated chains. They never act on an order itself."""

    async def fund(self, order: Order, units: int | None) -> SimulatedDeposit:
        """Send ``units``, or else what is still due, from a simulated user to the deposit address.

        Raises InvalidInput when nothing is due, and AmountAboveMaximum when the wallet could not
        hold it.
        """
        ...

    async def fault_on_order(self, kind: FaultKind, order: Order) -> None:
        """Provoke a fault of one order's deposit, or of its next payout or refund."""
        ...

    async def fault(self, kind: FaultKind, *, seconds: int | None, rate: str | None) -> None:
        """Provoke a fault of the whole sandbox. Raises MissingInput and InvalidInput."""
        ...
