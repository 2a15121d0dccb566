"""Reservations: the amounts that open orders may still take from each wallet.

It is in rows, written by the commit that changes the order; their sums are checked in the
transaction that makes one. A reservation of an unfunded order ends when the order expires; a later
deposit is swapped only if the wallet can pay for it then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.deposit_rules import units_by_rate
from rpcsvc.domain.order import AWAITS_DEPOSIT, Deposit, Order, OrderStatus, Transfer, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.unfunded import Reservation

# Atomic units by network.
Units = dict[str, int]
# Stands for the wallets of an upstream: reservations there are counted in USDC units.
UPSTREAM: Final = "upstream"

_OVER: Final = (TransferState.SETTLED, TransferState.FAILED, TransferState.CANCELLED)


class Holdings(Struct, frozen=True):
    """The amounts that a wallet can pay out, in atomic units.

    ``free`` can be paid now, fee included; ``locked`` comes back within ``seconds_to_unlock``.
    """

    free: int
    locked: int
    seconds_to_unlock: int


class ReservationChange(NamedTuple):
    """How the reservations of an order change with it (domain/reservations.py).

    ``funded``: units by network, of those that change; 0: none any more. ``unfunded``: what is
    reserved for deposits that have not come; None: nothing any more. One that does not begin now
    changes its units only where it has not ended.
    """

    order_id: str
    funded: Mapping[str, int]
    unfunded: Reservation | None
    begins: bool


def reservations_of(order: Order) -> Units:
    """Atomic units by network that an order may still be paid: its output, and what it sent in.

    A deposit counts until its payout is settled, since it may have to go back; what waits for a
    refund address, also of an order that is over, until its refund is settled. All of it together
    is more than can become due; the difference is the margin.
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
    """Whether a payout may yet be planned: not while, or after, all of it is sent back."""
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

    A deposit above the maximum is refunded: nobody holds up a wallet by sending one.
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
    return terms.price.payout(terms.direction, by_rate)[0] + terms.price.payout_fee


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
    """For wallets that take every order."""
