"""The decision about an order's deposits: swap, refund, wait or expire, and the payout's plan.

The rules about deposits, in the order in which they are asked (design part 3):
  1. Confirmed deposits reach ``deposit_amount``: all of them are swapped, each at its own rate
     (price_lock.py), or refunded if they are over ``max_deposit``.
  2. Until ``expires_at``, and while a deposit is still confirming, the order waits.
  3. After that a sum of at least ``min_deposit`` is swapped, a smaller one refunded.
  4. Deposits without a rate, such as those first seen after ``expires_at``, are priced before the
     sum is swapped; all of it is refunded if it brings less than ``min_received`` in proportion.
  5. What is confirmed after the decision goes back as a refund of its own.

What does not live here: the events that ask for it (deposit_rules.py, transfer_rules.py,
chunk_rules.py), how a rate becomes an amount (pricing.py), how a TWAP order is cut (twap.py).
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.effects import AdvanceTransfer, FillChunk, PriceLateDeposit
from rpcsvc.domain.order import Order, Transfer
from rpcsvc.domain.price_lock import units_by_rate
from rpcsvc.domain.pricing import keeps_proportion
from rpcsvc.domain.refund_rules import refund
from rpcsvc.domain.refunds import next_transfer_id
from rpcsvc.domain.states import DepositState, OrderStatus, TransferKind, TransferState
from rpcsvc.domain.steps import ImpossibleTransition, Transition, cancel, planned_payout

_UNCONFIRMED = "The deposit was never confirmed by its network."
_ABOVE_MAXIMUM = "The deposits are above the maximum."


def decide(order: Order, now: int, *, waited_enough: bool = False) -> Transition:
    """Swap, refund, wait or expire: the rules of the module's docstring, top to bottom."""
    if not any(d.is_active for d in order.deposits):
        return Transition(replace(order, status=OrderStatus.AWAITING_DEPOSIT))
    total = sum(d.units for d in order.unspent)
    if total >= order.terms.deposit_amount:
        return _swap(order, total)
    confirming = any(d.state is DepositState.SEEN for d in order.deposits)
    # With nothing to decide about, an order has stepped back: what was counted may come again.
    waiting = now < order.terms.expires_at or confirming or total == 0
    if waiting and not waited_enough:
        return Transition(replace(order, status=OrderStatus.DEPOSIT_DETECTED))
    if total >= order.terms.min_deposit:
        return _swap(order, total)
    if total == 0:
        return Transition(replace(order, status=OrderStatus.EXPIRED, error_message=_UNCONFIRMED))
    return refund(order, "The deposits stayed below the minimum until the order expired.")


def undecided(order: Order) -> Order:
    """Take back whatever is not signed: a deposit beside the payout counts towards it again."""
    for transfer in order.transfers:
        if transfer.state is TransferState.PLANNED:
            order = cancel(order, transfer)
    return replace(order, action_required=None)


def repriced(order: Order, event: ev.Repriced, _now: int) -> Transition:
    """Pay deposits that have no rate at the fresh one, or refund all if that moved too far."""
    if planned_payout(order) is not None:
        raise ImpossibleTransition("the payout is planned already")
    terms = order.terms
    total = sum(d.units for d in order.unspent)
    if total > terms.max_deposit:
        return refund(order, _ABOVE_MAXIMUM)  # more came while the price was awaited
    output, _fee = _output(order, event.rate)
    fair = keeps_proportion(
        output=output,
        deposited=total,
        min_received=terms.min_received,
        deposit_amount=terms.deposit_amount,
    )
    if not fair:
        return refund(order, "The deposit came late and the rate has moved too far since.")
    if event.payable is not None and output + terms.price.payout_fee > event.payable:
        return refund(order, "The deposit came late, when the service could not pay for it.")
    return _plan_payout(order, event.rate)


def pay(order: Order, units: int, integrator_fee: int) -> Transition:
    """Plan the payout that the deposits were taken up for, in payout units."""
    terms = order.terms
    payout = Transfer(
        transfer_id=next_transfer_id(order, TransferKind.PAYOUT),
        kind=TransferKind.PAYOUT,
        network=terms.payout_network,
        asset=terms.payout_asset,
        address=terms.to_address,
        units=units,
        fee=terms.price.payout_fee,
        integrator_fee=integrator_fee,
    )
    planned = replace(order, transfers=(*order.transfers, payout))
    return Transition(planned, (AdvanceTransfer(payout.transfer_id),))


def _swap(order: Order, total: int) -> Transition:
    if total > order.terms.max_deposit:
        return refund(order, _ABOVE_MAXIMUM)
    if twap.is_cut(order, total):
        filling = replace(twap.take_up(order), status=OrderStatus.EXECUTING_SWAP)
        return Transition(filling, (FillChunk(0),))
    confirmed = replace(order, status=OrderStatus.DEPOSIT_CONFIRMED)
    if any(d.rate is None for d in order.unspent):
        return Transition(confirmed, (PriceLateDeposit(),))
    output, _fee = _output(order, order.terms.price.rate)
    if output == 0:
        return refund(order, "The deposits are worth no more than the fees of paying them out.")
    return _plan_payout(confirmed, order.terms.price.rate)


def _output(order: Order, fresh: int) -> tuple[int, int]:
    """What all unspent deposits bring, and the integrator's fee; ``fresh`` for those without rate.

    In payout units.
    """
    terms = order.terms
    return terms.price.payout(terms.direction, units_by_rate(order.unspent, fresh))


def _plan_payout(order: Order, fresh: int) -> Transition:
    """Pay out what all unspent deposits bring; those without a rate at ``fresh``."""
    output, integrator_fee = _output(order, fresh)
    return pay(twap.take_up(order), output, integrator_fee)
