"""Keeps orders whose events can't be recorded from stopping all others.

A constraint of the store or a hole in a rule is a bug, and the order's record may differ from the
chain: nothing more is signed for it, what is signed is carried to its end, and health names it. A
store that is down stops everything instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import structlog

from rpcsvc.errors import ServiceError
from rpcsvc.orders.ports.health import Health

log = structlog.get_logger(__name__)


class Quarantine:
    """Orders of which a step broke, each until that step is done after all."""

    def __init__(self) -> None:
        self._broken: dict[str, set[Hashable]] = {}

    @contextmanager
    def isolate(self, order_id: str, step: Hashable) -> Iterator[None]:
        """Run the block for one order; what breaks in it quarantines that order.

        ``step`` names what is tried: another step that succeeds does not mend it. Raises only
        errors.ServiceError: the store can't serve anybody.
        """
        try:
            yield
        except ServiceError:
            raise
        except Exception:
            log.exception("order_quarantined", order_id=order_id)
            self._broken.setdefault(order_id, set()).add(step)
        else:
            self._mended(order_id, step)

    def __contains__(self, order_id: str) -> bool:
        return order_id in self._broken

    def is_broken(self, order_id: str, step: Hashable) -> bool:
        """Whether this very step of the order failed when it was last tried."""
        return step in self._broken.get(order_id, ())

    def failing(self, step: Hashable) -> list[str]:
        """The orders of which this step failed when it was last tried."""
        return [order_id for order_id, steps in self._broken.items() if step in steps]

    def _mended(self, order_id: str, step: Hashable) -> None:
        steps = self._broken.get(order_id, set())
        steps.discard(step)
        if not steps:
            self._broken.pop(order_id, None)

    def health(self) -> Health:
        """Not ok while an order is quarantined."""
        if not self._broken:
            return Health(True)
        count = len(self._broken)
        return Health(False, f"{count} orders can't be moved on; the log says order_quarantined.")
