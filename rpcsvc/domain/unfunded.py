"""Limits on the reservations of unfunded orders: per client, and in total.

A reservation counts until its order is funded, ends or expires. Shares are percentages of what the
wallet of a network holds beside funded orders.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv6Network
from typing import Final, NamedTuple

from msgspec import Struct

ADDRESS: Final = "address"
# ``details.reason`` of refusals: tells them from one for too many calls.
UNFUNDED_REASON: Final = "unfunded_orders"
TICKETS_REASON: Final = "tickets"
# Scopes of a sum that are no client's; the first is of funded orders, too.
TOTAL: Final = "total"
ALL: Final = "all"
BY_ADDRESS: Final = "by_address"
# The largest IPv6 network that one customer is given (RFC 6177).
_CUSTOMER_PREFIX: Final = 48


class Client(NamedTuple):
    """The caller that asks for an order.

    ``kind`` is ADDRESS for a caller known by its network address alone; ``name`` is then an IPv4
    address or an IPv6 /64. Other kinds name a token, an integrator or the UNIX socket.
    """

    kind: str
    name: str = ""

    def stored(self, secret: bytes) -> str:
        """The client as kept with its orders: the kind, and a keyed hash of the name."""
        digest = hmac.new(secret, f"{self.kind}:{self.name}".encode(), hashlib.sha256)
        return f"{self.kind}:{digest.hexdigest()[:24]}"

    @property
    def customer(self) -> Client:
        """The client as places are shared: an IPv6 /64 counts as its /48.

        The owner of a /48 has 65,536 networks of /64, and would count as many clients.
        """
        if self.kind != ADDRESS or ":" not in self.name:
            return self
        network = IPv6Network(self.name).supernet(new_prefix=_CUSTOMER_PREFIX)
        return Client(ADDRESS, str(network))


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


class UnfundedLimits(Struct, frozen=True):
    """The operator's bounds (settings ``orders.unfunded_*``): percentages, and orders."""

    share: int
    address_total_share: int
    address_share: int
    address_orders: int
    token_share: int
    token_orders: int
    address_orders_a_day: int
    address_authorizations_a_day: int

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


class ExceededBound(NamedTuple):
    """The bound that an order would break. ``scope`` is ALL, BY_ADDRESS or the client.

    ``limit`` and ``held`` are payout units, or orders when ``is_count``. ``frees_at`` (ms) is when
    reservations that expire make room, None when the order is above the bound by itself.
    """

    scope: str
    is_count: bool
    limit: int
    held: int
    frees_at: int | None


class Reserved(NamedTuple):
    """What is reserved on a network, in payout units: ``total`` by all orders, and by unfunded ones
    for each scope that bounds a client (``UnfundedLimits.shares_of``). ``orders``: how many
    unfunded ones the client has, on all networks.
    """

    total: int
    unfunded: Mapping[str, int]
    orders: int

    @property
    def funded(self) -> int:
        """The units reserved for money that has come."""
        return self.total - self.unfunded.get(ALL, 0)


class Admission(NamedTuple):
    """Who asks for an order, as stored, and what must hold in the transaction that makes it, with
    the order counted: ``units`` are the most on the network by scope, ``orders`` the most unfunded
    ones of the client, ``orders_today`` the most that it makes in a day. None: not bounded.
    """

    client: str
    units: tuple[tuple[str, int], ...] = ()
    orders: int | None = None
    orders_today: int | None = None


class Excess(NamedTuple):
    """A bound that an order would break, and by how much: units, or orders if ``is_count``."""

    scope: str
    is_count: bool
    limit: int
    held: int
    needed: int

    def refusal(self, network: str, unfunded: Iterable[Reservation]) -> ExceededBound:
        """The bound with the time when enough of ``unfunded`` expires; else the last of it."""
        found = sorted(
            (each.expires_at, 1 if self.is_count else each.units)
            for each in unfunded
            if self.scope in scopes_of(each.client) and (self.is_count or each.network == network)
        )
        missing, sum_freed, at = self.held + self.needed - self.limit, 0, 0
        for at, freed in found:  # noqa: B007 - the one that it stops at
            sum_freed += freed
            if sum_freed >= missing:
                break
        is_too_large = not self.is_count and self.needed > self.limit
        return ExceededBound(
            self.scope, self.is_count, self.limit, self.held, None if is_too_large else at
        )


def excesses(
    limits: UnfundedLimits, client: str, needed: int, wallet: int, reserved: Reserved
) -> list[Excess]:
    """The bounds that one more order would break; ``needed``: payout units with their fee;
    ``wallet``: what is there beside funded orders.
    """
    found = [Excess(client, True, limits.orders_of(client), reserved.orders, 1)]
    for scope, most in bounds_of(limits, client, wallet):
        found.append(Excess(scope, False, most, reserved.unfunded.get(scope, 0), needed))
    return [each for each in found if each.held + each.needed > each.limit]


def worst(refusals: Sequence[ExceededBound]) -> ExceededBound:
    """Return the bound, of several, that blocks the order for longest."""
    never = [each for each in refusals if each.frees_at is None]
    return never[0] if never else max(refusals, key=lambda each: each.frees_at or 0)


def bounds_of(limits: UnfundedLimits, client: str, wallet: int) -> list[tuple[str, int]]:
    """The scopes whose sums bound a client's next order, each with its most payout units."""
    return [(scope, wallet * share // 100) for scope, share in limits.shares_of(client)]


def room(limits: UnfundedLimits, client: str, wallet: int, reserved: Reserved) -> int:
    """The most payout units that one more order of a client may reserve."""
    if reserved.orders >= limits.orders_of(client):
        return 0
    bounds = bounds_of(limits, client, wallet)
    return max(0, min(most - reserved.unfunded.get(scope, 0) for scope, most in bounds))


def scopes_of(client: str) -> tuple[str, ...]:
    """The scopes in whose sums the reservations of a client are."""
    return (ALL, client) if is_known(client) else (ALL, BY_ADDRESS, client)
