"""The venue that has another service settle its orders. It has no wallets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import structlog
from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import day_of
from rpcsvc.domain.chains import MONERO_NETWORK, Chain, network_of
from rpcsvc.domain.clients import Client, worth
from rpcsvc.domain.money import MAX_UNITS, XMR, Money, mul_div_ceil, require_storable
from rpcsvc.domain.order import PERPS, Order
from rpcsvc.domain.pricing import BPS, ONE_XMR, Direction, Price, deposit_asset, implied_rate
from rpcsvc.domain.reservations import UPSTREAM, Admission, Reservation
from rpcsvc.errors import (
    AmountAboveMaximum,
    AmountBelowMinimum,
    InvalidInput,
    ServiceError,
    Unavailable,
)
from rpcsvc.health import Health
from rpcsvc.orders.authorizations import Authorizations
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.inventory import ClientLimits
from rpcsvc.orders.policy import OrderIds, Orders, TermsMaker
from rpcsvc.orders.ports.venue import (
    ExchangeRates,
    Market,
    NewOrder,
    OrderRequest,
    QuoteRequest,
    Rate,
    Venue,
    VenueQuote,
)
from rpcsvc.orders.ports.wallets import Fees
from rpcsvc.settlement.upstream.engine import UpstreamEngine
from rpcsvc.settlement.upstream.follower import Follower
from rpcsvc.settlement.upstream.relay import Asking, Relay
from rpcsvc.settlement.upstream.requests import Created, Offer, UpstreamRequest
from rpcsvc.store.changes import UNBOUNDED, OrderBounds, RelayRecord, Ticket

log = structlog.get_logger(__name__)

# How long a swap takes, where no quote of the upstream says.
_USUAL_SECONDS: Final = 1_800
# Amounts are known under other settings only, but a 503 has to name a time.
_RETRY_AMOUNTS_SECONDS: Final = 86_400
# How much more than was just quoted an upstream may ask for, when it makes the order: 1 %.
_MORE_DEPOSIT: Final = (101, 100)
# A bridge order takes any deposit; its terms name one unit each way, the least that can be stored.
_ANY_AMOUNT: Final = 1


class UpstreamVenue(Venue):
    """Implements Venue over the upstream port."""

    def __init__(
        self,
        orders: Orders,
        upstream: UpstreamEngine,
        relay: Relay,
        follower: Follower,
        limits: ClientLimits,
        authorizations: Authorizations,
    ) -> None:
        self.profile = orders.profile
        self.price_lock: int | None = None
        self.authorizations = authorizations
        self._upstream = upstream
        self._relay = relay
        self._follower = follower
        self._limits = limits
        self._maker = TermsMaker(orders.policy, orders.clock, orders.random)
        self._clock = orders.clock

    # --- prices ---

    @override
    async def market(self, client: Client) -> Market | None:
        # The upstream prices each amount by itself.
        return None

    @override
    def listed_chains(self) -> Sequence[Chain]:
        self._upstream.require_ready()
        return self.profile.chains.all()

    @override
    async def check_amount(self, direction: Direction, chain: Chain, amount: Money) -> None:
        # The upstream refuses what is outside its limits.
        with self._by_field(QuoteRequest(direction, chain, amount)):
            await self._upstream.quote(UpstreamRequest(direction, chain, amount))

    @override
    async def amounts(self, client: Client) -> Mapping[tuple[Direction, Chain], tuple[int, int]]:
        raise Unavailable(
            "The upstream prices each amount by itself. Ask for a quote of an amount instead.",
            retry_after=_RETRY_AMOUNTS_SECONDS,
        )

    @override
    async def quote(self, request: QuoteRequest) -> VenueQuote:
        # The upstream's fees are within its price, and it checks its own limits.
        quote, _ = await self._priced(request)
        return quote

    async def _priced(self, request: QuoteRequest) -> tuple[VenueQuote, Admission]:
        """A quote, and the bounds within which an order at it can be made."""
        self._upstream.require_ready()
        self.profile.require_offered(request.chain)
        if request.pays_gas:
            self.profile.require_authorizations()
        named = request.amount
        admission = await self._require(request, named, 0)
        if request.chain.name == PERPS:
            return _quote(request, None, self._clock.now_ms()), admission
        asked = UpstreamRequest(
            request.direction, request.chain, named, request.to, pays_gas=request.pays_gas
        )
        with self._by_field(request):
            offer = await self._upstream.quote(asked, request.most)
            require_storable(named)
            quote = _quote(request, offer, self._clock.now_ms())
            admission = await self._require(request, quote.deposit, _worth(quote))
        return quote, admission

    @contextmanager
    def _by_field(self, request: QuoteRequest) -> Iterator[None]:
        """Refuse an amount to arrive by its own field."""
        try:
            yield
        except (AmountBelowMinimum, AmountAboveMaximum) as refusal:
            if not request.is_exact:
                raise
            begins = f"For {request.amount.display()} to arrive: "
            raise type(refusal)(
                begins + refusal.message.removeprefix(begins),
                field=request.amount_field,
                received=request.amount.text(),
                details=refusal.details,
            ) from refusal

    async def _require(self, request: QuoteRequest, amount: Money, worth: int) -> Admission:
        client = request.client
        reserved = await self._limits.reserved(client, UPSTREAM)
        return await self._limits.require(client, amount, UPSTREAM, worth, reserved)

    # --- orders ---

    @override
    @asynccontextmanager
    async def opening(self, request: OrderRequest, claim: Claim | None) -> AsyncIterator[NewOrder]:
        # An order that can't be committed here is in doubt. A call that is made again is answered
        # even while there is no price for it.
        self._require_can_fix(request.refund_address)
        is_in_doubt = claim is not None and await self._relay.is_in_doubt(claim)
        quote, admission = None, Admission(self._limits.stored(request.client))
        try:
            quote, admission = await self._priced(request.priced)
        except ServiceError:
            if not is_in_doubt:
                raise
        if quote is not None and request.accept is not None and not is_in_doubt:
            request.accept(quote)
        named = self._maker.ids(request)
        # The session goes with the order: with it its owner can name a refund address there, too.
        # Nothing here may depend on the rate: a call that is repeated must be the very same.
        asked = UpstreamRequest(
            direction=request.direction,
            chain=request.chain,
            amount=self._asked_amount(request.priced, quote),
            to=request.to,
            session_id=named.session_id,
            twap=request.twap,
            refund_address=request.refund_address,
            pays_gas=request.pays_gas,
        )
        wanted = quote.receive_amount or quote.min_received if quote else 0
        least = max(wanted, request.least) if quote else 0
        most_gas = quote.funding_gas if quote else MAX_UNITS
        most_deposit = request.most
        if quote is not None and request.priced.is_exact and not is_in_doubt:
            most_deposit = min(most_deposit, mul_div_ceil(quote.deposit.units, *_MORE_DEPOSIT))
        reservation = self._reservation(request, quote, admission.client)
        bounds = self._bounds(request, quote, named.order_id)
        if request.approval is not None and bounds.approval is not None:
            # The upstream names the terms, and the person has approved no worse ones.
            least = max(least, request.approval.least_output)
            most_deposit = min(most_deposit, request.approval.most_deposit)
        fresh = Asking(named.order_id, reservation, admission, bounds)
        record, created = await self._relay.create(
            asked,
            claim,
            fresh,
            least=least,
            most_gas=most_gas,
            most_deposit=most_deposit,
            is_repeated=is_in_doubt,
        )
        async with self._relay.recording(record):
            yield self._made(request, quote, record, created, admission.client)
        if request.twap is not None:
            # Only its status says whether it is cut, and how.
            await self._follower.ask_first(record.order_id)

    def _bounds(
        self, request: OrderRequest, quote: VenueQuote | None, order_id: str
    ) -> OrderBounds:
        """Return what the order takes of its client's limits, counted with the claim."""
        if request.known is None or quote is None:
            return UNBOUNDED
        now, units = self._clock.now_ms(), _deposit_worth(quote)
        return OrderBounds(
            spending=request.known.spending(units, day_of(now)),
            approval=request.uses(units, order_id, now),
        )

    def _asked_amount(self, request: QuoteRequest, quote: VenueQuote | None) -> Money:
        """The amount to order by: of an upstream that takes deposits only, the deposit quoted."""
        if quote is None or self._upstream.takes_exact:
            return request.amount
        return quote.deposit

    def _require_can_fix(self, refund_address: str | None) -> None:
        """Raise InvalidInput for a refund address that the upstream could not be held to."""
        if refund_address is not None and not self._upstream.fixes_refund_addresses:
            raise InvalidInput(
                "refundAddress can't be fixed here: the service that settles this takes none when"
                " an order is created. Leave it out; if a refund waits for an address, name one"
                " with support.create and the order's sessionId.",
                field="refundAddress",
                received=refund_address,
            )

    def _reservation(
        self, request: OrderRequest, quote: VenueQuote | None, client: str
    ) -> Reservation:
        """Return the reservation of an order while it is being made: its worth in USDC units."""
        return Reservation(
            UPSTREAM,
            _worth(quote) if quote else 0,
            client,
            network_of(deposit_asset(request.direction), request.chain),
            self._maker.expires_at(),
        )

    def _made(
        self,
        request: OrderRequest,
        quote: VenueQuote | None,
        record: RelayRecord,
        created: Created,
        client: str,
    ) -> NewOrder:
        """Return the order as the upstream has agreed to it; its price may have moved since the
        quote.
        """
        is_promised = request.priced.is_exact and self._upstream.takes_exact
        agreed = _agreed(
            request.priced, quote, created, self._clock.now_ms(), is_promised=is_promised
        )
        named = OrderIds(record.order_id, record.session_id)
        terms = replace(
            self._maker.terms(request, agreed, named, created.deposit_address),
            expires_at=created.expires_at,
            upstream_id=created.upstream_id,
            twap=None,
        )
        # The bounds held when the upstream was asked; what it has made is recorded.
        return NewOrder(terms, agreed, Admission(client), record)

    @override
    def watch(self, order_id: str) -> None:
        self._follower.watch(order_id)

    @override
    async def refresh(self, order_id: str) -> None:
        await self._follower.ask_now(order_id)

    @override
    async def cancel(self, order: Order) -> Order:
        # An order whose answer is lost is read again by the follower.
        await self.authorizations.require_none_under_way(order)
        self._follower.watch(order.order_id)
        found = await self._upstream.cancel(order.terms)
        if found is None:
            raise Unavailable("The status that the order has now is not known. Ask for it later.")
        return await self._follower.take(order, found)

    @override
    async def give_refund_address(
        self,
        order: Order,
        address: str,
        ticket: Ticket,
    ) -> bool:
        try:
            await self._upstream.pass_on(order.terms.upstream_id or "", ticket)
        except ServiceError as error:
            log.warning("ticket_not_passed_on", order_id=order.order_id, reason=error.message)
            return False
        self._follower.watch(order.order_id)
        return True

    # --- the bridge ---

    @override
    def least_deposit(self, direction: Direction, chain: Chain) -> int:
        # The order takes any deposit, and the upstream has a minimum of its own.
        return _ANY_AMOUNT

    @override
    async def bridge_rates(self) -> ExchangeRates:
        return await self._upstream.bridge_rates()

    @override
    async def confirmations(self, order: Order) -> None:
        # The upstream watches deposits, and reports them.
        pass

    # --- health ---

    @override
    async def health(self) -> Mapping[str, Health]:
        return {"engine": await self._upstream.health(), "rates": Health(True)}

    @override
    async def readiness(self) -> Mapping[str, Health]:
        # An order can be made as long as the upstream answers.
        return await self.health()

    @override
    async def networks(self) -> Mapping[str, Health]:
        # The upstream does not report the networks one by one.
        health = Health((await self._upstream.health()).ok)
        names = (chain.name for chain in self.profile.chains.all())
        return dict.fromkeys((MONERO_NETWORK, *names), health)

    @override
    async def progress(self) -> Mapping[str, Health]:
        relay = await self._relay.health()
        return {"relay": relay if not relay.ok else self._follower.health()}


