"""What is asked of an upstream, what it answers, and every way in which it can fail.

    UpstreamError
    +-- NeverSent          nothing left this service
    |   +-- BudgetSpent        the published limit leaves no room now
    |   +-- BreakerOpen        the upstream was found down a moment ago
    |   +-- NotAnId            no upstream can have given that id
    +-- Refused            it understood and said no: nothing was done
    +-- NoAnswer           a read got no answer that can be used; it changed nothing
    +-- UpstreamBroken     an answer came that can't be understood; it names the field
    +-- OutcomeUnknown     something that creates was sent, and may have been done

``may_have_acted`` is the question that decides over money: only OutcomeUnknown says yes, and then
the call must not be repeated without its idempotency key. Field names are those of spec 2.4.
Reasons are fit for logs and for the operator: bounded, without keys or whole addresses. What does
not live here: reading JSON into these types (reading.py), HTTP (exchange.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Final

from rpcsvc.orders.unfunded import UNFUNDED_REASON
from rpcsvc.settlement.upstream.statuses import BridgeReading, OrderReading

# What is kept of an answer for audit. A good answer is some 2 KB.
RAW_LIMIT: Final = 65_536


def is_about_unfunded(details: Mapping[str, Any]) -> bool:
    """Whether another rpcsvc refuses because of orders without a deposit."""
    return details.get("reason") == UNFUNDED_REASON


class UpstreamError(Exception):
    """A call to the upstream that did not give what was asked.

    ``reason`` is for the operator. ``retry_after_ms`` is how long the upstream asked to be left
    alone, if it did. ``retryable``: the same read may succeed later. ``raw``: the answer, bounded.
    """

    may_have_acted: ClassVar[bool] = False

    def __init__(
        self,
        reason: str,
        *,
        retry_after_ms: int | None = None,
        retryable: bool = True,
        raw: bytes = b"",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        self.retryable = retryable
        self.raw = raw[:RAW_LIMIT]


class NeverSent(UpstreamError):
    """No byte of the call left this service: nothing can have happened."""


class BudgetSpent(NeverSent):
    """The published limit leaves no room soon enough; ``retry_after_ms`` says when it does."""


class BreakerOpen(NeverSent):
    """The upstream failed repeatedly and is left alone until ``retry_after_ms`` have passed."""


class NotAnId(NeverSent):
    """An id of a form that no upstream gives; it would not be safe in a path."""


class Refused(UpstreamError):
    """The upstream understood the call and refused it, in its own error form: nothing was done.

    ``message`` and ``details`` are the upstream's words: bounded, and not yet fit for a caller.
    ``code`` is None where the dialect has no codes.
    """

    def __init__(
        self,
        status: int,
        remote: RemoteError,
        *,
        retry_after_ms: int | None = None,
        raw: bytes = b"",
    ) -> None:
        named = f" ({remote.code})" if remote.code else ""
        super().__init__(
            f"The upstream refused with HTTP {status}{named}: {remote.message}",
            retry_after_ms=retry_after_ms,
            retryable=status == 429,
            raw=raw,
        )
        self.status = status
        self.code = remote.code
        self.message = remote.message
        self.details = remote.details


class NoAnswer(UpstreamError):
    """A time-out, a lost connection, or HTTP 5xx. For a read, that is all there is to it."""


class UpstreamBroken(UpstreamError):
    """An answer that can't be understood or trusted; ``field`` is the wrong part, if it is one."""

    def __init__(
        self, reason: str, *, field: str | None = None, retryable: bool = False, raw: bytes = b""
    ) -> None:
        super().__init__(reason, retryable=retryable, raw=raw)
        self.field = field


class OutcomeUnknown(UpstreamError):
    """Something that creates was sent and may have been done.

    ``upstream_id`` is the new order's id, where the answer shows one although it is otherwise
    unusable. ``safe_to_repeat``: it carried an idempotency key that the upstream honours, so that
    the same call with the same key can't create a second one.
    """

    may_have_acted = True

    def __init__(
        self,
        reason: str,
        *,
        safe_to_repeat: bool,
        upstream_id: str | None = None,
        retry_after_ms: int | None = None,
        raw: bytes = b"",
    ) -> None:
        super().__init__(reason, retry_after_ms=retry_after_ms, retryable=safe_to_repeat, raw=raw)
        self.safe_to_repeat = safe_to_repeat
        self.upstream_id = upstream_id


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An upstream's error as its dialect words it. ``code`` is None where there are no codes."""

    code: str | None
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)


# --- what is asked ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuoteBody:
    """Quote request of spec 2.4. ``from_amount`` in atomic units; chain id 0 is Monero."""

    from_chain_id: int
    to_chain_id: int
    from_token: str
    to_token: str
    from_amount: int


