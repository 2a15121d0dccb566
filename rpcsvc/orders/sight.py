"""How far deposits are known: no order is decided on while some that came in time may be unseen.

A node that is down, or reads up on what it missed, shows nothing, or a part. What it will show may
have come before the deadline of an order, which therefore waits until the network was seen whole
at a later time. Times are ms since the epoch.
What does not live here: looking (deposits.py), what is done at a deadline (domain/deadlines.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from rpcsvc.clock import Clock
from rpcsvc.domain.deadlines import DECIDED_BY_DEPOSITS
from rpcsvc.domain.order import Order
from rpcsvc.orders.ports import Health

# A look takes milliseconds, and one of a side that reads up on much some minutes.
_LONG_MS: Final = 10 * 60_000


class Sight:
    """Of the ``networks`` whose deposits are watched. A new one knows of none: it never looked."""

    def __init__(self, networks: Iterable[str], clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now_ms()
        self._known = dict.fromkeys(networks, 0)
        self._behind: dict[str, str] = {}

    @property
    def known(self) -> Mapping[str, int]:
        """Until when all deposits are on record, by network, but for the orders ``behind``."""
        return MappingProxyType(self._known)

    @property
    def behind(self) -> frozenset[str]:
        """Ids of orders with a deposit that was shown and is not on record yet."""
        return frozenset(self._behind)

    def looked(self, whole: Mapping[str, int], left: Mapping[str, str]) -> None:
        """What was shown is on record and acknowledged, but for that of the orders ``left``.

        ``whole`` as in Observation; ``left`` are order ids, each with the network.
        """
        # On a network that was not seen whole, what was left before may not have been shown now.
        still = {order: at for order, at in self._behind.items() if at not in whole}
        self._behind = {**still, **left}
        self._known.update(whole)

    def covers(self, order: Order) -> bool:
        """Whether all is known that may bear on what is done at the order's deadline.

        Where nobody watches, nothing is waited for.
        """
        if order.deadline_at is None or order.on_deadline not in DECIDED_BY_DEPOSITS:
            return True
        until = self._known.get(order.terms.deposit_network, order.deadline_at)
        return order.deadline_at <= until and order.order_id not in self._behind

    def is_complete(self, order_id: str, network: str, at: int) -> bool:
        """Whether all that was sent to an order until ``at`` (ms) is on record; an empty id stands
        for any order that is not ``behind``. Where nobody watches, until now.
        """
        return at <= self._known.get(network, self._clock.now_ms()) and order_id not in self._behind

    def health(self) -> Health:
        """Not ok while a network was not seen whole for long."""
        network = min(self._known, key=lambda name: self._known[name], default=None)
        if network is None:
            return Health(True)
        lasts = self._clock.now_ms() - max(self._known[network], self._since)
        if lasts < _LONG_MS:
            return Health(True)
        return Health(
            False,
            f"Deposits on {network} have not been seen whole for {lasts // 60_000} minutes;"
            " the deadlines of orders that wait for them are put off.",
        )
