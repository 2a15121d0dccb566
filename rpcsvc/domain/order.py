"""The order, its deposits and transfers, and their states. Immutable values, no rules, no I/O.

Amounts are integers of atomic units of the asset named beside them; times are ms since the epoch.
Sources: spec 3.1 (agent states), spec 3.2 (order statuses).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.money import Asset
from rpcsvc.domain.pricing import Direction, Price, deposit_asset, exact_output, payout_asset

REFUND_ADDRESS = "refund_address"
# The network refuses the agreed refund address: only the operator can have the refund tried again.
REFUND_BLOCKED = "refund_blocked"
# The chain of bridge orders: the perpetuals exchange (bridge.py).
PERPS = "perps"


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
    """The state of a deposit at the last scan."""

    SEEN = "seen"
    CONFIRMED = "confirmed"
    REMOVED = "removed"


class OrderReason(StrEnum):
    """Why an order was refunded or ended without a payout, by its stable code."""

    UNCONFIRMED = "unconfirmed"
    ABOVE_MAXIMUM = "above_maximum"
    BELOW_MINIMUM = "below_minimum"
    LATE_RATE_MOVED = "late_rate_moved"
    LATE_NOT_PAYABLE = "late_not_payable"
    BELOW_FEES = "below_fees"
    NO_DEPOSIT = "no_deposit"
    CANCELLED = "cancelled"
    RATE_FELL = "rate_fell"
    RATE_FELL_MIDWAY = "rate_fell_midway"
    PAYOUT_FAILED = "payout_failed"
    PAYOUT_NOT_PREPARED = "payout_not_prepared"
    DUST = "dust"
    DEPOSIT_LOST = "deposit_lost"

    @property
    def text(self) -> str:
        """The sentence that callers read, in English."""
        return _REASON_TEXTS[self]


_REASON_TEXTS: Final = {
    OrderReason.UNCONFIRMED: "The deposit was never confirmed by its network.",
    OrderReason.ABOVE_MAXIMUM: "The deposits are above the maximum.",
    OrderReason.BELOW_MINIMUM: "The deposits stayed below the minimum until the order expired.",
    OrderReason.LATE_RATE_MOVED: "The deposit came late and the rate has moved too far since.",
    OrderReason.LATE_NOT_PAYABLE: "The deposit came late, when the service could not pay for it.",
    OrderReason.BELOW_FEES: "The deposits are worth no more than the fees of paying them out.",
    OrderReason.NO_DEPOSIT: "No deposit came before the order expired.",
    OrderReason.CANCELLED: "The order was cancelled before a deposit came.",
    OrderReason.RATE_FELL: (
        "The rate fell below the order's minimum before the first chunk was swapped."
    ),
    OrderReason.RATE_FELL_MIDWAY: (
        "The rate fell below the order's minimum; what was swapped is paid out, the rest refunded."
    ),
    OrderReason.PAYOUT_FAILED: "The payout failed on its network.",
    OrderReason.PAYOUT_NOT_PREPARED: "The payout could not be prepared in time.",
    OrderReason.DUST: "They are worth no more than the fee of sending them back, and are held.",
    OrderReason.DEPOSIT_LOST: "A deposit vanished from its network after it was paid out.",
}


def reasons_in(message: str) -> list[OrderReason]:
    """The reasons that an order's error message tells; none if the words are an upstream's."""
    found = [reason for reason in OrderReason if reason.text in message]
    return found if " ".join(reason.text for reason in found) == message else []


class TransferKind(StrEnum):
    """Why the service sends money."""

    PAYOUT = "payout"
    REFUND = "refund"


class TransferState(StrEnum):
    """How far an outgoing transfer has come (design part 4, write-ahead payouts).

    PLANNED: decided, nothing signed. PREPARED: signed bytes and transaction id are committed.
    PUBLISHED: the network has it. UNKNOWN: it may have it. SETTLED and FAILED are final
    on the network. CANCELLED: before anything was signed.
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
        """True when the transfer needs no further work."""
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
    APPROVAL_REQUIRED = "approval_required"
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
    """The service's action when an order's deadline passes."""

    EXPIRE = "expire"
    SWAP_OR_REFUND = "swap_or_refund"
    REFUND = "refund"
    REPUBLISH = "republish_and_alert"
    REMIND = "remind_operator"
    ASK_UPSTREAM = "ask_upstream"


class DepositKey(NamedTuple):
    """Identifies a deposit, which is credited once under this key."""

    network: str
    txid: str
    output_index: int


