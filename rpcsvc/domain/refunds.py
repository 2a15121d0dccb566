"""Refunds: which deposits go back, to whom, how much arrives, and when an order is refunded.

A refund takes whole deposits: those of one recipient share one transfer and its fee. What is left
of the deposits of a TWAP order that was swapped in part goes with them. A deposit that is worth no
more than the fee is held as dust and shown.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct, field
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import (
    AdvanceTransfer,
    Effect,
    ImpossibleTransition,
    Transition,
    leftover_in,
    mark,
    next_transfer_id,
    open_transfers,
)
from rpcsvc.domain.order import (
    REFUND_ADDRESS,
    REFUND_BLOCKED,
    Deposit,
    DepositState,
    Order,
    OrderReason,
    OrderStatus,
    Transfer,
    TransferKind,
    TransferState,
)


def plan_refunds(order: Order, *, again: bool = False) -> tuple[Order, tuple[Effect, ...]]:
    """Plan a refund of every unspent deposit whose recipient is known; write dust off.

    Returns the order with the planned transfers and the effects that carry them out.
    ``action_required`` says whether a deposit is left, and what it waits for. ``again``: also to
    the agreed address when a refund to it has failed before.
    """
    effects: list[Effect] = []
    for recipient, share in _by_recipient(order, again=again).items():
        units = share.units - order.terms.refund_fee
        if units <= 0:
            order = mark(order, share.deposits, is_dust=True)
            continue
        if recipient is None:
            continue  # worth sending back, but to whom has to be said first
        transfer = _refund(order, recipient, units)
        order = mark(order, share.deposits, transfer_id=transfer.transfer_id)
        order = replace(
            order,
            transfers=(*order.transfers, transfer),
            leftover=order.leftover - share.leftover,
        )
        effects.append(AdvanceTransfer(transfer.transfer_id))
    waits = bool(order.unspent) or _due_leftover(order) > order.terms.refund_fee
    return replace(order, action_required=_needed(order) if waits else None), tuple(effects)


def _needed(order: Order) -> str:
    """The action that a refund without a recipient waits for."""
    return REFUND_ADDRESS if order.terms.refund_address is None else REFUND_BLOCKED


class _Share(Struct):
    """One recipient's part of the refunds, in deposit units."""

    deposits: list[Deposit] = field(default_factory=list)
    leftover: int = 0

    @property
    def units(self) -> int:
        return self.leftover + sum(d.units for d in self.deposits)


def _by_recipient(order: Order, *, again: bool) -> dict[str | None, _Share]:
    shares: dict[str | None, _Share] = defaultdict(_Share)
    for deposit in order.unspent:
        shares[_recipient(order, deposit.sender, again=again)].deposits.append(deposit)
    for sender, units in _leftovers(order).items():
        if units:
            shares[_recipient(order, sender, again=again)].leftover += units
    return shares


def _leftovers(order: Order) -> dict[str | None, int]:
    """Return the leftover that is due, by its sender, without what is already on its way to that
    sender.

    Nobody gets what another has sent: deposits are swapped in the order in which they were seen.
    """
    due, going = _due_leftover(order), _leftovers_under_way(order)
    if not due:
        return {}
    paid = _paid_out(order)
    rest, shares = due + sum(going.values()), dict.fromkeys((d.sender for d in reversed(paid)), 0)
    for deposit in reversed(paid):
        part = min(deposit.units, rest)
        shares[deposit.sender] += part
        rest -= part
    for sender, share in shares.items():
        shares[sender] = min(due, max(0, share - (going[sender] if sender else 0)))
        due -= shares[sender]
    return shares


def _leftovers_under_way(order: Order) -> dict[str, int]:
    """The part of the leftover that was, or may yet be, refunded, by recipient."""
    going: dict[str, int] = defaultdict(int)
    for refund in order.refunds:
        if refund.state not in (TransferState.FAILED, TransferState.CANCELLED):
            going[refund.address] += leftover_in(order, refund.transfer_id)
    return going


