"""The operator's terms, the terms of new orders, and data retention.

``Retention`` deletes in small steps, so that no commit of an order waits long behind one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import structlog
from msgspec import Struct

from rpcsvc import ids
from rpcsvc.clock import Clock
from rpcsvc.domain.chains import network_of
from rpcsvc.domain.order import Terms, Timeouts
from rpcsvc.domain.twap import is_worth_cutting
from rpcsvc.domain.unfunded import UnfundedLimits
from rpcsvc.ids import RandomBytes
from rpcsvc.orders.ports.venue import OrderRequest, VenueQuote
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.published_rates import RateRule
from rpcsvc.store.leases import Lease
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.replicas import RateRows


class Policy(Struct, frozen=True):
    """The operator's terms: fees and limits in bps and whole USD, times in milliseconds.

    ``rate_rule``: how far apart the rates of replicas may be. ``reservable``: what an upstream may
    reserve for this service, in USDC units.
    """

    spread_bps: int
    min_received_bps: int
    max_swap_usd: int
    bridge_min_usd: int
    deposit_window: int
    price_lock: int
    timeouts: Timeouts
    unfunded: UnfundedLimits
    rate_rule: RateRule
    reservable: int = 0
    lock_break_bps: int = 0


class Core(Struct, frozen=True):
    """Parts of every venue. ``secret`` keys the hashes of clients' names; under ``lease``
    orders are written and settled, and rates are published as ``rates``.
    """

    store: OrderStore
    processor: OrderProcessor
    policy: Policy
    retention: Retention
    clock: Clock
    random: RandomBytes
    secret: bytes
    lease: Lease
    rates: RateRows


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
        """The ``expiresAt`` (ms) of an order that is made now."""
        return self._clock.now_ms() + self._policy.deposit_window

    def terms(
        self, request: OrderRequest, quote: VenueQuote, named: OrderIds, deposit_address: str
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
            funding_gas=quote.funding_gas,
        )


log = structlog.get_logger(__name__)

HOUR_MS: Final = 3_600_000
_MINUTE_MS: Final = 60_000
# Orders that are pruned in one transaction.
STEP: Final = 200
# The stored answers of an unpaid order, with its idempotency key: no more than this. Measured by
# tools/unpaid_orders.py.
UNPAID_BYTES: Final = 11_000


class Kept(Struct, frozen=True):
    """Retention times in ms; ``unpaid_bytes`` limits the size of unpaid orders' answers.

    ``history``: None keeps it for ever.
    """

    responses: int
    tickets: int
    unpaid: int
    unpaid_bytes: int
    history: int | None


class Retention:
    """Deletes answers to idempotency keys, tickets, unpaid orders' answers, and the history
    of orders that are over, after their time.
    """

    def __init__(self, store: OrderStore, clock: Clock, kept: Kept) -> None:
        self._store = store
        self._clock = clock
        self._kept = kept
        self._next_cleaning = 0
        self._next_pruning = 0

    async def clean(self) -> int:
        """Delete what is due; returns 0, because no work follows from it."""
        now = self._clock.now_ms()
        if now >= self._next_pruning:
            await self._prune(now)
        if now >= self._next_cleaning:
            self._next_cleaning = now + HOUR_MS
            await self._forget(now)
        return 0

    async def _prune(self, now: int) -> None:
        """One step of each; the next one follows at once while there is more."""
        kept, reduced = self._kept, 0
        most = kept.unpaid_bytes // UNPAID_BYTES
        pruned = await self._store.prune_unpaid(now - kept.unpaid, most, STEP)
        if kept.history is not None:
            reduced = await self._store.reduce_history(now - kept.history, STEP)
        if max(pruned, reduced) < STEP:
            self._next_pruning = now + _MINUTE_MS
        if pruned:
            log.info("unpaid_orders_pruned", count=pruned)
        if reduced:
            log.info("histories_reduced", count=reduced)

    async def _forget(self, now: int) -> None:
        forgotten = await self._store.forget_responses(now - self._kept.responses)
        if forgotten:
            log.info("idempotency_keys_forgotten", count=forgotten)
        ended = await self._store.forget_webhooks(now - self._kept.responses)
        if ended:
            log.info("webhooks_forgotten", count=ended)
        dropped = await self._store.forget_tickets(now - self._kept.tickets)
        if dropped:
            log.info("tickets_forgotten", count=dropped)
