"""Which deposits go back, to whom, and how much arrives. Pure parts of the order machine.

A refund takes whole deposits: those of one recipient share one transfer and its fee. A deposit
that is worth no more than the fee is held as dust and shown. What does not live here: when an
order is refunded (transition.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rpcsvc.domain.effects import AdvanceTransfer, Effect
from rpcsvc.domain.order import REFUND_ADDRESS, Deposit, Order, Transfer
from rpcsvc.domain.states import TransferKind, TransferState


def next_transfer_id(order: Order, kind: TransferKind) -> str:
    """The id of the next transfer of that kind: ``<order id>/<kind>/<n>``."""
    count = sum(1 for t in order.transfers if t.kind is kind)
    return f"{order.order_id}/{kind}/{count + 1}"


def plan_refunds(order: Order) -> tuple[Order, tuple[Effect, ...]]:
    """Plan a refund of every unspent deposit whose recipient is known; write dust off.

    Returns the order with the planned transfers and the effects that carry them out.
    ``action_required`` says whether a deposit is left that waits for a refund address.
    """
    effects: list[Effect] = []
    for recipient, deposits in _by_recipient(order).items():
        units = sum(d.units for d in deposits) - order.terms.refund_fee
        if units <= 0:
            order = _mark(order, deposits, is_dust=True)
            continue
        if recipient is None:
            continue  # worth sending back, but to whom has to be said first
        transfer = _refund(order, recipient, units)
        order = _mark(order, deposits, transfer_id=transfer.transfer_id)
        order = replace(order, transfers=(*order.transfers, transfer))
        effects.append(AdvanceTransfer(transfer.transfer_id))
    needed = REFUND_ADDRESS if order.unspent else None
    return replace(order, action_required=needed), tuple(effects)


def release(order: Order, transfer_id: str) -> Order:
    """Free the deposits that a transfer had taken up, because it will never be carried out."""
    taken = [d for d in order.deposits if d.transfer_id == transfer_id]
    return _mark(order, taken, transfer_id=None)


def _by_recipient(order: Order) -> dict[str | None, list[Deposit]]:
    groups: dict[str | None, list[Deposit]] = {}
    for deposit in order.unspent:
        groups.setdefault(_recipient(order, deposit), []).append(deposit)
    return groups


def _recipient(order: Order, deposit: Deposit) -> str | None:
    """Where the deposit goes back to; None when an address has to be given first.

    An address that a refund has already failed to reach is not tried again.
    """
    candidate = order.refund_address
    if candidate is None and order.terms.senders_can_be_refunded:
        candidate = deposit.sender
    refused = {t.address for t in order.refunds if t.state is TransferState.FAILED}
    return None if candidate in refused else candidate


def _refund(order: Order, recipient: str, units: int) -> Transfer:
    return Transfer(
        transfer_id=next_transfer_id(order, TransferKind.REFUND),
        kind=TransferKind.REFUND,
        network=order.terms.deposit_network,
        asset=order.terms.deposit_asset,
        address=recipient,
        units=units,
        fee=order.terms.refund_fee,
    )


def _mark(
    order: Order,
    deposits: Iterable[Deposit],
    *,
    transfer_id: str | None = None,
    is_dust: bool = False,
) -> Order:
    keys = {d.key for d in deposits}
    return replace(
        order,
        deposits=tuple(
            replace(d, transfer_id=transfer_id, is_dust=is_dust) if d.key in keys else d
            for d in order.deposits
        ),
    )
