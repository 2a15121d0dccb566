"""Reservations: the amounts that open orders may still take from each wallet, and their limits.

They are rows, written by the commit that changes the order; their sums are checked in the
transaction that makes one. A reservation of an unfunded order ends when the order expires; a later
deposit is swapped only if the wallet can pay for it then. Limits on unfunded orders are per client
and in total; shares are percentages of what the wallet of a network holds in addition to funded
orders.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.clients import is_known
from rpcsvc.domain.deposit_rules import units_by_rate
from rpcsvc.domain.order import (
    AWAITS_DEPOSIT,
    Deposit,
    Order,
    OrderStatus,
    Transfer,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.pricing import Direction

# ``details.reason`` of refusals: tells them from one for too many calls.
UNFUNDED_REASON: Final = "unfunded_orders"
TICKETS_REASON: Final = "tickets"
# Scopes of a sum that are no client's; the first is of funded orders, too.
TOTAL: Final = "total"
ALL: Final = "all"
BY_ADDRESS: Final = "by_address"

# Atomic units by network.
Units = dict[str, int]
# Stands for the wallets of an upstream: reservations there are counted in USDC units.
UPSTREAM: Final = "upstream"

_OVER: Final = (TransferState.SETTLED, TransferState.FAILED, TransferState.CANCELLED)


# --- limits on unfunded orders -------------------------------------------------------------------


class Reservation(NamedTuple):
    """Units that an order reserves on ``network``, of its payout, for money that has not come.

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
        """Return how many unfunded orders a client may have."""
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
    """The reservations on a network, in payout units: ``total`` of all orders, and of unfunded
    orders for each scope that bounds a client (``UnfundedLimits.shares_of``).

    ``orders``: how many unfunded orders the client has, on all networks.
    """

    total: int
    unfunded: Mapping[str, int]
    orders: int

    @property
    def funded(self) -> int:
        """The units reserved for money that has come."""
        return self.total - self.unfunded.get(ALL, 0)


