"""Params and results of the operations as pydantic models: they validate, and give the schemas.

Params are strict: no coercion, no unknown properties (spec 2.3, 4.1). ``None`` stands for an
optional property that was left out or sent as null. What an amount, a chain or an address must
be is checked in inputs.py, where the message can teach. Results describe ``data`` of the envelope.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rpcsvc.settlement.sandbox.controls import FaultKind

UUID_PATTERN = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
ORDER_ID_PATTERN = "^ord_[0-9A-HJKMNP-TV-Z]{26}$"
AMOUNT_PATTERN = r"^(0|[1-9][0-9]*)(\.[0-9]+)?$"

Direction = Annotated[
    Literal["x2u", "u2x"],
    Field(description="x2u sends XMR and receives USDC; u2x sends USDC and receives XMR."),
]
ChainName = Annotated[
    str | int,
    Field(description="The USDC side: chain name, alias or number, as capabilities list them."),
]
Amount = Annotated[
    str,
    Field(
        description="What the user sends, as a decimal string: XMR for x2u, USDC for u2x.",
        json_schema_extra={"pattern": AMOUNT_PATTERN},
    ),
]
Destination = Annotated[
    str,
    Field(description="Where the payout goes: an EVM address for x2u, a Monero address for u2x."),
]
SessionId = Annotated[
    str,
    Field(
        description="A UUID that ties the agent's calls together.",
        json_schema_extra={"format": "uuid"},
    ),
]
OrderId = Annotated[
    str, Field(description="The order's id.", json_schema_extra={"pattern": ORDER_ID_PATTERN})
]


class Params(BaseModel):
    """Params of an operation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


class NoParams(Params):
    """An operation that takes nothing."""


class PlanParams(Params):
    """PlanRequest of spec 2.3: every field optional."""

    direction: Direction | None = None
    chain: ChainName | None = None
    amount: Amount | None = None
    to: Destination | None = None
    has_funds: bool | None = None


class QuoteParams(Params):
    """SwapRequestBase of spec 2.3."""

    direction: Direction
    chain: ChainName
    amount: Amount


class SwapParams(QuoteParams):
    """SwapRequest of spec 2.3."""

    to: Destination
    session_id: SessionId | None = None


class StatusParams(Params):
    """Which order, and optionally the destination that it must have."""

    order_id: OrderId
    verify: Destination | None = None


class SupportParams(Params):
    """SupportRequest of spec 2.3."""

    message: Annotated[str, Field(min_length=1, max_length=8000)]
    category: Annotated[str, Field(min_length=1, max_length=64)] = "agent"
    order_id: OrderId | None = None
    session_id: SessionId | None = None
    wallet_address: Annotated[str, Field(max_length=256)] | None = None


class FundParams(Params):
    """A simulated deposit; ``amount`` is what is still due if left out."""

    order_id: OrderId
    amount: Amount | None = None


class FaultParams(Params):
    """A simulated fault."""

    fault: Annotated[
        Literal[tuple(kind.value for kind in FaultKind)],  # type: ignore[valid-type] # from one list
        Field(description="What goes wrong."),
    ]
    order_id: OrderId | None = None
    seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    rate: Annotated[str, Field(description="USDC per XMR, for set_rate.")] | None = None


class View(BaseModel):
    """A part of a result. Names are camelCase on the wire."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class Result(View):
    """``data`` of an envelope. ``sessionSource`` is in all of them (spec 2.1)."""

    network: Annotated[str, Field(description="sandbox, or the engine's network.")]
    session_id: str | None
    session_source: Literal["request", "local", "generated", "none"]


class AssetInfo(View):
    """An asset and how finely it divides."""

    symbol: str
    decimals: int


class ChainInfo(View):
    """A chain on which the service takes and pays USDC."""

    name: str
    chain_id: int
    aliases: list[str]
    display_name: str
    token: str
    min_swap_usd: int


class Limits(View):
    """The least and the most of one direction, in the asset that is sent."""

    direction: Direction
    asset: str
    minimum: str
    maximum: str


class DepositPolicyRow(View):
    """What the service does with a deposit in one case."""

    case: str
    action: str


class CapabilitiesResult(Result):
    """What the service can do now."""

    engine: str
    directions: list[dict[str, str]]
    chains: list[ChainInfo]
    assets: list[AssetInfo]
    limits: list[Limits]
    operations: list[dict[str, Any]]
    deposit_policy: list[DepositPolicyRow]
    deposit_window_seconds: int
    rate: dict[str, str] | None


class SchemasResult(Result):
    """JSON Schemas of every operation's params and result."""

    operations: dict[str, dict[str, Any]]
    envelope: dict[str, Any]


class Quote(View):
    """A price for an amount. Amounts are decimal strings; ``fees`` are in ``payoutAsset``."""

    direction: Direction
    chain: str
    chain_id: int
    deposit_asset: str
    deposit_amount: str
    payout_asset: str
    expected_output: str
    min_received: str
    rate: str
    rate_as_of: str
    fees: dict[str, str]
    estimated_time_seconds: int
    deposit_window_seconds: int
    deposit_policy: list[DepositPolicyRow]


class QuoteResult(Result):
    """A quote."""

    quote: Quote


class PlanResult(Result):
    """What is known so far, normalised."""

    intent: dict[str, Any]


class FundingInstructions(View):
    """What the user has to send, where and until when (design part 3)."""

    deposit_address: str
    amount: str
    amount_display: str
    asset: str
    network: str
    chain_id: int
    expires_at: str
    payment_uri: str
    warnings: list[str]


class OrderView(View):
    """The draft order fields of spec 2.4, and the deadline of a status that is not terminal.

    Amounts are atomic units as strings, as in the BFF.
    """

    order_id: str
    status: str
    deposit_address: str
    deposit_token_symbol: str
    deposit_amount: str
    to_address: str
    expected_output: str
    deposit_chain_id: int
    deposit_tx_hash: str | None
    actual_output: str | None
    error_message: str | None
    refund_tx_hash: str | None
    created_at: str
    expires_at: str
    completed_at: str | None
    deadline_at: str | None = None
    on_deadline: str | None = None


class OrderResult(Result):
    """A new order with its quote and funding instructions."""

    order: OrderView
    funding_instructions: FundingInstructions
    quote: Quote


class DepositView(View):
    """A deposit on record. ``use``: undecided, payout, refund or dust."""

    txid: str
    amount: str
    status: str
    first_seen_at: str
    use: str


class TransferView(View):
    """A payout or refund on record."""

    kind: str
    address: str
    amount: str
    asset: str
    status: str
    txid: str | None


class StatusResult(Result):
    """An order as it stands."""

    order: OrderView
    funding_instructions: FundingInstructions | None
    amount_due: str | None
    deposits: list[DepositView]
    transfers: list[TransferView]
    outcome: str | None
    action_required: str | None


class SupportResult(Result):
    """The created ticket."""

    ticket: dict[str, Any]
    refund_address: dict[str, Any] | None


class FundResult(Result):
    """The simulated deposit."""

    transaction: dict[str, Any]


class FaultResult(Result):
    """The fault as it was set."""

    fault: str
    now: str
