"""Deposits: the rate of each, the rules of deposit events, and the decision to swap or refund.

The decision, in this order (design part 3):
  1. Confirmed deposits reach ``deposit_amount``: all of them are swapped, each at its own rate, or
     refunded if they are over ``max_deposit``.
  2. Until ``expires_at``, and while a deposit is still confirming, the order waits.
  3. After that a sum of at least ``min_deposit`` is swapped, a smaller one refunded.
  4. Deposits without a rate, such as those first seen after ``expires_at``, are priced before the
     sum is swapped; all of it is refunded if it brings less than ``min_received`` in proportion.
  5. An order for an exact payout pays that, and not more, for the deposit that it asked for.
  6. A deposit that is confirmed after the decision is refunded by itself.

The rate of a deposit is fixed when it is first recorded; inside the price lock it is the quote's.
A deposit holds the price lock for itself only.
Rates are USDC units per XMR; times are ms since the epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.events import (
    AdvanceTransfer,
    FillChunk,
    ImpossibleTransition,
    PriceLateDeposit,
    Transition,
    cancel,
    known_deposit,
    leftover_in,
    next_transfer_id,
    planned_payout,
    remove_deposit,
    set_deposit,
)
from rpcsvc.domain.finality import counts_early
from rpcsvc.domain.order import (
    Deposit,
    DepositState,
    Order,
    OrderReason,
    OrderStatus,
    Terms,
    Transfer,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.pricing import BPS, Direction, keeps_proportion
from rpcsvc.domain.refunds import refund, refund_extra


def rate_of_deposit(order: Order, first_seen_at: int, current: int | None) -> int | None:
    """The rate of a deposit first seen at ``first_seen_at``; None if it is priced when decided.

    ``current`` is the rate at which it is recorded, None when there is no fresh one.
    """
    if first_seen_at <= order.price_locked_until:
        return order.terms.price.rate
    if first_seen_at <= order.terms.expires_at and current is not None:
        return current if brings_min_received(order.terms, current) else None
    return None


def brings_min_received(terms: Terms, rate: int) -> bool:
    """Return whether the whole order would bring at least ``min_received`` at this rate."""
    output = terms.price.at(rate).output(terms.direction, terms.deposit_amount)
    return output > 0 and output >= terms.min_received


def units_by_rate(deposits: Iterable[Deposit], fallback: int) -> dict[int, int]:
    """Deposit units by the rate they are swapped at; ``fallback`` for those without a rate."""
    found: Counter[int] = Counter()
    for deposit in deposits:
        found[fallback if deposit.rate is None else deposit.rate] += deposit.units
    return dict(found)


def spread_earned(order: Order, payout: Transfer) -> int:
    """The service's spread on a payout's deposits, in payout units.

    A late deposit, which has no rate of its own, counts at the order's.
    """
    price, direction = order.terms.price, order.terms.direction
    spent = [d for d in order.deposits if d.transfer_id == payout.transfer_id]
    swapped = [(fill.rate, fill.units) for fill in order.fills]
    swapped = swapped or list(units_by_rate(spent, price.rate).items())
    return sum(price.at(rate).spread(direction, units) for rate, units in swapped)


def breaking_rate(direction: Direction, current: int, break_bps: int) -> int:
    """The locked rate from which on a lock breaks at the ``current`` rate.

    An x2u lock breaks when its rate is above the result, a u2x lock when it is below: then the
    rate has moved against the service by more than ``break_bps`` of the locked one.
    """
    if direction is Direction.XMR_TO_USDC:
        return current * BPS // (BPS - break_bps)
    return -(-current * BPS // (BPS + break_bps))


def lock_broken(order: Order, _event: ev.LockBroken, now: int) -> Transition:
    """End the lock now. Deposits that were seen before keep their rate."""
    if now >= order.price_locked_until:
        raise ImpossibleTransition(f"the price lock of {order.order_id} is over")
    return Transition(replace(order, lock_broken_at=now))


def decide(order: Order, now: int, *, waited_enough: bool = False) -> Transition:
    """Swap, refund, wait or expire: the rules of the module's docstring, top to bottom."""
    if not any(d.is_active for d in order.deposits):
        return Transition(replace(order, status=OrderStatus.AWAITING_DEPOSIT))
    total = sum(d.units for d in order.unspent)
    if total >= order.terms.deposit_amount:
        return _swap(order, total)
    confirming = any(d.state is DepositState.SEEN for d in order.deposits)
    # With nothing to decide about, an order has stepped back: its counted deposits may come again.
    waiting = now < order.terms.expires_at or confirming or total == 0
    if waiting and not waited_enough:
        return Transition(replace(order, status=OrderStatus.DEPOSIT_DETECTED))
    if total >= order.terms.min_deposit:
        return _swap(order, total)
    if total == 0:
        return Transition(
            replace(order, status=OrderStatus.EXPIRED, error_message=OrderReason.UNCONFIRMED.text)
        )
    return refund(order, OrderReason.BELOW_MINIMUM)


