"""The names of what an order, a deposit and a transfer can be, and what an agent sees of it.

What does not live here: how one becomes another (transition.py).
Sources: spec 3.1 (agent states), spec 3.2 (order statuses).
"""

from __future__ import annotations

from enum import StrEnum


class Direction(StrEnum):
    """Which way an order swaps."""

    XMR_TO_USDC = "x2u"
    USDC_TO_XMR = "u2x"

    @property
    def reverse(self) -> Direction:
        """The other way."""
        return Direction.USDC_TO_XMR if self is Direction.XMR_TO_USDC else Direction.XMR_TO_USDC


class OrderStatus(StrEnum):
    """The status of an order (spec 3.2)."""

    AWAITING_DEPOSIT = "awaiting_deposit"
    DEPOSIT_DETECTED = "deposit_detected"
    DEPOSIT_CONFIRMED = "deposit_confirmed"
    EXECUTING_SWAP = "executing_swap"
    COMPLETED = "completed"
    REFUNDING = "refunding"
    REFUNDED = "refunded"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """True when the order's status never changes again."""
        return self in TERMINAL


TERMINAL = frozenset(
    {OrderStatus.COMPLETED, OrderStatus.REFUNDED, OrderStatus.FAILED, OrderStatus.EXPIRED}
)


# Money may still be sent to such an order.
AWAITS_DEPOSIT = frozenset({OrderStatus.AWAITING_DEPOSIT, OrderStatus.DEPOSIT_DETECTED})


class DepositState(StrEnum):
    """What the chain says of a deposit at the last look."""

    SEEN = "seen"
    CONFIRMED = "confirmed"
    REMOVED = "removed"


class TransferKind(StrEnum):
    """Why the service sends money."""

    PAYOUT = "payout"
    REFUND = "refund"


class TransferState(StrEnum):
    """How far an outgoing transfer has come (design part 4, write-ahead payouts).

    PLANNED: decided, nothing signed. PREPARED: signed bytes and transaction id are committed.
    PUBLISHED: the network has it. UNKNOWN: it may have it. SETTLED and FAILED are what the
    network says for good. CANCELLED: taken back before anything was signed.
    """

    PLANNED = "planned"
    PREPARED = "prepared"
    PUBLISHED = "published"
    UNKNOWN = "unknown"
    SETTLED = "settled"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True when there is no more to do for the transfer."""
        return self in FINAL_TRANSFERS

    @property
    def may_be_live(self) -> bool:
        """True when signed bytes exist that the network may yet carry out."""
        return self in LIVE_TRANSFERS


FINAL_TRANSFERS = frozenset({TransferState.SETTLED, TransferState.FAILED, TransferState.CANCELLED})
LIVE_TRANSFERS = frozenset({TransferState.PREPARED, TransferState.PUBLISHED, TransferState.UNKNOWN})


class AgentState(StrEnum):
    """The ``state`` of the agent envelope (spec 3.1, design part 3 "States")."""

    NEEDS_INPUT = "needs_input"
    NEEDS_DESTINATION = "needs_destination"
    READY = "ready"
    QUOTED = "quoted"
    WAITING_FOR_FUNDING = "waiting_for_funding"
    DEPOSIT_DETECTED = "deposit_detected"
    SWAP_PROCESSING = "swap_processing"
    REFUNDING = "refunding"
    COMPLETED = "completed"
    TERMINAL_FAILURE = "terminal_failure"
    TICKET_CREATED = "ticket_created"
    INVALID_INPUT = "invalid_input"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    NOT_FOUND = "not_found"
    VERIFICATION_FAILED = "verification_failed"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    INTERNAL_ERROR = "internal_error"


AGENT_STATE_OF: dict[OrderStatus, AgentState] = {
    OrderStatus.AWAITING_DEPOSIT: AgentState.WAITING_FOR_FUNDING,
    OrderStatus.DEPOSIT_DETECTED: AgentState.DEPOSIT_DETECTED,
    OrderStatus.DEPOSIT_CONFIRMED: AgentState.DEPOSIT_DETECTED,
    OrderStatus.EXECUTING_SWAP: AgentState.SWAP_PROCESSING,
    OrderStatus.REFUNDING: AgentState.REFUNDING,
    OrderStatus.COMPLETED: AgentState.COMPLETED,
    OrderStatus.REFUNDED: AgentState.TERMINAL_FAILURE,
    OrderStatus.FAILED: AgentState.TERMINAL_FAILURE,
    OrderStatus.EXPIRED: AgentState.TERMINAL_FAILURE,
}


class OnDeadline(StrEnum):
    """What the service does by itself when an order's deadline passes."""

    EXPIRE = "expire"
    SWAP_OR_REFUND = "swap_or_refund"
    REFUND = "refund"
    REPUBLISH = "republish_and_alert"
    REMIND = "remind_operator"
    ASK_UPSTREAM = "ask_upstream"
