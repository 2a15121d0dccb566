"""Bounds on what orders may reserve before they are funded: per client, and in all.

A reservation counts until its order is funded, ends or expires. Shares are percentages of what the
wallet of a network holds beside funded orders.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple

from rpcsvc.clock import day_of

ADDRESS: Final = "address"
# ``details.reason`` of a refusal: tells it from one for too many calls.
UNFUNDED_REASON: Final = "unfunded_orders"
# Scopes of a sum that are no client's.
ALL: Final = "all"
BY_ADDRESS: Final = "by_address"


class Client(NamedTuple):
    """Who asks for an order.

    ``kind`` is ADDRESS for a caller known by its network address alone; ``name`` is then an IPv4
    address or an IPv6 /64. Other kinds name a token, an integrator or the UNIX socket.
    """

    kind: str
    name: str = ""

    def stored(self, secret: bytes) -> str:
        """What is kept of the client with its orders: the kind, and a keyed hash of the name."""
        digest = hmac.new(secret, f"{self.kind}:{self.name}".encode(), hashlib.sha256)
        return f"{self.kind}:{digest.hexdigest()[:24]}"


# The user that the service runs as: through the UNIX socket, or in one process with it.
SOCKET: Final = Client("socket")


def is_known(client: str) -> bool:
    """Whether a stored client was known by a token, a key or the socket."""
    return bool(client) and not client.startswith(f"{ADDRESS}:")


class Reservation(NamedTuple):
    """What an order reserves for money that has not come: ``units`` of the payout on ``network``.

    It ends at ``expires_at`` (ms), once all deposits until then are known on ``deposit_network``.
    """

    network: str
    units: int
    client: str
    deposit_network: str
    expires_at: int


@dataclass(frozen=True, slots=True)
class UnfundedLimits:
    """The operator's bounds (settings ``orders.unfunded_*``): percentages, and orders."""

    share: int
    address_total_share: int
    address_share: int
    address_orders: int
    token_share: int
    token_orders: int
    address_orders_a_day: int

    def orders_of(self, client: str) -> int:
        """How many unfunded orders a client may have."""
        return self.token_orders if is_known(client) else self.address_orders

    def shares_of(self, client: str) -> list[tuple[str, int]]:
        """The scopes whose sums bound a client's next order, each with its percentage."""
        if is_known(client):
            return [(client, self.token_share), (ALL, self.share)]
        return [
            (client, self.address_share),
            (BY_ADDRESS, self.address_total_share),
            (ALL, self.share),
        ]


class OrdersToday:
    """How many orders each client has made on the current day of UTC; ``made``: by then."""

    def __init__(self, now: int = 0, made: Mapping[str, int] = MappingProxyType({})) -> None:
        self._day = day_of(now)
        self._made = Counter(made)

    def count(self, client: str, now: int) -> int:
        """How many a client has made today."""
        return self._made[client] if day_of(now) == self._day else 0

    def add(self, client: str, now: int, number: int = 1) -> None:
        """Count an order that was made now, or with -1 one that was not made after all."""
        if day_of(now) != self._day:
            self._day = day_of(now)
            self._made.clear()
        self._made[client] += number


class Refusal(NamedTuple):
    """The bound that an order would break. ``scope`` is ALL, BY_ADDRESS or the client.

    ``limit`` and ``held`` are payout units, or orders when ``is_count``. ``frees_at`` (ms) is when
    reservations that expire make room, None when the order is above the bound by itself.
    """

    scope: str
    is_count: bool
    limit: int
    held: int
    frees_at: int | None


