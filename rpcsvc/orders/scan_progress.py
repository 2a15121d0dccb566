"""Per-network deposit scan progress.

An order is not decided until the scan has passed its deadline: a node that was down may yet show
deposits that came in time. Times are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from rpcsvc.clock import Clock
from rpcsvc.domain.machine import DECIDED_BY_DEPOSITS
from rpcsvc.domain.order import Order
from rpcsvc.orders.ports.health import Health

# A scan takes milliseconds; of a network that catches up, some minutes.
_LAGGING_AFTER_MS: Final = 10 * 60_000


class ScanProgress:
    """Progress on the ``networks`` whose deposits are watched, none at the start."""

    def __init__(self, networks: Iterable[str], clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now_ms()
        self._complete_until = dict.fromkeys(networks, 0)
        self._lagging: dict[str, str] = {}

    @property
    def complete_until(self) -> Mapping[str, int]:
        """Until when all deposits are on record, by network, except those of ``lagging`` orders."""
        return MappingProxyType(self._complete_until)

    @property
    def lagging(self) -> frozenset[str]:
        """Ids of orders with a deposit that was seen and is not on record yet."""
        return frozenset(self._lagging)

    def advance(self, complete_until: Mapping[str, int], left: Mapping[str, str]) -> None:
        """Record a scan whose deposits are on record, except those of the orders ``left``.

        ``complete_until`` as in Observation; ``left`` maps order ids to networks.
        """
        # A network without a complete scan may not have shown again what was left before.
        still = {order: at for order, at in self._lagging.items() if at not in complete_until}
        self._lagging = {**still, **left}
        self._complete_until.update(complete_until)

    def covers(self, order: Order) -> bool:
        """Whether every deposit that matters at the order's deadline is known.

        True on a network that nobody watches.
        """
        if order.deadline_at is None or order.on_deadline not in DECIDED_BY_DEPOSITS:
            return True
        until = self._complete_until.get(order.terms.deposit_network, order.deadline_at)
        return order.deadline_at <= until and order.order_id not in self._lagging

    def is_complete(self, order_id: str, network: str, at: int) -> bool:
        """Whether all that was sent to an order until ``at`` (ms) is on record.

        An empty id stands for any order that is not lagging. A network that nobody watches is
        complete until now.
        """
        until = self._complete_until.get(network, self._clock.now_ms())
        return at <= until and order_id not in self._lagging

    def health(self) -> Health:
        """Not ok while the scan of a network is minutes behind."""
        scans = self._complete_until
        network = min(scans, key=lambda name: scans[name], default=None)
        if network is None:
            return Health(True)
        behind = self._clock.now_ms() - max(scans[network], self._since)
        if behind < _LAGGING_AFTER_MS:
            return Health(True)
        return Health(
            False,
            f"Deposit scan of {network} is {behind // 60_000} min behind; deadlines on this"
            " network are suspended.",
        )
