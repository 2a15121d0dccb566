"""What becomes of a TWAP order while it is swapped chunk by chunk, each at the rate of its moment.

Nothing is signed until the last chunk is swapped, or until no fair rate has come for too long.
What does not live here: how an order is cut, what a chunk brings and when it is due (twap.py), who
fetches the rate (orders/scheduler/effects.py), how the filling begins (decision.py).
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.decision import decide, pay, undecided
from rpcsvc.domain.deposit_rules import removed_later
from rpcsvc.domain.effects import FillChunk
from rpcsvc.domain.order import Order
from rpcsvc.domain.refund_rules import refund, refund_extra
from rpcsvc.domain.refunds import next_transfer_id, release
from rpcsvc.domain.states import TransferKind
from rpcsvc.domain.steps import (
    ImpossibleTransition,
    Transition,
    known_deposit,
    planned_payout,
    withdraw,
)

_RATE_FELL = "The rate fell below the order's minimum before the first chunk was swapped."
_RATE_FELL_MIDWAY = (
    "The rate fell below the order's minimum; what was swapped is paid out, the rest refunded."
)


def chunk_filled(order: Order, event: ev.ChunkFilled, now: int) -> Transition:
    """Record the chunk, and call for the next one or plan the payout of them all."""
    _require_next_chunk(order, event.index)
    fill = twap.next_fill(order, event.rate, now)
    if fill is None:
        raise ImpossibleTransition("at this rate the chunk brings less than min_received")
    order = replace(order, fills=(*order.fills, fill))
    if twap.is_filled(order):
        return _pay_fills(order)
    return Transition(order, (FillChunk(event.index + 1),))


def filling_stopped(order: Order, event: ev.FillingStopped, _now: int) -> Transition:
    """Pay out what was swapped so far and leave the rest to be refunded; all, if nothing was."""
    _require_next_chunk(order, event.index)
    if not order.fills:
        order = release(order, next_transfer_id(order, TransferKind.PAYOUT))
        return refund(order, _RATE_FELL)
    leftover = twap.total_of(order) - twap.swapped_units(order)
    return _pay_fills(replace(order, leftover=leftover, error_message=_RATE_FELL_MIDWAY))


def removed_in_executing(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """While nothing is signed, chunks are taken back with the deposit that they were cut from."""
    payout = planned_payout(order)
    if payout is None and not twap.is_filling(order):
        return removed_later(order, event, now)
    payout_id = payout.transfer_id if payout else next_transfer_id(order, TransferKind.PAYOUT)
    spent_on = known_deposit(order, event.key).transfer_id
    order = withdraw(order, event)
    if spent_on != payout_id:
        return refund_extra(order)
    order = undecided(order if payout else release(order, payout_id))
    return decide(replace(order, fills=(), leftover=0, error_message=None), now)


def _pay_fills(order: Order) -> Transition:
    fees = sum(fill.integrator_fee for fill in order.fills)
    return pay(order, sum(fill.output for fill in order.fills), fees)


def _require_next_chunk(order: Order, index: int) -> None:
    if not twap.is_filling(order) or index != len(order.fills):
        raise ImpossibleTransition(f"chunk {index} is not the next one")
