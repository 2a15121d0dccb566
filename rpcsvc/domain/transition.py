"""The order machine: everything that decides what becomes of an order lives here.

``transition(order, event, now)`` gives the next order and the effects that follow. It is pure:
no I/O, no clock, no randomness. ``TRANSITIONS`` is the one table of what may happen in which
status; a pair that is not in it raises ``ImpossibleTransition`` and changes nothing. The
diagram in docs/lifecycle.md is generated from the table.

The rules about deposits, in the order in which they are asked (design part 3):
  1. Confirmed deposits reach ``deposit_amount``: all of them are swapped at the locked rate,
     or refunded if they are over ``max_deposit``.
  2. Until ``expires_at``, and while a deposit is still confirming, the order waits.
  3. After that a sum of at least ``min_deposit`` is swapped, a smaller one refunded.
  4. A sum with a deposit first seen after ``expires_at`` is re-priced before it is swapped.
  5. What is confirmed after the decision goes back as a refund of its own.

A TWAP order is swapped chunk by chunk, each at the rate of its moment; nothing is signed until
the last chunk is, or until no fair rate has come for too long (twap.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rpcsvc.domain import events as ev
from rpcsvc.domain import relay, twap
from rpcsvc.domain.effects import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.order import Deposit, DepositKey, Order, Terms, Transfer
from rpcsvc.domain.pricing import Price, keeps_proportion
from rpcsvc.domain.refunds import leftover_in, next_transfer_id, plan_refunds, release
from rpcsvc.domain.states import (
    DepositState,
    OnDeadline,
    OrderStatus,
    TransferKind,
    TransferState,
)


class ImpossibleTransition(Exception):
    """The event can't happen to the order as it stands; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What an event makes of an order, and the work that follows."""

    order: Order
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """How an event is decided in a status, and every status that this may lead to."""

    decide: Callable[[Order, Any, int], Transition]
    targets: tuple[OrderStatus, ...]


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
    return _with_deadline(order, terms.created_at)


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


# --- bookkeeping of every transition ---------------------------------------------------------


def _stamp(before: Order, after: Order, now: int) -> Order:
    after = replace(after, version=before.version + 1)
    if after.status is not before.status:
        after = replace(after, status_at=now)
        if after.status.is_terminal:
            after = replace(after, completed_at=now)
    return _with_deadline(after, now)


def _with_deadline(order: Order, now: int) -> Order:
    if order.terms.upstream_id is not None and not order.status.is_terminal:
        ask_at = now + order.terms.timeouts.payout_check
        return replace(order, deadline_at=ask_at, on_deadline=OnDeadline.ASK_UPSTREAM)
    deadline = _DEADLINES.get(order.status)
    at, action = deadline(order, now) if deadline else (None, None)
    return replace(order, deadline_at=at, on_deadline=action)


def _awaiting_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    late_window = order.terms.timeouts.late_window
    return max(order.terms.expires_at, now) + late_window, OnDeadline.EXPIRE


def _detected_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    if now < order.terms.expires_at and order.due_units > 0:
        return order.terms.expires_at, OnDeadline.SWAP_OR_REFUND
    return _confirmation_deadline(order), OnDeadline.SWAP_OR_REFUND


def _confirmation_deadline(order: Order) -> int:
    last_seen = max((d.first_seen_at for d in order.deposits if d.is_active), default=0)
    return last_seen + order.terms.timeouts.confirm


def _confirmed_deadline(order: Order, _now: int) -> tuple[int, OnDeadline]:
    return order.status_at + order.terms.timeouts.prepare, OnDeadline.REFUND


def _executing_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    if _planned_payout(order) is not None:  # the chunks are swapped, and nothing is signed yet
        if order.on_deadline is OnDeadline.REFUND:
            return order.deadline_at or now, OnDeadline.REFUND
        return now + order.terms.timeouts.prepare, OnDeadline.REFUND
    if order.on_deadline is OnDeadline.REPUBLISH and (order.deadline_at or 0) > now:
        return order.deadline_at or now, OnDeadline.REPUBLISH
    return now + order.terms.timeouts.payout_check, OnDeadline.REPUBLISH


def _refunding_deadline(order: Order, now: int) -> tuple[int, OnDeadline]:
    if _open_transfers(order):
        return _executing_deadline(order, now)
    return now + order.terms.timeouts.refund_reminder, OnDeadline.REMIND


