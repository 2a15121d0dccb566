"""Results of the operations as Structs: they give the JSON of ``data`` and its schemas."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from typing import Annotated, Any, ClassVar, Final

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.json import schema_components
from pydantic.alias_generators import to_camel

from rpcsvc.domain.bridge import BridgeKind, BridgeStatus
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
from rpcsvc.domain.pricing import Direction as DirectionKind
from rpcsvc.operations import params
from rpcsvc.operations.params import AMOUNT_PATTERN
from rpcsvc.strict_json import Json

_KINDS: Final = {
    kind.__name__: kind
    for kind in (
        BridgeKind, BridgeStatus, DepositState, OnDeadline, OrderStatus, TransferKind,
        TransferState,
    )
}  # fmt: skip


class View(Struct, frozen=True, rename="camel"):
    """A part of a result. Names are camelCase on the wire; an UNSET value is absent.

    ``lean`` names the fields that a lean answer keeps, unless they are null or empty; None: all.
    ``part.field`` is kept of a part of this result only.
    """

    lean: ClassVar[tuple[str, ...] | None] = None


def schema_of(view: type[Struct]) -> Json:
    """Return the JSON Schema of a result, with those of its parts in ``$defs``.

    Required are the fields that a lean answer has, too.
    """
    _, parts = schema_components([view], ref_template="#/$defs/{name}")
    leans = {each.__name__: each.lean for each in _views(View) if each.lean is not None}
    for name, part in parts.items():
        part["description"] = cleandoc(part["description"])
        if name in leans:
            kept = {to_camel(each) for each in (*Result.__struct_fields__, *leans[name])}
            known = part["properties"]
            part["required"] = [
                each for each in part["required"] if each in kept and not _may_be_empty(known[each])
            ]
        if name in _KINDS:  # whose values msgspec sorts
            part |= {"type": "string", "enum": list(_KINDS[name])}
        else:
            part["additionalProperties"] = False
    return {**parts.pop(view.__name__), "$defs": parts}


def _may_be_empty(schema: Json) -> bool:
    return schema.get("type") == "array" or {"type": "null"} in schema.get("anyOf", ())


def _views(view: type[View]) -> Iterator[type[View]]:
    for each in view.__subclasses__():
        yield each
        yield from _views(each)


def about(text: str | None = None, **schema: Any) -> Meta:
    """The annotation of a value: what it is, and what its schema says beside the type."""
    return Meta(description=text, extra_json_schema=schema)


def like(param: Any) -> Meta:
    """The annotation of a value with the description and the pattern of a param's type."""
    told = param.__metadata__[0]
    return about(told.description, **(told.json_schema_extra or {}))


Time = Annotated[str, about("RFC 3339, UTC.", format="date-time")]
Decimal = Annotated[
    str, about("A decimal string, in whole units of the asset.", pattern=AMOUNT_PATTERN)
]
Units = Annotated[
    str,
    about(
        "Atomic units of the asset, as a string: 10^-12 XMR, 10^-6 USDC.",
        pattern="^(0|[1-9][0-9]*)$",
    ),
]
Asset = Annotated[str, about("The asset's symbol.", enum=["XMR", "USDC"])]
ChainId = Annotated[int, about("The chain's number; 0 is Monero.", minimum=0)]
Seconds = Annotated[int, about("Whole seconds.", minimum=0)]
Direction = Annotated[str, about(enum=[*DirectionKind]), like(params.Direction)]
Destination = Annotated[str, like(params.Destination)]
FundingKind = Annotated[str, about(const="x402"), like(params.FundingKind)]
OrderId = Annotated[str, like(params.OrderId)]
TicketId = Annotated[str, about(pattern=params.TICKET_ID_PATTERN)]
# A JSON number, digit for digit: amounts never pass through a float.
Number = Annotated[Raw, about(type="number")]
WholeNumber = Annotated[Raw, about(type="integer")]


Cursor = Annotated[int, about("Of an event of the order: it only grows.", minimum=0)]