class Deposit(Struct, frozen=True):
    """Money that the user sent to the order's deposit address.

    ``transfer_id`` names the payout or refund that this deposit was spent on; None while it is
    undecided. ``is_dust``: not worth the fee of sending it back; held for the operator.
    ``rate`` in USDC units per XMR is what it is swapped at, None if that is found when the order
    is decided (deposit_rules.py).
    """

    key: DepositKey
    units: int
    sender: str | None
    first_seen_at: int
    state: DepositState = DepositState.SEEN
    transfer_id: str | None = None
    is_dust: bool = False
    rate: int | None = None

    @property
    def is_active(self) -> bool:
        """True while the chain holds it, confirmed or not."""
        return self.state is not DepositState.REMOVED

    @property
    def is_unspent(self) -> bool:
        """True when it is confirmed and neither swapped, sent back, nor written off as dust."""
        return (
            self.state is DepositState.CONFIRMED and self.transfer_id is None and not self.is_dust
        )


class Transfer(Struct, frozen=True):
    """Money that the service sends: a payout or a refund.

    ``units`` is what the recipient gets; ``fee`` what the network takes besides. ``raw`` holds the
    signed bytes, hex, from PREPARED on: the very same are published again, never others. It is
    empty when the wallet keeps the bytes itself, or the operator recorded it as paid.
    ``integrator_fee``: what was kept from a payout for the order's integrator, in the same units.
    ``receipt`` (JSON): how anyone can check that it was made; its transaction id is the one that
    was mined, which differs from ``txid`` when the fee had to be raised.
    """

    transfer_id: str
    kind: TransferKind
    network: str
    asset: Asset
    address: str
    units: int
    fee: int
    state: TransferState = TransferState.PLANNED
    txid: str | None = None
    raw: str | None = None
    reason: str | None = None
    integrator_fee: int = 0
    receipt: str | None = None


class TwapPlan(Struct, frozen=True):
    """The order is swapped in chunks: worth ``chunk_units`` (millionths of a USD) each,
    one every ``interval_ms`` (spec 2.4, twapConfig).
    """

    chunk_units: int
    interval_ms: int


class Fill(Struct, frozen=True):
    """A chunk that was swapped: ``units`` of the deposit brought ``output`` payout units at
    ``rate`` (USDC units per XMR), after all fees; ``integrator_fee`` in payout units.
    """

    units: int
    output: int
    integrator_fee: int
    rate: int
    at: int


class Report(Struct, frozen=True):
    """The upstream's last report of an order that it settles. ``output`` in payout units.

    ``extra`` is JSON text: its twap object, if the order is swapped in chunks there, or how far a
    bridge order has come (spec 2.4). ``refund_address`` is where it sends refunds, once it has one.
    ``due``: deposit units that the user still has to send; None where it reports none.
    """

    deposit_txid: str | None = None
    output: int | None = None
    refund_txid: str | None = None
    error: str | None = None
    completed_at: int | None = None
    extra: str | None = None
    refund_address: str | None = None
    due: int | None = None


class Timeouts(Struct, frozen=True):
    """How long an order may stay in each status, in milliseconds."""

    late_window: int
    confirm: int
    prepare: int
    payout_check: int
    refund_reminder: int


class Terms(Struct, frozen=True):
    """The terms agreed when the order was made. Immutable.

    ``upstream_id`` is the id of an order that an upstream settles, there.
    ``refund_address``: refunds go there and nowhere else; None if none was given at creation.
    ``chain_id`` and ``chain`` are the USDC side. ``deposit_amount``, ``min_deposit`` and
    ``max_deposit`` are deposit units; ``expected_output`` and ``min_received`` payout units.
    ``price_locked_until`` is None when the rate is locked until ``expires_at``.
    ``funding_gas``: USDC units of gas for a signed payment that the order bears; 0: none.
    ``receive_amount``: payout units that a deposit of ``deposit_amount`` pays exactly, of an order
    that named them; None of one that named its deposit. ``client``: who made it with a token, by
    name; None without a token.
    """

    order_id: str
    session_id: str
    direction: Direction
    chain: str
    chain_id: int
    deposit_network: str
    payout_network: str
    deposit_address: str
    to_address: str
    deposit_amount: int
    expected_output: int
    min_received: int
    min_deposit: int
    max_deposit: int
    price: Price
    refund_fee: int
    created_at: int
    expires_at: int
    timeouts: Timeouts
    integrator: str | None = None
    twap: TwapPlan | None = None
    upstream_id: str | None = None
    refund_address: str | None = None
    price_locked_until: int | None = None
    funding_gas: int = 0
    receive_amount: int | None = None
    client: str | None = None

    @property
    def deposit_asset(self) -> Asset:
        """The asset that the user sends."""
        return deposit_asset(self.direction)

    @property
    def payout_asset(self) -> Asset:
        """The asset that is paid out."""
        return payout_asset(self.direction)

    def payout(self, units_by_rate: Mapping[int, int], *, is_priced: bool) -> tuple[int, int]:
        """The payout for deposits by their rates, and the integrator's fee within it.

        ``is_priced``: each of them has its final rate, none is being priced now.
        """
        output, integrator_fee = self.price.payout(self.direction, units_by_rate)
        if self.receive_amount is not None:
            excess = sum(units_by_rate.values()) - self.deposit_amount
            output = exact_output(output, self.receive_amount, excess, is_priced=is_priced)
        return output, integrator_fee

    @property
    def is_bridge(self) -> bool:
        """True for an order to or from the perpetuals exchange."""
        return self.chain == PERPS

    @property
    def senders_can_be_refunded(self) -> bool:
        """True when a deposit names its sender: USDC does, XMR hides it."""
        return self.direction is Direction.USDC_TO_XMR


