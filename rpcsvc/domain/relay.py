"""Orders that another service settles: what its report makes of ours. Pure.

Such an order has the terms of any other, and none of its money passes through here: no deposit is
watched, nothing is paid. Its status is what the upstream last said of it, within what can follow.
What does not live here: asking the upstream (orders/upstream/follower.py), its words
(settlement/upstream/).
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.domain.order import Order, Report
from rpcsvc.domain.states import OrderStatus

_S = OrderStatus
_ANY = frozenset(OrderStatus)
# Once money is going back, it is not swapped. Whatever is before that may be long ago by the next
# report: a reorganisation can have taken the deposit away, and the order have expired without it.
MAY_BECOME: dict[OrderStatus, frozenset[OrderStatus]] = {
    _S.AWAITING_DEPOSIT: _ANY,
    _S.DEPOSIT_DETECTED: _ANY,
    _S.DEPOSIT_CONFIRMED: _ANY,
    _S.EXECUTING_SWAP: _ANY,
    _S.REFUNDING: frozenset({_S.REFUNDING, _S.REFUNDED, _S.FAILED}),
}


def reported(order: Order, status: OrderStatus, report: Report) -> Order | None:
    """The order as the upstream reports it; None when that can't follow, or says nothing new."""
    if status not in MAY_BECOME.get(order.status, ()):
        return None
    if status is order.status and report == order.report:
        return None
    return replace(order, status=status, report=report, error_message=report.error)
