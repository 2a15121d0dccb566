"""Events and effects of the order machine, and the helpers that its rules share.

An event is a fact, found by the engine, the clock or a caller. An effect is work that is committed
with the transition, done after it, and found again after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.domain.order import (
    Deposit,
    DepositKey,
    DepositState,
    Order,
    OrderStatus,
    Report,
    Transfer,
    TransferKind,
    TransferState,
)


class DepositSeen(Struct, frozen=True):
    """The chain or its pool shows a deposit that was not there at the last scan.

    ``rate`` is the current one in USDC units per XMR, None when there is no fresh one.
    """

    key: DepositKey
    units: int
    sender: str | None
    first_seen_at: int
    rate: int | None = None


class DepositConfirmed(Struct, frozen=True):
    """A deposit has the confirmations that its amount asks for.

    ``is_final``: it has all that its network ever asks for. Otherwise the commit of the event adds
    it to the sum at risk (domain/finality.py).
    """

    key: DepositKey
    is_final: bool = True


class DepositRemoved(Struct, frozen=True):
    """A deposit is gone from the chain and its pool: reorganised away, dropped or double-spent."""

    key: DepositKey


class Repriced(Struct, frozen=True):
    """A fresh rate for deposits that have none, in USDC units per XMR.

    ``payable``: payout units that the wallet can pay for them, None where that is not known.
    """

    rate: int
    payable: int | None = None


class LockBroken(Struct, frozen=True):
    """The rate, in USDC units per XMR, has moved too far against the service for a price lock."""

    rate: int


class ChunkFilled(Struct, frozen=True):
    """The next chunk of a TWAP order was swapped at a rate in USDC units per XMR."""

    index: int
    rate: int


class FillingStopped(Struct, frozen=True):
    """No fair rate came for the next chunk for as long as the order waits."""

    index: int


class UpstreamReported(Struct, frozen=True):
    """The upstream that settles the order reported its status."""

    status: OrderStatus
    report: Report


class DeadlinePassed(Struct, frozen=True):
    """The order's ``deadline_at`` has passed."""


class Cancelled(Struct, frozen=True):
    """The order's owner cancelled it."""


class RefundAddressGiven(Struct, frozen=True):
    """The order's owner named where refunds go. The address is validated before."""

    address: str


class RefundRetried(Struct, frozen=True):
    """The operator had a refund tried again that failed to reach the agreed refund address."""


class SupportReplied(Struct, frozen=True):
    """The operator answered a ticket about the order. Nothing about the money changes."""

    ticket_id: str


class TransferPrepared(Struct, frozen=True):
    """A transfer was signed; its bytes and id exist, and nothing was published."""

    transfer_id: str
    txid: str
    raw: str


class TransferPublished(Struct, frozen=True):
    """The network has the transfer; it is not final yet."""

    transfer_id: str


class TransferUnknown(Struct, frozen=True):
    """The outcome of publishing is unknown; the network may have the transfer."""

    transfer_id: str
    reason: str


class TransferSettled(Struct, frozen=True):
    """The transfer is final on the network. ``receipt`` (JSON) proves it, where there is one."""

    transfer_id: str
    receipt: str | None = None


class TransferFailed(Struct, frozen=True):
    """The network reports that the transfer has failed permanently."""

    transfer_id: str
    reason: str


Event = (
    DepositSeen
    | DepositConfirmed
    | DepositRemoved
    | Repriced
    | LockBroken
    | ChunkFilled
    | FillingStopped
    | UpstreamReported
    | DeadlinePassed
    | Cancelled
    | RefundAddressGiven
    | RefundRetried
    | SupportReplied
    | TransferPrepared
    | TransferPublished
    | TransferUnknown
    | TransferSettled
    | TransferFailed
)


class AdvanceTransfer(Struct, frozen=True):
    """Carry a transfer on from its state: prepare, publish or confirm it."""

    transfer_id: str


class PriceLateDeposit(Struct, frozen=True):
    """Fetch a fresh rate for an order with deposits that have none."""


class FillChunk(Struct, frozen=True):
    """Swap the next chunk of a TWAP order when its time has come. ``index`` counts from 0."""

    index: int


Effect = AdvanceTransfer | PriceLateDeposit | FillChunk


def next_transfer_id(order: Order, kind: TransferKind) -> str:
    """The id of the next transfer of that kind: ``<order id>/<kind>/<n>``."""
    count = sum(1 for t in order.transfers if t.kind is kind)
    return f"{order.order_id}/{kind}/{count + 1}"


def order_of(transfer_id: str) -> str:
    """The id of the order that a transfer belongs to."""
    return transfer_id.partition("/")[0]


def release(order: Order, transfer_id: str) -> Order:
    """Free the deposits of a transfer that will never be carried out."""
    taken = [d for d in order.deposits if d.transfer_id == transfer_id]
    leftover = order.leftover + leftover_in(order, transfer_id)
    return replace(mark(order, taken, transfer_id=None), leftover=leftover)


def leftover_in(order: Order, transfer_id: str) -> int:
    """The part of a refund that comes from swapped deposits, in deposit units.

    A refund sends back whole deposits and the leftover, less its fee.
    """
    transfer = order.transfer(transfer_id)
    if transfer is None or transfer.kind is not TransferKind.REFUND:
        return 0
    whole = sum(d.units for d in order.deposits if d.transfer_id == transfer_id)
    return transfer.units + transfer.fee - whole


def mark(
    order: Order,
    deposits: Iterable[Deposit],
    *,
    transfer_id: str | None = None,
    is_dust: bool = False,
) -> Order:
    """The order with these deposits spent on that transfer, or free, or dust."""
    keys = {d.key for d in deposits}
    return replace(
        order,
        deposits=tuple(
            replace(d, transfer_id=transfer_id, is_dust=is_dust) if d.key in keys else d
            for d in order.deposits
        ),
    )


class ImpossibleTransition(Exception):
    """The event does not fit the order's current state; nothing was changed."""


class Transition(Struct, frozen=True):
    """The order after an event, and the effects to carry out."""

    order: Order
    effects: tuple[Effect, ...] = ()


class Rule(Struct, frozen=True):
    """The rule for an event in a status, and every status that it may lead to."""

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
    """Cancel a transfer that was not signed, and free its deposits."""
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


def remove_deposit(order: Order, event: DepositRemoved) -> Order:
    """Mark the deposit removed, and cancel its refund if that is not signed yet.

    Other deposits of that refund are free again: the caller plans again.
    """
    deposit = known_deposit(order, event.key)
    order = set_deposit(order, event.key, DepositState.REMOVED)
    refund = order.transfer(deposit.transfer_id) if deposit.transfer_id else None
    if refund and refund.kind is TransferKind.REFUND and refund.state is TransferState.PLANNED:
        return cancel(order, refund)
    return order
