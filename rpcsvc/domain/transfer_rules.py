"""After the decision: TWAP chunks are swapped, and transfers are signed, published and settled.

Nothing is signed for a TWAP order until its last chunk is swapped, or no fair rate has come for too
long.
"""

from __future__ import annotations

from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.deposit_rules import cancel_planned, decide, pay, removed_later
from rpcsvc.domain.events import (
    AdvanceTransfer,
    Effect,
    FillChunk,
    ImpossibleTransition,
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
from rpcsvc.domain.order import Order, OrderReason, OrderStatus, TransferKind, TransferState
from rpcsvc.domain.refunds import finish_refunding, refund, refund_extra

_MAY_END = (
    TransferState.PREPARED,
    TransferState.PUBLISHED,
    TransferState.UNKNOWN,
)


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
        order = replace(order, status=OrderStatus.COMPLETED)
        return refund_extra(order) if order.leftover else Transition(order)
    return Transition(finish_refunding(order))


def failed(order: Order, event: ev.TransferFailed, _now: int) -> Transition:
    """A transfer failed for good: its deposits are refunded by a new one."""
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
    """A refund failed after its order had stepped back: decide anew with the freed deposits."""
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


# --- deadlines -------------------------------------------------------------------------------


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
    order = cancel_planned(order if payout else release(order, payout_id))
    return decide(replace(order, fills=(), leftover=0, error_message=None), now)


def _pay_fills(order: Order) -> Transition:
    fees = sum(fill.integrator_fee for fill in order.fills)
    return pay(order, sum(fill.output for fill in order.fills), fees)


def _require_next_chunk(order: Order, index: int) -> None:
    if not twap.is_filling(order) or index != len(order.fills):
        raise ImpossibleTransition(f"chunk {index} is not the next one")