@dataclass(frozen=True, slots=True)
class TwapRequest:
    """twapConfig of spec 2.4, a chunk in USDC units; what is None is left out."""

    disabled: bool | None = None
    chunk_usdc: int | None = None
    interval_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OrderBody(QuoteBody):
    """Order create request of spec 2.4, and the final refund address of another rpcsvc's BFF."""

    to_address: str = field(repr=False)
    session_id: str | None = field(default=None, repr=False)
    twap: TwapRequest | None = None
    refund_address: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TicketBody:
    """Support ticket request of spec 2.4."""

    message: str
    category: str
    order_id: str | None = None
    session_id: str | None = field(default=None, repr=False)
    wallet_address: str | None = field(default=None, repr=False)


# --- what is answered ------------------------------------------------------------------------
# Amounts are atomic units, times are ms since the epoch, other numbers are exact decimals.


@dataclass(frozen=True, slots=True)
class UpstreamHealth:
    """Health of spec 2.4. ``status``: ok or degraded."""

    status: str
    version: str
    time: int
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamChain:
    """Chain of spec 2.4; chain id 0 is Monero."""

    chain_id: int
    name: str
    native_token: str
    min_swap_usd: Decimal


@dataclass(frozen=True, slots=True)
class UpstreamChains:
    """The chains that the upstream offers."""

    chains: tuple[UpstreamChain, ...]
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class IntegratorFee:
    """integratorFee of spec 2.4. ``amount`` in atomic units."""

    percent: Decimal
    amount: int
    amount_usd: Decimal


@dataclass(frozen=True, slots=True)
class UpstreamQuote:
    """Quote response of spec 2.4. ``estimated_seconds`` is rounded up."""

    from_amount: int
    from_amount_usd: Decimal
    from_symbol: str
    to_amount: int
    to_amount_usd: Decimal
    to_symbol: str
    estimated_seconds: int
    min_received: int
    integrator_fee: IntegratorFee | None
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamOrder:
    """Order create response of spec 2.4. ``status_text`` is the upstream's own word."""

    order_id: str
    deposit_address: str = field(repr=False)
    deposit_chain: str
    deposit_chain_id: int
    deposit_token: str
    deposit_token_symbol: str
    deposit_amount: int
    to_address: str = field(repr=False)
    expected_output: int
    expires_at: int
    status: OrderReading
    status_text: str
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamTwap:
    """The twap object of spec 2.4."""

    enabled: bool
    status: str
    chunks_completed: int
    chunks_total: int
    filled_qty: Decimal
    total_qty: Decimal
    chunk_size_usd: Decimal
    interval_ms: Decimal
    estimated_time_remaining_ms: Decimal


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """Order (GET by id) of spec 2.4, and the refund address of another rpcsvc's BFF.

    ``status_text`` is the upstream's own word.
    """

    order_id: str
    status: OrderReading
    status_text: str
    deposit_address: str = field(repr=False)
    deposit_token_symbol: str
    deposit_amount: int
    deposit_chain_id: int
    to_address: str = field(repr=False)
    expected_output: int
    deposit_tx_hash: str | None
    actual_output: int | None
    error_message: str | None
    refund_tx_hash: str | None
    created_at: int
    completed_at: int | None
    twap: UpstreamTwap | None
    refund_address: str | None = field(repr=False)
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamListItem:
    """Order list item of spec 2.4; ``order_id`` is its ``id``."""

    order_id: str
    from_chain_id: int
    from_token_symbol: str
    from_amount: int
    to_chain_id: int
    to_token_symbol: str
    to_amount_expected: int
    to_address: str = field(repr=False)
    status: OrderReading
    status_text: str
    created_at: int
    completed_at: int | None


@dataclass(frozen=True, slots=True)
class UpstreamOrderList:
    """The orders of a session."""

    orders: tuple[UpstreamListItem, ...]
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamTicket:
    """Support ticket response of spec 2.4."""

    ticket_id: str
    created_at: int
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BridgeRate:
    """One exchange's rate, of the bridge rate list of spec 2.4."""

    exchange: str
    rate: Decimal
    eta: str


@dataclass(frozen=True, slots=True)
class BridgeRates:
    """Bridge rate list of spec 2.4; ``wagyu_rate`` is the reference rate."""

    rates: tuple[BridgeRate, ...]
    wagyu_rate: Decimal
    wagyu_eta: str
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BridgeOrder:
    """What a bridge deposit or withdrawal answers (spec 2.4)."""

    order_id: str
    deposit_address: str = field(repr=False)
    destination: str = field(repr=False)
    expires_at: int
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BridgeOrderStatus:
    """Bridge order (GET) of spec 2.4. ``kind``: deposit or withdraw."""

    order_id: str
    kind: str
    status: BridgeReading
    status_text: str
    amount: int
    confirmations: int
    required_confirmations: int
    tx_in: str | None
    tx_out: str | None
    failure_reason: str | None
    created_at: int
    completed_at: int | None
    raw: bytes = field(repr=False)


def json_number(value: Decimal) -> int | float:
    """A number that is not an amount, as it was on the wire: whole ones without a point."""
    return int(value) if value == value.to_integral_value() else float(value)