_DEADLINES: dict[OrderStatus, Callable[[Order, int], tuple[int, OnDeadline]]] = {
    OrderStatus.AWAITING_DEPOSIT: _awaiting_deadline,
    OrderStatus.DEPOSIT_DETECTED: _detected_deadline,
    OrderStatus.DEPOSIT_CONFIRMED: _confirmed_deadline,
    OrderStatus.EXECUTING_SWAP: _executing_deadline,
    OrderStatus.REFUNDING: _refunding_deadline,
}


# --- deposits --------------------------------------------------------------------------------


def _record_seen(order: Order, event: ev.DepositSeen) -> Order:
    known = order.deposit(event.key)
    if known is None:
        fresh = Deposit(event.key, event.units, event.sender, event.first_seen_at)
        return replace(order, deposits=(*order.deposits, fresh))
    if known.is_active:
        raise ImpossibleTransition(f"deposit {event.key.txid} is known already")
    if known.units != event.units:
        raise ImpossibleTransition(f"deposit {event.key.txid} came back with another amount")
    # It came back after a reorganisation: the first sight of it is what counts for expires_at.
    return _set_deposit(order, event.key, DepositState.SEEN)


def _set_deposit(order: Order, key: DepositKey, state: DepositState) -> Order:
    known = order.deposit(key)
    if known is None or known.state is state:
        raise ImpossibleTransition(f"deposit {key.txid} can't become {state}")
    return replace(
        order,
        deposits=tuple(replace(d, state=state) if d.key == key else d for d in order.deposits),
    )


def _record_confirmed(order: Order, event: ev.DepositConfirmed) -> Order:
    known = order.deposit(event.key)
    if known is None or known.state is not DepositState.SEEN:
        raise ImpossibleTransition(f"deposit {event.key.txid} is not waiting to be confirmed")
    return _set_deposit(order, event.key, DepositState.CONFIRMED)


def _seen_first(order: Order, event: ev.DepositSeen, _now: int) -> Transition:
    order = _record_seen(order, event)
    return Transition(replace(order, status=OrderStatus.DEPOSIT_DETECTED))


def _seen_more(order: Order, event: ev.DepositSeen, _now: int) -> Transition:
    order = _record_seen(order, event)
    deposit, payout = order.deposit(event.key), order.payout
    if deposit and payout and deposit.transfer_id == payout.transfer_id:
        order = _count_leftover(order)  # it was gone, and is back
    return Transition(order)


def _confirmed_in_detected(order: Order, event: ev.DepositConfirmed, now: int) -> Transition:
    return _decide(_record_confirmed(order, event), now)


