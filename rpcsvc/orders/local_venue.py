"""The venue on wallets: the sandbox's simulated ones, or the operator's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from itertools import product

from msgspec import Struct
from typing_extensions import override

from rpcsvc.clock import day_of
from rpcsvc.domain.chains import Chain, network_of
from rpcsvc.domain.clients import Client, Spending, worth
from rpcsvc.domain.events import Cancelled, ImpossibleTransition, RefundAddressGiven
from rpcsvc.domain.money import (
    MAX_UNITS,
    RECEIVE_LIMITS,
    USDC,
    XMR,
    Money,
    as_units,
    format_units,
    mul_div_ceil,
)
from rpcsvc.domain.order import PERPS, DepositState, Order, OrderStatus
from rpcsvc.domain.pricing import (
    ONE_XMR,
    Direction,
    Price,
    convert_floor,
    deposit_asset,
    payout_asset,
    usd_to_deposit_ceil,
    usd_to_deposit_floor,
)
from rpcsvc.domain.reservations import Admission
from rpcsvc.errors import (
    AmountAboveMaximum,
    AmountBelowMinimum,
    InputError,
    OrderNotCancellable,
    Unavailable,
)
from rpcsvc.health import Health
from rpcsvc.orders.authorizations import Authorizations
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.inventory import Inventory, payable_deposit
from rpcsvc.orders.policy import Orders, TermsMaker
from rpcsvc.orders.ports.venue import (
    Confirmations,
    DirectionLimits,
    ExchangeRate,
    ExchangeRates,
    Market,
    NewOrder,
    OrderRequest,
    QuoteRequest,
    Rate,
    Venue,
    VenueQuote,
)
from rpcsvc.orders.ports.wallets import Fees, OrderingWallets
from rpcsvc.orders.published_rates import PublishedRates
from rpcsvc.store.changes import OrderBounds, RateBounds, Ticket

_JOINED = "This replica takes orders; another one settles them."


class _Priced(Struct, frozen=True):
    """A quote, and the conditions for the transaction that makes an order at it."""

    quote: VenueQuote
    admission: Admission | None
    rates: RateBounds | None


class LocalVenue(Venue):
    """Implements Venue on wallets and a rate source. ``wake`` starts a worker pass at once.

    ``inventory`` decides which orders the wallets can take on.
    """

    def __init__(
        self,
        orders: Orders,
        wallets: OrderingWallets,
        inventory: Inventory,
        scan: ScanProgress,
        rates: PublishedRates,
        wake: Callable[[], None],
        authorizations: Authorizations,
    ) -> None:
        self.profile = orders.profile
        self.price_lock: int | None = orders.policy.price_lock
        self.authorizations = authorizations
        self._wallets = wallets
        self._inventory = inventory
        self._scan = scan
        self._rates = rates
        self._wake = wake
        self._policy = orders.policy
        self._store = orders.store
        self._processor = orders.processor
        self._clock = orders.clock
        self._lease = orders.lease
        self._maker = TermsMaker(orders.policy, orders.clock, orders.random)

    # --- prices ---

    @override
    async def market(self, client: Client) -> Market | None:
        try:
            rate = self._rates.rate()
        except Unavailable:
            return None
        return Market(rate, [await self._limits_of(each, rate, client) for each in Direction])

    async def _limits_of(self, direction: Direction, rate: Rate, client: Client) -> DirectionLimits:
        pairs = [self._limits(direction, chain, rate) for chain in self.profile.chains.all()]
        least, most = min(low for low, _ in pairs), max(high for _, high in pairs)
        return DirectionLimits(direction, least, most, await self._max_now(direction, rate, client))

    async def _max_now(self, direction: Direction, rate: Rate, client: Client) -> int | None:
        """The largest deposit that a client can order now, on the chain with most; None: any."""
        payout, most = payout_asset(direction), 0
        for network in {network_of(payout, chain) for chain in self.profile.chains.all()}:
            try:
                room = await self._inventory.room(client, network)
            except Unavailable:
                continue  # this one can pay nothing; health says why
            if room is None:
                return None
            most = max(most, room)
        return payable_deposit(direction, most, rate)

    def _limits(self, direction: Direction, chain: Chain, rate: Rate) -> tuple[int, int]:
        """Return the least and the most that can be swapped, in deposit units.

        The most can be stored, both as a deposit and as its output.
        """
        usdc_per_xmr = rate.usdc_per_xmr
        return (
            usd_to_deposit_ceil(direction, chain.min_swap_usd, usdc_per_xmr),
            min(
                usd_to_deposit_floor(direction, self._policy.max_swap_usd, usdc_per_xmr),
                convert_floor(direction.reverse, MAX_UNITS, usdc_per_xmr),
                MAX_UNITS,
            ),
        )

    def _within_limits(
        self, direction: Direction, chain: Chain, amount: Money, rate: Rate
    ) -> tuple[int, int]:
        """The limits. Raises AmountBelowMinimum or AmountAboveMaximum when it is outside."""
        minimum, maximum = self._limits(direction, chain, rate)
        if minimum <= amount.units <= maximum:
            return minimum, maximum
        asset = amount.asset
        shown = {
            "minimum": format_units(minimum, asset),
            "maximum": format_units(maximum, asset),
            "asset": asset.symbol,
        }
        if amount.units < minimum:
            raise AmountBelowMinimum(
                f"{amount.display()} is below the minimum of {shown['minimum']} {asset.symbol}"
                f" ({chain.min_swap_usd} USD) on {chain.name}.",
                field="amount",
                received=format_units(amount.units, asset),
                details=shown,
            )
        raise AmountAboveMaximum(
            f"{amount.display()} is above the maximum of {shown['maximum']} {asset.symbol}"
            f" ({self._policy.max_swap_usd} USD). Split it into several orders.",
            field="amount",
            received=format_units(amount.units, asset),
            details=shown,
        )

    @override
    def listed_chains(self) -> Sequence[Chain]:
        return self.profile.chains.all()

    @override
    async def check_amount(self, direction: Direction, chain: Chain, amount: Money) -> None:
        request, rate = QuoteRequest(direction, chain, amount), self._rates.rate()
        if not request.is_exact:
            self._within_limits(direction, chain, amount, rate)
            return
        price, _, _ = self._price(request, rate)
        deposit, _ = _amounts(request, price)
        try:
            self._within_limits(direction, chain, deposit, rate)
        except (AmountBelowMinimum, AmountAboveMaximum) as refusal:
            raise _exact_refused(refusal, request, price) from refusal

    @override
    async def amounts(self, client: Client) -> Mapping[tuple[Direction, Chain], tuple[int, int]]:
        rate, found = self._rates.rate(), {}
        for direction, chain in product(Direction, self.profile.chains.all()):
            try:
                network = network_of(payout_asset(direction), chain)
                room = await self._inventory.room(client, network)
            except Unavailable:
                continue  # this one can pay nothing; health says why
            least, most = self._limits(direction, chain, rate)
            if room is not None:
                most = min(most, payable_deposit(direction, room, rate))
            found[direction, chain] = least, most
        return found

    @override
    async def quote(self, request: QuoteRequest) -> VenueQuote:
        return (await self._priced(request)).quote

    async def _priced(self, request: QuoteRequest) -> _Priced:
        """A quote, and the bounds within which an order at it can be made."""
        direction, chain = request.direction, request.chain
        self._wallets.require_ready()
        self.profile.require_offered(chain)
        rate = self._rates.rate()
        rates = await self._rates.require(rate.usdc_per_xmr)
        price, fees, gas = self._price(request, rate)
        deposit, output = _amounts(request, price)
        try:
            minimum, maximum = self._within_limits(direction, chain, deposit, rate)
            if output == 0:
                raise _eaten_by_fees(price, direction, deposit, chain)
            needed = output + fees.payout
            admission = await self._inventory.require(
                request.client, direction, chain, deposit, needed, rate
            )
        except (AmountBelowMinimum, AmountAboveMaximum) as refusal:
            if not request.is_exact:
                raise
            raise _exact_refused(refusal, request, price) from refusal
        exact = output if request.is_exact else None
        if request.known is not None:
            most = request.known.most_deposit(direction, deposit.units, rate.usdc_per_xmr)
            maximum = min(maximum, most)
        quote = VenueQuote(
            direction=direction,
            chain=chain,
            deposit=deposit,
            price=price,
            rate=rate,
            fees=fees,
            minimum=minimum,
            maximum=maximum,
            expected_output=output,
            min_received=exact or price.min_received(direction, deposit.units),
            seconds=self._wallets.estimated_seconds(deposit, chain.name),
            price_locked_until=self._clock.now_ms() + self._policy.price_lock,
            funding_gas=gas,
            receive_amount=exact,
        )
        return _Priced(quote, admission, rates)

    def _price(self, request: QuoteRequest, rate: Rate) -> tuple[Price, Fees, int]:
        """The price of any amount, the networks' fees, and the gas of a signed payment."""
        direction, policy, chain = request.direction, self._policy, request.chain
        payout = self._wallets.fee(network_of(payout_asset(direction), chain))
        refund = self._wallets.fee(network_of(deposit_asset(direction), chain))
        gas = self._funding_gas(request)
        # The gas is spent before the deposit is there, so that a refund bears it, too.
        fees = Fees(payout, refund + gas)
        own_spread = None if request.known is None else request.known.spread_bps
        price = Price(
            rate.usdc_per_xmr,
            policy.spread_bps if own_spread is None else own_spread,
            fees.payout,
            policy.min_received_bps,
            request.integrator.fee_bps if request.integrator else 0,
            mul_div_ceil(gas, ONE_XMR, rate.usdc_per_xmr),
        )
        return price, fees, gas

    def _funding_gas(self, request: QuoteRequest) -> int:
        """The gas, in USDC units, of a signed payment that the order is to bear; 0: none."""
        if not request.pays_gas:
            return 0
        if deposit_asset(request.direction) is not USDC:
            raise ValueError("only USDC is paid by signing")
        return self.authorizations.fee(network_of(USDC, request.chain))

    # --- orders ---

    @override
    @asynccontextmanager
    async def opening(
        self,
        request: OrderRequest,
        claim: Claim | None,
    ) -> AsyncIterator[NewOrder]:
        # A failed order leaves no trace.
        self._wallets.require_ready()
        await self._require_payable(request)
        priced = await self._priced(request.priced)
        quote = priced.quote
        if request.accept is not None:
            request.accept(quote)
        named = self._maker.ids(request)
        address = self._wallets.deposit_address(quote.deposit_asset)
        terms = self._maker.terms(request, quote, named, address)
        pooled = self._wallets.pooled(address, terms.payout_network)
        units = worth(quote.direction, quote.deposit.units, quote.rate.usdc_per_xmr)
        bounds = OrderBounds(
            priced.rates,
            pooled,
            _spending(request, units, terms.created_at),
            request.uses(units, terms.order_id, terms.created_at),
        )
        yield NewOrder(terms, quote, priced.admission, bounds=bounds)

    async def _require_payable(self, request: OrderRequest) -> None:
        """Raise InvalidDestination for a payout or refund address that its network refuses."""
        named = [(payout_asset(request.direction), request.to, request.to_field)]
        if request.refund_address is not None:
            sent = deposit_asset(request.direction)
            named.append((sent, request.refund_address, "refundAddress"))
        for asset, address, field in named:
            network = network_of(asset, request.chain)
            await self._wallets.require_payable(network, address, field=field)

    @override
    def watch(self, order_id: str) -> None:
        # The worker follows the chains.
        pass

    @override
    async def refresh(self, order_id: str) -> None:
        # The worker follows the chains.
        pass

    @override
    async def cancel(self, order: Order) -> Order:
        # An order that expired meanwhile stays so.
        await self.authorizations.require_none_under_way(order)
        try:
            return await self._processor.apply(order.order_id, Cancelled())
        except ImpossibleTransition:
            return _require_expired(await self._store.order(order.order_id) or order)

    @override
    async def give_refund_address(
        self,
        order: Order,
        address: str,
        ticket: Ticket,
    ) -> bool:
        try:
            await self._processor.apply(order.order_id, RefundAddressGiven(address))
        except ImpossibleTransition:
            return False
        self._wake()
        return True

    # --- the bridge ---

    @override
    def least_deposit(self, direction: Direction, chain: Chain) -> int:
        rate = self._rates.rate()
        return usd_to_deposit_ceil(direction, chain.min_swap_usd, rate.usdc_per_xmr)

    @override
    async def bridge_rates(self) -> ExchangeRates:
        rate, policy = self._rates.rate(), self._policy
        ours = Price(rate.usdc_per_xmr, policy.spread_bps, 0, policy.min_received_bps)
        seconds = self._wallets.estimated_seconds(Money(ONE_XMR, XMR), PERPS)
        eta = f"{seconds} s" if seconds < 120 else f"{-(-seconds // 60)} min"
        own = ours.output(Direction.XMR_TO_USDC, ONE_XMR)
        return ExchangeRates(
            [ExchangeRate(rate.source, _dollars(rate.usdc_per_xmr), eta)],
            ExchangeRate(self.profile.engine, _dollars(own), eta),
        )

    @override
    async def confirmations(self, order: Order) -> Confirmations:
        # Count the deposit that has the fewest, and no more than are needed: as many as for all
        # that has arrived, or before that for the amount of the order. A deposit that has them and
        # does not count waits until it is final.
        arrived = [deposit for deposit in order.deposits if deposit.is_active]
        units = sum(deposit.units for deposit in arrived) or order.terms.deposit_amount
        network = order.terms.deposit_network
        required = self._wallets.required_confirmations(network, units)
        counts = [await self._wallets.confirmations(deposit.key) for deposit in arrived]
        waits = any(deposit.state is DepositState.SEEN for deposit in arrived)
        if waits and min(counts) >= required:
            required = self._wallets.required_confirmations(network, MAX_UNITS)
        return Confirmations(min([required, *counts]) if counts else 0, required)

    # --- health ---

    @override
    async def health(self) -> Mapping[str, Health]:
        found = {"engine": await self._wallets.health(), "rates": await self._rates_health()}
        return found if self._lease.is_held else {**found, "lease": Health(True, _JOINED)}

    @override
    async def readiness(self) -> Mapping[str, Health]:
        return {"engine": self._takes_orders(), "rates": await self._rates_health()}

    @override
    async def networks(self) -> Mapping[str, Health]:
        behind = self._scan.behind()
        states = self._wallets.states()
        return {name: Health(it.is_up and name not in behind) for name, it in states.items()}

    @override
    async def progress(self) -> Mapping[str, Health]:
        return {"deposits": self._scan.health()}

    def _takes_orders(self) -> Health:
        try:
            self._wallets.require_ready()
        except Unavailable as error:
            return Health(False, error.message)
        return Health(True)

    async def _rates_health(self) -> Health:
        try:
            await self._rates.require(self._rates.rate().usdc_per_xmr)
        except Unavailable as error:
            return Health(False, error.message)
        return Health(True)