class Result(View, frozen=True):
    """``data`` of an envelope. ``sessionSource`` is in all of them (spec 2.1)."""

    network: Annotated[str, about("sandbox, or the engine's network.")]
    session_id: Annotated[
        str | None,
        about("With the orderId, the secret of the order's owner: keep it.", format="uuid"),
    ]
    session_source: Annotated[
        str,
        about(
            "Where sessionId came from; none when there is none.",
            enum=["request", "local", "generated", "none"],
        ),
    ]


class ApprovalResult(Result, frozen=True):
    """``data`` of a call that waits for a person: ``id``, ``reason`` and ``expiresAt``."""

    approval: dict[str, str]


class AssetInfo(View, frozen=True):
    """An asset and how finely it divides."""

    symbol: Asset
    decimals: Annotated[int, about("The most decimals that an amount may have.")]


class DirectionInfo(View, frozen=True):
    """A direction: what the user sends and what is paid out."""

    direction: Direction
    send: Asset
    receive: Asset


class ChainInfo(View, frozen=True):
    """A chain on which the service takes and pays USDC."""

    lean = ("name", "chain_id", "token", "min_swap_usd")

    name: Annotated[str, about("The name to send as chain.")]
    chain_id: Annotated[int, about("The number to send as chain.", minimum=1)]
    aliases: Annotated[list[str], about("Other names that mean this chain.")]
    display_name: str
    token: Annotated[str, about("The chain's USDC contract.")]
    min_swap_usd: Annotated[int, about("The least that is swapped, in whole USD.")]


class Limits(View, frozen=True):
    """The least and the most of one direction, in the asset that is sent."""

    direction: Direction
    asset: Asset
    minimum: Decimal
    maximum: Decimal
    max_now: Annotated[
        Decimal | None, about("What can be paid for now; null where the engine does not limit it.")
    ]


class DepositPolicyRow(View, frozen=True):
    """The service's way with a deposit in one case."""

    case: str
    action: str


class OperationInfo(View, frozen=True):
    """An operation. ``http`` is method and path under /api/v1, null where HTTPS lacks it."""

    operation: str
    summary: str
    http: str | None
    idempotent: Annotated[bool, about("Whether it takes an idempotency key.")]


class RateInfo(View, frozen=True):
    """The current rate."""

    usdc_per_xmr: Decimal
    source: str


class WebhookInfo(View, frozen=True):
    """The webhooks that orders can have."""

    public_key: Annotated[
        str | None, about("whpk_: what messages are signed with (v1a); null: a secret is needed.")
    ]
    onion: Annotated[bool, about("Whether onion services can be called.")]


class CapabilitiesResult(Result, frozen=True):
    """The abilities of the service now."""

    lean = ("engine", "directions", "chains", "limits", "rate")

    engine: str
    directions: list[DirectionInfo]
    chains: list[ChainInfo]
    assets: list[AssetInfo]
    limits: Annotated[list[Limits], about("Over all chains; empty while there is no rate.")]
    operations: list[OperationInfo]
    deposit_policy: list[DepositPolicyRow]
    deposit_window_seconds: Seconds
    price_lock_seconds: Annotated[
        Seconds | None, about("How long an order keeps its rate; null at an upstream.")
    ]
    rate: Annotated[RateInfo | None, about("Null while there is no rate.")]
    webhooks: WebhookInfo


class OperationSchemas(View, frozen=True):
    """JSON Schemas of one operation's params and result."""

    params: dict[str, Any]
    result: dict[str, Any]


class SchemasResult(Result, frozen=True):
    """JSON Schemas of every operation's params and result."""

    operations: dict[str, OperationSchemas]
    envelope: dict[str, Any]


