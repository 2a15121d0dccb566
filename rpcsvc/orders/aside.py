"""Keeping one broken order from stopping all the others.

An order whose events can't be recorded (a constraint of the store refuses them, a rule has a hole)
is a bug that must be mended; until then nothing is done for that order, all others go on, and
health tells the operator. What does not live here: a store that is down, which stops everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from rpcsvc.errors import ServiceError
from rpcsvc.orders.ports import Health

log = structlog.get_logger(__name__)


class OrdersAside:
    """The orders that were set aside. Each is tried again whenever it is its turn."""

    def __init__(self) -> None:
        self._orders: set[str] = set()

    @contextmanager
    def isolate(self, order_id: str) -> Iterator[None]:
        """Run the block for one order; what breaks in it sets that order aside.

        Raises only errors.ServiceError: the store can't serve anybody.
        """
        try:
            yield
        except ServiceError:
            raise
        except Exception:
            log.exception("order_set_aside", order_id=order_id)
            self._orders.add(order_id)
        else:
            self._orders.discard(order_id)

    def __contains__(self, order_id: str) -> bool:
        return order_id in self._orders

    def health(self) -> Health:
        """Not ok while an order is aside."""
        if not self._orders:
            return Health(True)
        count = len(self._orders)
        return Health(False, f"{count} orders can't be moved on; the log says order_set_aside.")
