"""Reconciling deposits: what the chain shows now against what the order has on record.

Each pass takes the deposits that may have changed and turns the difference into events, so a
restart, a missed block or a reorganisation need no code of their own. Watching costs per changed
deposit, never per open order. An event costs more with every deposit that its order has, and anyone
may send an order thousands of tiny ones: each order has its turn in a pass, and waits for the next.
"""

from __future__ import annotations

from collections import Counter

import structlog

from rpcsvc.domain.events import DepositConfirmed, DepositRemoved, DepositSeen
from rpcsvc.domain.order import Order
from rpcsvc.domain.states import DepositState
from rpcsvc.domain.transition import ImpossibleTransition
from rpcsvc.orders.aside import OrdersAside
from rpcsvc.orders.ports import DepositSighting, OrderStore, SettlementEngine
from rpcsvc.orders.processor import OrderProcessor

log = structlog.get_logger(__name__)

TRIES = 3
# So many deposits of an order are recorded in one pass.
TURN = 20

DepositEvent = DepositSeen | DepositConfirmed | DepositRemoved


def events_of(order: Order, sighting: DepositSighting) -> list[DepositEvent]:
    """The events that bring the order's record of a deposit up to what the chain shows."""
    known = order.deposit(sighting.key)
    before = known.state if known else DepositState.REMOVED
    if before is sighting.state:
        return []
    events: list[DepositEvent] = []
    if before is not DepositState.REMOVED and sighting.state is not DepositState.CONFIRMED:
        events.append(DepositRemoved(sighting.key))
        before = DepositState.REMOVED
    if before is DepositState.REMOVED and sighting.state is not DepositState.REMOVED:
        events.append(
            DepositSeen(sighting.key, sighting.units, sighting.sender, sighting.first_seen_at)
        )
    if sighting.state is DepositState.CONFIRMED:
        events.append(DepositConfirmed(sighting.key))
    return events


class DepositWatcher:
    """Turns what the engine sees into events of orders."""

    def __init__(
        self,
        store: OrderStore,
        engine: SettlementEngine,
        processor: OrderProcessor,
        aside: OrdersAside,
    ) -> None:
        self._store = store
        self._engine = engine
        self._processor = processor
        self.aside = aside

    async def reconcile(self) -> int:
        """One pass; returns how many events it found. Safe to repeat at any time."""
        done, count = [], 0
        recorded: Counter[str] = Counter()  # deposits of each order in this pass
        for sighting in await self._engine.observe():
            network = sighting.key.network
            order_id = self._store.order_id_of_deposit_address(network, sighting.address)
            if order_id is None:
                log.warning("deposit_without_order", network=network, txid=sighting.key.txid)
            elif recorded[order_id] >= TURN:
                continue  # not acknowledged: the next pass is shown it again
            else:
                with self.aside.isolate(order_id, sighting.key):
                    events = await self._reconcile_one(order_id, sighting)
                    count += events
                    recorded[order_id] += events > 0
            if order_id is None or not self.aside.is_broken(order_id, sighting.key):
                done.append(sighting)
        # Only now may the engine forget them: every event above is committed.
        await self._engine.acknowledge(done)
        return count

    async def _reconcile_one(self, order_id: str, sighting: DepositSighting) -> int:
        """Bring the order up to what the chain shows; how many events that took.

        Raises ImpossibleTransition when it can't be: then the engine shows it again.
        """
        for remaining in reversed(range(TRIES)):
            order = self._store.order(order_id)
            if order is None:
                raise LookupError(f"order {order_id} has an address, but is not in the store")
            events = events_of(order, sighting)
            try:
                for event in events:
                    await self._processor.apply(order_id, event)
            except ImpossibleTransition as refused:
                if not remaining:
                    raise
                # Something else happened to the order in between: look with fresh eyes.
                log.info("deposit_looked_at_again", order_id=order_id, reason=str(refused))
            else:
                break
        return len(events)