class QuoteFees(View, frozen=True):
    """The fees within a quote, in ``asset``; a refund's fee is taken in ``refundAsset``."""

    asset: Asset
    spread: Decimal
    network: Decimal
    refund_network: Annotated[Decimal, about("Taken of a refund: its network fee, and fundingGas.")]
    refund_asset: Asset
    funding: Annotated[
        Decimal | UnsetType | None,
        about("Gas of the signed payment, with funding x402; absent without."),
    ] = UNSET
    funding_gas: Annotated[
        Decimal | UnsetType | None, about("The same in USDC, as the network takes it.")
    ] = UNSET


class ObservedTimeView(View, frozen=True):
    """Seconds that like orders of the last 14 days took, from the deposit's first sight until the
    payout was final. Like orders have the direction, the chain, and about the size.
    """

    p50_seconds: Annotated[int, about("Half of them took no longer.")]
    p95_seconds: Annotated[int, about("95 % of them took no longer.")]
    samples: Annotated[int, about("How many orders that are.", minimum=20)]


ObservedTime = Annotated[
    ObservedTimeView | UnsetType | None,
    about("Null below 20 samples. Up to a minute old; estimates are computed, this is measured."),
]


class Quote(View, frozen=True):
    """A price for an amount. Amounts are decimal strings; ``fees`` are in ``payoutAsset``."""

    lean = (
        "deposit_asset",
        "deposit_amount",
        "payout_asset",
        "expected_output",
        "min_received",
        "rate",
        "receive_amount",
        "observed_time",
    )

    direction: Direction
    chain: str
    chain_id: ChainId
    deposit_asset: Asset
    deposit_amount: Decimal
    payout_asset: Asset
    expected_output: Annotated[Decimal, about("What is paid out, after all fees.")]
    min_received: Annotated[Decimal, about("The least that would be paid out.")]
    rate: Annotated[Decimal, about("USDC per XMR.")]
    rate_as_of: Time
    fees: QuoteFees
    estimated_time_seconds: Seconds
    deposit_window_seconds: Seconds
    price_locked_until: Annotated[
        Time | None,
        about(
            "Until when an order at this quote keeps its rate, unless the lock breaks"
            " early; null where an upstream decides."
        ),
    ]
    deposit_policy: list[DepositPolicyRow]
    receive_amount: Annotated[
        Decimal | UnsetType | None,
        about("What the deposit pays exactly; there if the caller named it."),
    ] = UNSET
    observed_time: ObservedTime = UNSET


Percent = Annotated[
    str, about("In percent, such as -0.25.", pattern=r"^-?(0|[1-9][0-9]*)(\.[0-9]{1,4})?$")
]


class QuoteChange(View, frozen=True):
    """Changes since an earlier quote. Null: its digest does not say."""

    lean = ("rate", "expected_output", "deposit_amount")

    quoted_at: Time
    rate: Percent | None
    expected_output: Percent | None
    deposit_amount: Percent | None


class QuoteResult(Result, frozen=True):
    """A quote."""

    quote: Quote
    quote_digest: Annotated[
        str,
        about(
            "The quote's terms as text. Sent with create or execute, it has the order"
            " refused if its terms would be worse."
        ),
    ]
    changed: Annotated[
        QuoteChange | UnsetType | None, about("There if requoteOf named an earlier quote.")
    ] = UNSET


class Intent(View, frozen=True):
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
    receive_amount: Decimal | UnsetType | None = UNSET


class PlanResult(Result, frozen=True):
    """The swap as far as it is known, normalised."""

    intent: Intent


PriceLockedUntil = Annotated[
    Time | None,
    about(
        "Deposits first seen until then are swapped at the quoted rate, later ones at"
        " the rate of their moment. It moves to an earlier time when the lock breaks; null where"
        " an upstream decides."
    ),
]


class FundingInstructions(View, frozen=True):
    """The amount that the user has to send, where and until when (design part 3)."""

    lean = ("deposit_address", "amount", "asset", "network", "price_locked_until")

    deposit_address: str
    amount: Decimal
    amount_display: Annotated[str, about("The amount with its asset: 0.8 XMR.")]
    asset: Asset
    network: Annotated[str, about("The network to send on.")]
    chain_id: ChainId
    price_locked_until: PriceLockedUntil
    expires_at: Time
    payment_uri: Annotated[str, about("For wallets: a monero: or an EIP-681 URI.", format="uri")]
    warnings: Annotated[list[str], about("Show them to the user.")]


