"""The operator's terms, the terms of new orders, and data retention.

``Retention`` deletes in small steps, so that no commit of an order waits long behind one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import structlog
from msgspec import Struct

from rpcsvc import ids
from rpcsvc.clock import DAY_MS, Clock
from rpcsvc.domain.chains import network_of
from rpcsvc.domain.finality import FinalityLimits
from rpcsvc.domain.order import Terms, Timeouts
from rpcsvc.domain.reservations import Counting, UnfundedLimits
from rpcsvc.domain.twap import is_worth_cutting
from rpcsvc.ids import RandomBytes
from rpcsvc.orders.ports.venue import OrderRequest, VenueProfile, VenueQuote
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.published_rates import RateRule
from rpcsvc.store.database import Tables
from rpcsvc.store.leases import Lease
from rpcsvc.store.orders import OrderStore

# Makes the orders of an engine: its names, the clock of its orders, and how it counts reservations.
MakeOrders: TypeAlias = "Callable[[VenueProfile, Clock, Counting], Orders]"
log = structlog.get_logger(__name__)
HOUR_MS: Final = 3_600_000
_MINUTE_MS: Final = 60_000
# Orders that are pruned in one transaction.
STEP: Final = 200
# Answers that are packed in one transaction: each takes some 0.2 ms.
_PACKED_AT_ONCE: Final = 20
# The stored answers of an unpaid order, with its idempotency key: no more than this. Measured by
# tools/order_sizes.py.
UNPAID_BYTES: Final = 11_000


class Policy(Struct):
    """The operator's terms: fees and limits in bps and whole USD, times in milliseconds.

    All who need it hold the same one and read it at each call, since ``take`` changes it.
    ``rate_rule``: how far apart the rates of replicas may be. ``reservable``: what an upstream may
    reserve for this service, in USDC units. ``finality``: bounds on deposits that are not final.
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
    reservable: int
    lock_break_bps: int
    finality: FinalityLimits

    def take(self, other: Policy) -> None:
        """Have the terms of another policy from now on; orders that are made keep theirs."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(other, name))


class Orders(Struct, frozen=True):
    """The orders of one process: their store, their rules, and the venue's names.

    ``tables`` are those of ``store``, for queries beside orders. ``clock`` says when orders expire.
    ``secret`` keys the hashes of clients' names. Orders are written and settled under ``lease``.
    """

    profile: VenueProfile
    tables: Tables
    store: OrderStore
    processor: OrderProcessor
    policy: Policy
    retention: Retention
    clock: Clock
    random: RandomBytes
    secret: bytes
    lease: Lease


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
            receive_amount=quote.exact_output,
            client=request.known.name if request.known else None,
        )


class Retention:
    """Packs answers to idempotency keys after an hour, of orders under way after a day; deletes
    them, tickets, unpaid orders' answers, and the history of orders that are over, after their
    time.

    ``keep_history_ms``: None keeps the history permanently. ``unpaid_bytes`` limits the size of
    unpaid orders' answers.
    """

    def __init__(
        self,
        store: OrderStore,
        clock: Clock,
        *,
        keep_responses_ms: int,
        keep_tickets_ms: int,
        keep_unpaid_ms: int,
        keep_history_ms: int | None,
        unpaid_bytes: int,
    ) -> None:
        self._store = store
        self._clock = clock
        self._responses_ms = keep_responses_ms
        self._tickets_ms = keep_tickets_ms
        self._unpaid_ms = keep_unpaid_ms
        self._history_ms = keep_history_ms
        self._most_unpaid = unpaid_bytes // UNPAID_BYTES
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
        """Make one step of each deletion; the next one follows at once while there is more."""
        reduced = 0
        pruned = await self._store.prune_unpaid(now - self._unpaid_ms, self._most_unpaid, STEP)
        if self._history_ms is not None:
            reduced = await self._store.reduce_history(now - self._history_ms, STEP)
        # What is packed while its order is under way keeps its status answer.
        packed = await self._store.pack_responses(now - HOUR_MS, now - DAY_MS, _PACKED_AT_ONCE)
        if max(pruned, reduced) < STEP and packed < _PACKED_AT_ONCE:
            self._next_pruning = now + _MINUTE_MS
        if pruned:
            log.info("unpaid_orders_pruned", count=pruned)
        if reduced:
            log.info("histories_reduced", count=reduced)

    async def _forget(self, now: int) -> None:
        forgotten = await self._store.forget_responses(now - self._responses_ms)
        if forgotten:
            log.info("idempotency_keys_forgotten", count=forgotten)
        ended = await self._store.forget_webhooks(now - self._responses_ms)
        if ended:
            log.info("webhooks_forgotten", count=ended)
        dropped = await self._store.forget_tickets(now - self._tickets_ms)
        if dropped:
            log.info("tickets_forgotten", count=dropped)
