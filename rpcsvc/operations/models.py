"""Results of the operations as pydantic models: ``data`` of the envelope, and its schemas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rpcsvc.domain.order import (
    REFUND_ADDRESS,
    REFUND_BLOCKED,
    DepositState,
    OnDeadline,
    OrderStatus,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.payment_check import Problem
from rpcsvc.operations.params import AMOUNT_PATTERN, Destination, Direction, FundingKind, OrderId


class View(BaseModel):
    """A part of a result. Names are camelCase on the wire."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, defer_build=True)


Time = Annotated[
    str, Field(description="RFC 3339, UTC.", json_schema_extra={"format": "date-time"})
]
Decimal = Annotated[
    str,
    Field(
        description="A decimal string, in whole units of the asset.",
        json_schema_extra={"pattern": AMOUNT_PATTERN},
    ),
]
Units = Annotated[
    str,
    Field(
        description="Atomic units of the asset, as a string: 10^-12 XMR, 10^-6 USDC.",
        json_schema_extra={"pattern": "^(0|[1-9][0-9]*)$"},
    ),
]
Asset = Annotated[Literal["XMR", "USDC"], Field(description="The asset's symbol.")]
ChainId = Annotated[int, Field(description="The chain's number; 0 is Monero.", ge=0)]
Seconds = Annotated[int, Field(description="Whole seconds.", ge=0)]


Cursor = Annotated[int, Field(description="Of an event of the order: it only grows.", ge=0)]


class Result(View):
    """``data`` of an envelope. ``sessionSource`` is in all of them (spec 2.1)."""

    network: Annotated[str, Field(description="sandbox, or the engine's network.")]
    session_id: Annotated[
        str | None,
        Field(
            description="With the orderId, the secret of the order's owner: keep it.",
            json_schema_extra={"format": "uuid"},
        ),
    ]
    session_source: Annotated[
        Literal["request", "local", "generated", "none"],
        Field(description="Where sessionId came from; none when there is none."),
    ]


class AssetInfo(View):
    """An asset and how finely it divides."""

    symbol: Asset
    decimals: Annotated[int, Field(description="The most decimals that an amount may have.")]


class DirectionInfo(View):
    """A direction: what the user sends and what is paid out."""

    direction: Direction
    send: Asset
    receive: Asset


class ChainInfo(View):
    """A chain on which the service takes and pays USDC."""

    name: Annotated[str, Field(description="The name to send as chain.")]
    chain_id: Annotated[int, Field(description="The number to send as chain.", ge=1)]
    aliases: Annotated[list[str], Field(description="Other names that mean this chain.")]
    display_name: str
    token: Annotated[str, Field(description="The chain's USDC contract.")]
    min_swap_usd: Annotated[int, Field(description="The least that is swapped, in whole USD.")]


class Limits(View):
    """The least and the most of one direction, in the asset that is sent."""

    direction: Direction
    asset: Asset
    minimum: Decimal
    maximum: Decimal
    max_now: Annotated[
        Decimal | None,
        Field(description="What can be paid for now; null where the engine does not limit it."),
    ]


class DepositPolicyRow(View):
    """The service's way with a deposit in one case."""

    case: str
    action: str


class OperationInfo(View):
    """An operation. ``http`` is method and path under /api/v1, null where HTTPS lacks it."""

    operation: str
    summary: str
    http: str | None
    idempotent: Annotated[bool, Field(description="Whether it takes an idempotency key.")]


class RateInfo(View):
    """The current rate."""

    usdc_per_xmr: Decimal
    source: str


class WebhookInfo(View):
    """The webhooks that orders can have."""

    public_key: Annotated[
        str | None,
        Field(description="whpk_: what messages are signed with (v1a); null: a secret is needed."),
    ]
    onion: Annotated[bool, Field(description="Whether onion services can be called.")]


class CapabilitiesResult(Result):
    """The abilities of the service now."""

    engine: str
    directions: list[DirectionInfo]
    chains: list[ChainInfo]
    assets: list[AssetInfo]
    limits: Annotated[
        list[Limits], Field(description="Over all chains; empty while there is no rate.")
    ]
    operations: list[OperationInfo]
    deposit_policy: list[DepositPolicyRow]
    deposit_window_seconds: Seconds
    price_lock_seconds: Annotated[
        Seconds | None, Field(description="How long an order keeps its rate; null at an upstream.")
    ]
    rate: Annotated[RateInfo | None, Field(description="Null while there is no rate.")]
    webhooks: WebhookInfo