def _dollars(units: int) -> Decimal:
    """USDC units as a decimal, digit for digit."""
    return Decimal(format_units(units, USDC))


def _require_expired(order: Order) -> Order:
    """The order, if it expired. Raises OrderNotCancellable."""
    if order.status is OrderStatus.EXPIRED:
        return order
    raise OrderNotCancellable(
        f"The order is {order.status.value} and a deposit was seen: it is swapped or refunded, not"
        " cancelled. Ask for its status.",
        details={"status": order.status.value},
    )


def _amounts(request: QuoteRequest, price: Price) -> tuple[Money, int]:
    """The deposit and its payout, in payout units: the one that is named gives the other."""
    direction, named = request.direction, request.amount
    if request.is_exact:
        units = price.deposit_for(direction, named.units)
        return Money(units, deposit_asset(direction)), named.units
    return named, price.output(direction, named.units)


def _exact_refused(refusal: InputError, request: QuoteRequest, price: Price) -> InputError:
    """The refusal of a deposit, with its limits also for what is to arrive."""
    sent, received = deposit_asset(request.direction), request.amount.asset
    limits: dict[str, str] = {}
    for name, text in (refusal.details or {}).items():
        if name in RECEIVE_LIMITS:
            units = int(as_units(text, sent))
            arriving = max(1, price.output(request.direction, units))
            while name == "minimum" and price.deposit_for(request.direction, arriving) < units:
                arriving += 1
            limits[RECEIVE_LIMITS[name]] = format_units(arriving, received)
    words = ", ".join(f"{name} {text}" for name, text in limits.items())
    return type(refusal)(
        f"For {request.amount.display()} to arrive: {refusal.message} In {received.symbol}:"
        f" {words}.",
        field=request.amount_field,
        received=request.amount.text(),
        details={**(refusal.details or {}), **limits, "receiveAsset": received.symbol},
    )


def _spending(request: OrderRequest, units: int, now: int) -> Spending | None:
    """Return what an order takes of its client's day; None without a client that is counted."""
    return None if request.known is None else request.known.spending(units, day_of(now))


def _eaten_by_fees(
    price: Price, direction: Direction, amount: Money, chain: Chain
) -> AmountBelowMinimum:
    """Return the error for an amount of which nothing would be paid out.

    ``minimum`` is the least that brings a unit.
    """
    minimum = format_units(price.deposit_for(direction, 1), amount.asset)
    return AmountBelowMinimum(
        f"The fees on {chain.name} are more than {amount.display()} is worth: at least {minimum}"
        f" {amount.asset.symbol} has to be sent for anything to arrive.",
        field="amount",
        received=format_units(amount.units, amount.asset),
        details={"minimum": minimum, "asset": amount.asset.symbol},
    )