class UnfundedOrders:
    """The reservations of all orders that are not funded. Reads take constant time."""

    def __init__(self) -> None:
        self._of: dict[str, Reservation] = {}
        self._units: Counter[tuple[str, str]] = Counter()
        self._orders: Counter[str] = Counter()
        self._expiring: dict[str, list[tuple[int, str]]] = {}

    def put(self, order_id: str, reservation: Reservation | None) -> None:
        """What an order reserves now; None: nothing."""
        before = self._of.pop(order_id, None)
        if before is not None:
            self._count(before, -1)
        if reservation is None:
            return
        self._of[order_id] = reservation
        self._count(reservation, 1)
        if before is None or before.expires_at != reservation.expires_at:
            heap = self._expiring.setdefault(reservation.deposit_network, [])
            heappush(heap, (reservation.expires_at, order_id))

    def _count(self, reservation: Reservation, sign: int) -> None:
        for scope in _scopes(reservation.client):
            self._units[scope, reservation.network] += sign * reservation.units
        self._orders[reservation.client] += sign
        if not self._orders[reservation.client]:
            del self._orders[reservation.client]

    def client_of(self, order_id: str) -> str:
        """The client whose reservation an order holds; empty where none is known."""
        held = self._of.get(order_id)
        return held.client if held else ""

    def units(self, network: str, scope: str = ALL) -> int:
        """Payout units reserved on a network."""
        return self._units[scope, network]

    def orders(self, client: str) -> int:
        """How many unfunded orders a client has."""
        return self._orders[client]

    def expired(
        self, is_complete: Callable[[str, str, int], bool]
    ) -> list[tuple[str, Reservation]]:
        """Take out what has expired; ``is_complete`` of an order, its deposit network and a time
        says whether all that was sent to it until then is known.
        """
        ended: list[tuple[str, Reservation]] = []
        for network, heap in self._expiring.items():
            waiting: list[tuple[int, str]] = []
            while heap and is_complete("", network, heap[0][0]):
                at, order_id = heappop(heap)
                held = self._of.get(order_id)
                if held is None or held.expires_at != at:
                    continue
                if is_complete(order_id, network, at):
                    self.put(order_id, None)
                    ended.append((order_id, held))
                else:
                    waiting.append((at, order_id))
            for entry in waiting:
                heappush(heap, entry)
        return ended

    def refusal(
        self, limits: UnfundedLimits, client: str, network: str, needed: int, wallet: int | None
    ) -> Refusal | None:
        """The bound that one more order would break, if any; of several, that which is in the way
        for longest.

        ``needed``: payout units with their fee; ``wallet``: what is there beside funded orders,
        None where it is not known and only the number of orders is bounded.
        """
        found = [*self._too_many(limits, client), *self._too_much(limits, client, network, needed,
                 wallet)]  # fmt: skip
        never = [each for each in found if each.frees_at is None]
        return next(iter(never), max(found, key=lambda each: each.frees_at or 0, default=None))

    def _too_many(self, limits: UnfundedLimits, client: str) -> Iterator[Refusal]:
        most, held = limits.orders_of(client), self.orders(client)
        if held >= most:
            yield Refusal(client, True, most, held, self._frees_at(client, None, held + 1 - most))

    def _too_much(
        self, limits: UnfundedLimits, client: str, network: str, needed: int, wallet: int | None
    ) -> Iterator[Refusal]:
        for scope, share in limits.shares_of(client) if wallet is not None else ():
            limit, held = (wallet or 0) * share // 100, self.units(network, scope)
            excess = held + needed - limit
            if excess > 0:
                at = None if needed > limit else self._frees_at(scope, network, excess)
                yield Refusal(scope, False, limit, held, at)

    def room(self, limits: UnfundedLimits, client: str, network: str, wallet: int) -> int:
        """The most payout units that one more order of a client may reserve."""
        if self.orders(client) >= limits.orders_of(client):
            return 0
        bounds = limits.shares_of(client)
        room = min(wallet * share // 100 - self.units(network, scope) for scope, share in bounds)
        return max(0, room)

    def _frees_at(self, scope: str, network: str | None, excess: int) -> int:
        """When reservations of a scope have expired that make up ``excess``: orders without
        ``network``, else units on it.
        """
        found = sorted(
            (held.expires_at, held.units if network else 1)
            for held in self._of.values()
            if scope in _scopes(held.client) and network in (None, held.network)
        )
        sums = accumulate(freed for _, freed in found)
        return next((at for (at, _), freed in zip(found, sums, strict=True) if freed >= excess), 0)


def _scopes(client: str) -> tuple[str, ...]:
    return (ALL, client) if is_known(client) else (ALL, BY_ADDRESS, client)
