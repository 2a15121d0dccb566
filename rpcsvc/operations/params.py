"""Params of the operations as pydantic models: they validate, and give the schemas.

They are strict: no coercion, no unknown properties (spec 2.3, 4.1). ``None`` stands for an optional
property that was left out or sent as null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rpcsvc.domain.money import LONGEST_AMOUNT, USDC, XMR
from rpcsvc.domain.pricing import Direction as DirectionKind
from rpcsvc.domain.pricing import deposit_asset, payout_asset
from rpcsvc.operations import narrowing
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.narrowing import Networks
from rpcsvc.orders.ports.venue import NEEDED, RATE_PATTERN, FaultKind

# Version 4, which is random: a session id is half of its owner's secret (RFC 9562, section 5.4).
UUID_PATTERN = (
    "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
)
ORDER_ID_PATTERN = "^ord_[0-9A-HJKMNP-TV-Z]{26}$"
AMOUNT_PATTERN = r"^(0|[1-9][0-9]*)(\.[0-9]+)?$"

Direction = Annotated[
    Literal["x2u", "u2x"],
    Field(description="x2u sends XMR and receives USDC; u2x sends USDC and receives XMR."),
]


def whole(value: Any) -> Any:
    """42161.0 as 42161: JSON has one kind of number, and some languages write every one so.

    JSON Schema calls both an integer (2020-12, Validation, section 6.1.1).
    """
    is_whole = isinstance(value, float) and abs(value) < 2**53 and value.is_integer()
    return int(value) if is_whole else value


# For whole numbers that callers send; a fraction is refused.
WHOLE = BeforeValidator(whole)

ChainName = Annotated[
    str | int,
    Field(
        description="The USDC side: chain name, alias or number, as capabilities list them. Names"
        " are taken in capitals, too."
    ),
    WHOLE,
]
Amount = Annotated[
    str,
    Field(
        description="What the user sends, as a decimal string: XMR for x2u, USDC for u2x. Its"
        " limits move with the rate: capabilities tell them.",
        json_schema_extra={"pattern": AMOUNT_PATTERN, "maxLength": LONGEST_AMOUNT},
    ),
]
Destination = Annotated[
    str,
    Field(
        description="Where the payout goes: an EVM address for x2u, a Monero address for u2x. The"
        " checksum must hold, that of EIP-55 for an EVM address in mixed case. Addresses of tokens"
        " and of the service itself are refused."
    ),
]
RefundAddress = Annotated[
    str,
    Field(
        description="Where refunds go, and nowhere else: an address of the user on the network of"
        " the deposit, a Monero address for x2u, an EVM address for u2x. It is checked as the"
        " destination is, and can't be changed. Recommended for XMR, which hides its sender;"
        " without it the holder of sessionId names the address.",
        max_length=256,
    ),
]
SessionId = Annotated[
    str,
    Field(
        description="A UUID of version 4 that ties the agent's calls together.",
        json_schema_extra={"format": "uuid", "pattern": UUID_PATTERN},
    ),
]
OrderId = Annotated[
    str, Field(description="The order's id.", json_schema_extra={"pattern": ORDER_ID_PATTERN})
]


class Params(BaseModel):
    """Params of an operation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:  # noqa: ARG003 - subclasses use it
        """What JSON Schema can say beside the types: schemas of which one must hold."""
        return []

    @classmethod
    def input_schema(cls, networks: Networks) -> Json:
        """The JSON Schema of params on these networks, as strict as it can be."""
        return narrowing.narrowed(cls.model_json_schema(by_alias=True), cls.cases(networks))


def _swap_case(direction: DirectionKind, networks: Networks) -> Json:
    """What the inputs of a swap are in one direction."""
    sent, received = deposit_asset(direction), payout_asset(direction)
    return {
        "properties": {
            "direction": {"const": direction.value},
            "chain": narrowing.chain(networks),
            "amount": narrowing.amount(sent),
            "to": narrowing.address(received, networks),
            "refundAddress": narrowing.address(sent, networks),
        }
    }


