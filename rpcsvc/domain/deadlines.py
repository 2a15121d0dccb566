"""The deadline of each status, and what is done when it is over: no order waits for ever.

What does not live here: the doing (the rules of ``DeadlinePassed``, found in transition.py's
tables), the clock (it is passed in), and how long each wait is (the order's ``timeouts``).
Times are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rpcsvc.domain.order import Order
from rpcsvc.domain.states import OnDeadline, OrderStatus
from rpcsvc.domain.steps import open_transfers, planned_payout

# What is done then depends on which deposits came until then.
DECIDED_BY_DEPOSITS: Final = frozenset({OnDeadline.EXPIRE, OnDeadline.SWAP_OR_REFUND})


def with_deadline(order: Order, now: int) -> Order:
    """The order with the deadline that its status has at ``now``; none on a terminal one."""
    if order.terms.upstream_id is not None and not order.status.is_terminal:
        return replace(order, deadline_at=_ask_at(order, now), on_deadline=OnDeadline.ASK_UPSTREAM)
    deadline = _DEADLINES.get(order.status)
    at, action = deadline(order, now) if deadline else (None, None)
    return replace(order, deadline_at=at, on_deadline=action)


def confirmation_deadline(order: Order) -> int:
    """Until when the order waits for its deposits to be confirmed."""
    last_seen = max((d.first_seen_at for d in order.deposits if d.is_active), default=0)
    return last_seen + order.terms.timeouts.confirm


def _ask_at(order: Order, now: int) -> int:
    """When the upstream will have been asked again, at the latest; the follower asks anyway.

    The deadline moves nothing, so it is put off for as long as the status has lasted. One that
    never ends costs a line of history each time that this doubles, and not one every ten minutes.
    """
    return now + max(order.terms.timeouts.payout_check, now - order.status_at)


def _awaiting_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    late_window = order.terms.timeouts.late_window
    return max(order.terms.expires_at, now) + late_window, OnDeadline.EXPIRE


def _detected_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    if now < order.terms.expires_at and order.due_units > 0:
        return order.terms.expires_at, OnDeadline.SWAP_OR_REFUND
    return confirmation_deadline(order), OnDeadline.SWAP_OR_REFUND


def _confirmed_deadline(order: Order, _now: int) -> tuple[int, OnDeadline]:
    return order.status_at + order.terms.timeouts.prepare, OnDeadline.REFUND


def _executing_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    if planned_payout(order) is not None:  # the chunks are swapped, and nothing is signed yet
        if order.on_deadline is OnDeadline.REFUND:
            return order.deadline_at or now, OnDeadline.REFUND
        return now + order.terms.timeouts.prepare, OnDeadline.REFUND
    if order.on_deadline is OnDeadline.REPUBLISH and (order.deadline_at or 0) > now:
        return order.deadline_at or now, OnDeadline.REPUBLISH
    return now + order.terms.timeouts.payout_check, OnDeadline.REPUBLISH


def _refunding_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    if open_transfers(order):
        return _executing_deadline(order, now)
    return now + order.terms.timeouts.refund_reminder, OnDeadline.REMIND


_DEADLINES: dict[OrderStatus, Callable[[Order, int], tuple[int, OnDeadline]]] = {
    OrderStatus.AWAITING_DEPOSIT: _awaiting_deadline,
    OrderStatus.DEPOSIT_DETECTED: _detected_deadline,
    OrderStatus.DEPOSIT_CONFIRMED: _confirmed_deadline,
    OrderStatus.EXECUTING_SWAP: _executing_deadline,
    OrderStatus.REFUNDING: _refunding_deadline,
}