class Order(Struct, frozen=True):
    """An order in its current state.

    ``version`` counts its events from 1. ``deadline_at`` and ``on_deadline`` are set on every
    status that is not terminal: no order waits forever. ``fills`` are the chunks of a TWAP order
    so far; ``leftover`` is the part of its deposits, in deposit units, that was not swapped and
    is still to be sent back. ``refund_address`` was named by the holder of the session when a
    refund waited for one; it is never set where the terms have one. ``lock_broken_at`` is when the
    price lock ended early.
    """

    terms: Terms
    status: OrderStatus
    status_at: int
    version: int
    deadline_at: int | None
    on_deadline: OnDeadline | None
    deposits: tuple[Deposit, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    refund_address: str | None = None
    action_required: str | None = None
    error_message: str | None = None
    completed_at: int | None = None
    fills: tuple[Fill, ...] = ()
    leftover: int = 0
    report: Report | None = None
    lock_broken_at: int | None = None

    @property
    def price_locked_until(self) -> int:
        """Until when deposits that are first seen get the locked rate."""
        agreed = self.terms.price_locked_until
        lock_end = self.terms.expires_at if agreed is None else agreed
        return lock_end if self.lock_broken_at is None else min(lock_end, self.lock_broken_at)

    @property
    def ended_unpaid(self) -> bool:
        """Whether the order ended and no deposit was ever seen, here or upstream."""
        paid_upstream = self.report is not None and self.report.deposit_txid is not None
        return self.status is OrderStatus.EXPIRED and not self.deposits and not paid_upstream

    @property
    def has_money(self) -> bool:
        """Whether deposits came that are worth more than sending them back costs, here or upstream;
        what became of them since does not matter.
        """
        if self.report is not None and self.report.deposit_txid is not None:
            return True
        units = sum(each.units for each in self.deposits if each.is_active and not each.is_dust)
        return units > self.terms.refund_fee

    @property
    def was_cancelled(self) -> bool:
        """Whether the order ended before it expired, and no deposit was ever seen."""
        return self.ended_unpaid and self.status_at < self.terms.expires_at

    @property
    def order_id(self) -> str:
        """The order's public id, ``ord_...``."""
        return self.terms.order_id

    @property
    def refund_to(self) -> str | None:
        """The agreed refund address, else the one named later, if any."""
        reported = self.report.refund_address if self.report else None
        return self.terms.refund_address or self.refund_address or reported

    @property
    def unspent(self) -> tuple[Deposit, ...]:
        """Confirmed deposits that no payout or refund spends."""
        return tuple(d for d in self.deposits if d.is_unspent)

    @property
    def pending_units(self) -> int:
        """Deposits, confirmed or not, that count towards the swap so far, in deposit units."""
        return sum(
            d.units
            for d in self.deposits
            if d.is_active and d.transfer_id is None and not d.is_dust
        )

    @property
    def due_units(self) -> int:
        """The amount that the user still has to send, in deposit units."""
        if self.report is not None and self.report.due is not None:
            return self.report.due
        if self.terms.upstream_id is not None and self.status is not OrderStatus.AWAITING_DEPOSIT:
            return 0
        return max(0, self.terms.deposit_amount - self.pending_units)

    @property
    def payout(self) -> Transfer | None:
        """The current payout: the last one that was not cancelled."""
        return next(
            (
                t
                for t in reversed(self.transfers)
                if t.kind is TransferKind.PAYOUT and t.state is not TransferState.CANCELLED
            ),
            None,
        )

    @property
    def refunds(self) -> tuple[Transfer, ...]:
        """All refunds, in the order in which they were planned."""
        return tuple(t for t in self.transfers if t.kind is TransferKind.REFUND)

    def deposit(self, key: DepositKey) -> Deposit | None:
        """The deposit under ``key``, if this order knows it."""
        return next((d for d in self.deposits if d.key == key), None)

    def transfer(self, transfer_id: str) -> Transfer | None:
        """The transfer of that id, if this order has it."""
        return next((t for t in self.transfers if t.transfer_id == transfer_id), None)
