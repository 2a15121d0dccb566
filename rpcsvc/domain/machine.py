"""The order machine: (order, event) -> (order, effects), deadlines included. Pure.

``TRANSITIONS`` names every status that an event may lead to, and any other pair raises
ImpossibleTransition; the diagram in docs/develop/lifecycle.md is generated from it. No order waits
for ever. Nothing is signed for a TWAP order until its last chunk is swapped, or no fair rate has
come for too long. An order that an upstream settles changes only by its reports (``RELAYED``).
Times are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from rpcsvc.domain import deposit_rules, refunds, twap
from rpcsvc.domain import events as ev
from rpcsvc.domain.deposit_rules import (
    cancel_planned,
    confirmation_deadline,
    decide,
    pay,
    removed_later,
)
from rpcsvc.domain.events import (
    AdvanceTransfer,
    Effect,
    FillChunk,
    ImpossibleTransition,
    Rule,
    Transition,
    cancel,
    known_deposit,
    next_transfer_id,
    open_transfers,
    planned_payout,
    put,
    release,
    remove_deposit,
    transfer_in,
)
from rpcsvc.domain.finality import is_lost
from rpcsvc.domain.order import (
    OnDeadline,
    Order,
    OrderReason,
    OrderStatus,
    Terms,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.refunds import finish_refunding, refund, refund_extra

_MAY_END = (
    TransferState.PREPARED,
    TransferState.PUBLISHED,
    TransferState.UNKNOWN,
)
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
# The action at these deadlines depends on the deposits that came until then.
DECIDED_BY_DEPOSITS: Final = frozenset(
    {OnDeadline.EXPIRE, OnDeadline.SWAP_OR_REFUND, OnDeadline.REFUND}
)

# Where a refund ends at once if there is nothing (more) to send: all dust, or gone.
_ENDED = (_S.REFUNDING, _S.REFUNDED, _S.FAILED)
_FUNDED = (_S.DEPOSIT_CONFIRMED, _S.EXECUTING_SWAP, *_ENDED)


# --- transfers and chunks, after the decision ----------------------------------------------------


def prepared(order: Order, event: ev.TransferPrepared, _now: int) -> Transition:
    """A transfer is signed; with its payout signed, the order is being executed."""
    transfer = transfer_in(order, event.transfer_id, TransferState.PLANNED)
    signed = replace(transfer, state=TransferState.PREPARED, txid=event.txid, raw=event.raw)
    order = put(order, signed)
    if transfer.kind is TransferKind.PAYOUT:
        order = replace(order, status=OrderStatus.EXECUTING_SWAP)
    return Transition(order)


def published(order: Order, event: ev.TransferPublished, _now: int) -> Transition:
    """The network has taken a transfer."""
    transfer = transfer_in(order, event.transfer_id, TransferState.PREPARED, TransferState.UNKNOWN)
    return Transition(put(order, replace(transfer, state=TransferState.PUBLISHED, reason=None)))


def outcome_unknown(order: Order, event: ev.TransferUnknown, _now: int) -> Transition:
    """The network may have taken a transfer."""
    transfer = transfer_in(
        order, event.transfer_id, TransferState.PREPARED, TransferState.PUBLISHED
    )
    unknown = replace(transfer, state=TransferState.UNKNOWN, reason=event.reason)
    return Transition(put(order, unknown))


def settled(order: Order, event: ev.TransferSettled, _now: int) -> Transition:
    """A transfer is final: completes the order, or its refunds."""
    transfer = transfer_in(order, event.transfer_id, *_MAY_END)
    final = replace(transfer, state=TransferState.SETTLED, reason=None, receipt=event.receipt)
    order = put(order, final)
    if transfer.kind is TransferKind.PAYOUT:
        return refund_extra(replace(order, status=OrderStatus.COMPLETED))
    return Transition(finish_refunding(order))


def failed(order: Order, event: ev.TransferFailed, _now: int) -> Transition:
    """Record a permanent failure, and refund the transfer's deposits by a new one."""
    order, kind = _record_failed(order, event)
    if kind is TransferKind.PAYOUT:
        return refund(replace(order, leftover=0), OrderReason.PAYOUT_FAILED)
    return refund_extra(order)


def failed_before_payout(order: Order, event: ev.TransferFailed, now: int) -> Transition:
    """A transfer failed before a payout was signed: refund its deposits by a new transfer.

    Without a planned payout the order still awaits its price, and the freed deposits are priced
    with the rest.
    """
    if planned_payout(order) is None:
        return Transition(_record_failed(order, event)[0])  # it is priced with the rest
    return failed(order, event, now)