class OperationSchemas(View):
    """JSON Schemas of one operation's params and result."""

    params: dict[str, Any]
    result: dict[str, Any]


class SchemasResult(Result):
    """JSON Schemas of every operation's params and result."""

    operations: dict[str, OperationSchemas]
    envelope: dict[str, Any]


class QuoteFees(View):
    """The fees within a quote, in ``asset``; a refund's fee is taken in ``refundAsset``."""

    asset: Asset
    spread: Decimal
    network: Decimal
    refund_network: Annotated[
        Decimal, Field(description="Taken of a refund: its network fee, and fundingGas.")
    ]
    refund_asset: Asset
    funding: Annotated[
        Decimal | None,
        Field(description="Gas of the signed payment, with funding x402; absent without."),
    ] = None
    funding_gas: Annotated[
        Decimal | None, Field(description="The same in USDC, as the network takes it.")
    ] = None


class Quote(View):
    """A price for an amount. Amounts are decimal strings; ``fees`` are in ``payoutAsset``."""

    direction: Direction
    chain: str
    chain_id: ChainId
    deposit_asset: Asset
    deposit_amount: Decimal
    payout_asset: Asset
    expected_output: Annotated[Decimal, Field(description="What is paid out, after all fees.")]
    min_received: Annotated[Decimal, Field(description="The least that would be paid out.")]
    rate: Annotated[Decimal, Field(description="USDC per XMR.")]
    rate_as_of: Time
    fees: QuoteFees
    estimated_time_seconds: Seconds
    deposit_window_seconds: Seconds
    price_locked_until: Annotated[
        Time | None,
        Field(
            description="Until when an order at this quote keeps its rate, unless the lock breaks"
            " early; null where an upstream decides."
        ),
    ]
    deposit_policy: list[DepositPolicyRow]


class QuoteResult(Result):
    """A quote."""

    quote: Quote
    quote_digest: Annotated[
        str,
        Field(
            description="The quote's terms as text. Sent with create or execute, it has the order"
            " refused if its terms would be worse."
        ),
    ]


class Intent(View):
    """A swap as far as it is known, normalised; null is what is not known."""

    direction: Direction | None
    chain: str | None
    chain_id: ChainId | None
    amount: Decimal | None
    send: Asset | None
    receive: Asset | None
    to: Destination | None
    has_funds: bool | None
    funding: FundingKind | None


class PlanResult(Result):
    """The swap as far as it is known, normalised."""

    intent: Intent


PriceLockedUntil = Annotated[
    Time | None,
    Field(
        description="Deposits first seen until then are swapped at the quoted rate, later ones at"
        " the rate of their moment. It moves to an earlier time when the lock breaks; null where"
        " an upstream decides."
    ),
]


class FundingInstructions(View):
    """The amount that the user has to send, where and until when (design part 3)."""

    deposit_address: str
    amount: Decimal
    amount_display: Annotated[str, Field(description="The amount with its asset: 0.8 XMR.")]
    asset: Asset
    network: Annotated[str, Field(description="The network to send on.")]
    chain_id: ChainId
    price_locked_until: PriceLockedUntil
    expires_at: Time
    payment_uri: Annotated[
        str,
        Field(
            description="For wallets: a monero: or an EIP-681 URI.",
            json_schema_extra={"format": "uri"},
        ),
    ]
    warnings: Annotated[list[str], Field(description="Show them to the user.")]


class Twap(View):
    """How far an order that is swapped in chunks has come. Quantities in whole deposit units."""

    enabled: bool
    status: Literal["pending", "active", "completed", "failed"]
    chunks_completed: int
    chunks_total: int
    filled_qty: float
    total_qty: float
    chunk_size_usd: float
    interval_ms: int
    estimated_time_remaining_ms: int


TwapProgress = Annotated[
    Twap | None, Field(description="There only for orders that are swapped in chunks.")
]


CheckoutUrl = Annotated[
    str,
    Field(
        description="The order's page at the service itself, to hand to the user: amount, address,"
        " time left, progress. For its owner alone, #session= and the sessionId may be added: the"
        " page takes a refund address then without asking for the secret.",
        json_schema_extra={"format": "uri"},
    ),
]


