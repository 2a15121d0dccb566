"""Which deposits go back, to whom, and how much arrives. Pure parts of the order machine.

A refund takes whole deposits: those of one recipient share one transfer and its fee. What is left
of the deposits of a TWAP order that was swapped in part goes with them. A deposit that is worth no
more than the fee is held as dust and shown. What does not live here: when an
order is refunded (refund_rules.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rpcsvc.domain.effects import AdvanceTransfer, Effect
from rpcsvc.domain.order import REFUND_ADDRESS, REFUND_BLOCKED, Deposit, Order, Transfer
from rpcsvc.domain.states import DepositState, OrderStatus, TransferKind, TransferState


def next_transfer_id(order: Order, kind: TransferKind) -> str:
    """The id of the next transfer of that kind: ``<order id>/<kind>/<n>``."""
    count = sum(1 for t in order.transfers if t.kind is kind)
    return f"{order.order_id}/{kind}/{count + 1}"


def order_of(transfer_id: str) -> str:
    """The id of the order that a transfer belongs to."""
    return transfer_id.partition("/")[0]


def plan_refunds(order: Order, *, again: bool = False) -> tuple[Order, tuple[Effect, ...]]:
    """Plan a refund of every unspent deposit whose recipient is known; write dust off.

    Returns the order with the planned transfers and the effects that carry them out.
    ``action_required`` says whether a deposit is left, and what it waits for. ``again``: also to
    the agreed address when a refund to it has failed before.
    """
    effects: list[Effect] = []
    for recipient, share in _by_recipient(order, again=again).items():
        units = share.units - order.terms.refund_fee
        if units <= 0:
            order = _mark(order, share.deposits, is_dust=True)
            continue
        if recipient is None:
            continue  # worth sending back, but to whom has to be said first
        transfer = _refund(order, recipient, units)
        order = _mark(order, share.deposits, transfer_id=transfer.transfer_id)
        order = replace(
            order,
            transfers=(*order.transfers, transfer),
            leftover=order.leftover - share.leftover,
        )
        effects.append(AdvanceTransfer(transfer.transfer_id))
    waits = bool(order.unspent) or _due_leftover(order) > order.terms.refund_fee
    return replace(order, action_required=_needed(order) if waits else None), tuple(effects)


def _needed(order: Order) -> str:
    """What a refund without a recipient waits for."""
    return REFUND_ADDRESS if order.terms.refund_address is None else REFUND_BLOCKED


def release(order: Order, transfer_id: str) -> Order:
    """Free what a transfer had taken up, because it will never be carried out."""
    taken = [d for d in order.deposits if d.transfer_id == transfer_id]
    leftover = order.leftover + leftover_in(order, transfer_id)
    return replace(_mark(order, taken, transfer_id=None), leftover=leftover)


def leftover_in(order: Order, transfer_id: str) -> int:
    """How much of a refund is a part of a swapped deposit, in deposit units.

    A refund sends back whole deposits and the leftover, less its fee.
    """
    transfer = order.transfer(transfer_id)
    if transfer is None or transfer.kind is not TransferKind.REFUND:
        return 0
    whole = sum(d.units for d in order.deposits if d.transfer_id == transfer_id)
    return transfer.units + transfer.fee - whole


@dataclass(slots=True)
class _Share:
    """What goes back to one recipient, in deposit units."""

    deposits: list[Deposit] = field(default_factory=list)
    leftover: int = 0

    @property
    def units(self) -> int:
        return self.leftover + sum(d.units for d in self.deposits)


def _by_recipient(order: Order, *, again: bool) -> dict[str | None, _Share]:
    shares: dict[str | None, _Share] = defaultdict(_Share)
    for deposit in order.unspent:
        shares[_recipient(order, deposit.sender, again=again)].deposits.append(deposit)
    for sender, units in _leftovers(order).items():
        if units:
            shares[_recipient(order, sender, again=again)].leftover += units
    return shares


def _leftovers(order: Order) -> dict[str | None, int]:
    """The leftover that is due, by who sent it; not what is on its way to that sender already.

    Nobody gets what another has sent: deposits are swapped in the order in which they were seen.
    """
    due, going = _due_leftover(order), _leftovers_under_way(order)
    if not due:
        return {}
    paid = _paid_out(order)
    rest, shares = due + sum(going.values()), dict.fromkeys((d.sender for d in reversed(paid)), 0)
    for deposit in reversed(paid):
        part = min(deposit.units, rest)
        shares[deposit.sender] += part
        rest -= part
    for sender, share in shares.items():
        shares[sender] = min(due, max(0, share - (going[sender] if sender else 0)))
        due -= shares[sender]
    return shares


def _leftovers_under_way(order: Order) -> dict[str, int]:
    """What of the leftover was, or may yet be, sent back, by recipient."""
    going: dict[str, int] = defaultdict(int)
    for refund in order.refunds:
        if refund.state not in (TransferState.FAILED, TransferState.CANCELLED):
            going[refund.address] += leftover_in(order, refund.transfer_id)
    return going


def _due_leftover(order: Order) -> int:
    """The leftover goes back once its payout is settled: until then all may still be refunded.

    And while a deposit that it is of has gone and come back, not before that is confirmed again.
    """
    is_due = order.status is OrderStatus.COMPLETED and not any(
        d.state is DepositState.SEEN for d in _paid_out(order)
    )
    return order.leftover if is_due else 0


def _paid_out(order: Order) -> list[Deposit]:
    """The deposits that the payout was made of and that are there."""
    payout_id = order.payout.transfer_id if order.payout else None
    return [d for d in order.deposits if d.transfer_id == payout_id and d.is_active]


def _recipient(order: Order, sender: str | None, *, again: bool) -> str | None:
    """Where a deposit of ``sender`` goes back to; None when that is not known or was refused.

    The agreed address, and nothing else where there is one. Otherwise a known sender, then the
    address that the session has named: it can't redirect what another sender has paid. An address
    that a refund has already failed to reach is not tried again, unless ``again`` asks for the
    agreed one.
    """
    agreed = order.terms.refund_address
    if agreed is not None:
        return None if has_refused(order, agreed) and not again else agreed
    known = sender if order.terms.senders_can_be_refunded else None
    candidates = (known, order.refund_address)
    return next((each for each in candidates if each and not has_refused(order, each)), None)


def has_refused(order: Order, address: str) -> bool:
    """Whether a refund has failed to reach the address."""
    failed = (t.address for t in order.refunds if t.state is TransferState.FAILED)
    return address in failed


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
