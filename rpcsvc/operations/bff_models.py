"""Params and results of the BFF, the bridge included: names, types and nullability of spec 2.4.

Amounts are atomic units as strings. Handlers check what a token, an amount or an address must be:
their messages can name what to send instead.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Struct, UnsetType, field
from pydantic import ConfigDict, Field

from rpcsvc.domain import twap
from rpcsvc.domain.bridge import BridgeKind, BridgeStatus
from rpcsvc.domain.chains import MONERO_CHAIN_ID, Chain
from rpcsvc.domain.money import MAX_UNITS, USDC, XMR
from rpcsvc.domain.order import OrderStatus
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.operations import narrowing
from rpcsvc.operations.models import (
    CheckoutUrl,
    ExactAmount,
    Number,
    Time,
    TwapProgress,
    Units,
    View,
    about,
    like,
)
from rpcsvc.operations.narrowing import WHOLE, Networks
from rpcsvc.operations.params import (
    AMOUNT_PATTERN,
    Destination,
    FundingKind,
    OrderId,
    Params,
    RefundAddress,
    SessionId,
)
from rpcsvc.strict_json import Json

# The bounds are for readers of the schema: what is no chain's number is refused in bff.py.
ChainNumber = Annotated[
    int,
    Field(
        description="The chain's number; 0 is XMR.",
        json_schema_extra={"minimum": 0, "maximum": 2**53 - 1},
    ),
    WHOLE,
]
Token = Annotated[str, Field(description="XMR on chain 0, else the chain's USDC contract.")]
FromAmount = Annotated[
    str,
    Field(
        description="Atomic units of the asset that is sent, above 0, as a string.",
        json_schema_extra={"pattern": f"^[1-9][0-9]{{0,{len(str(MAX_UNITS)) - 1}}}$"},
    ),
]
ToAmount = Annotated[
    str,
    Field(
        description="In place of fromAmount, what is to arrive exactly, in atomic units.",
        json_schema_extra={"pattern": f"^[1-9][0-9]{{0,{len(str(MAX_UNITS)) - 1}}}$"},
    ),
]
_AMOUNTS: Final = ("fromAmount", "toAmount")
# The same in results.
_ChainNumber = Annotated[int, like(ChainNumber)]
_Token = Annotated[str, like(Token)]
UsdText = Annotated[
    str, about("US dollars as a decimal string; one USDC counts as one.", pattern=AMOUNT_PATTERN)
]


FundingGas = Annotated[
    Units,
    about(
        "USDC units of gas for a signed payment, which the output is after and a refund"
        " bears, too; there only with funding x402."
    ),
]


class Nothing(Params):
    """A call without inputs."""

    model_config = ConfigDict(title="BffNothing")


class BffQuoteParams(Params):
    """The swap to price (spec 2.4, quote request)."""

    model_config = ConfigDict(title="BffQuoteRequest")

    one_of = _AMOUNTS

    from_chain_id: ChainNumber
    to_chain_id: ChainNumber
    from_token: Token
    to_token: Token
    from_amount: FromAmount | None = None
    to_amount: ToAmount | None = None
    funding: FundingKind | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """Return the cases by direction, and within it by chain."""
        return [_pair_case(direction, networks) for direction in Direction]

    @classmethod
    def input_schema(cls, networks: Networks) -> Json:
        """The schema with the sides that its cases refer to."""
        schema = super().input_schema(networks)
        sides = {
            name: narrowing.chained([_usdc_side(side, chain) for chain in networks.chains])
            for side, name in _SIDES.items()
        }
        return {**schema, "$defs": {**schema.get("$defs", {}), **sides}}


def _pair_case(direction: Direction, networks: Networks) -> Json:
    sent, received = deposit_asset(direction), payout_asset(direction)
    xmr, usdc = ("from", "to") if sent is XMR else ("to", "from")
    return {
        "properties": {
            f"{xmr}ChainId": {"const": MONERO_CHAIN_ID},
            f"{xmr}Token": {"const": XMR.symbol},
            **({"funding": {"const": None}} if sent is XMR else {}),
            "toAddress": narrowing.address(received, networks),
            "refundAddress": narrowing.address(sent, networks),
        },
        "allOf": [{"$ref": f"#/$defs/{_SIDES[usdc]}"}, narrowing.one_of(*_AMOUNTS)],
    }


# The sides of a pair, as schemas.
_SIDES = {"from": "FromUsdc", "to": "ToUsdc"}


def _usdc_side(side: str, chain: Chain) -> Json:
    contract = chain.usdc_contract
    tokens = {"enum": [contract, contract.lower()]}
    return {"properties": {f"{side}ChainId": {"const": chain.chain_id}, f"{side}Token": tokens}}


class TwapConfig(Params):
    """Whether and how an order is swapped in chunks (spec 2.4)."""

    # Numbers, as the spec has them: bff.py leaves off what is less than 10^-6 USD or a millisecond.

    disabled: Annotated[bool, Field(description="True: at once, at the quoted rate.")] = False
    chunk_size_usd: Annotated[
        float, Field(ge=twap.LEAST_CHUNK_USD, description="US dollars, to six decimals.")
    ] = twap.LEAST_CHUNK_USD
    interval_ms: Annotated[
        float,
        Field(
            ge=twap.LEAST_INTERVAL_MS,
            le=twap.LONGEST_INTERVAL_MS,
            description="Milliseconds between chunks; a fraction of one counts for nothing.",
        ),
    ] = twap.DEFAULT_INTERVAL_MS


class BffOrderParams(BffQuoteParams):
    """An order to make (spec 2.4). Without twapConfig an order worth more than 500 USD is cut,
    unless it names toAmount.
    """

    model_config = ConfigDict(title="BffOrderRequest")

    to_address: Destination
    session_id: SessionId | None = None
    twap_config: TwapConfig | None = None
    refund_address: RefundAddress | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """Return the cases by direction, each without chunks where toAmount is given."""
        at_once = {"properties": {"disabled": {"const": True}}, "required": ["disabled"]}
        wanted = {"toAmount": {"const": None}}, {"twapConfig": at_once}
        exact = {"anyOf": [{"properties": each} for each in wanted]}
        return [{**case, "allOf": [*case["allOf"], exact]} for case in super().cases(networks)]


class BffOrderIdParams(Params):
    """Which order, and optionally the destination that it must have."""

    order_id: OrderId
    verify: (
        Annotated[str, Field(description="The order's destination, if it is to be checked.")] | None
    ) = None


class BffCancelParams(Params):
    """Which order to end, and the session that it was made in."""

    model_config = ConfigDict(title="BffCancelRequest")

    order_id: OrderId
    session_id: SessionId


class BffSessionParams(Params):
    """The session whose orders are listed."""

    session: SessionId


class BffTicketParams(Params):
    """A support ticket (spec 2.4)."""

    model_config = ConfigDict(title="BffTicketRequest")

    order_id: OrderId | None
    session_id: SessionId | None
    wallet_address: Annotated[str, Field(max_length=256)] | None
    category: Annotated[str, Field(min_length=1, max_length=64)]
    message: Annotated[str, Field(min_length=1, max_length=8000)]


class BffHealth(View, frozen=True):
    """Whether the service is well."""

    status: Annotated[str, about(enum=["ok", "degraded"])]
    version: str
    time: Time


class BffChain(View, frozen=True):
    """A chain; number 0 is XMR."""

    chain_id: _ChainNumber
    name: str
    native_token: str
    min_swap_usd: Annotated[int, about("The least that is swapped, in USD.")]


class BffChains(View, frozen=True):
    """All chains."""

    chains: list[BffChain]


class IntegratorFee(View, frozen=True):
    """The integrator's part of the output."""

    percent: Number
    amount: Units
    amount_usd: UsdText