class OrderView(View):
    """An order, and its deadline while its status is not terminal (spec 2.4).

    Amounts are atomic units as strings, as in the BFF.
    """

    order_id: OrderId
    status: OrderStatus
    deposit_address: str
    deposit_token_symbol: Asset
    deposit_amount: Units
    to_address: str
    expected_output: Units
    deposit_chain_id: ChainId
    deposit_tx_hash: str | None
    actual_output: Annotated[Units | None, Field(description="Set once the payout has settled.")]
    error_message: str | None
    refund_tx_hash: str | None
    created_at: Time
    expires_at: Annotated[Time, Field(description="Until when a deposit is awaited.")]
    refund_address: Annotated[
        str | None,
        Field(description="Where refunds go: as given at creation, or named later; else null."),
    ]
    price_locked_until: PriceLockedUntil
    checkout_url: CheckoutUrl
    completed_at: Time | None
    twap: TwapProgress = None
    deadline_at: Annotated[
        Time | None, Field(description="When the service acts by itself; absent when terminal.")
    ] = None
    on_deadline: Annotated[
        OnDeadline | None, Field(description="What the service does then; absent when terminal.")
    ] = None
    attestation: Annotated[
        str | None,
        Field(
            description="The order's terms, signed: a compact JWS; there while money is awaited."
        ),
    ] = None


class OrderResult(Result):
    """A new order with its quote and funding instructions."""

    order: OrderView
    funding_instructions: FundingInstructions
    quote: Quote


class DepositView(View):
    """A deposit on record. ``use``: undecided, payout, refund or dust."""

    txid: str
    amount: Decimal
    status: DepositState
    first_seen_at: Time
    rate: Annotated[
        Decimal | None,
        Field(description="USDC per XMR it is swapped at; null: the rate when it is decided."),
    ]
    use: Literal["undecided", "payout", "refund", "dust"]


class TransferView(View):
    """A payout or refund on record."""

    kind: TransferKind
    address: str
    amount: Decimal
    asset: Asset
    status: TransferState
    txid: str | None


class ReceiptView(View):
    """The proof of a payout for anyone with a node: rpcsvc receipt verify checks it.

    The Monero fields are for check_tx_key and check_tx_proof of a wallet; the EVM fields name the
    token's Transfer event.
    """

    network: str
    asset: Asset
    txid: str
    address: str
    amount: Decimal
    block: Annotated[int, Field(description="Number of the block that it is in.")]
    transaction_key: str | None = None
    transaction_proof: str | None = None
    proof_message: str | None = None
    chain_id: int | None = None
    token: str | None = None
    log_index: Annotated[int | None, Field(description="Within the block.")] = None


class StatusResult(Result):
    """An order's current state. ``cursor`` is that of its last event."""

    order: OrderView
    cursor: Cursor
    funding_instructions: Annotated[
        FundingInstructions | None,
        Field(description="Null once nothing is due any more, or a signed payment is under way."),
    ]
    amount_due: Annotated[Decimal | None, Field(description="What is still to be sent.")]
    deposits: list[DepositView]
    transfers: list[TransferView]
    outcome: Annotated[
        Literal[tuple(status.value for status in OrderStatus if status.is_terminal)] | None,  # type: ignore[valid-type] # mypy takes no computed Literal
        Field(description="The order's last status; null until then."),
    ]
    action_required: Annotated[
        Literal[REFUND_ADDRESS, REFUND_BLOCKED] | None,  # type: ignore[valid-type] # mypy takes no computed Literal
        Field(
            description="refund_address: the user has to give one, see nextActions. refund_blocked:"
            " the network refuses the agreed refund address, and the operator tries again."
        ),
    ]
    receipt: Annotated[
        ReceiptView | None,
        Field(description="Proof of the payout, once completed on a real network; else null."),
    ]


class PaymentResponse(View):
    """SettlementResponse of x402, version 2."""

    success: Literal[True]
    transaction: str
    network: Annotated[str, Field(description="The chain (CAIP-2), such as eip155:8453.")]
    payer: str
    amount: Units


class FundingResult(Result):
    """An order after a signed payment."""

    order: OrderView
    payment_response: Annotated[
        PaymentResponse | None,
        Field(description="Null while it is not known what became of the payment: sign no other."),
    ]


class EventDeposit(View):
    """The deposit that an event is about; of order.created, the one that is awaited."""

    txid: str | None
    amount: Decimal | None
    asset: Asset


class EventTransfer(View):
    """The payout or refund that an event is about."""

    kind: TransferKind
    address: str
    amount: Decimal
    asset: Asset
    txid: str | None


