"""Params and results of the admin methods."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rpcsvc.operations.envelope import Json
from rpcsvc.operations.params import Params
from rpcsvc.operations.service import Flat

MOST_LISTED: Final = 10_000

# --- params ------------------------------------------------------------------------------------


class TransfersParams(Params):
    """Which transfers to list. ``state``: pending, all, or a state of transfers."""

    state: str = "pending"
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 100
    full: bool = False


class TransferParams(Params):
    """One transfer; ``full`` addresses are not shortened."""

    transfer_id: str
    full: bool = False


class RefundParams(Params):
    """The address that an order's deposit goes back to."""

    order_id: str
    address: str


class ClaimParams(Params):
    """A claim on an upstream order, and what was found about it."""

    order_id: str
    note: str


class TicketParams(Params):
    """One ticket."""

    ticket_id: str


class WebhooksParams(Params):
    """Which messages to list. ``state``: pending, dead, delivered or all."""

    state: Literal["pending", "dead", "delivered", "all"] = "pending"
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 100


class ReplayParams(Params):
    """The messages of an order to send again: all dead ones, or the one of an event."""

    order_id: str
    sequence: Annotated[int, Field(ge=1)] | None = None


class AnnotationParams(Params):
    """A transaction that was made by hand, and what it was for."""

    network: str
    txid: str
    note: str
    internal_wei: int = 0


class TransactionParams(Params):
    """A transaction."""

    network: str
    txid: str


class WithdrawalParams(Params):
    """A withdrawal: ``amount`` in whole coins; ``to``: one of ``inventory.withdraw_to``."""

    withdrawal_id: str
    network: str
    amount: str
    to: str


class WithdrawalsParams(Params):
    """How many withdrawals to list."""

    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 100


# --- results -----------------------------------------------------------------------------------


class AdminResult(BaseModel):
    """A part of an answer. Names are camelCase on the wire."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, defer_build=True
    )

    def flat(self) -> Flat:
        """The answer."""
        return Flat(self.model_dump(mode="json", by_alias=True))


class AttemptView(AdminResult):
    """A transaction that was signed for a transfer."""

    txid: str
    at: str
    wallet: str
    block: int | None


class AdminTransfer(AdminResult):
    """A transfer, and what happens to it next."""

    transfer_id: str
    order_id: str
    order_status: str
    kind: str
    state: str
    amount: str
    units: str
    network: str
    address: str
    txid: str | None
    attempts: list[AttemptView]
    since: str
    reason: str | None
    next: str


class TransferDetails(AdminTransfer):
    """A transfer with its receipt, and why payouts are paused, if they are."""

    receipt: Json | None
    paused: str | None


class TransferList(AdminResult):
    """Transfers, the newest first."""

    paused: str | None
    transfers: list[AdminTransfer]


class AdminOutcome(AdminResult):
    """Whether it was done: ``refused`` says why not."""

    refused: str | None = None


class RefundView(AdminResult):
    """A refund and its address."""

    order_id: str
    amount: str
    address: str
    refused: str | None = None


class DoubtView(AdminResult):
    """A claim in doubt."""

    order_id: str
    upstream_id: str | None
    reason: str | None
    note: str | None
    created_at: str


class DoubtList(AdminResult):
    """The claims in doubt, oldest first."""

    in_doubt: list[DoubtView]


class ClosedClaim(AdminResult):
    """A claim that was ended."""

    order_id: str
    reason: str


class ClosedTicket(AdminResult):
    """A ticket that was deleted."""

    ticket_id: str


class Closed(AdminResult):
    """What was closed."""

    closed: ClosedClaim | ClosedTicket


class FeesView(AdminResult):
    """What an integrator has earned in one asset."""

    integrator: str
    asset: str
    amount: str
    payouts: int


class FeesReport(AdminResult):
    """What integrators have earned."""

    fees: list[FeesView]


class TicketHead(AdminResult):
    """A ticket without its message."""

    ticket_id: str
    created_at: str
    category: str
    order_id: str | None
    wallet_address: str | None


class AdminTicket(TicketHead):
    """A ticket."""

    message: str


class TicketList(AdminResult):
    """The tickets, oldest first."""

    tickets: list[TicketHead]


class OneTicket(AdminResult):
    """One ticket."""

    ticket: AdminTicket


class MessageView(AdminResult):
    """A message to the webhook of an order."""

    order_id: str
    sequence: int
    type: str
    at: str
    url: str
    state: str
    attempts: int
    last_attempt_at: str | None
    last_status: int | None
    last_error: str | None
    next_attempt_at: str | None


class MessageList(AdminResult):
    """Messages, the newest first; how many are pending in all, and since when the oldest."""

    pending: int
    oldest_at: str | None
    messages: list[MessageView]


class Replayed(AdminResult):
    """How many messages are sent again."""

    replayed: int


class TreasuryView(AdminResult):
    """What the wallets hold, and what of it is reserved, owed, swept and spent on fees.

    ``problems``: which nodes and wallets could not be asked.
    """

    as_of: str
    paused: str | None
    xmr: Json
    usdc: list[Json]
    caps: dict[str, Json]
    of_no_order: list[Json]
    problems: list[str]


class InventoryView(AdminResult):
    """What a network holds, and what of it is free. ``uncovered``: what no move brings.

    ``received`` and ``sent`` are of the last days. ``runs_dry_at``: None within a year.
    """

    network: str
    asset: str
    held: str
    spendable: str
    reserved: str
    free: str
    target: str | None
    received: str
    sent: str
    runs_dry_at: str | None
    uncovered: str


class MoveView(AdminResult):
    """A move that is proposed. ``arrives`` is without the fees of moving or exchanging."""

    source: str = Field(alias="from")
    amount: str
    asset: str
    to: str
    arrives: str
    arrives_asset: str
    why: str


class TreasuryPlan(AdminResult):
    """Moves that would bring networks to their targets, the most urgent first.

    ``problems``: which nodes and wallets could not be asked; no move is proposed for those.
    """

    as_of: str
    days: int
    usdc_per_xmr: str | None
    networks: list[InventoryView]
    moves: list[MoveView]
    problems: list[str]


class AnnotationResult(AdminResult):
    """What a transaction moved, in words, and the payment that it is on record as."""

    txid: str
    note: str | None = None
    moved: str | None = None
    recorded: str | None = None
    refused: str | None = None


class WithdrawalView(AdminResult):
    """A withdrawal. ``fee``: what is reserved for the network besides. ``waits_for``: why it was
    not signed at the last try. Amounts are in whole coins.
    """

    withdrawal_id: str
    network: str
    asset: str
    amount: str
    fee: str
    address: str
    state: str
    txid: str | None
    created_at: str
    since: str
    reason: str | None
    waits_for: str | None
    receipt: Json | None


class WithdrawalResult(AdminResult):
    """A withdrawal, or why there is none. ``is_made``: it is on record, and carried out."""

    is_made: bool
    withdrawal: WithdrawalView | None = None
    refused: str | None = None


class WithdrawalList(AdminResult):
    """Withdrawals, the newest first, and the addresses that may be paid, by network."""

    withdrawals: list[WithdrawalView]
    allowed: dict[str, list[str]]
