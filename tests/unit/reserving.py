"""Orders with reservations in a store, and a recount of these."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import Admission, counted, funded_reservations_of, reservations_of
from rpcsvc.store.changes import Change, HistoryEntry
from rpcsvc.store.checks import BOOKS
from rpcsvc.store.database import Tables
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import NOW, VIEW, terms

NETWORKS = ("monero", "arbitrum")


def numbered(number: int, direction: Direction = Direction.XMR_TO_USDC) -> Order:
    """One of several orders."""
    agreed = terms(direction)
    return open_order(
        replace(agreed, order_id=f"ord_{number}", deposit_address=f"address {number}")
    )


class Keeper:
    """Commits orders with their reservations, and computes the expected sums."""

    def __init__(self, store: OrderStore) -> None:
        self.store = store
        self.orders: dict[str, Order] = {}
        self.ended: set[str] = set()

    async def open(self, order: Order, admission: Admission) -> None:
        await self._commit(None, order, admission)

    async def apply(self, order_id: str, event: ev.Event, now: int = NOW) -> None:
        """Apply an event. Raises ImpossibleTransition."""
        before = self.orders[order_id]
        result = transition(before, event, now)
        await self._commit(before, result.order, effects=result.effects)

    async def _commit(
        self,
        before: Order | None,
        after: Order,
        admission: Admission | None = None,
        effects: tuple[ev.Effect, ...] = (),
    ) -> None:
        change = counted(before, after, admission.client if admission else "")
        await self.store.commit(
            Change(
                order=after,
                view=VIEW,
                is_new=before is None,
                history=HistoryEntry(after.version, NOW, "e", after.status.value, {}),
                effects=effects,
                reservation=change,
                admission=admission,
            )
        )
        self.orders[after.order_id] = after
        if change is not None and change.begins and change.unfunded is not None:
            self.ended.discard(after.order_id)

    async def expire(self, now: int) -> None:
        """End what has expired."""
        due = await self.store.expired_reservations(now, 100, {})
        await self.store.end_reservations(due, now)
        self.ended.update(due)

    def recount(self) -> dict[str, int]:
        """The reserved units on each network, added up from the orders."""
        total: Counter[str] = Counter()
        for order_id, order in self.orders.items():
            over = order_id in self.ended
            total.update(funded_reservations_of(order) if over else reservations_of(order))
        return {network: total[network] for network in NETWORKS}

    async def reserved(self) -> dict[str, int]:
        """The reserved units on each network, from the store."""
        return {network: (await self.store.reserved(network)).total for network in NETWORKS}


async def wrong_sums(database: Tables) -> list[object]:
    """The wrong sums of reservations that ``db check`` finds."""
    checks = [sql for what, sql in BOOKS if "reserv" in what]
    assert checks
    return [row[0] for sql in checks for row in await database.fetch(sql)]
