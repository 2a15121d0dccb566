"""The operator's terms, and the terms of a new order that follow from them and its quote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rpcsvc import ids
from rpcsvc.clock import Clock
from rpcsvc.domain.order import Terms, Timeouts
from rpcsvc.domain.twap import is_worth_cutting
from rpcsvc.ids import RandomBytes
from rpcsvc.orders.ports.store import OrderStore
from rpcsvc.orders.ports.venue import OrderRequest, Quote, network_of
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.scheduler.retention import Retention
from rpcsvc.orders.unfunded import UnfundedLimits


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's terms: fees and limits in bps and whole USD, times in milliseconds.

    ``reservable``: what an upstream may reserve for this service, in USDC units.
    """

    spread_bps: int
    min_received_bps: int
    max_swap_usd: int
    bridge_min_usd: int
    deposit_window: int
    price_lock: int
    timeouts: Timeouts
    unfunded: UnfundedLimits
    reservable: int = 0
    lock_break_bps: int = 0


@dataclass(frozen=True, slots=True)
class Core:
    """What every venue works with. ``secret`` keys the hashes of clients' names."""

    store: OrderStore
    processor: OrderProcessor
    policy: Policy
    retention: Retention
    clock: Clock
    random: RandomBytes
    secret: bytes


class OrderIds(NamedTuple):
    """The two halves of an order's owner secret."""

    order_id: str
    session_id: str


class TermsMaker:
    """Makes the terms of new orders."""

    def __init__(self, policy: Policy, clock: Clock, random: RandomBytes) -> None:
        self._policy = policy
        self._clock = clock
        self._random = random

    def ids(self, request: OrderRequest) -> OrderIds:
        """A fresh order id, and the session that the caller named or a fresh one."""
        order_id = ids.order_id(self._random)
        return OrderIds(order_id, request.session_id or ids.session_id(self._random))

    def expires_at(self) -> int:
        """Until when (ms) the deposit of an order that is made now is awaited."""
        return self._clock.now_ms() + self._policy.deposit_window

    def terms(
        self, request: OrderRequest, quote: Quote, named: OrderIds, deposit_address: str
    ) -> Terms:
        """The terms of an order at a quote."""
        plan = request.twap
        is_cut = plan is not None and is_worth_cutting(
            plan, quote.direction, quote.price.rate, quote.deposit.units
        )
        return Terms(
            order_id=named.order_id,
            session_id=named.session_id,
            direction=quote.direction,
            chain=quote.chain.name,
            chain_id=quote.chain.chain_id,
            deposit_network=network_of(quote.deposit_asset, quote.chain),
            payout_network=network_of(quote.payout_asset, quote.chain),
            deposit_address=deposit_address,
            to_address=request.to,
            deposit_amount=quote.deposit.units,
            expected_output=quote.expected_output,
            min_received=quote.min_received,
            min_deposit=quote.minimum,
            max_deposit=quote.maximum,
            price=quote.price,
            refund_fee=quote.fees.refund,
            created_at=self._clock.now_ms(),
            expires_at=self.expires_at(),
            timeouts=self._policy.timeouts,
            integrator=request.integrator.id if request.integrator else None,
            twap=plan if is_cut else None,
            refund_address=request.refund_address,
            price_locked_until=quote.price_locked_until,
        )