def _due_leftover(order: Order) -> int:
    """The leftover goes back once its payout is settled: until then all may still be refunded.

    And while a deposit that it is of has gone and come back, not before that is confirmed again.
    """
    is_due = order.status is OrderStatus.COMPLETED and not any(
        d.state is DepositState.SEEN for d in _paid_out(order)
    )
    return order.leftover if is_due else 0


def _paid_out(order: Order) -> list[Deposit]:
    """Return the deposits that the payout was made of and that are still there."""
    payout_id = order.payout.transfer_id if order.payout else None
    return [d for d in order.deposits if d.transfer_id == payout_id and d.is_active]


def _recipient(order: Order, sender: str | None, *, again: bool) -> str | None:
    """The refund address for a deposit of ``sender``; None when it is unknown or was refused.

    It is the agreed address, and nothing else where there is one. Otherwise it is a known sender,
    then the address that the session has named: that can't redirect what another sender has paid.
    An address that a refund has already failed to reach is not tried again, unless ``again`` asks
    for the agreed one.
    """
    agreed = order.terms.refund_address
    if agreed is not None:
        return None if has_refused(order, agreed) and not again else agreed
    known = sender if order.terms.senders_can_be_refunded else None
    candidates = (known, order.refund_address)
    return next((each for each in candidates if each and not has_refused(order, each)), None)


def has_refused(order: Order, address: str) -> bool:
    """Return whether a refund has failed to reach the address."""
    failed = (t.address for t in order.refunds if t.state is TransferState.FAILED)
    return address in failed


def _refund(order: Order, recipient: str, units: int) -> Transfer:
    return Transfer(
        transfer_id=next_transfer_id(order, TransferKind.REFUND),
        kind=TransferKind.REFUND,
        network=order.terms.deposit_network,
        asset=order.terms.deposit_asset,
        address=recipient,
        units=units,
        fee=order.terms.refund_fee,
    )


def refund(order: Order, reason: OrderReason) -> Transition:
    """Refund everything unspent, and end the order when that is settled."""
    order = replace(order, status=OrderStatus.REFUNDING, error_message=reason.text)
    order, effects = plan_refunds(order)
    return Transition(finish_refunding(order), effects)


def refund_extra(order: Order) -> Transition:
    """Refund deposits that the decision does not cover, in any status."""
    order, effects = plan_refunds(order)
    return Transition(finish_refunding(order), effects)


def finish_refunding(order: Order) -> Order:
    """Leave ``refunding`` when nothing is left to send: refunded, or failed if all was dust."""
    if order.status is not OrderStatus.REFUNDING or order.unspent or open_transfers(order):
        return order
    if any(t.state is TransferState.SETTLED for t in order.refunds):
        return replace(order, status=OrderStatus.REFUNDED)
    if any(d.is_dust for d in order.deposits):
        reasons = f"{order.error_message or ''} {OrderReason.DUST.text}".lstrip()
        order = replace(order, error_message=reasons)
    return replace(order, status=OrderStatus.FAILED)


def refund_address_given(order: Order, event: ev.RefundAddressGiven, _now: int) -> Transition:
    """Refund the deposits that wait for an address. Raises ImpossibleTransition if none does."""
    if order.action_required != REFUND_ADDRESS:
        raise ImpossibleTransition("the order does not wait for a refund address")
    return refund_extra(replace(order, refund_address=event.address))


def refund_retried(order: Order, _event: ev.RefundRetried, _now: int) -> Transition:
    """Try the agreed refund address again. Raises ImpossibleTransition if none has failed."""
    if order.action_required != REFUND_BLOCKED:
        raise ImpossibleTransition("no refund to an agreed address has failed")
    order, effects = plan_refunds(order, again=True)
    return Transition(finish_refunding(order), effects)


def waiting_units(order: Order) -> int:
    """Deposit units that wait for a refund address, before the refund's fee."""
    return sum(deposit.units for deposit in order.unspent) + order.leftover