class Admission(Struct, frozen=True):
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
    """Return the bounds that one more order would break.

    ``needed``: payout units with their fee; ``wallet``: its holdings beyond funded orders.
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


# --- reservations of orders ----------------------------------------------------------------------


class Holdings(Struct, frozen=True):
    """The amounts that a wallet can pay out, in atomic units.

    ``free`` can be paid now, fee included; ``locked`` comes back within ``seconds_to_unlock``.
    """

    free: int
    locked: int
    seconds_to_unlock: int


class Claims(NamedTuple):
    """The units on a network that orders and withdrawals may still take, less signed transfers.

    ``returnable``: the part of ``total`` that may have to go back to depositors, planned refunds
    included. ``above_quotes``: the part for payouts above what their orders were quoted.
    """

    total: int
    returnable: int
    above_quotes: int


def units_to_leave(order: Order, transfer: Transfer, claims: Claims) -> int:
    """Return the units that a wallet must have left, or coming back, after an unsigned transfer.

    A refund waits for nobody. A payout never takes deposits that may have to go back; above what
    was quoted (too much was deposited, or the rate rose) it takes no money that another order was
    quoted. What others get above their quotes it may take: an order that is overpaid, for more than
    the wallet has, holds up no other. An order that waits too long is refunded at its deadline, so
    that none waits for ever.
    """
    if transfer.kind is TransferKind.REFUND:
        return 0
    if transfer.units <= order.terms.expected_output:
        return claims.returnable
    return claims.total - claims.above_quotes - order.terms.expected_output - transfer.fee


class ReservationChange(Struct, frozen=True):
    """The change of an order's reservations that goes with a change of the order.

    ``funded``: units by network that change; 0: none any more. ``unfunded``: units for deposits
    that have not come; None: none any more. An unfunded reservation that does not begin now changes
    its units only where it has not ended.
    """

    order_id: str
    funded: Mapping[str, int]
    unfunded: Reservation | None
    begins: bool


def reservations_of(order: Order) -> Units:
    """Return the atomic units by network that an order may still be paid: its output, and its
    deposits.

    A deposit counts until its payout is settled, since it may have to go back; money that waits for
    a refund address, also after the order is over, until its refund is settled. The total is more
    than can become due; the difference is the margin.
    """
    reserved: Units = defaultdict(int)
    for transfer in order.transfers:
        if transfer.state not in _OVER:
            reserved[transfer.network] += transfer.units + transfer.fee
    if _may_be_paid_out(order):
        reserved[order.terms.payout_network] += _output(order)
    reserved[order.terms.deposit_network] += _returnable(order)
    return {network: units for network, units in reserved.items() if units}


def unfunded_units(order: Order) -> int:
    """Return the payout units that an order reserves for deposits that have not come.

    For an order that an upstream settles, return its worth in USDC units. The worth of a bridge
    order, which takes any amount, is not known.
    """
    if order.status not in AWAITS_DEPOSIT:
        return 0
    if order.terms.upstream_id is not None:
        return _relayed_worth(order)
    if not _may_be_paid_out(order):
        return 0
    return max(0, _output(order) - _output_with(order, 0))


def funded_reservations_of(order: Order) -> Units:
    """Return what an order needs once its reservation has ended: nothing for missing deposits."""
    reserved, network = reservations_of(order), order.terms.payout_network
    return {**reserved, network: reserved.get(network, 0) - unfunded_units(order)}


def _relayed_worth(order: Order) -> int:
    terms = order.terms
    if order.status is not OrderStatus.AWAITING_DEPOSIT or terms.is_bridge:
        return 0
    is_usdc_paid = terms.direction is Direction.XMR_TO_USDC
    return terms.expected_output if is_usdc_paid else terms.deposit_amount


def _may_be_paid_out(order: Order) -> bool:
    """Return whether a payout may yet be planned: not while, or after, all of it is sent back."""
    if order.status.is_terminal or order.status is OrderStatus.REFUNDING:
        return False
    return order.payout is None or order.payout.state is TransferState.FAILED


def _returnable(order: Order) -> int:
    """Deposit units that may have to go back and that are in no refund yet."""
    if _is_paid(order.payout):
        return order.pending_units + order.leftover
    return sum(deposit.units for deposit in _not_refunded(order))


def _not_refunded(order: Order) -> list[Deposit]:
    refunds = {refund.transfer_id for refund in order.refunds}
    return [
        deposit
        for deposit in order.deposits
        if deposit.is_active and not deposit.is_dust and deposit.transfer_id not in refunds
    ]


def _output(order: Order) -> int:
    """Return what the order pays out, with its fee, if all that came so far is swapped.

    Deposits above the maximum together are refunded: nobody holds up a wallet by sending them.
    """
    return _output_with(order, max(0, order.terms.deposit_amount - _returnable(order)))


def _output_with(order: Order, missing: int) -> int:
    """The payout and its fee for the deposits that came, each at its rate, and ``missing`` more at
    the locked rate.
    """
    terms, came = order.terms, _not_refunded(order)
    by_rate = Counter(units_by_rate(came, terms.price.rate))
    by_rate[terms.price.rate] += missing
    total = by_rate.total()
    if total == 0:
        return 0
    if total > terms.max_deposit:
        by_rate = Counter({terms.price.rate: terms.max_deposit})
    return terms.payout(by_rate, is_priced=True)[0] + terms.price.payout_fee


def _is_paid(payout: Transfer | None) -> bool:
    return payout is not None and payout.state is TransferState.SETTLED


def unfunded_reservation_of(order: Order, client: str = "") -> Reservation | None:
    """Return what an order reserves for deposits that have not come, until it expires."""
    terms, units = order.terms, unfunded_units(order)
    if terms.upstream_id is not None:
        awaits = order.status is OrderStatus.AWAITING_DEPOSIT
        return _reserved_by(order, client, UPSTREAM, units) if awaits else None
    return _reserved_by(order, client, terms.payout_network, units) if units else None


def _reserved_by(order: Order, client: str, network: str, units: int) -> Reservation:
    terms = order.terms
    return Reservation(network, units, client, terms.deposit_network, terms.expires_at)


def funded_units(order: Order) -> Units:
    """Return the reserved units for money that has come, by network; none if an upstream pays."""
    if order.terms.upstream_id is not None:
        return {}
    return {network: units for network, units in funded_reservations_of(order).items() if units}


# What becomes of the reservations of an order, by itself before (None: it is new) and as it is now,
# and by who asks for it.
Counting = Callable[[Order | None, Order, str], ReservationChange | None]


def counted(before: Order | None, after: Order, client: str = "") -> ReservationChange | None:
    """Return how a change of an order changes its reservations, or None.

    An unfunded reservation that expired stays ended, however much later deposits leave open.
    """
    funded = {} if before is None else funded_units(before)
    now = funded_units(after)
    changed = {
        network: now.get(network, 0)
        for network in sorted({*funded, *now})
        if funded.get(network) != now.get(network)
    }
    held = None if before is None else unfunded_reservation_of(before)
    unfunded = unfunded_reservation_of(after, client)
    if not changed and held == unfunded:
        return None
    return ReservationChange(after.order_id, changed, unfunded, begins=held is None)


def uncounted(_before: Order | None, _after: Order, _client: str = "") -> None:
    """Count no reservation: for wallets that take every order."""