class BffQuote(View, frozen=True):
    """A price for an amount at the current rate."""

    from_amount: Units
    from_amount_usd: UsdText
    from_symbol: str
    to_amount: Units
    to_amount_usd: UsdText
    to_symbol: str
    estimated_time: Annotated[int, about("Seconds.")]
    min_received: Units
    integrator_fee: Annotated[
        IntegratorFee | UnsetType | None, about("There only for calls with an x-api-key.")
    ] = UNSET
    funding_gas: FundingGas | UnsetType | None = UNSET


class BffNewOrder(View, frozen=True):
    """An order that was made."""

    order_id: str
    deposit_address: str
    deposit_chain: str
    deposit_chain_id: _ChainNumber
    deposit_token: _Token
    deposit_token_symbol: str
    deposit_amount: Units
    to_address: str
    expected_output: Units
    expires_at: Time
    status: OrderStatus
    checkout_url: CheckoutUrl
    refund_address: Annotated[
        str | UnsetType | None, about("There only for orders that were made with one.")
    ] = UNSET
    funding_gas: FundingGas | UnsetType | None = UNSET
    receive_amount: ExactAmount | UnsetType | None = UNSET


class BffOrder(View, frozen=True):
    """An order's current state."""

    order_id: str
    status: OrderStatus
    deposit_address: str
    deposit_token_symbol: str
    deposit_amount: Units
    to_address: str
    expected_output: Units
    deposit_chain_id: _ChainNumber
    deposit_tx_hash: str | None
    actual_output: Units | None
    error_message: str | None
    refund_tx_hash: str | None
    created_at: Time
    completed_at: Time | None
    twap: TwapProgress = UNSET
    refund_address: Annotated[
        str | UnsetType | None, about("Where refunds go; there only once it was given.")
    ] = UNSET
    amount_due: Annotated[
        Units | UnsetType | None,
        about(
            "What is still to be sent, once a part has arrived; not while a signed"
            " payment is under way."
        ),
    ] = UNSET
    receive_amount: ExactAmount | UnsetType | None = UNSET