class Twap(View, frozen=True):
    """How far an order that is swapped in chunks has come. Quantities in whole deposit units."""

    enabled: bool
    status: Annotated[str, about(enum=["pending", "active", "completed", "failed"])]
    chunks_completed: int
    chunks_total: int
    filled_qty: Number
    total_qty: Number
    chunk_size_usd: Number
    interval_ms: WholeNumber
    estimated_time_remaining_ms: WholeNumber


TwapProgress = Annotated[
    Twap | UnsetType | None, about("There only for orders that are swapped in chunks.")
]


CheckoutUrl = Annotated[
    str,
    about(
        "The order's page at the service itself, to hand to the user: amount, address,"
        " time left, progress. For its owner alone, #session= and the sessionId may be added: the"
        " page takes a refund address then without asking for the secret.",
        format="uri",
    ),
]


ExactAmount = Annotated[
    Units, about("What depositAmount pays exactly; there only if the order was made for that.")
]


AttestationDigest = Annotated[
    str,
    about(
        "In lean answers, in place of attestation: its SHA-256, base64url.",
        pattern="^[A-Za-z0-9_-]{43}$",
    ),
]


class OrderView(View, frozen=True, kw_only=True):
    """An order, and its deadline while its status is not terminal (spec 2.4).

    Amounts are atomic units as strings, as in the BFF.
    """

    lean = (
        "order_id",
        "status",
        "expected_output",
        "actual_output",
        "error_message",
        "receive_amount",
        "expires_at",
        "refund_address",
        "attestation_digest",
    )

    order_id: OrderId
    status: OrderStatus
    deposit_address: str
    deposit_token_symbol: Asset
    deposit_amount: Units
    to_address: str
    expected_output: Units
    deposit_chain_id: ChainId
    deposit_tx_hash: str | None
    actual_output: Annotated[Units | None, about("Set once the payout has settled.")]
    error_message: str | None
    refund_tx_hash: str | None
    created_at: Time
    completed_at: Time | None
    twap: TwapProgress = UNSET
    receive_amount: ExactAmount | UnsetType | None = UNSET
    expires_at: Annotated[Time, about("Until when a deposit is awaited.")]
    refund_address: Annotated[
        str | None, about("Where refunds go: as given at creation, or named later; else null.")
    ]
    price_locked_until: PriceLockedUntil
    checkout_url: CheckoutUrl
    deadline_at: Annotated[
        Time | UnsetType | None, about("When the service acts by itself; absent when terminal.")
    ] = UNSET
    on_deadline: Annotated[
        OnDeadline | UnsetType | None, about("What the service does then; absent when terminal.")
    ] = UNSET
    attestation: Annotated[
        str | UnsetType | None,
        about("The order's terms, signed: a compact JWS; there while money is awaited."),
    ] = UNSET
    attestation_digest: AttestationDigest | UnsetType | None = UNSET


class OrderResult(Result, frozen=True):
    """A new order with its quote and funding instructions."""

    lean = ("order", "order.checkout_url", "funding_instructions", "quote")

    order: OrderView
    funding_instructions: FundingInstructions
    quote: Quote


class DepositView(View, frozen=True):
    """A deposit on record. ``use``: undecided, payout, refund or dust."""

    txid: str
    amount: Decimal
    status: DepositState
    first_seen_at: Time
    rate: Annotated[
        Decimal | None, about("USDC per XMR it is swapped at; null: the rate when it is decided.")
    ]
    use: Annotated[str, about(enum=["undecided", "payout", "refund", "dust"])]


class TransferView(View, frozen=True):
    """A payout or refund on record."""

    lean = ("kind", "amount", "asset", "status", "txid")

    kind: TransferKind
    address: str
    amount: Decimal
    asset: Asset
    status: TransferState
    txid: str | None


