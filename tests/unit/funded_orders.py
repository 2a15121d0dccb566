"""Orders with deposits, carried to a given event."""

from __future__ import annotations

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import Order, Terms
from tests.unit.orders import HOUR, NOW, key

LATER = NOW + 2 * HOUR  # the deposit window is over
OPEN_REFUND = "ord_1/refund/1"
ENOUGH = 165_000_000  # the quoted rate


def after(order: Order, *events: ev.Event, now: int = NOW) -> Order:
    """The order after these events."""
    for event in events:
        order = transition(order, event, now).order
    return order


def seen(n: int, units: int, *, sender: str | None = None) -> ev.DepositSeen:
    return ev.DepositSeen(key(n), units, sender, NOW)


def funded(agreed: Terms, *units: int, sender: str | None = None) -> Order:
    """An order with deposits of so many units, confirmed one after the other."""
    order = after(open_order(agreed), *(seen(n, u, sender=sender) for n, u in enumerate(units)))
    return after(order, *(ev.DepositConfirmed(key(n)) for n in range(len(units))))
