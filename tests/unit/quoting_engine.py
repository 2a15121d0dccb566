"""An engine that only quotes: all that a package in rpcsvc/settlement/ needs for one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import Chain, ChainRegistry
from rpcsvc.domain.clients import Client
from rpcsvc.domain.money import Asset, Money
from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.domain.reservations import uncounted
from rpcsvc.engine_context import EngineContext
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.policy import MakeOrders, Orders
from rpcsvc.orders.ports.venue import (
    ExchangeRates,
    Market,
    NewOrder,
    OrderRequest,
    QuoteRequest,
    Rate,
    VenueProfile,
    VenueQuote,
)
from rpcsvc.orders.ports.wallets import Fees, NetworkNames
from rpcsvc.orders.processor import Quarantine
from rpcsvc.orders.scheduler.worker import Worker
from rpcsvc.orders.settlement import Settlement, authorization_funding
from rpcsvc.settings import Settings
from rpcsvc.store.changes import Ticket

RATE = 150_000_000


class QuotingVenue:
    """Quotes one rate, and takes no order."""

    def __init__(self, orders: Orders) -> None:
        self.profile = orders.profile
        self.price_lock: int | None = None
        self.authorizations = authorization_funding(orders, cast("Any", None), 1_000)
        self._clock = orders.clock

    async def amounts(self, client: Client) -> Mapping[tuple[Direction, Chain], tuple[int, int]]:
        raise Unavailable("Ask for a quote.")

    async def quote(self, request: QuoteRequest) -> VenueQuote:
        price = Price(RATE, 0, 0, 9_900)
        output = price.output(request.direction, request.amount.units)
        return VenueQuote(
            direction=request.direction,
            chain=request.chain,
            deposit=request.amount,
            price=price,
            rate=Rate(RATE, self._clock.now_ms(), "quoting"),
            fees=Fees(0, 0),
            minimum=1,
            maximum=10**15,
            expected_output=output,
            min_received=price.min_received(request.direction, request.amount.units),
            seconds=60,
        )

    def opening(
        self, request: OrderRequest, claim: Claim | None
    ) -> AbstractAsyncContextManager[NewOrder]:
        raise Unavailable("This service only quotes.")

    async def market(self, client: Client) -> Market | None:
        return None

    def listed_chains(self) -> Sequence[Chain]:
        return self.profile.chains.all()

    async def check_amount(self, direction: Direction, chain: Chain, amount: Money) -> None:
        """Take any amount."""

    def watch(self, order_id: str) -> None:
        """No orders exist."""

    async def refresh(self, order_id: str) -> None:
        """There are no orders."""

    async def cancel(self, order: Order) -> Order:
        raise Unavailable("This service only quotes.")

    async def give_refund_address(self, order: Order, address: str, ticket: Ticket) -> bool:
        return False

    def least_deposit(self, direction: Direction, chain: Chain) -> int:
        return 1

    async def bridge_rates(self) -> ExchangeRates:
        raise Unavailable("This service has no bridge.")

    async def confirmations(self, order: Order) -> None:
        """No deposits exist."""

    async def health(self) -> Mapping[str, Health]:
        return {"engine": Health(True), "rates": Health(True)}

    async def readiness(self) -> Mapping[str, Health]:
        return await self.health()

    async def networks(self) -> Mapping[str, Health]:
        return {}

    async def progress(self) -> Mapping[str, Health]:
        return {}


@asynccontextmanager
async def connect(context: EngineContext, make_orders: MakeOrders) -> AsyncIterator[Settlement]:
    """Quote, with a worker that keeps the database small."""

    def names(asset: Asset, chain: str) -> NetworkNames:
        raise AssertionError((asset, chain))

    profile = VenueProfile(
        engine="quoting",
        network="quoting",
        chains=context.chains,
        monero_networks=frozenset(MoneroNetwork),
        names=names,
    )
    orders = make_orders(profile, context.clock, uncounted)
    venue = QuotingVenue(orders)
    yield Settlement(orders, venue, venue, Worker((orders.retention.clean,), Quarantine()))


def check(settings: Settings, chains: ChainRegistry) -> None:
    """Accept all settings."""
