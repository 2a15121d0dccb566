"""The order machine: (order, event) -> (order, effects), deadlines included. Pure.

``TRANSITIONS`` names every status that an event may lead to, and any other pair raises
ImpossibleTransition; the diagram in docs/develop/lifecycle.md is generated from it. No order waits
for ever. An order that an upstream settles changes only by its reports (``RELAYED``). Times are
ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from rpcsvc.domain import deposit_rules, refunds, transfer_rules
from rpcsvc.domain import events as ev
from rpcsvc.domain.deposit_rules import confirmation_deadline
from rpcsvc.domain.events import (
    ImpossibleTransition,
    Rule,
    Transition,
    open_transfers,
    planned_payout,
)
from rpcsvc.domain.order import OnDeadline, Order, OrderStatus, Terms

_S = OrderStatus
_ANY = frozenset(OrderStatus)
# Once money is going back, it is not swapped. What comes before that may be long ago by the next
# report: a reorganisation can have taken the deposit away, and the order have expired without it.
_MAY_BECOME: dict[OrderStatus, frozenset[OrderStatus]] = {
    _S.AWAITING_DEPOSIT: _ANY,
    _S.DEPOSIT_DETECTED: _ANY,
    _S.DEPOSIT_CONFIRMED: _ANY,
    _S.EXECUTING_SWAP: _ANY,
    _S.REFUNDING: frozenset({_S.REFUNDING, _S.REFUNDED, _S.FAILED}),
}
# What is done then depends on which deposits came until then.
DECIDED_BY_DEPOSITS: Final = frozenset({OnDeadline.EXPIRE, OnDeadline.SWAP_OR_REFUND})


def with_deadline(order: Order, now: int) -> Order:
    """The order with the deadline that its status has at ``now``; none on a terminal one."""
    if order.terms.upstream_id is not None and not order.status.is_terminal:
        return replace(order, deadline_at=_ask_at(order, now), on_deadline=OnDeadline.ASK_UPSTREAM)
    deadline = _DEADLINES.get(order.status)
    at, action = deadline(order, now) if deadline else (None, None)
    return replace(order, deadline_at=at, on_deadline=action)


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


def open_order(terms: Terms) -> Order:
    """A fresh order that waits for its deposit. Its first event is its creation."""
    order = Order(
        terms=terms,
        status=OrderStatus.AWAITING_DEPOSIT,
        status_at=terms.created_at,
        version=1,
        deadline_at=None,
        on_deadline=None,
    )
    return with_deadline(order, terms.created_at)


def transition(order: Order, event: ev.Event, now: int) -> Transition:
    """The order after ``event`` at ``now`` (ms since the epoch), and the effects to carry out.

    Raises ImpossibleTransition when the table does not know the pair, or the event does not fit
    the order's deposits, transfers or deadline.
    """
    if isinstance(event, ev.DeadlinePassed) and now < (order.deadline_at or now):
        # Seen before another event put the deadline off: what it was for is no longer due.
        raise ImpossibleTransition(f"the deadline of {order.order_id} is not over")
    table = TRANSITIONS if order.terms.upstream_id is None else RELAYED
    rule = table[order.status].get(type(event))
    if rule is None:
        raise ImpossibleTransition(f"{type(event).__name__} in {order.status}")
    result = rule.decide(order, event, now)
    if result.order.status not in rule.targets:
        raise ImpossibleTransition(
            f"{type(event).__name__} led from {order.status} to {result.order.status}"
        )
    return Transition(_stamp(order, result.order, now), result.effects)


def _stamp(before: Order, after: Order, now: int) -> Order:
    after = replace(after, version=before.version + 1)
    if after.status is not before.status:
        after = replace(after, status_at=now)
        if after.status.is_terminal:
            after = replace(after, completed_at=now)
    return with_deadline(after, now)


def _reported(order: Order, event: ev.UpstreamReported, _now: int) -> Transition:
    if event.status not in _MAY_BECOME.get(order.status, ()):
        raise ImpossibleTransition(f"{event.status} can't follow {order.status}")
    if event.status is order.status and event.report == order.report:
        raise ImpossibleTransition(f"{event.status} says nothing new")
    return Transition(
        replace(order, status=event.status, report=event.report, error_message=event.report.error)
    )


# Where a refund ends at once if there is nothing (more) to send: all dust, or gone.
_ENDED = (_S.REFUNDING, _S.REFUNDED, _S.FAILED)
_FUNDED = (_S.DEPOSIT_CONFIRMED, _S.EXECUTING_SWAP, *_ENDED)


def _stays(status: OrderStatus) -> dict[type, Rule]:
    """Rules of every status in which the decision is made: deposits and refunds go on beside it."""
    return {
        ev.DepositSeen: Rule(deposit_rules.seen_more, (status,)),
        ev.DepositConfirmed: Rule(deposit_rules.extra_confirmed, (status,)),
        ev.DepositRemoved: Rule(deposit_rules.removed_later, (status,)),
        ev.TransferPrepared: Rule(transfer_rules.prepared, (status,)),
        ev.TransferPublished: Rule(transfer_rules.published, (status,)),
        ev.TransferUnknown: Rule(transfer_rules.outcome_unknown, (status,)),
        ev.TransferSettled: Rule(transfer_rules.settled, (status,)),
        ev.TransferFailed: Rule(transfer_rules.failed, (status,)),
        ev.RefundAddressGiven: Rule(refunds.refund_address_given, (status,)),
        ev.RefundRetried: Rule(refunds.refund_retried, (status,)),
    }


def _undecided_rules(*statuses: OrderStatus) -> dict[type, Rule]:
    """Rules for a refund that was signed before its order stepped back to ``statuses[0]``."""
    return {
        ev.TransferPublished: Rule(transfer_rules.published, statuses[:1]),
        ev.TransferUnknown: Rule(transfer_rules.outcome_unknown, statuses[:1]),
        ev.TransferSettled: Rule(transfer_rules.settled, statuses[:1]),
        ev.TransferFailed: Rule(transfer_rules.failed_undecided, statuses),
    }


def _relayed_rules(status: OrderStatus) -> dict[type, Rule]:
    if status.is_terminal:
        return {}
    return {
        ev.UpstreamReported: Rule(_reported, tuple(_MAY_BECOME.get(status, ()))),
        ev.DeadlinePassed: Rule(transfer_rules.look_again, (status,)),
    }


TRANSITIONS: Mapping[OrderStatus, Mapping[type, Rule]] = {
    _S.AWAITING_DEPOSIT: {
        **_undecided_rules(_S.AWAITING_DEPOSIT),
        ev.DepositSeen: Rule(deposit_rules.seen_first, (_S.DEPOSIT_DETECTED,)),
        ev.LockBroken: Rule(deposit_rules.lock_broken, (_S.AWAITING_DEPOSIT,)),
        ev.DeadlinePassed: Rule(deposit_rules.expire, (_S.EXPIRED,)),
        ev.Cancelled: Rule(deposit_rules.cancel_unfunded, (_S.EXPIRED,)),
    },
    _S.DEPOSIT_DETECTED: {
        **_undecided_rules(_S.DEPOSIT_DETECTED, *_FUNDED),
        ev.DepositSeen: Rule(deposit_rules.seen_more, (_S.DEPOSIT_DETECTED,)),
        ev.LockBroken: Rule(deposit_rules.lock_broken, (_S.DEPOSIT_DETECTED,)),
        ev.DepositConfirmed: Rule(
            deposit_rules.confirmed_in_detected, (_S.DEPOSIT_DETECTED, *_FUNDED)
        ),
        ev.DepositRemoved: Rule(
            deposit_rules.removed_in_detected, (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED)
        ),
        ev.DeadlinePassed: Rule(
            deposit_rules.deadline_in_detected, (_S.DEPOSIT_DETECTED, *_FUNDED, _S.EXPIRED)
        ),
    },
    _S.DEPOSIT_CONFIRMED: {
        **_stays(_S.DEPOSIT_CONFIRMED),
        ev.DepositConfirmed: Rule(deposit_rules.confirmed_before_payout, (_S.DEPOSIT_CONFIRMED,)),
        ev.DepositRemoved: Rule(
            deposit_rules.removed_before_payout,
            (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED),
        ),
        ev.Repriced: Rule(deposit_rules.repriced, _FUNDED),
        ev.TransferPrepared: Rule(
            transfer_rules.prepared, (_S.DEPOSIT_CONFIRMED, _S.EXECUTING_SWAP)
        ),
        ev.TransferFailed: Rule(transfer_rules.failed_before_payout, _FUNDED),
        ev.DeadlinePassed: Rule(transfer_rules.cancel_and_refund, _ENDED),
    },
    _S.EXECUTING_SWAP: {
        **_stays(_S.EXECUTING_SWAP),
        ev.TransferSettled: Rule(transfer_rules.settled, (_S.EXECUTING_SWAP, _S.COMPLETED)),
        ev.DepositRemoved: Rule(
            transfer_rules.removed_in_executing,
            (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED),
        ),
        ev.ChunkFilled: Rule(transfer_rules.chunk_filled, (_S.EXECUTING_SWAP,)),
        ev.FillingStopped: Rule(transfer_rules.filling_stopped, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.TransferFailed: Rule(transfer_rules.failed, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.DeadlinePassed: Rule(transfer_rules.deadline_in_executing, (_S.EXECUTING_SWAP, *_ENDED)),
    },
    _S.REFUNDING: {
        **_stays(_S.REFUNDING),
        ev.DepositConfirmed: Rule(deposit_rules.extra_confirmed, (_S.REFUNDING,)),
        ev.DepositRemoved: Rule(deposit_rules.removed_in_refunding, _ENDED),
        ev.TransferSettled: Rule(transfer_rules.settled, (_S.REFUNDING, _S.REFUNDED)),
        ev.TransferFailed: Rule(transfer_rules.failed, _ENDED),
        ev.RefundAddressGiven: Rule(refunds.refund_address_given, _ENDED),
        ev.RefundRetried: Rule(refunds.refund_retried, _ENDED),
        ev.DeadlinePassed: Rule(transfer_rules.look_again, (_S.REFUNDING,)),
    },
    _S.COMPLETED: _stays(_S.COMPLETED),
    _S.REFUNDED: _stays(_S.REFUNDED),
    _S.FAILED: _stays(_S.FAILED),
    _S.EXPIRED: _stays(_S.EXPIRED),
}
# Orders that an upstream settles: nothing happens to them but what it reports.
RELAYED: Mapping[OrderStatus, Mapping[type, Rule]] = {
    status: _relayed_rules(status) for status in OrderStatus
}