class ReceiptView(View, frozen=True):
    """The proof of a payout for anyone with a node: rpcsvc receipt verify checks it.

    The Monero fields are for check_tx_key and check_tx_proof of a wallet; the EVM fields name the
    token's Transfer event.
    """

    network: str
    asset: Asset
    txid: str
    address: str
    amount: Decimal
    block: Annotated[int, about("Number of the block that it is in.")]
    transaction_key: str | UnsetType | None = UNSET
    transaction_proof: str | UnsetType | None = UNSET
    proof_message: str | UnsetType | None = UNSET
    chain_id: int | UnsetType | None = UNSET
    token: str | UnsetType | None = UNSET
    log_index: Annotated[int | UnsetType | None, about("Within the block.")] = UNSET


class StatusResult(Result, frozen=True):
    """An order's current state. ``cursor`` is that of its last event."""

    lean = (
        "order",
        "cursor",
        "funding_instructions",
        "transfers",
        "outcome",
        "action_required",
        "observed_time",
    )

    order: OrderView
    cursor: Cursor
    funding_instructions: Annotated[
        FundingInstructions | None,
        about("Null once nothing is due any more, or a signed payment is under way."),
    ]
    amount_due: Annotated[Decimal | None, about("What is still to be sent.")]
    deposits: list[DepositView]
    transfers: list[TransferView]
    outcome: Annotated[
        Annotated[str, about(enum=[each for each in OrderStatus if each.is_terminal])] | None,
        about("The order's last status; null until then."),
    ]
    action_required: Annotated[
        Annotated[str, about(enum=[REFUND_ADDRESS, REFUND_BLOCKED])] | None,
        about(
            "refund_address: the user has to give one, see nextActions. refund_blocked:"
            " the network refuses the agreed refund address, and the operator tries again."
        ),
    ]
    receipt: Annotated[
        ReceiptView | None,
        about("Proof of the payout, once completed on a real network; else null."),
    ]
    observed_time: Annotated[ObservedTime, about("Absent once the order is over.")] = UNSET


class PaymentResponse(View, frozen=True):
    """SettlementResponse of x402, version 2."""

    success: Annotated[bool, about(const=True)]
    transaction: str
    network: Annotated[str, about("The chain (CAIP-2), such as eip155:8453.")]
    payer: str
    amount: Units


class FundingResult(Result, frozen=True):
    """An order after a signed payment."""

    lean = ("order", "payment_response")

    order: OrderView
    payment_response: Annotated[
        PaymentResponse | None,
        about("Null while it is not known what became of the payment: sign no other."),
    ]


class EventDeposit(View, frozen=True):
    """The deposit that an event is about; of order.created, the one that is awaited."""

    txid: str | None
    amount: Decimal | None
    asset: Asset


class EventTransfer(View, frozen=True):
    """The payout or refund that an event is about."""

    kind: TransferKind
    address: str
    amount: Decimal
    asset: Asset
    txid: str | None


class EventView(View, frozen=True):
    """An event of an order, and the order's state after it."""

    cursor: Cursor
    at: Time
    type: Annotated[str, about("What happened, such as deposit.seen.")]
    state: Annotated[str, about("The state that its status answer had then.")]
    status: OrderStatus
    deadline_at: Annotated[
        Time | UnsetType | None, about("When the service would act by itself; absent: never.")
    ] = UNSET
    deposit: EventDeposit | UnsetType | None = UNSET
    transfer: EventTransfer | UnsetType | None = UNSET
    ticket_id: Annotated[TicketId | UnsetType, about("The ticket that was answered.")] = UNSET


class EventsResult(Result, frozen=True):
    """Events of an order, oldest first."""

    events: list[EventView]
    cursor: Annotated[Cursor, about("Send it as after to get what comes next.")]