def _worth(quote: VenueQuote) -> int:
    """An order's worth in USDC units; 0 of a bridge order, which takes any amount."""
    if quote.chain.name == PERPS:
        return 0
    return quote.expected_output if quote.deposit_asset is XMR else quote.deposit.units


def _deposit_worth(quote: VenueQuote) -> int:
    """The worth that an order counts for on its client's day, in USDC units."""
    return worth(quote.direction, quote.deposit.units, quote.rate.usdc_per_xmr)


def _quote(request: QuoteRequest, offer: Offer | None, as_of: int) -> VenueQuote:
    """The quote at an offer of the upstream; a bridge order has none."""
    if offer is None:
        offer = Offer(request.amount.units, _ANY_AMOUNT, 0, _USUAL_SECONDS)
        price = _ANY_AMOUNT
    else:
        swapped = offer.deposit - offer.funding_gas
        price = implied_rate(request.direction, swapped, offer.expected_output)
    rate, gas = Rate(price, as_of, "upstream"), offer.funding_gas
    gas_fee = mul_div_ceil(gas, ONE_XMR, price)
    return VenueQuote(
        direction=request.direction,
        chain=request.chain,
        deposit=Money(offer.deposit, deposit_asset(request.direction)),
        price=Price(rate.usdc_per_xmr, 0, 0, BPS, funding_fee=gas_fee),
        rate=rate,
        fees=Fees(0, gas),  # a refund bears the gas, too
        minimum=1,
        maximum=MAX_UNITS,
        expected_output=offer.expected_output,
        min_received=offer.min_received,
        seconds=offer.seconds,
        funding_gas=gas,
        receive_amount=request.amount.units if request.is_exact else None,
    )


def _agreed(
    request: QuoteRequest,
    quote: VenueQuote | None,
    created: Created,
    now: int,
    *,
    is_promised: bool,
) -> VenueQuote:
    """Return the terms that the upstream has agreed to; ``quote``, if any, bounds them.

    ``is_promised``: the upstream has promised what is to arrive, and not only quoted it.
    """
    output, as_of = created.expected_output, quote.rate.as_of if quote else now
    if output is None:
        return _quote(request, None, as_of)
    least, seconds = (quote.min_received, quote.seconds) if quote else (0, _USUAL_SECONDS)
    if request.is_exact:
        output = request.amount.units
    if is_promised:
        least = output
    offer = Offer(created.deposit, output, min(least, output), seconds, created.funding_gas)
    return _quote(request, offer, as_of)
