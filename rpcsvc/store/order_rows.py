"""Orders and their parts as rows: the columns, and the conversions both ways.

Columns are matched by name in both directions: by position, two amounts could be swapped unnoticed.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import asdict

from rpcsvc.domain.events import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.money import ASSETS
from rpcsvc.domain.order import (
    Deposit,
    DepositKey,
    Fill,
    Order,
    Terms,
    Timeouts,
    Transfer,
    TwapPlan,
)
from rpcsvc.domain.pricing import Price
from rpcsvc.store.database import Row, Values
from rpcsvc.store.rows import fields_of, from_row, to_row

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
    """Return the values of TERMS."""
    timeouts, twap = terms.timeouts, terms.twap
    return {
        **asdict(terms),
        **asdict(terms.price),
        **asdict(timeouts),
        "direction": terms.direction.value,
        "confirm_timeout": timeouts.confirm,
        "prepare_timeout": timeouts.prepare,
        "agreed_refund_address": terms.refund_address,
        "twap_chunk_units": twap and twap.chunk_units,
        "twap_interval_ms": twap and twap.interval_ms,
    }


def changing_values(order: Order) -> dict[str, Any]:
    """Return the values of CHANGING."""
    return {
        **asdict(order),
        "status": order.status.value,
        "on_deadline": order.on_deadline and order.on_deadline.value,
        "unpaid_since": order.completed_at if order.ended_unpaid else None,
    }


def order_from(row: Row) -> Order:
    """Return the order of a row of ORDER, without its deposits, transfers, chunks and report."""
    values = fields_of(row)
    chunk_units, interval_ms = values["twap_chunk_units"], values["twap_interval_ms"]
    terms = from_row(
        Terms,
        values,
        price=from_row(Price, values),
        timeouts=from_row(
            Timeouts,
            values,
            confirm=values["confirm_timeout"],
            prepare=values["prepare_timeout"],
        ),
        twap=None if chunk_units is None else TwapPlan(chunk_units, interval_ms),
        refund_address=values["agreed_refund_address"],
    )
    return from_row(Order, values, terms=terms)


# --- deposits, transfers, chunks ---------------------------------------------------------------


def deposit_values(order_id: str, deposit: Deposit) -> Values:
    """Return the values of DEPOSIT."""
    return to_row(deposit, order_id=order_id, **deposit.key._asdict())


def deposit_from(row: Row) -> Deposit:
    """Return the deposit of a row of DEPOSIT."""
    return from_row(Deposit, row, key=DepositKey(row["network"], row["txid"], row["output_index"]))


def transfer_values(order_id: str, transfer: Transfer) -> Values:
    """Return the values of TRANSFER."""
    return to_row(transfer, order_id=order_id, asset=transfer.asset.symbol)


def transfer_from(row: Row) -> Transfer:
    """Return the transfer of a row of TRANSFER."""
    return from_row(Transfer, row, asset=ASSETS[row["asset"]])


def fill_values(order_id: str, chunk: int, fill: Fill) -> Values:
    """Return the values of FILL."""
    return to_row(fill, order_id=order_id, chunk=chunk)


def fill_from(row: Row) -> Fill:
    """Return the chunk of a row of FILLED."""
    return from_row(Fill, row)


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