def _removed_in_detected(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    return _decide(_withdraw(order, event), now)


def _deadline_in_detected(order: Order, _event: ev.DeadlinePassed, now: int) -> Transition:
    return _decide(order, now, waited_enough=now >= _confirmation_deadline(order))


def _decide(order: Order, now: int, *, waited_enough: bool = False) -> Transition:
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
    return _refund(order, "The deposits stayed below the minimum until the order expired.")


def _swap(order: Order, total: int) -> Transition:
    if total > order.terms.max_deposit:
        return _refund(order, "The deposits are above the maximum.")
    if twap.is_cut(order, total):
        filling = replace(twap.take_up(order), status=OrderStatus.EXECUTING_SWAP)
        return Transition(filling, (FillChunk(0),))
    confirmed = replace(order, status=OrderStatus.DEPOSIT_CONFIRMED)
    if any(d.first_seen_at > order.terms.expires_at for d in order.unspent):
        return Transition(confirmed, (PriceLateDeposit(),))
    if order.terms.price.output(order.terms.direction, total) == 0:
        return _refund(order, "The deposits are worth no more than the fees of paying them out.")
    return _plan_payout(confirmed, order.terms.price, total)


def _plan_payout(order: Order, price: Price, total: int) -> Transition:
    """Pay out what all unspent deposits, ``total`` units, bring at ``price``."""
    direction = order.terms.direction
    fee = price.integrator_fee(direction, total)
    return _pay(twap.take_up(order), price.output(direction, total), fee)


def _pay(order: Order, units: int, integrator_fee: int) -> Transition:
    """Plan the payout that the deposits were taken up for."""
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


def _repriced(order: Order, event: ev.Repriced, _now: int) -> Transition:
    if _planned_payout(order) is not None:
        raise ImpossibleTransition("the payout is planned already")
    terms = order.terms
    total = sum(d.units for d in order.unspent)
    price = terms.price.at(event.rate)
    output = price.output(terms.direction, total)
    fair = keeps_proportion(
        output=output,
        deposited=total,
        min_received=terms.min_received,
        deposit_amount=terms.deposit_amount,
    )
    if not fair or total > terms.max_deposit:
        return _refund(order, "The deposit came late and the rate has moved too far since.")
    return _plan_payout(order, price, total)


def _confirmed_before_payout(order: Order, event: ev.DepositConfirmed, _now: int) -> Transition:
    order = _record_confirmed(order, event)
    if _planned_payout(order) is None:
        return Transition(order)  # still waiting for its price: this deposit is priced with it
    return _refund_extra(order)


def _removed_before_payout(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """A counted deposit went away before anything was signed: take the payout back."""
    payout = _planned_payout(order)
    spent_on = (order.deposit(event.key) or _unknown(event.key)).transfer_id
    order = _withdraw(order, event)
    if payout is not None and spent_on != payout.transfer_id:
        return _refund_extra(order)
    return _decide(_undecided(order), now)


def _undecided(order: Order) -> Order:
    """Take back whatever is not signed: a deposit beside the payout counts towards it again."""
    for transfer in order.transfers:
        if transfer.state is TransferState.PLANNED:
            order = _cancel(order, transfer)
    return replace(order, action_required=None)


def _extra_confirmed(order: Order, event: ev.DepositConfirmed, _now: int) -> Transition:
    return _refund_extra(_record_confirmed(order, event))


def _require_next_chunk(order: Order, index: int) -> None:
    if not twap.is_filling(order) or index != len(order.fills):
        raise ImpossibleTransition(f"chunk {index} is not the next one")


def _chunk_filled(order: Order, event: ev.ChunkFilled, now: int) -> Transition:
    _require_next_chunk(order, event.index)
    fill = twap.next_fill(order, event.rate, now)
    if fill is None:
        raise ImpossibleTransition("at this rate the chunk brings less than min_received")
    order = replace(order, fills=(*order.fills, fill))
    if twap.is_filled(order):
        return _pay_fills(order)
    return Transition(order, (FillChunk(event.index + 1),))


def _filling_stopped(order: Order, event: ev.FillingStopped, _now: int) -> Transition:
    _require_next_chunk(order, event.index)
    if not order.fills:
        order = release(order, next_transfer_id(order, TransferKind.PAYOUT))
        return _refund(order, _RATE_FELL)
    leftover = twap.total_of(order) - twap.swapped_units(order)
    return _pay_fills(replace(order, leftover=leftover, error_message=_RATE_FELL_MIDWAY))


def _pay_fills(order: Order) -> Transition:
    fees = sum(fill.integrator_fee for fill in order.fills)
    return _pay(order, sum(fill.output for fill in order.fills), fees)


def _removed_in_executing(order: Order, event: ev.DepositRemoved, now: int) -> Transition:
    """While nothing is signed, chunks are taken back with the deposit that they were cut from."""
    payout = _planned_payout(order)
    if payout is None and not twap.is_filling(order):
        return _removed_later(order, event, now)
    payout_id = payout.transfer_id if payout else next_transfer_id(order, TransferKind.PAYOUT)
    spent_on = (order.deposit(event.key) or _unknown(event.key)).transfer_id
    order = _withdraw(order, event)
    if spent_on != payout_id:
        return _refund_extra(order)
    order = _undecided(order if payout else release(order, payout_id))
    return _decide(replace(order, fills=(), leftover=0, error_message=None), now)


def _removed_later(order: Order, event: ev.DepositRemoved, _now: int) -> Transition:
    payout = order.payout
    deposit = order.deposit(event.key) or _unknown(event.key)
    order = _withdraw(order, event)
    if payout is None or deposit.transfer_id != payout.transfer_id:
        return _refund_extra(order)
    return _refund_extra(_withhold_leftover(order))


def _withhold_leftover(order: Order) -> Order:
    """What is left of deposits that were paid out can't go back once these are gone."""
    for refund in order.refunds:
        if refund.state is TransferState.PLANNED and leftover_in(order, refund.transfer_id):
            order = _cancel(order, refund)
    return _count_leftover(order)


def _count_leftover(order: Order) -> Order:
    """What is there of the deposits that were paid out, less what was swapped or is going back."""
    if not order.fills or order.payout is None:
        return order
    paid_out = order.payout.transfer_id
    there = sum(d.units for d in order.deposits if d.transfer_id == paid_out and d.is_active)
    gone = (TransferState.FAILED, TransferState.CANCELLED)
    back = sum(leftover_in(order, t.transfer_id) for t in order.refunds if t.state not in gone)
    return replace(order, leftover=max(0, there - twap.swapped_units(order) - back))


def _removed_in_refunding(order: Order, event: ev.DepositRemoved, _now: int) -> Transition:
    return _refund_extra(_withdraw(order, event))


def _withdraw(order: Order, event: ev.DepositRemoved) -> Order:
    """Mark the deposit removed, and take back a refund of it that was not signed yet.

    Other deposits that were to go back with it are free again: the caller plans anew.
    """
    deposit = order.deposit(event.key) or _unknown(event.key)
    order = _set_deposit(order, event.key, DepositState.REMOVED)
    refund = order.transfer(deposit.transfer_id) if deposit.transfer_id else None
    if refund and refund.kind is TransferKind.REFUND and refund.state is TransferState.PLANNED:
        return _cancel(order, refund)
    return order


def _unknown(key: DepositKey) -> Deposit:
    raise ImpossibleTransition(f"deposit {key.txid} is not known")


# --- transfers -------------------------------------------------------------------------------


def _transfer(order: Order, transfer_id: str, *allowed: TransferState) -> Transfer:
    transfer = order.transfer(transfer_id)
    if transfer is None or transfer.state not in allowed:
        state = transfer.state if transfer else "absent"
        raise ImpossibleTransition(f"transfer {transfer_id} is {state}")
    return transfer


def _put(order: Order, transfer: Transfer) -> Order:
    same = transfer.transfer_id
    return replace(
        order,
        transfers=tuple(transfer if t.transfer_id == same else t for t in order.transfers),
    )


def _cancel(order: Order, transfer: Transfer) -> Order:
    cancelled = replace(transfer, state=TransferState.CANCELLED)
    return release(_put(order, cancelled), transfer.transfer_id)


def _planned_payout(order: Order) -> Transfer | None:
    payout = order.payout
    return payout if payout and payout.state is TransferState.PLANNED else None


def _open_transfers(order: Order) -> tuple[Transfer, ...]:
    return tuple(t for t in order.transfers if not t.state.is_final)


def _prepared(order: Order, event: ev.TransferPrepared, _now: int) -> Transition:
    transfer = _transfer(order, event.transfer_id, TransferState.PLANNED)
    signed = replace(transfer, state=TransferState.PREPARED, txid=event.txid, raw=event.raw)
    order = _put(order, signed)
    if transfer.kind is TransferKind.PAYOUT:
        order = replace(order, status=OrderStatus.EXECUTING_SWAP)
    return Transition(order)


def _published(order: Order, event: ev.TransferPublished, _now: int) -> Transition:
    transfer = _transfer(order, event.transfer_id, TransferState.PREPARED, TransferState.UNKNOWN)
    return Transition(_put(order, replace(transfer, state=TransferState.PUBLISHED, reason=None)))


def _outcome_unknown(order: Order, event: ev.TransferUnknown, _now: int) -> Transition:
    transfer = _transfer(order, event.transfer_id, TransferState.PREPARED, TransferState.PUBLISHED)
    unknown = replace(transfer, state=TransferState.UNKNOWN, reason=event.reason)
    return Transition(_put(order, unknown))


_MAY_END = (
    TransferState.PREPARED,
    TransferState.PUBLISHED,
    TransferState.UNKNOWN,
)


def _settled(order: Order, event: ev.TransferSettled, _now: int) -> Transition:
    transfer = _transfer(order, event.transfer_id, *_MAY_END)
    settled = replace(transfer, state=TransferState.SETTLED, reason=None, receipt=event.receipt)
    order = _put(order, settled)
    if transfer.kind is TransferKind.PAYOUT:
        order = replace(order, status=OrderStatus.COMPLETED)
        return _refund_extra(order) if order.leftover else Transition(order)
    return Transition(_finish_refunding(order))


def _failed(order: Order, event: ev.TransferFailed, _now: int) -> Transition:
    order, kind = _record_failed(order, event)
    if kind is TransferKind.PAYOUT:
        return _refund(replace(order, leftover=0), "The payout failed on its network.")
    return _refund_extra(order)


def _failed_undecided(order: Order, event: ev.TransferFailed, now: int) -> Transition:
    return _decide(_record_failed(order, event)[0], now)


def _record_failed(order: Order, event: ev.TransferFailed) -> tuple[Order, TransferKind]:
    transfer = _transfer(order, event.transfer_id, TransferState.PLANNED, *_MAY_END)
    failed = replace(transfer, state=TransferState.FAILED, reason=event.reason)
    return release(_put(order, failed), transfer.transfer_id), transfer.kind


def _cancel_and_refund(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    payout = _planned_payout(order)
    if payout is not None:
        order = _cancel(order, payout)
    return _refund(replace(order, leftover=0), "The payout could not be prepared in time.")


# --- refunds ---------------------------------------------------------------------------------


def _refund(order: Order, reason: str) -> Transition:
    """Send everything unspent back and end the order when that is done."""
    order = replace(order, status=OrderStatus.REFUNDING, error_message=reason)
    order, effects = plan_refunds(order)
    return Transition(_finish_refunding(order), effects)


def _refund_extra(order: Order) -> Transition:
    """Send back what the decision does not cover, whatever the order's status is."""
    order, effects = plan_refunds(order)
    return Transition(_finish_refunding(order), effects)


def _finish_refunding(order: Order) -> Order:
    """Leave ``refunding`` when nothing is left to send: refunded, or failed if all was dust."""
    if order.status is not OrderStatus.REFUNDING or order.unspent or _open_transfers(order):
        return order
    if any(t.state is TransferState.SETTLED for t in order.refunds):
        return replace(order, status=OrderStatus.REFUNDED)
    return replace(order, status=OrderStatus.FAILED)


def _refund_address_given(order: Order, event: ev.RefundAddressGiven, _now: int) -> Transition:
    if order.action_required is None:
        raise ImpossibleTransition("the order does not wait for a refund address")
    return _refund_extra(replace(order, refund_address=event.address))


# --- deadlines -------------------------------------------------------------------------------


def _expire(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    return Transition(replace(order, status=OrderStatus.EXPIRED, error_message=_NO_DEPOSIT))


def _look_again(order: Order, _event: ev.DeadlinePassed, _now: int) -> Transition:
    effects: list[Effect] = [AdvanceTransfer(t.transfer_id) for t in _open_transfers(order)]
    if twap.is_filling(order):
        effects.append(FillChunk(len(order.fills)))
    return Transition(order, tuple(effects))


def _reported(order: Order, event: ev.UpstreamReported, _now: int) -> Transition:
    after = relay.reported(order, event.status, event.report)
    if after is None:
        raise ImpossibleTransition(f"{event.status} says nothing new, or can't follow")
    return Transition(after)


def _deadline_in_executing(order: Order, event: ev.DeadlinePassed, now: int) -> Transition:
    if _planned_payout(order) is not None:
        return _cancel_and_refund(order, event, now)
    return _look_again(order, event, now)


_NO_DEPOSIT = "No deposit came before the order expired."
_UNCONFIRMED = "The deposit was never confirmed by its network."
_RATE_FELL = "The rate fell below the order's minimum before the first chunk was swapped."
_RATE_FELL_MIDWAY = (
    "The rate fell below the order's minimum; what was swapped is paid out, the rest refunded."
)

_S = OrderStatus
# Where a refund ends at once if there is nothing (more) to send: all dust, or gone.
_ENDED = (_S.REFUNDING, _S.REFUNDED, _S.FAILED)
_FUNDED = (_S.DEPOSIT_CONFIRMED, _S.EXECUTING_SWAP, *_ENDED)


def _stays(status: OrderStatus) -> dict[type, Rule]:
    """Rules of every status in which the decision is made: deposits and refunds go on beside it."""
    return {
        ev.DepositSeen: Rule(_seen_more, (status,)),
        ev.DepositConfirmed: Rule(_extra_confirmed, (status,)),
        ev.DepositRemoved: Rule(_removed_later, (status,)),
        ev.TransferPrepared: Rule(_prepared, (status,)),
        ev.TransferPublished: Rule(_published, (status,)),
        ev.TransferUnknown: Rule(_outcome_unknown, (status,)),
        ev.TransferSettled: Rule(_settled, (status,)),
        ev.TransferFailed: Rule(_failed, (status,)),
        ev.RefundAddressGiven: Rule(_refund_address_given, (status,)),
    }


def _undecided_rules(*statuses: OrderStatus) -> dict[type, Rule]:
    """Rules for a refund that was signed before its order stepped back to ``statuses[0]``."""
    return {
        ev.TransferPublished: Rule(_published, statuses[:1]),
        ev.TransferUnknown: Rule(_outcome_unknown, statuses[:1]),
        ev.TransferSettled: Rule(_settled, statuses[:1]),
        ev.TransferFailed: Rule(_failed_undecided, statuses),
    }


TRANSITIONS: Mapping[OrderStatus, Mapping[type, Rule]] = {
    _S.AWAITING_DEPOSIT: {
        **_undecided_rules(_S.AWAITING_DEPOSIT),
        ev.DepositSeen: Rule(_seen_first, (_S.DEPOSIT_DETECTED,)),
        ev.DeadlinePassed: Rule(_expire, (_S.EXPIRED,)),
    },
    _S.DEPOSIT_DETECTED: {
        **_undecided_rules(_S.DEPOSIT_DETECTED, *_FUNDED),
        ev.DepositSeen: Rule(_seen_more, (_S.DEPOSIT_DETECTED,)),
        ev.DepositConfirmed: Rule(_confirmed_in_detected, (_S.DEPOSIT_DETECTED, *_FUNDED)),
        ev.DepositRemoved: Rule(
            _removed_in_detected, (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED)
        ),
        ev.DeadlinePassed: Rule(_deadline_in_detected, (_S.DEPOSIT_DETECTED, *_FUNDED, _S.EXPIRED)),
    },
    _S.DEPOSIT_CONFIRMED: {
        **_stays(_S.DEPOSIT_CONFIRMED),
        ev.DepositConfirmed: Rule(_confirmed_before_payout, (_S.DEPOSIT_CONFIRMED,)),
        ev.DepositRemoved: Rule(
            _removed_before_payout, (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED)
        ),
        ev.Repriced: Rule(_repriced, _FUNDED),
        ev.TransferPrepared: Rule(_prepared, (_S.DEPOSIT_CONFIRMED, _S.EXECUTING_SWAP)),
        ev.TransferFailed: Rule(_failed, _FUNDED),
        ev.DeadlinePassed: Rule(_cancel_and_refund, _ENDED),
    },
    _S.EXECUTING_SWAP: {
        **_stays(_S.EXECUTING_SWAP),
        ev.TransferSettled: Rule(_settled, (_S.EXECUTING_SWAP, _S.COMPLETED)),
        ev.DepositRemoved: Rule(
            _removed_in_executing, (_S.AWAITING_DEPOSIT, _S.DEPOSIT_DETECTED, *_FUNDED)
        ),
        ev.ChunkFilled: Rule(_chunk_filled, (_S.EXECUTING_SWAP,)),
        ev.FillingStopped: Rule(_filling_stopped, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.TransferFailed: Rule(_failed, (_S.EXECUTING_SWAP, *_ENDED)),
        ev.DeadlinePassed: Rule(_deadline_in_executing, (_S.EXECUTING_SWAP, *_ENDED)),
    },
    _S.REFUNDING: {
        **_stays(_S.REFUNDING),
        ev.DepositConfirmed: Rule(_extra_confirmed, (_S.REFUNDING,)),
        ev.DepositRemoved: Rule(_removed_in_refunding, _ENDED),
        ev.TransferSettled: Rule(_settled, (_S.REFUNDING, _S.REFUNDED)),
        ev.TransferFailed: Rule(_failed, _ENDED),
        ev.RefundAddressGiven: Rule(_refund_address_given, _ENDED),
        ev.DeadlinePassed: Rule(_look_again, (_S.REFUNDING,)),
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
        ev.DeadlinePassed: Rule(_look_again, (status,)),
    }
    for status in OrderStatus
    if not status.is_terminal
} | {status: {} for status in OrderStatus if status.is_terminal}
