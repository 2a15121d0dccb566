"""What the chain shows of a deposit: it is seen, confirmed, removed, or nothing comes in time.

What does not live here: what is decided about the deposits (decision.py), what happens to the
chunks that a removed deposit was cut into (chunk_rules.py), who watches the chain
(orders/deposits.py).
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.deadlines import confirmation_deadline
from rpcsvc.domain.decision import decide, undecided
from rpcsvc.domain.order import Deposit, Order
from rpcsvc.domain.price_lock import rate_of_deposit
from rpcsvc.domain.refund_rules import refund_extra
from rpcsvc.domain.refunds import leftover_in
from rpcsvc.domain.states import DepositState, OrderStatus, TransferState
from rpcsvc.domain.steps import (
    ImpossibleTransition,
    Transition,
    cancel,
    known_deposit,
    planned_payout,
    set_deposit,
    withdraw,
)

_NO_DEPOSIT = "No deposit came before the order expired."
_CANCELLED = "The order was cancelled before a deposit came."


# --- seen ------------------------------------------------------------------------------------


def seen_first(order: Order, event: ev.DepositSeen, _now: int) -> Transition:
    """The deposit that the order has waited for is there."""
    order = _record_seen(order, event)
    return Transition(replace(order, status=OrderStatus.DEPOSIT_DETECTED))


def seen_more(order: Order, event: ev.DepositSeen, _now: int) -> Transition:
    """Another deposit is there, or one that was gone is back."""
    order = _record_seen(order, event)
    deposit, payout = order.deposit(event.key), order.payout
    if deposit and payout and deposit.transfer_id == payout.transfer_id:
        order = twap.count_leftover(order)  # it was gone, and is back
    return Transition(order)


def _record_seen(order: Order, event: ev.DepositSeen) -> Order:
    known = order.deposit(event.key)
    if known is None:
        rate = rate_of_deposit(order, event.first_seen_at, event.rate)
        fresh = Deposit(event.key, event.units, event.sender, event.first_seen_at, rate=rate)
        return replace(order, deposits=(*order.deposits, fresh))
    if known.is_active:
        raise ImpossibleTransition(f"deposit {event.key.txid} is known already")
    if known.units != event.units:
        raise ImpossibleTransition(f"deposit {event.key.txid} came back with another amount")
    # It came back after a reorganisation: the first sight of it is what counts, and its rate.
    return set_deposit(order, event.key, DepositState.SEEN)


# --- confirmed -------------------------------------------------------------------------------


def confirmed_in_detected(order: Order, event: ev.DepositConfirmed, now: int) -> Transition:
    """Decide with one more deposit that counts."""
    return decide(_record_confirmed(order, event), now)


def confirmed_before_payout(order: Order, event: ev.DepositConfirmed, _now: int) -> Transition:
    """A deposit that comes beside the decision is refunded, unless the price is still awaited."""
    order = _record_confirmed(order, event)
    if planned_payout(order) is None:
        return Transition(order)  # still waiting for its price: this deposit is priced with it
    return refund_extra(order)


def extra_confirmed(order: Order, event: ev.DepositConfirmed, _now: int) -> Transition:
    """What is confirmed after the decision goes back as a refund of its own."""
    return refund_extra(_record_confirmed(order, event))


def _record_confirmed(order: Order, event: ev.DepositConfirmed) -> Order:
    known = order.deposit(event.key)
    if known is None or known.state is not DepositState.SEEN:
        raise ImpossibleTransition(f"deposit {event.key.txid} is not waiting to be confirmed")
    return set_deposit(order, event.key, DepositState.CONFIRMED)


# --- removed ---------------------------------------------------------------------------------


def removed_in_detected(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """Decide with one deposit less."""
    return decide(withdraw(order, event), now)


def removed_before_payout(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """A counted deposit went away before anything was signed: take the payout back."""
    payout = planned_payout(order)
    spent_on = known_deposit(order, event.key).transfer_id
    order = withdraw(order, event)
    if payout is not None and spent_on != payout.transfer_id:
        return refund_extra(order)
    return decide(undecided(order), now)


def removed_in_refunding(order: Order, event: ev.DepositRemoved, _now: int) -> Transition:
    """What it was to go back with is refunded without it."""
    return refund_extra(withdraw(order, event))


def removed_later(order: Order, event: ev.DepositRemoved, _now: int) -> Transition:
    """A deposit went away after the payout was signed: no more of it goes back."""
    payout = order.payout
    deposit = known_deposit(order, event.key)
    order = withdraw(order, event)
    if payout is None or deposit.transfer_id != payout.transfer_id:
        return refund_extra(order)
    return refund_extra(_withhold_leftover(order))


def _withhold_leftover(order: Order) -> Order:
    """What is left of deposits that were paid out can't go back once these are gone."""
    for refund in order.refunds:
        if refund.state is TransferState.PLANNED and leftover_in(order, refund.transfer_id):
            order = cancel(order, refund)
    return twap.count_leftover(order)


# --- not in time -----------------------------------------------------------------------------


def expire(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    """No deposit came, and the late window is over."""
    return Transition(replace(order, status=OrderStatus.EXPIRED, error_message=_NO_DEPOSIT))


def cancel_unfunded(order: Order, _event: ev.Cancelled, _now: int) -> Transition:
    """The owner gave the order up before anything came. Later deposits go back.

    Raises ImpossibleTransition once a deposit was seen: one that a reorganisation took may return.
    """
    if order.deposits:
        raise ImpossibleTransition("a deposit was seen")
    return Transition(replace(order, status=OrderStatus.EXPIRED, error_message=_CANCELLED))


def deadline_in_detected(order: Order, _event: ev.DeadlinePassed, now: int) -> Transition:
    """Decide with what is confirmed by now."""
    return decide(order, now, waited_enough=now >= confirmation_deadline(order))