class EventView(View):
    """An event of an order, and the order's state after it."""

    cursor: Cursor
    at: Time
    type: Annotated[str, Field(description="What happened, such as deposit.seen.")]
    state: Annotated[str, Field(description="The state that its status answer had then.")]
    status: OrderStatus
    deadline_at: Annotated[
        Time | None, Field(description="When the service would act by itself; absent: never.")
    ] = None
    deposit: EventDeposit | None = None
    transfer: EventTransfer | None = None


class EventsResult(Result):
    """Events of an order, oldest first."""

    events: list[EventView]
    cursor: Annotated[Cursor, Field(description="Send it as after to get what comes next.")]


class WebhookView(View):
    """The webhook of an order. Its secret is not shown."""

    url: str
    signatures: Annotated[list[Literal["v1a", "v1"]], Field(description="What messages carry.")]
    state: Annotated[
        Literal["active", "failing", "ended"],
        Field(description="ended: the receiver answered 410, and no more is sent."),
    ]
    failing_since: Time | None


class DeliveryView(View):
    """A message to a webhook: the event with this cursor."""

    message_id: Annotated[str, Field(description="The header webhook-id.")]
    sequence: Cursor
    type: Annotated[str, Field(description="The event, such as deposit.seen.")]
    state: Annotated[
        Literal["pending", "delivered", "dead"],
        Field(description="dead: no longer tried, after 24 hours or a 410."),
    ]
    attempts: Annotated[int, Field(description="How often it was sent.", ge=0)]
    last_attempt_at: Time | None
    last_status: Annotated[int | None, Field(description="The HTTP status of the last attempt.")]
    last_error: str | None
    next_attempt_at: Annotated[
        Time | None, Field(description="Of a pending one; null: as soon as those before it went.")
    ]


class DeliveriesResult(Result):
    """The newest messages of an order, oldest first."""

    webhook: Annotated[WebhookView | None, Field(description="Null: the order has none.")]
    deliveries: list[DeliveryView]


class OrderSummary(View):
    """An order in a list. Amounts are decimal strings."""

    order_id: OrderId
    state: Annotated[str, Field(description="The state that its status answer has.")]
    status: OrderStatus
    direction: Direction
    chain: str
    deposit_asset: Asset
    deposit_amount: Decimal
    payout_asset: Asset
    expected_output: Decimal
    to_address: str
    created_at: Time
    expires_at: Time
    completed_at: Time | None


class ListResult(Result):
    """A page of a session's orders, newest first."""

    orders: list[OrderSummary]
    next_after: Annotated[
        OrderId | None, Field(description="Send it as after for the next page; null at the end.")
    ]


class PaymentProblem(View):
    """One thing in which a payment differs from what is due. Null: not given."""

    code: Annotated[Literal[tuple(Problem)], Field(description="What differs.")]  # type: ignore[valid-type] # from one list
    message: str
    expected: str | None
    received: str | None


class PaymentCheck(View):
    """Whether a payment is the one that the order waits for."""

    safe_to_send: Annotated[
        bool, Field(description="False: don't have it signed, whatever the problem.")
    ]
    problems: list[PaymentProblem]
    amount_due: Annotated[Decimal | None, Field(description="Null once nothing is due any more.")]
    expires_at: Annotated[Time, Field(description="Until when a deposit is awaited.")]


class CheckResult(Result):
    """The check of an unsigned payment."""

    payment_check: PaymentCheck


class TicketView(View):
    """A ticket."""

    ticket_id: Annotated[str, Field(json_schema_extra={"pattern": "^tkt_[0-9A-HJKMNP-TV-Z]{26}$"})]
    created_at: Time
    category: str
    order_id: OrderId | None


class RefundAddressView(View):
    """A refund address that was named. Not accepted: another was set before it, or the order was
    made with one, which is final.
    """

    accepted: bool
    address: str


class RefundAddressResult(Result):
    """The refund address as it was taken."""

    refund_address: RefundAddressView


class SupportResult(Result):
    """The created ticket; ``refundAddress`` is null where none was asked for."""

    ticket: TicketView
    refund_address: RefundAddressView | None


class TransactionView(View):
    """A transaction on a simulated chain."""

    txid: str
    network: str
    to: str
    amount: Decimal
    asset: Asset


class FundResult(Result):
    """The simulated deposit."""

    transaction: TransactionView


class FaultResult(Result):
    """The fault as it was set, and the sandbox's time."""

    fault: str
    now: Time