class NoParams(Params):
    """An operation that takes nothing."""


class PlanParams(Params):
    """What is known of a swap so far: every field may be left out (spec 2.3)."""

    model_config = ConfigDict(title="PlanRequest")

    direction: Direction | None = None
    chain: ChainName | None = None
    amount: Amount | None = None
    to: Destination | None = None
    has_funds: bool | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """By direction; while it is not known, an amount of either asset and either address."""
        unknown = {
            "direction": {"const": None},
            "chain": narrowing.chain(networks),
            "amount": narrowing.amount(XMR),
            "to": narrowing.any_address((USDC, XMR), networks),
        }
        known = [_swap_case(direction, networks) for direction in DirectionKind]
        return [*known, {"properties": unknown}]


class QuoteParams(Params):
    """An amount to price (spec 2.3)."""

    model_config = ConfigDict(title="SwapRequestBase")

    direction: Direction
    chain: ChainName
    amount: Amount

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """By direction."""
        return [_swap_case(direction, networks) for direction in DirectionKind]


class SwapParams(QuoteParams):
    """An order to make (spec 2.3)."""

    model_config = ConfigDict(title="SwapRequest")

    to: Destination
    session_id: SessionId | None = None
    refund_address: RefundAddress | None = None


class StatusParams(Params):
    """Which order, and optionally the destination that it must have."""

    order_id: OrderId
    verify: (
        Annotated[str, Field(description="The order's destination, if it is to be checked.")] | None
    ) = None


class CancelParams(Params):
    """Which order to end, and the session that it was made in."""

    model_config = ConfigDict(title="CancelRequest")

    order_id: OrderId
    session_id: SessionId


class SupportParams(Params):
    """A ticket to open (spec 2.3). With the order's own sessionId, walletAddress sets where a
    refund goes that waits for an address.
    """

    model_config = ConfigDict(title="SupportRequest")

    message: Annotated[str, Field(min_length=1, max_length=8000)]
    category: Annotated[str, Field(min_length=1, max_length=64)] = "agent"
    order_id: OrderId | None = None
    session_id: SessionId | None = None
    wallet_address: Annotated[str, Field(max_length=256)] | None = None


class FundParams(Params):
    """A simulated deposit; ``amount`` is what is still due if left out."""

    model_config = ConfigDict(title="FundRequest")

    order_id: OrderId
    amount: Amount | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:  # noqa: ARG003 - the base class's parameter
        """The order says which asset is sent."""
        return [{"properties": {"amount": narrowing.amount(XMR, USDC)}}]


class FaultParams(Params):
    """A simulated fault."""

    model_config = ConfigDict(title="FaultRequest")

    fault: Annotated[
        Literal[tuple(kind.value for kind in FaultKind)],  # type: ignore[valid-type] # from one list
        Field(description="What goes wrong."),
    ]
    order_id: OrderId | None = None
    seconds: Annotated[int, Field(ge=1, le=31_536_000), WHOLE] | None = None
    rate: Annotated[str, Field(description="USDC per XMR, for set_rate.")] | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:  # noqa: ARG003 - the base class's parameter
        """By what a fault needs."""
        needs: dict[str | None, Json] = {
            None: {},
            "orderId": {"type": "string"},
            "seconds": {"type": "integer"},
            "rate": {"type": "string", "pattern": RATE_PATTERN},
        }
        return [_fault_case(name, schema) for name, schema in needs.items()]


def _fault_case(needed: str | None, schema: Json) -> Json:
    kinds = {"enum": [kind.value for kind in FaultKind if NEEDED.get(kind) == needed]}
    if needed is None:
        return {"properties": {"fault": kinds}}
    return {"properties": {"fault": kinds, needed: schema}, "required": [needed]}