def failed_undecided(order: Order, event: ev.TransferFailed, now: int) -> Transition:
    """Decide again with the freed deposits: a refund failed after its order had stepped back."""
    return decide(_record_failed(order, event)[0], now)


def _record_failed(order: Order, event: ev.TransferFailed) -> tuple[Order, TransferKind]:
    transfer = transfer_in(order, event.transfer_id, TransferState.PLANNED, *_MAY_END)
    ended = replace(transfer, state=TransferState.FAILED, reason=event.reason)
    order = release(put(order, ended), transfer.transfer_id)
    if transfer.kind is TransferKind.REFUND:
        order = _withdraw_refunds_to(order, transfer.address)
        order = twap.count_leftover(order)  # what it was of may have gone since it was signed
    return order, transfer.kind


def _withdraw_refunds_to(order: Order, address: str) -> Order:
    """Cancel unsigned refunds to an address that a refund has just failed to reach.

    It would fail as well; and once another address is given, nobody would sign it any more.
    """
    for planned in order.refunds:
        if planned.state is TransferState.PLANNED and planned.address == address:
            order = cancel(order, planned)
    return order


# --- deadlines -----------------------------------------------------------------------------------


def deadline_in_executing(order: Order, event: ev.DeadlinePassed, now: int) -> Transition:
    """Keep watching a signed payout; cancel an unsigned one."""
    if planned_payout(order) is not None:
        return cancel_and_refund(order, event, now)
    return look_again(order, event, now)