def cancel_planned(order: Order) -> Order:
    """Cancel unsigned transfers, so that their deposits count towards the payout again."""
    for transfer in order.transfers:
        if transfer.state is TransferState.PLANNED:
            order = cancel(order, transfer)
    return replace(order, action_required=None)


def repriced(order: Order, event: ev.Repriced, _now: int) -> Transition:
    """Swap deposits without a rate at the fresh one, or refund all if it moved too far."""
    if planned_payout(order) is not None:
        raise ImpossibleTransition("the payout is planned already")
    terms = order.terms
    total = sum(d.units for d in order.unspent)
    if total > terms.max_deposit:
        return refund(order, OrderReason.ABOVE_MAXIMUM)  # more came while the price was awaited
    output, _fee = _output(order, event.rate)
    fair = keeps_proportion(
        output=output,
        deposited=total,
        min_received=terms.min_received,
        deposit_amount=terms.deposit_amount,
    )
    if not fair:
        return refund(order, OrderReason.LATE_RATE_MOVED)
    if event.payable is not None and output + terms.price.payout_fee > event.payable:
        return refund(order, OrderReason.LATE_NOT_PAYABLE)
    return _plan_payout(order, event.rate)


def pay(order: Order, units: int, integrator_fee: int) -> Transition:
    """Plan the payout of the deposits that are assigned to it; amounts in payout units."""
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
        return refund(order, OrderReason.ABOVE_MAXIMUM)
    if twap.is_cut(order, total):
        filling = replace(twap.assign_to_payout(order), status=OrderStatus.EXECUTING_SWAP)
        return Transition(filling, (FillChunk(0),))
    confirmed = replace(order, status=OrderStatus.DEPOSIT_CONFIRMED)
    if any(d.rate is None for d in order.unspent):
        return Transition(confirmed, (PriceLateDeposit(),))
    output, _fee = _output(order, order.terms.price.rate)
    if output == 0:
        return refund(order, OrderReason.BELOW_FEES)
    return _plan_payout(confirmed, order.terms.price.rate)


def _output(order: Order, fresh: int) -> tuple[int, int]:
    """The output of all unspent deposits and the integrator's fee, in payout units.

    ``fresh`` is the rate of deposits that have none.
    """
    is_priced = all(deposit.rate is not None for deposit in order.unspent)
    return order.terms.payout(units_by_rate(order.unspent, fresh), is_priced=is_priced)


def _plan_payout(order: Order, fresh: int) -> Transition:
    """Pay out what all unspent deposits bring; price deposits without a rate at ``fresh``."""
    output, integrator_fee = _output(order, fresh)
    return pay(twap.assign_to_payout(order), output, integrator_fee)


def confirmation_deadline(order: Order) -> int:
    """The deadline (ms) for the confirmation of the order's deposits."""
    last_seen = max((d.first_seen_at for d in order.deposits if d.is_active), default=0)
    return last_seen + order.terms.timeouts.confirm


# --- seen ------------------------------------------------------------------------------------


def seen_first(order: Order, event: ev.DepositSeen, _now: int) -> Transition:
    """The first deposit was seen."""
    order = _record_seen(order, event)
    return Transition(replace(order, status=OrderStatus.DEPOSIT_DETECTED))


