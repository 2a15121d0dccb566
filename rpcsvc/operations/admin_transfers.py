"""What happens to a transfer by itself, and what the operator can do, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from rpcsvc.clock import iso8601
from rpcsvc.domain.order import (
    FINAL_TRANSFERS,
    REFUND_BLOCKED,
    OnDeadline,
    TransferKind,
    TransferState,
)
from rpcsvc.orders.ports.operator import BookedTransfer, Signed

PENDING: Final = tuple(state for state in TransferState if state not in FINAL_TRANSFERS)


def receipt_of(item: BookedTransfer) -> dict[str, Any] | None:
    """The receipt that proves it."""
    return None if item.receipt is None else dict(orjson.loads(item.receipt))


def next_of(item: BookedTransfer, signed: Sequence[Signed], paused: str | None) -> str:
    """What happens to a transfer next."""
    off_chain = _off_chain(item, signed)
    if off_chain is not None:
        return off_chain
    if item.state.is_final:
        return _ended(item)
    if paused is not None and item.state is not TransferState.PUBLISHED:
        return f"nothing while payouts are paused{_cancellation(item)}"
    return f"{_NEXT[item.state]}{_cancellation(item)}"


def is_blocked(item: BookedTransfer) -> bool:
    """Whether it is a refund that the agreed refund address has refused."""
    failed = item.state is TransferState.FAILED and item.kind == TransferKind.REFUND.value
    return failed and item.action_required == REFUND_BLOCKED


def _off_chain(item: BookedTransfer, signed: Sequence[Signed]) -> str | None:
    """What to do for a settled transfer that a reorganisation took off its chain."""
    is_settled = item.state is TransferState.SETTLED and bool(signed)
    if not is_settled or any(each.block is not None for each in signed):
        return None
    return (
        "a reorganisation took it off its chain, and the same bytes are published again; if health"
        f" names it for hours: rpcsvc payouts close {item.transfer_id} --note TEXT"
    )


def _cancellation(item: BookedTransfer) -> str:
    """When a payout that is not signed is cancelled."""
    is_payout = item.kind == TransferKind.PAYOUT.value
    waits = item.state is TransferState.PLANNED and item.on_deadline is OnDeadline.REFUND
    if not (is_payout and waits and item.deadline_at is not None):
        return ""
    return f"; if it is not signed by {iso8601(item.deadline_at)}, the order is refunded"


def _ended(item: BookedTransfer) -> str:
    if item.state is TransferState.SETTLED:
        return "nothing: it is paid, and its network calls it final"
    if item.state is TransferState.CANCELLED:
        return "nothing: it was cancelled before it was signed, and the deposit is refunded"
    if is_blocked(item):
        again = f"rpcsvc payouts retry {item.transfer_id}"
        return f"the agreed refund address refused it; to try once more: {again}"
    if item.action_required is not None:
        return f"waits for an address: rpcsvc refund {item.order_id} --to ADDRESS"
    return "nothing for this one: what it was to pay goes back by a refund of the order"


_NEXT: Final = {
    TransferState.PLANNED: "it is signed as soon as its wallet can; tried again within a minute",
    TransferState.PREPARED: "the signed bytes are published",
    TransferState.PUBLISHED: "its network is asked until the transaction is deep enough",
    TransferState.UNKNOWN: (
        "its network is asked for the transaction; if it is not there, the same bytes are"
        " published again"
    ),
}