class WebhookView(View, frozen=True):
    """The webhook of an order. Its secret is not shown."""

    url: str
    signatures: Annotated[
        list[Annotated[str, about(enum=["v1a", "v1"])]], about("What messages carry.")
    ]
    state: Annotated[
        str,
        about(
            "ended: the receiver answered 410, and no more is sent.",
            enum=["active", "failing", "ended"],
        ),
    ]
    failing_since: Time | None


class DeliveryView(View, frozen=True):
    """A message to a webhook: the event with this cursor."""

    message_id: Annotated[str, about("The header webhook-id.")]
    sequence: Cursor
    type: Annotated[str, about("The event, such as deposit.seen.")]
    state: Annotated[
        str,
        about(
            "dead: no longer tried, after 24 hours or a 410.", enum=["pending", "delivered", "dead"]
        ),
    ]
    attempts: Annotated[int, about("How often it was sent.", minimum=0)]
    last_attempt_at: Time | None
    last_status: Annotated[int | None, about("The HTTP status of the last attempt.")]
    last_error: str | None
    next_attempt_at: Annotated[
        Time | None, about("Of a pending one; null: as soon as those before it went.")
    ]


class DeliveriesResult(Result, frozen=True):
    """The newest messages of an order, oldest first."""

    webhook: Annotated[WebhookView | None, about("Null: the order has none.")]
    deliveries: list[DeliveryView]


class OrderSummary(View, frozen=True):
    """An order in a list. Amounts are decimal strings."""

    order_id: OrderId
    state: Annotated[str, about("The state that its status answer has.")]
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


class ListResult(Result, frozen=True):
    """A page of a session's orders, newest first."""

    orders: list[OrderSummary]
    next_after: Annotated[
        OrderId | None, about("Send it as after for the next page; null at the end.")
    ]


class PaymentProblem(View, frozen=True):
    """One thing in which a payment differs from what is due. Null: not given."""

    code: Annotated[str, about("What differs.", enum=[*Problem])]
    message: str
    expected: str | None
    received: str | None


class PaymentCheck(View, frozen=True):
    """Whether a payment is the one that the order waits for."""

    safe_to_send: Annotated[bool, about("False: don't have it signed, whatever the problem.")]
    problems: list[PaymentProblem]
    amount_due: Annotated[Decimal | None, about("Null once nothing is due any more.")]
    expires_at: Annotated[Time, about("Until when a deposit is awaited.")]


class CheckResult(Result, frozen=True):
    """The check of an unsigned payment."""

    payment_check: PaymentCheck


class TicketView(View, frozen=True):
    """A ticket."""

    ticket_id: TicketId
    created_at: Time
    category: str
    order_id: OrderId | None


class RefundAddressView(View, frozen=True):
    """A refund address that was named. Not accepted: another was set before it, or the order was
    made with one, which is final.
    """

    accepted: bool
    address: str


class RefundAddressResult(Result, frozen=True):
    """The refund address as it was taken."""

    refund_address: RefundAddressView


class SupportResult(Result, frozen=True):
    """The ticket; ``refundAddress`` is null where none was asked for."""

    ticket: TicketView
    ticket_secret: Annotated[
        str | None,
        about("Opens the conversation by support.get; shown once. Null for one more message."),
    ]
    refund_address: RefundAddressView | None


class TicketMessageView(View, frozen=True):
    """A message of a ticket."""

    at: Time
    author: Annotated[str, about(enum=["user", "operator"])]
    text: str


class TicketResult(Result, frozen=True):
    """A ticket and its conversation, oldest message first."""

    ticket: TicketView
    messages: list[TicketMessageView]


class TransactionView(View, frozen=True):
    """A transaction on a simulated chain."""

    txid: str
    network: str
    to: str
    amount: Decimal
    asset: Asset


class FundResult(Result, frozen=True):
    """The simulated deposit."""

    transaction: TransactionView


class FaultResult(Result, frozen=True):
    """The fault as it was set, and the sandbox's time."""

    fault: str
    now: Time
