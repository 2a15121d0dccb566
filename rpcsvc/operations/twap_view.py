"""How far an order that is swapped in chunks has come (spec 2.4, twap object). Pure."""

from __future__ import annotations

from typing import Any

import orjson

from rpcsvc.domain import twap
from rpcsvc.domain.money import USDC, Asset, format_units
from rpcsvc.domain.order import Order, OrderStatus, TransferState, TwapPlan


def twap_view(order: Order, now: int) -> dict[str, Any] | None:
    """The twap object at ``now`` (ms); None for an order that is swapped at once."""
    plan = order.terms.twap
    if plan is None:
        return None
    asset = order.terms.deposit_asset
    total = _total(order)
    chunks = len(twap.chunks(order, total))
    return {
        "enabled": chunks >= twap.LEAST_CHUNKS,
        "status": _status(order, chunks),
        "chunksCompleted": len(order.fills),
        "chunksTotal": chunks,
        "filledQty": _number(twap.swapped_units(order), asset),
        "totalQty": _number(total, asset),
        "chunkSizeUsd": _number(plan.chunk_units, USDC),
        "intervalMs": plan.interval_ms,
        "estimatedTimeRemainingMs": _remaining(order, plan, chunks, now),
    }


def _total(order: Order) -> int:
    """The deposit units that are, were, or will be swapped if all comes as agreed."""
    payout_id = order.payout.transfer_id if order.payout else None
    spent = sum(d.units for d in order.deposits if payout_id and d.transfer_id == payout_id)
    return spent or twap.total_of(order) or order.terms.deposit_amount


def _status(order: Order, chunks: int) -> str:
    if len(order.fills) == chunks and not _payout_failed(order):
        return "completed"
    if twap.is_filling(order):
        return "active"
    was_stopped = bool(order.fills) or order.status is OrderStatus.REFUNDING
    return "failed" if was_stopped or order.status.is_terminal else "pending"


def _payout_failed(order: Order) -> bool:
    return order.payout is not None and order.payout.state is TransferState.FAILED


def _remaining(order: Order, plan: TwapPlan, chunks: int, now: int) -> int:
    """Until the last chunk, in ms: the wait for the next one and an interval for each after it."""
    left = chunks - len(order.fills)
    if twap.is_filling(order):
        return max(0, twap.due_at(order) - now) + (left - 1) * plan.interval_ms
    waiting = _status(order, chunks) == "pending"
    return (left - 1) * plan.interval_ms if waiting else 0


def _number(units: int, asset: Asset) -> orjson.Fragment:
    """Whole units as a JSON number, digit for digit: no float comes near an amount."""
    return orjson.Fragment(format_units(units, asset).encode())
