"""When an order is refunded: the whole of it, or what its decision does not cover.

What does not live here: which deposits go back, to whom and how much arrives (refunds.py), why an
order is not swapped (decision.py, chunk_rules.py, transfer_rules.py), and what a chain makes of a
refund (transfer_rules.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rpcsvc.domain import events as ev
from rpcsvc.domain.order import REFUND_ADDRESS, REFUND_BLOCKED, Order
from rpcsvc.domain.refunds import plan_refunds
from rpcsvc.domain.states import OrderStatus, TransferState
from rpcsvc.domain.steps import ImpossibleTransition, Transition, open_transfers

_DUST: Final = "They are worth no more than the fee of sending them back, and are held."


def refund(order: Order, reason: str) -> Transition:
    """Send everything unspent back and end the order when that is done."""
    order = replace(order, status=OrderStatus.REFUNDING, error_message=reason)
    order, effects = plan_refunds(order)
    return Transition(finish_refunding(order), effects)


def refund_extra(order: Order) -> Transition:
    """Send back what the decision does not cover, whatever the order's status is."""
    order, effects = plan_refunds(order)
    return Transition(finish_refunding(order), effects)


def finish_refunding(order: Order) -> Order:
    """Leave ``refunding`` when nothing is left to send: refunded, or failed if all was dust."""
    if order.status is not OrderStatus.REFUNDING or order.unspent or open_transfers(order):
        return order
    if any(t.state is TransferState.SETTLED for t in order.refunds):
        return replace(order, status=OrderStatus.REFUNDED)
    if any(d.is_dust for d in order.deposits):
        order = replace(order, error_message=f"{order.error_message or ''} {_DUST}".lstrip())
    return replace(order, status=OrderStatus.FAILED)


def refund_address_given(order: Order, event: ev.RefundAddressGiven, _now: int) -> Transition:
    """Refund what has waited for an address. Raises ImpossibleTransition if nothing has."""
    if order.action_required != REFUND_ADDRESS:
        raise ImpossibleTransition("the order does not wait for a refund address")
    return refund_extra(replace(order, refund_address=event.address))


def refund_retried(order: Order, _event: ev.RefundRetried, _now: int) -> Transition:
    """Try the agreed refund address again. Raises ImpossibleTransition if none has failed."""
    if order.action_required != REFUND_BLOCKED:
        raise ImpossibleTransition("no refund to an agreed address has failed")
    order, effects = plan_refunds(order, again=True)
    return Transition(finish_refunding(order), effects)
