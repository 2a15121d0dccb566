"""What every rule of the order machine is made of: its result, its refusal, and small changes.

The changes keep the books of an order: a transfer that is put in its place or taken back, a
deposit that takes another state. What does not live here: when each is due (decision.py and the
modules named ``*_rules.py``), and which rule answers which event (transition.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rpcsvc.domain import events as ev
from rpcsvc.domain.effects import Effect
from rpcsvc.domain.order import Deposit, DepositKey, Order, Transfer
from rpcsvc.domain.refunds import release
from rpcsvc.domain.states import DepositState, OrderStatus, TransferKind, TransferState


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


# --- transfers -------------------------------------------------------------------------------


def transfer_in(order: Order, transfer_id: str, *allowed: TransferState) -> Transfer:
    """The order's transfer of that id. Raises ImpossibleTransition unless its state is allowed."""
    transfer = order.transfer(transfer_id)
    if transfer is None or transfer.state not in allowed:
        state = transfer.state if transfer else "absent"
        raise ImpossibleTransition(f"transfer {transfer_id} is {state}")
    return transfer


def put(order: Order, transfer: Transfer) -> Order:
    """The order with ``transfer`` in the place of the one that has its id."""
    same = transfer.transfer_id
    return replace(
        order,
        transfers=tuple(transfer if t.transfer_id == same else t for t in order.transfers),
    )


def cancel(order: Order, transfer: Transfer) -> Order:
    """Take back a transfer that was not signed, and free what it had taken up."""
    cancelled = replace(transfer, state=TransferState.CANCELLED)
    return release(put(order, cancelled), transfer.transfer_id)


def planned_payout(order: Order) -> Transfer | None:
    """The payout while it is not signed; None before it is planned and after it is signed."""
    payout = order.payout
    return payout if payout and payout.state is TransferState.PLANNED else None


def open_transfers(order: Order) -> tuple[Transfer, ...]:
    """The transfers that are not at their end yet."""
    return tuple(t for t in order.transfers if not t.state.is_final)


# --- deposits --------------------------------------------------------------------------------


def known_deposit(order: Order, key: DepositKey) -> Deposit:
    """The order's deposit under ``key``. Raises ImpossibleTransition when there is none."""
    deposit = order.deposit(key)
    if deposit is None:
        raise ImpossibleTransition(f"deposit {key.txid} is not known")
    return deposit


def set_deposit(order: Order, key: DepositKey, state: DepositState) -> Order:
    """Give a deposit another state. Raises ImpossibleTransition if it is unknown or has it."""
    known = order.deposit(key)
    if known is None or known.state is state:
        raise ImpossibleTransition(f"deposit {key.txid} can't become {state}")
    return replace(
        order,
        deposits=tuple(replace(d, state=state) if d.key == key else d for d in order.deposits),
    )


def withdraw(order: Order, event: ev.DepositRemoved) -> Order:
    """Mark the deposit removed, and take back a refund of it that was not signed yet.

    Other deposits that were to go back with it are free again: the caller plans anew.
    """
    deposit = known_deposit(order, event.key)
    order = set_deposit(order, event.key, DepositState.REMOVED)
    refund = order.transfer(deposit.transfer_id) if deposit.transfer_id else None
    if refund and refund.kind is TransferKind.REFUND and refund.state is TransferState.PLANNED:
        return cancel(order, refund)
    return order
