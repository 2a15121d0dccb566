"""The venue of a standby: it answers for orders that are on record, and makes and changes none."""

# ruff: noqa: ARG002 - most of what the port gives is refused unread
from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Money
from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.gasless import GaslessFunding
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.lease import StandingBy
from rpcsvc.orders.ports.store import Health, Ticket
from rpcsvc.orders.ports.venue import (
    BridgeRates,
    Market,
    NewOrder,
    OrderRequest,
    Quote,
    QuoteRequest,
    VenueProfile,
)
from rpcsvc.orders.unfunded import Client

_STANDS_BY = "This replica is a standby: another one takes orders; it takes over when that is gone."


class StandbyVenue:
    """Implements Venue without wallets or upstream. Prices and changes raise StandingBy."""

    def __init__(
        self,
        profile: VenueProfile,
        price_lock: int | None = None,
        gasless: GaslessFunding | None = None,
    ) -> None:
        self.profile = profile
        self.price_lock = price_lock
        self.gasless = gasless

    async def market(self, client: Client) -> Market | None:
        """None: the replica that takes orders has the rate."""
        return None

    def listed_chains(self) -> Sequence[Chain]:
        """The configured chains."""
        return self.profile.chains.all()

    async def check_amount(self, direction: Direction, chain: Chain, amount: Money) -> None:
        """Refused: limits follow the rate."""
        raise StandingBy

    async def quote(self, request: QuoteRequest) -> Quote:
        """Refused."""
        raise StandingBy

    @asynccontextmanager
    async def opening(
        self,
        request: OrderRequest,
        claim: Claim | None,
    ) -> AsyncIterator[NewOrder]:
        """Refused. The retry of a key is answered before it comes to this."""
        raise StandingBy
        yield

    def watch(self, order_id: str) -> None:
        """Nothing to do: the replica that settles updates the order."""

    async def refresh(self, order_id: str) -> None:
        """Nothing to do: the replica that settles updates the order."""

    async def cancel(self, order: Order) -> Order:
        """Refused."""
        raise StandingBy

    async def give_refund_address(self, order: Order, address: str, ticket: Ticket) -> bool:
        """Refused."""
        raise StandingBy

    def least_deposit(self, direction: Direction, chain: Chain) -> int:
        """Refused."""
        raise StandingBy

    async def bridge_rates(self) -> BridgeRates:
        """Refused."""
        raise StandingBy

    async def confirmations(self, order: Order) -> None:
        """None: nothing is watched here."""

    async def health(self) -> Mapping[str, Health]:
        """Well: a standby has nothing to do but to answer and to wait."""
        return {"lease": Health(True, _STANDS_BY)}

    async def readiness(self) -> Mapping[str, Health]:
        """Not ready: no order can be made here."""
        return {"lease": Health(False, _STANDS_BY)}

    async def networks(self) -> Mapping[str, Health]:
        """None: the replica that takes orders watches them."""
        return {}

    async def progress(self) -> Mapping[str, Health]:
        """Nothing is in progress here."""
        return {}
