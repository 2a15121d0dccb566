"""Orders and their parts as rows: the columns, and the conversions both ways.

Columns are matched by name in both directions: by position, two amounts could be swapped unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import asdict

from rpcsvc.domain.events import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import (
    Deposit,
    DepositKey,
    DepositState,
    Fill,
    OnDeadline,
    Order,
    OrderStatus,
    Terms,
    Timeouts,
    Transfer,
    TransferKind,
    TransferState,
    TwapPlan,
)
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.store.database import Row, Values, fields_of

_ASSETS: Final = {asset.symbol: asset for asset in (XMR, USDC)}

TERMS: Final = (
    "order_id", "session_id", "direction", "chain", "chain_id", "deposit_network",
    "payout_network", "deposit_address", "to_address", "deposit_amount", "expected_output",
    "min_received", "min_deposit", "max_deposit", "rate", "spread_bps", "payout_fee",
    "min_received_bps", "integrator_bps", "funding_fee", "funding_gas", "refund_fee", "created_at",
    "expires_at", "late_window", "confirm_timeout", "prepare_timeout", "payout_check",
    "refund_reminder", "integrator", "twap_chunk_units", "twap_interval_ms", "upstream_id",
    "agreed_refund_address", "price_locked_until",
)  # fmt: skip
_STANDING: Final = (
    "status", "status_at", "version", "deadline_at", "on_deadline", "refund_address",
    "action_required", "error_message", "completed_at", "leftover", "lock_broken_at",
)  # fmt: skip
ORDER: Final = (*TERMS, *_STANDING)
CHANGING: Final = (*_STANDING, "unpaid_since")
DEPOSIT: Final = (
    "network", "txid", "output_index", "order_id", "units", "sender", "first_seen_at", "state",
    "transfer_id", "is_dust", "rate",
)  # fmt: skip
TRANSFER: Final = (
    "transfer_id", "order_id", "kind", "network", "asset", "address", "units", "fee", "state",
    "txid", "raw", "reason", "integrator_fee", "receipt",
)  # fmt: skip
FILLED: Final = Fill.__struct_fields__
FILL: Final = ("order_id", "chunk", *FILLED)


# --- orders ------------------------------------------------------------------------------------


def terms_values(terms: Terms) -> dict[str, Any]:
    """The values of TERMS."""
    price, timeouts, twap = terms.price, terms.timeouts, terms.twap
    return {
        "order_id": terms.order_id,
        "session_id": terms.session_id,
        "direction": terms.direction.value,
        "chain": terms.chain,
        "chain_id": terms.chain_id,
        "deposit_network": terms.deposit_network,
        "payout_network": terms.payout_network,
        "deposit_address": terms.deposit_address,
        "to_address": terms.to_address,
        "deposit_amount": terms.deposit_amount,
        "expected_output": terms.expected_output,
        "min_received": terms.min_received,
        "min_deposit": terms.min_deposit,
        "max_deposit": terms.max_deposit,
        "rate": price.rate,
        "spread_bps": price.spread_bps,
        "payout_fee": price.payout_fee,
        "min_received_bps": price.min_received_bps,
        "integrator_bps": price.integrator_bps,
        "funding_fee": price.funding_fee,
        "funding_gas": terms.funding_gas,
        "refund_fee": terms.refund_fee,
        "created_at": terms.created_at,
        "expires_at": terms.expires_at,
        "late_window": timeouts.late_window,
        "confirm_timeout": timeouts.confirm,
        "prepare_timeout": timeouts.prepare,
        "payout_check": timeouts.payout_check,
        "refund_reminder": timeouts.refund_reminder,
        "integrator": terms.integrator,
        "twap_chunk_units": twap and twap.chunk_units,
        "twap_interval_ms": twap and twap.interval_ms,
        "upstream_id": terms.upstream_id,
        "agreed_refund_address": terms.refund_address,
        "price_locked_until": terms.price_locked_until,
    }


def changing_values(order: Order) -> dict[str, Any]:
    """The values of CHANGING."""
    return {
        "status": order.status.value,
        "status_at": order.status_at,
        "version": order.version,
        "deadline_at": order.deadline_at,
        "on_deadline": order.on_deadline and order.on_deadline.value,
        "refund_address": order.refund_address,
        "action_required": order.action_required,
        "error_message": order.error_message,
        "completed_at": order.completed_at,
        "leftover": order.leftover,
        "lock_broken_at": order.lock_broken_at,
        "unpaid_since": order.completed_at if order.ended_unpaid else None,
    }


def order_from(row: Row) -> Order:
    """The order of a row of ORDER, without its deposits, transfers, chunks and report."""
    values = fields_of(row)
    on_deadline = values["on_deadline"]
    return Order(
        terms=_terms_from(values),
        status=OrderStatus(values["status"]),
        status_at=values["status_at"],
        version=values["version"],
        deadline_at=values["deadline_at"],
        on_deadline=None if on_deadline is None else OnDeadline(on_deadline),
        refund_address=values["refund_address"],
        action_required=values["action_required"],
        error_message=values["error_message"],
        completed_at=values["completed_at"],
        leftover=values["leftover"],
        lock_broken_at=values["lock_broken_at"],
    )


def _terms_from(values: Mapping[str, Any]) -> Terms:
    return Terms(
        order_id=values["order_id"],
        session_id=values["session_id"],
        direction=Direction(values["direction"]),
        chain=values["chain"],
        chain_id=values["chain_id"],
        deposit_network=values["deposit_network"],
        payout_network=values["payout_network"],
        deposit_address=values["deposit_address"],
        to_address=values["to_address"],
        deposit_amount=values["deposit_amount"],
        expected_output=values["expected_output"],
        min_received=values["min_received"],
        min_deposit=values["min_deposit"],
        max_deposit=values["max_deposit"],
        price=_price_from(values),
        refund_fee=values["refund_fee"],
        created_at=values["created_at"],
        expires_at=values["expires_at"],
        timeouts=_timeouts_from(values),
        integrator=values["integrator"],
        twap=_twap_from(values),
        upstream_id=values["upstream_id"],
        refund_address=values["agreed_refund_address"],
        price_locked_until=values["price_locked_until"],
        funding_gas=values["funding_gas"],
    )


def _price_from(values: Mapping[str, Any]) -> Price:
    return Price(
        rate=values["rate"],
        spread_bps=values["spread_bps"],
        payout_fee=values["payout_fee"],
        min_received_bps=values["min_received_bps"],
        integrator_bps=values["integrator_bps"],
        funding_fee=values["funding_fee"],
    )


def _timeouts_from(values: Mapping[str, Any]) -> Timeouts:
    return Timeouts(
        late_window=values["late_window"],
        confirm=values["confirm_timeout"],
        prepare=values["prepare_timeout"],
        payout_check=values["payout_check"],
        refund_reminder=values["refund_reminder"],
    )


def _twap_from(values: Mapping[str, Any]) -> TwapPlan | None:
    if values["twap_chunk_units"] is None:
        return None
    return TwapPlan(chunk_units=values["twap_chunk_units"], interval_ms=values["twap_interval_ms"])


# --- deposits, transfers, chunks ---------------------------------------------------------------


def deposit_values(order_id: str, deposit: Deposit) -> Values:
    """The values of DEPOSIT."""
    key = deposit.key
    return {
        "network": key.network,
        "txid": key.txid,
        "output_index": key.output_index,
        "order_id": order_id,
        "units": deposit.units,
        "sender": deposit.sender,
        "first_seen_at": deposit.first_seen_at,
        "state": deposit.state.value,
        "transfer_id": deposit.transfer_id,
        "is_dust": int(deposit.is_dust),
        "rate": deposit.rate,
    }


def deposit_from(row: Row) -> Deposit:
    """The deposit of a row of DEPOSIT."""
    values = row
    return Deposit(
        key=DepositKey(
            network=values["network"], txid=values["txid"], output_index=values["output_index"]
        ),
        units=values["units"],
        sender=values["sender"],
        first_seen_at=values["first_seen_at"],
        state=DepositState(values["state"]),
        transfer_id=values["transfer_id"],
        is_dust=bool(values["is_dust"]),
        rate=values["rate"],
    )


def transfer_values(order_id: str, transfer: Transfer) -> Values:
    """The values of TRANSFER."""
    return {
        "transfer_id": transfer.transfer_id,
        "order_id": order_id,
        "kind": transfer.kind.value,
        "network": transfer.network,
        "asset": transfer.asset.symbol,
        "address": transfer.address,
        "units": transfer.units,
        "fee": transfer.fee,
        "state": transfer.state.value,
        "txid": transfer.txid,
        "raw": transfer.raw,
        "reason": transfer.reason,
        "integrator_fee": transfer.integrator_fee,
        "receipt": transfer.receipt,
    }


def transfer_from(row: Row) -> Transfer:
    """The transfer of a row of TRANSFER."""
    values = row
    return Transfer(
        transfer_id=values["transfer_id"],
        kind=TransferKind(values["kind"]),
        network=values["network"],
        asset=_ASSETS[values["asset"]],
        address=values["address"],
        units=values["units"],
        fee=values["fee"],
        state=TransferState(values["state"]),
        txid=values["txid"],
        raw=values["raw"],
        reason=values["reason"],
        integrator_fee=values["integrator_fee"],
        receipt=values["receipt"],
    )


def fill_values(order_id: str, chunk: int, fill: Fill) -> Values:
    """The values of FILL."""
    return {"order_id": order_id, "chunk": chunk, **asdict(fill)}


def fill_from(row: Row) -> Fill:
    """The chunk of a row of FILLED."""
    return Fill(**row)


# --- effects --------------------------------------------------------------------------


def effect_values(order_id: str, effect: Effect) -> Values:
    """The key of a row of ``effects``: order, kind, and the transfer or chunk that it is about."""
    if isinstance(effect, AdvanceTransfer):
        return {"order_id": order_id, "kind": "advance_transfer", "subject": effect.transfer_id}
    if isinstance(effect, FillChunk):
        return {"order_id": order_id, "kind": "fill_chunk", "subject": str(effect.index)}
    return {"order_id": order_id, "kind": "price_late_deposit", "subject": ""}


def effect_from(kind: str, subject: str) -> Effect:
    """The effect of a row of ``effects``."""
    if kind == "advance_transfer":
        return AdvanceTransfer(subject)
    if kind == "fill_chunk":
        return FillChunk(int(subject))
    if kind == "price_late_deposit":
        return PriceLateDeposit()
    raise ValueError(f"unknown effect {kind!r} in the store")
