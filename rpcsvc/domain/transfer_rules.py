"""What becomes of a payout or a refund, and of its order: signed, published, settled or failed.

What does not live here: how a transfer is planned (decision.py, refunds.py), who signs and
publishes it (orders/payouts.py, settlement/).
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.decision import decide
from rpcsvc.domain.effects import AdvanceTransfer, Effect, FillChunk
from rpcsvc.domain.order import Order
from rpcsvc.domain.refund_rules import finish_refunding, refund, refund_extra
from rpcsvc.domain.refunds import release
from rpcsvc.domain.states import OrderStatus, TransferKind, TransferState
from rpcsvc.domain.steps import (
    Transition,
    cancel,
    open_transfers,
    planned_payout,
    put,
    transfer_in,
)

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
    """A transfer is final: the order is completed, or may have been refunded to its end."""
    transfer = transfer_in(order, event.transfer_id, *_MAY_END)
    final = replace(transfer, state=TransferState.SETTLED, reason=None, receipt=event.receipt)
    order = put(order, final)
    if transfer.kind is TransferKind.PAYOUT:
        order = replace(order, status=OrderStatus.COMPLETED)
        return refund_extra(order) if order.leftover else Transition(order)
    return Transition(finish_refunding(order))


def failed(order: Order, event: ev.TransferFailed, _now: int) -> Transition:
    """A transfer can never be carried out: what it had taken up goes back another way."""
    order, kind = _record_failed(order, event)
    if kind is TransferKind.PAYOUT:
        return refund(replace(order, leftover=0), "The payout failed on its network.")
    return refund_extra(order)


def failed_before_payout(order: Order, event: ev.TransferFailed, now: int) -> Transition:
    """What a refund frees that fails beside the decision goes back, unless the price is awaited."""
    if planned_payout(order) is None:
        return Transition(_record_failed(order, event)[0])  # it is priced with the rest
    return failed(order, event, now)


def failed_undecided(order: Order, event: ev.TransferFailed, now: int) -> Transition:
    """A refund failed after its order had stepped back: what it frees is decided about anew."""
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
    """Take back what is not signed yet and goes where a refund has just failed to arrive.

    It would fail as well; and once another address is given, nobody would sign it any more.
    """
    for planned in order.refunds:
        if planned.state is TransferState.PLANNED and planned.address == address:
            order = cancel(order, planned)
    return order


# --- deadlines -------------------------------------------------------------------------------


def deadline_in_executing(order: Order, event: ev.DeadlinePassed, now: int) -> Transition:
    """A payout that is signed is looked after; one that is not is taken back."""
    if planned_payout(order) is not None:
        return cancel_and_refund(order, event, now)
    return look_again(order, event, now)


def cancel_and_refund(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    """The payout was not signed, or not even priced, in time: refund instead."""
    payout = planned_payout(order)
    if payout is not None:
        order = cancel(order, payout)
    return refund(replace(order, leftover=0), "The payout could not be prepared in time.")


def look_again(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    """Call once more for everything that is not at its end."""
    effects: list[Effect] = [AdvanceTransfer(t.transfer_id) for t in open_transfers(order)]
    if twap.is_filling(order):
        effects.append(FillChunk(len(order.fills)))
    return Transition(order, tuple(effects))
