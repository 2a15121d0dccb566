"""The order machine: which event may happen in which status of an order, and what follows from it.

``transition(order, event, now)`` gives the next order and the effects that follow. It is pure:
no I/O, no clock, no randomness. ``TRANSITIONS`` is the one table of what may happen in which
status; a pair that is not in it raises ``ImpossibleTransition`` and changes nothing. The
diagram in docs/lifecycle.md is generated from the table.

What does not live here is what the rules of the table do:
  - decision.py: swap, refund, wait or expire, with the rules about deposits in their order.
  - deposit_rules.py: deposits that are seen, confirmed and removed, or that do not come.
  - transfer_rules.py: payouts and refunds that are signed, published, settled or failed.
  - chunk_rules.py: TWAP orders, which are swapped chunk by chunk.
  - price_lock.py: which rate a deposit gets, and when the lock of an order ends early.
  - refund_rules.py: when an order is refunded; refunds.py: what goes back to whom.
  - deadlines.py: how long an order stays in each status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rpcsvc.domain import (
    chunk_rules,
    decision,
    deposit_rules,
    price_lock,
    refund_rules,
    relay,
    transfer_rules,
)
from rpcsvc.domain import events as ev
from rpcsvc.domain.deadlines import with_deadline
from rpcsvc.domain.order import Order, Terms
from rpcsvc.domain.states import OrderStatus
from rpcsvc.domain.steps import ImpossibleTransition, Rule, Transition

__all__ = [
    "RELAYED",
    "TRANSITIONS",
    "ImpossibleTransition",
    "Rule",
    "Transition",
    "open_order",
    "transition",
]


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
    after = relay.reported(order, event.status, event.report)
    if after is None:
        raise ImpossibleTransition(f"{event.status} says nothing new, or can't follow")
    return Transition(after)


_S = OrderStatus
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
        ev.RefundAddressGiven: Rule(refund_rules.refund_address_given, (status,)),
        ev.RefundRetried: Rule(refund_rules.refund_retried, (status,)),
    }


def _undecided_rules(*statuses: OrderStatus) -> dict[type, Rule]:
    """Rules for a refund that was signed before its order stepped back to ``statuses[0]``."""
    return {
        ev.TransferPublished: Rule(transfer_rules.published, statuses[:1]),
        ev.TransferUnknown: Rule(transfer_rules.outcome_unknown, statuses[:1]),
        ev.TransferSettled: Rule(transfer_rules.settled, statuses[:1]),
        ev.TransferFailed: Rule(transfer_rules.failed_undecided, statuses),
    }


TRANSITIONS: Mapping[OrderStatus, Mapping[type, Rule]] = {
    _S.AWAITING_DEPOSIT: {
        **_undecided_rules(_S.AWAITING_DEPOSIT),
        ev.DepositSeen: Rule(deposit_rules.seen_first, (_S.DEPOSIT_DETECTED,)),
        ev.LockBroken: Rule(price_lock.lock_broken, (_S.AWAITING_DEPOSIT,)),
        ev.DeadlinePassed: Rule(deposit_rules.expire, (_S.EXPIRED,)),
        ev.Cancelled: Rule(deposit_rules.cancel_unfunded, (_S.EXPIRED,)),
    },
    _S.DEPOSIT_DETECTED: {
        **_undecided_rules(_S.DEPOSIT_DETECTED, *_FUNDED),
        ev.DepositSeen: Rule(deposit_rules.seen_more, (_S.DEPOSIT_DETECTED,)),
        ev.LockBroken: Rule(price_lock.lock_broken, (_S.DEPOSIT_DETECTED,)),
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
        ev.Repriced: Rule(decision.repriced, _FUNDED),
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
            chunk_rules.removed_in_executing, (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED)
        ),
        ev.ChunkFilled: Rule(chunk_rules.chunk_filled, (_S.EXECUTING_SWAP,)),
        ev.FillingStopped: Rule(chunk_rules.filling_stopped, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.TransferFailed: Rule(transfer_rules.failed, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.DeadlinePassed: Rule(transfer_rules.deadline_in_executing, (_S.EXECUTING_SWAP, *_ENDED)),
    },
    _S.REFUNDING: {
        **_stays(_S.REFUNDING),
        ev.DepositConfirmed: Rule(deposit_rules.extra_confirmed, (_S.REFUNDING,)),
        ev.DepositRemoved: Rule(deposit_rules.removed_in_refunding, _ENDED),
        ev.TransferSettled: Rule(transfer_rules.settled, (_S.REFUNDING, _S.REFUNDED)),
        ev.TransferFailed: Rule(transfer_rules.failed, _ENDED),
        ev.RefundAddressGiven: Rule(refund_rules.refund_address_given, _ENDED),
        ev.RefundRetried: Rule(refund_rules.refund_retried, _ENDED),
        ev.DeadlinePassed: Rule(transfer_rules.look_again, (_S.REFUNDING,)),
    },
    _S.COMPLETED: _stays(_S.COMPLETED),
    _S.REFUNDED: _stays(_S.REFUNDED),
    _S.FAILED: _stays(_S.FAILED),
    _S.EXPIRED: _stays(_S.EXPIRED),
}

# Orders that an upstream settles: nothing happens to them but what it reports.
RELAYED: Mapping[OrderStatus, Mapping[type, Rule]] = {
    status: {
        ev.UpstreamReported: Rule(_reported, tuple(relay.MAY_BECOME.get(status, ()))),
        ev.DeadlinePassed: Rule(transfer_rules.look_again, (status,)),
    }
    for status in OrderStatus
    if not status.is_terminal
} | {status: {} for status in OrderStatus if status.is_terminal}