def seen_more(order: Order, event: ev.DepositSeen, _now: int) -> Transition:
    """A further deposit was seen, or a removed one returned."""
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
    # It came back after a reorganisation: its first-seen time and rate are kept.
    return set_deposit(order, event.key, DepositState.SEEN)


# --- confirmed -------------------------------------------------------------------------------


def confirmed_in_detected(order: Order, event: ev.DepositConfirmed, now: int) -> Transition:
    """Decide with one more deposit that counts."""
    return decide(_record_confirmed(order, event), now)


def confirmed_before_payout(order: Order, event: ev.DepositConfirmed, _now: int) -> Transition:
    """Refund a deposit that comes after the decision, unless the price is still awaited."""
    order = _record_confirmed(order, event)
    if planned_payout(order) is None:
        return Transition(order)  # still waiting for its price: this deposit is priced with it
    return refund_extra(order)


def extra_confirmed(order: Order, event: ev.DepositConfirmed, _now: int) -> Transition:
    """Refund a deposit that is confirmed after the decision."""
    return refund_extra(_record_confirmed(order, event))


def _record_confirmed(order: Order, event: ev.DepositConfirmed) -> Order:
    known = order.deposit(event.key)
    if known is None or known.state is not DepositState.SEEN:
        raise ImpossibleTransition(f"deposit {event.key.txid} is not waiting to be confirmed")
    if not event.is_final and not counts_early(order, known):
        raise ImpossibleTransition(f"deposit {event.key.txid} has to be final")
    return set_deposit(order, event.key, DepositState.CONFIRMED)


# --- removed ---------------------------------------------------------------------------------


def removed_in_detected(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """Decide with one deposit less."""
    return decide(remove_deposit(order, event), now)


def removed_before_payout(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """A counted deposit was removed before anything was signed: cancel the payout."""
    payout = planned_payout(order)
    spent_on = known_deposit(order, event.key).transfer_id
    order = remove_deposit(order, event)
    if payout is not None and spent_on != payout.transfer_id:
        return refund_extra(order)
    return decide(cancel_planned(order), now)


def removed_in_refunding(order: Order, event: ev.DepositRemoved, _now: int) -> Transition:
    """Refund the other deposits without the removed one."""
    return refund_extra(remove_deposit(order, event))


def removed_later(order: Order, event: ev.DepositRemoved, _now: int) -> Transition:
    """A deposit was removed after the payout was signed: refund nothing more of it."""
    payout = order.payout
    deposit = known_deposit(order, event.key)
    order = remove_deposit(order, event)
    if payout is None or deposit.transfer_id != payout.transfer_id:
        return refund_extra(order)
    return refund_extra(_withhold_leftover(order))


def _withhold_leftover(order: Order) -> Order:
    """The leftover of deposits that were paid out is not refunded once these are removed."""
    for transfer in order.refunds:
        if transfer.state is TransferState.PLANNED and leftover_in(order, transfer.transfer_id):
            order = cancel(order, transfer)
    return twap.count_leftover(order)


# --- not in time -----------------------------------------------------------------------------


def expire(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    """Expire the order: no deposit came until the end of the late window."""
    return Transition(
        replace(order, status=OrderStatus.EXPIRED, error_message=OrderReason.NO_DEPOSIT.text)
    )


def cancel_unfunded(order: Order, _event: ev.Cancelled, _now: int) -> Transition:
    """The owner cancelled the order before any deposit. Later deposits are refunded.

    Raises ImpossibleTransition once a deposit was seen: one that a reorganisation took may return.
    """
    if order.deposits:
        raise ImpossibleTransition("a deposit was seen")
    return Transition(
        replace(order, status=OrderStatus.EXPIRED, error_message=OrderReason.CANCELLED.text)
    )


def deadline_in_detected(order: Order, _event: ev.DeadlinePassed, now: int) -> Transition:
    """Decide with the deposits confirmed so far."""
    return decide(order, now, waited_enough=now >= confirmation_deadline(order))