class BffListItem(Struct, frozen=True):
    """An order in a list; its names are in snake_case (spec 2.4)."""

    id: str
    from_chain_id: _ChainNumber
    from_token_symbol: str
    from_amount: Units
    to_chain_id: _ChainNumber
    to_token_symbol: str
    to_amount_expected: Units
    to_address: str
    status: OrderStatus
    created_at: Time
    completed_at: Time | None


class BffOrders(View, frozen=True):
    """A session's orders, newest first."""

    orders: list[BffListItem]


class BffTicket(View, frozen=True):
    """A ticket that was opened."""

    ticket_id: str
    created_at: Time


class BridgeParams(Params):
    """Where bridged money goes."""

    to_address: str


class BridgeDepositParams(BridgeParams):
    """Where on the exchange the XMR goes that is bridged."""

    model_config = ConfigDict(title="BridgeDepositRequest")

    to_address: Annotated[str, Field(description="An address on the exchange, in EVM form.")]

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """Return one case: the exchange's addresses are those of EVM networks."""
        return [{"properties": {"toAddress": narrowing.address(USDC, networks)}}]


class BridgeWithdrawParams(BridgeParams):
    """Where the XMR goes that is bridged from the exchange."""

    model_config = ConfigDict(title="BridgeWithdrawRequest")

    to_address: Annotated[str, Field(description="A Monero address.")]

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """Return one case: Monero's addresses."""
        return [{"properties": {"toAddress": narrowing.address(XMR, networks)}}]


class BridgeOrderIdParams(Params):
    """Which bridge order."""

    order_id: OrderId


class BridgeRate(View, frozen=True):
    """An exchange's rate: USDC for one XMR, and how long it takes."""

    exchange: str
    rate: Number
    eta: str


class ReferenceRate(View, frozen=True):
    """This service's rate: USDC for one XMR, and how long it takes."""

    rate: Number
    eta: str


class BridgeRates(View, frozen=True):
    """Rates of the exchanges, and the service's own."""

    rates: list[BridgeRate]
    wagyu_rate: ReferenceRate


class BridgeOpened(View, frozen=True):
    """A bridge order that was made."""

    order_id: str
    deposit_address: str
    destination: str
    expires_at: Time


class BridgeOrderView(Struct, frozen=True):
    """A bridge order's current state."""

    id: str
    type: BridgeKind
    status: BridgeStatus
    amount: Annotated[Units, about("What has come so far, in atomic units.")]
    confirmations: int
    required_confirmations: int = field(name="requiredConfirmations")
    tx_in: str | None
    tx_out: str | None
    failure_reason: str | None
    created_at: Time
    completed_at: Time | None