def cancel_and_refund(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    """The payout was not signed, or not even priced, in time: refund instead."""
    payout = planned_payout(order)
    if payout is not None:
        order = cancel(order, payout)
    return refund(replace(order, leftover=0), OrderReason.PAYOUT_NOT_PREPARED)


def look_again(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    """Schedule every open transfer once more."""
    effects: list[Effect] = [AdvanceTransfer(t.transfer_id) for t in open_transfers(order)]
    if twap.is_filling(order):
        effects.append(FillChunk(len(order.fills)))
    return Transition(order, tuple(effects))


def chunk_filled(order: Order, event: ev.ChunkFilled, now: int) -> Transition:
    """Record the chunk, and schedule the next one or plan the payout of them all."""
    _require_next_chunk(order, event.index)
    fill = twap.next_fill(order, event.rate, now)
    if fill is None:
        raise ImpossibleTransition("at this rate the chunk brings less than min_received")
    order = replace(order, fills=(*order.fills, fill))
    if twap.is_filled(order):
        return _pay_fills(order)
    return Transition(order, (FillChunk(event.index + 1),))


def filling_stopped(order: Order, event: ev.FillingStopped, _now: int) -> Transition:
    """Pay out the chunks swapped so far and refund the rest; refund all if there are none."""
    _require_next_chunk(order, event.index)
    if not order.fills:
        order = release(order, next_transfer_id(order, TransferKind.PAYOUT))
        return refund(order, OrderReason.RATE_FELL)
    leftover = twap.total_of(order) - twap.swapped_units(order)
    return _pay_fills(
        replace(order, leftover=leftover, error_message=OrderReason.RATE_FELL_MIDWAY.text)
    )


def removed_in_executing(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """Cancel the chunks of a removed deposit while nothing is signed."""
    payout = planned_payout(order)
    if payout is None and not twap.is_filling(order):
        return removed_later(order, event, now)
    payout_id = payout.transfer_id if payout else next_transfer_id(order, TransferKind.PAYOUT)
    spent_on = known_deposit(order, event.key).transfer_id
    order = remove_deposit(order, event)
    if spent_on != payout_id:
        return refund_extra(order)
    order = cancel_planned(release(order, payout_id))
    return decide(replace(order, fills=(), leftover=0, error_message=None), now)


def _pay_fills(order: Order) -> Transition:
    fees = sum(fill.integrator_fee for fill in order.fills)
    return pay(order, sum(fill.output for fill in order.fills), fees)


def _require_next_chunk(order: Order, index: int) -> None:
    if not twap.is_filling(order) or index != len(order.fills):
        raise ImpossibleTransition(f"chunk {index} is not the next one")


# --- the machine ---------------------------------------------------------------------------------


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
    if isinstance(event, ev.SupportReplied):  # a line of history: every deadline stays
        return Transition(replace(order, version=order.version + 1))
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
    after = _with_loss(replace(after, version=before.version + 1))
    if after.status is not before.status:
        after = replace(after, status_at=now)
        if after.status.is_terminal:
            after = replace(after, completed_at=now)
    return with_deadline(after, now)


def _with_loss(order: Order) -> Order:
    """The order, whose message says that a deposit was lost while that is so."""
    said, text = order.error_message or "", OrderReason.DEPOSIT_LOST.text
    has_loss = any(map(is_lost, order.deposits))
    if has_loss is said.endswith(text) and said.count(text) == has_loss:
        return order
    words = " ".join(said.replace(text, "").split())
    reasons = (f"{words} {text}".lstrip() if has_loss else words) or None
    return replace(order, error_message=reasons)


def _reported(order: Order, event: ev.UpstreamReported, _now: int) -> Transition:
    if event.status not in _MAY_BECOME[order.status]:
        raise ImpossibleTransition(f"{event.status} can't follow {order.status}")
    if event.status is order.status and event.report == order.report:
        raise ImpossibleTransition(f"{event.status} says nothing new")
    return Transition(
        replace(order, status=event.status, report=event.report, error_message=event.report.error)
    )


def _stays(status: OrderStatus) -> dict[type, Rule]:
    """Rules of each status in which the decision is made: deposits and refunds still go on."""
    return {
        ev.DepositSeen: Rule(deposit_rules.seen_more, (status,)),
        ev.DepositConfirmed: Rule(deposit_rules.extra_confirmed, (status,)),
        ev.DepositRemoved: Rule(deposit_rules.removed_later, (status,)),
        ev.TransferPrepared: Rule(prepared, (status,)),
        ev.TransferPublished: Rule(published, (status,)),
        ev.TransferUnknown: Rule(outcome_unknown, (status,)),
        ev.TransferSettled: Rule(settled, (status,)),
        ev.TransferFailed: Rule(failed, (status,)),
        ev.RefundAddressGiven: Rule(refunds.refund_address_given, (status,)),
        ev.RefundRetried: Rule(refunds.refund_retried, (status,)),
    }


def _undecided_rules(*statuses: OrderStatus) -> dict[type, Rule]:
    """Rules for a refund that was signed before its order stepped back to ``statuses[0]``."""
    return {
        ev.TransferPublished: Rule(published, statuses[:1]),
        ev.TransferUnknown: Rule(outcome_unknown, statuses[:1]),
        ev.TransferSettled: Rule(settled, statuses[:1]),
        ev.TransferFailed: Rule(failed_undecided, statuses),
    }


def _relayed_rules(status: OrderStatus) -> dict[type, Rule]:
    if status.is_terminal:
        return {}
    return {
        ev.UpstreamReported: Rule(_reported, tuple(_MAY_BECOME[status])),
        ev.DeadlinePassed: Rule(look_again, (status,)),
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
        ev.TransferPrepared: Rule(prepared, (_S.DEPOSIT_CONFIRMED, _S.EXECUTING_SWAP)),
        ev.TransferFailed: Rule(failed_before_payout, _FUNDED),
        ev.DeadlinePassed: Rule(cancel_and_refund, _ENDED),
    },
    _S.EXECUTING_SWAP: {
        **_stays(_S.EXECUTING_SWAP),
        ev.TransferSettled: Rule(settled, (_S.EXECUTING_SWAP, _S.COMPLETED)),
        ev.DepositRemoved: Rule(
            removed_in_executing,
            (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED),
        ),
        ev.ChunkFilled: Rule(chunk_filled, (_S.EXECUTING_SWAP,)),
        ev.FillingStopped: Rule(filling_stopped, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.TransferFailed: Rule(failed, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.DeadlinePassed: Rule(deadline_in_executing, (_S.EXECUTING_SWAP, *_ENDED)),
    },
    _S.REFUNDING: {
        **_stays(_S.REFUNDING),
        ev.DepositConfirmed: Rule(deposit_rules.extra_confirmed, (_S.REFUNDING,)),
        ev.DepositRemoved: Rule(deposit_rules.removed_in_refunding, _ENDED),
        ev.TransferSettled: Rule(settled, (_S.REFUNDING, _S.REFUNDED)),
        ev.TransferFailed: Rule(failed, _ENDED),
        ev.RefundAddressGiven: Rule(refunds.refund_address_given, _ENDED),
        ev.RefundRetried: Rule(refunds.refund_retried, _ENDED),
        ev.DeadlinePassed: Rule(look_again, (_S.REFUNDING,)),
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
