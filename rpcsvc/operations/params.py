"""Params of the operations as pydantic models: they validate, and give the schemas.

They are strict: no coercion, no unknown properties (spec 2.3, 4.1). ``None`` stands for an optional
property that was left out or sent as null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from typing_extensions import override

from rpcsvc.domain.money import LONGEST_AMOUNT, USDC, XMR, decimal_pattern
from rpcsvc.domain.payment_check import TRANSACTION_KEYS, require_no_secret, require_unsigned
from rpcsvc.domain.pricing import Direction as DirectionKind
from rpcsvc.domain.pricing import deposit_asset, payout_asset
from rpcsvc.domain.webhooks import LONGEST_URL, SECRET_PATTERN, URL_PATTERN
from rpcsvc.operations import narrowing
from rpcsvc.operations.narrowing import WHOLE, Networks
from rpcsvc.operations.x402 import describe_payment
from rpcsvc.orders.ports.venue import NEEDED, RATE_PATTERN, FaultKind
from rpcsvc.orders.quoted import PATTERN as DIGEST_PATTERN
from rpcsvc.orders.waits import LONGEST_WAIT_SECONDS
from rpcsvc.strict_json import Json

# Version 4, which is random: a session id is half of its owner's secret (RFC 9562, section 5.4).
UUID_PATTERN = (
    "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
)
ORDER_ID_PATTERN = "^ord_[0-9A-HJKMNP-TV-Z]{26}$"
TICKET_ID_PATTERN = "^tkt_[0-9A-HJKMNP-TV-Z]{26}$"
# The characters of a field's name in an error.
LONGEST_NAME = 64
AMOUNT_PATTERN = f"^{decimal_pattern()}$"

Direction = Annotated[
    Literal["x2u", "u2x"],
    Field(description="x2u sends XMR and receives USDC; u2x sends USDC and receives XMR."),
]


def _as_text(schema: Json) -> None:
    """Describe a chain by its name alone: see ``narrowing.chain``."""
    del schema["anyOf"]
    schema["type"] = "string"


ChainName = Annotated[
    str | int,
    Field(
        description="The USDC side. An alias or a number, as capabilities list them, is taken, too,"
        " in any case.",
        json_schema_extra=_as_text,
    ),
    WHOLE,
]
_ABOVE_ZERO: Json = {
    "pattern": AMOUNT_PATTERN,
    "maxLength": LONGEST_AMOUNT,
    "not": {"type": "string", "pattern": "^[0.]+$"},
}
Amount = Annotated[
    str,
    Field(
        description="What the user sends, as a decimal string: XMR for x2u, USDC for u2x. Its"
        " limits move with the rate: capabilities list them.",
        json_schema_extra=_ABOVE_ZERO,
    ),
]
ReceiveAmount = Annotated[
    str,
    Field(
        description="In place of amount, what is to arrive exactly: USDC for x2u, XMR for u2x. The"
        " quote says what to send for it.",
        json_schema_extra=_ABOVE_ZERO,
    ),
]
Destination = Annotated[
    str,
    Field(
        description="Where the payout goes: an EVM address for USDC, a Monero address for XMR. The"
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
FundingKind = Annotated[
    Literal["x402"],
    Field(
        description="x402: the user pays by signing (swap.fund) and without gas, and the gas that"
        " the service spends is in the quote's fees. For u2x, where swap.fund is offered."
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
TicketId = Annotated[
    str,
    Field(
        description="The ticket's id.",
        json_schema_extra={"pattern": TICKET_ID_PATTERN},
    ),
]
TicketSecret = Annotated[str, Field(description="Came with the ticketId.", max_length=64)]

DETAIL, FULL, LEAN = "detail", "full", "lean"
Detail = Annotated[
    Literal["full", "lean"],
    Field(
        description="How much data comes back. lean: only what the next call needs; the default"
        " over MCP. full: all of it; the default elsewhere."
    ),
]


def plain_types(annotation: Any) -> Iterator[Any]:
    """The plain types that a field accepts, extracted from unions, literals and annotations."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from map(type, arguments)
    elif origin is Annotated:
        yield from plain_types(arguments[0])
    elif arguments:
        for argument in arguments:
            yield from plain_types(argument)
    else:
        yield annotation


WaitSec = Annotated[
    int,
    Field(
        description="How long to wait for something new, in whole seconds.",
        ge=0,
        le=LONGEST_WAIT_SECONDS,
    ),
    WHOLE,
]


class Params(BaseModel):
    """Params of an operation."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, defer_build=True
    )

    # Of these two inputs exactly one is needed; the first is the usual one.
    one_of: ClassVar[tuple[str, str] | None] = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:  # noqa: ARG003 - subclasses use it
        """Schemas of which one must hold, beside the types."""
        return []

    @classmethod
    def asks_nothing(cls) -> bool:
        """Return whether all calls get the same answer, in one detail or another."""
        return cls.model_fields.keys() <= {DETAIL}

    @classmethod
    def input_schema(cls, networks: Networks) -> Json:
        """The JSON Schema of the params on these networks, as strict as possible."""
        return narrowing.narrowed(cls.model_json_schema(by_alias=True), cls.cases(networks))


class CallParams(Params):
    """Params of an operation of the agent API, which answers as fully as it is asked to."""

    detail: Detail | None = None

    @classmethod
    @override
    def input_schema(cls, networks: Networks) -> Json:
        schema = super().input_schema(networks)
        properties = schema["properties"]
        properties["detail"] = properties.pop("detail")  # after the operation's own
        return schema


_URL: Json = {"pattern": URL_PATTERN, "maxLength": LONGEST_URL}


class WebhookParams(Params):
    """Where the events of an order are sent (Standard Webhooks)."""

    model_config = ConfigDict(title="Webhook")

    url: Annotated[
        str,
        Field(
            description="An https URL of a public host, where each event is posted.",
            json_schema_extra=_URL,
        ),
    ]
    secret: (
        Annotated[
            str,
            Field(
                description="whsec_ and the base64 of 24 to 64 random bytes: messages are signed"
                " with it, too (v1). It is not shown again.",
                json_schema_extra={"pattern": SECRET_PATTERN},
            ),
        ]
        | None
    ) = None


def _with_url(webhook: Any) -> Any:
    """Accept a URL for a webhook without a secret."""
    return {"url": webhook} if isinstance(webhook, str) else webhook


def _or_url(schema: Json) -> None:
    schema["anyOf"].append({"type": "string", **_URL})


WebhookField = Annotated[
    WebhookParams | None,
    BeforeValidator(_with_url),
    Field(
        description="Where the order's events are sent as they happen: a URL, or an object with url"
        " and secret. docs/use/webhooks.md says how to check them.",
        json_schema_extra=_or_url,
    ),
]


def _swap_case(direction: DirectionKind, networks: Networks) -> Json:
    """Schemas of a swap's inputs in one direction."""
    sent, received = deposit_asset(direction), payout_asset(direction)
    return {
        "properties": {
            "direction": {"const": direction.value},
            "chain": narrowing.chain(networks),
            "amount": narrowing.amount(sent),
            "receiveAmount": narrowing.amount(received),
            "to": narrowing.address(received, networks),
            "refundAddress": narrowing.address(sent, networks),
            **({"funding": {"const": None}} if sent is XMR else {}),
        }
    }


_AMOUNTS: Final = ("amount", "receiveAmount")


class NoParams(Params):
    """An operation without inputs."""


class DetailParams(CallParams):
    """Nothing but how much of the answer is wanted."""


class PlanParams(CallParams):
    """The known inputs of a swap: every field is optional (spec 2.3)."""

    model_config = ConfigDict(title="PlanRequest")

    direction: Direction | None = None
    chain: ChainName | None = None
    amount: Amount | None = None
    receive_amount: ReceiveAmount | None = None
    to: Destination | None = None
    has_funds: Annotated[bool, Field(description="Whether the user has the money.")] | None = None
    funding: FundingKind | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """Return the cases by direction; without one, an amount and address of either asset."""
        unknown = {
            "direction": {"const": None},
            "chain": narrowing.chain(networks),
            "amount": narrowing.amount(XMR),
            "receiveAmount": narrowing.amount(XMR),
            "to": narrowing.any_address((USDC, XMR), networks),
        }
        known = [_swap_case(direction, networks) for direction in DirectionKind]
        one = {"allOf": [narrowing.not_both(*_AMOUNTS)]}
        return [case | one for case in (*known, {"properties": unknown})]


class PricedParams(CallParams):
    """A swap with its amount."""

    one_of = _AMOUNTS

    direction: Direction
    chain: ChainName
    amount: Amount | None = None
    receive_amount: ReceiveAmount | None = None
    funding: FundingKind | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """Return the cases by direction, each with one of the amounts."""
        needed = {"allOf": [narrowing.one_of(*_AMOUNTS)]}
        return [_swap_case(direction, networks) | needed for direction in DirectionKind]


class QuoteParams(PricedParams):
    """An amount to price (spec 2.3)."""

    model_config = ConfigDict(title="SwapRequestBase")

    requote_of: (
        Annotated[
            str,
            Field(
                description="The quoteDigest of an earlier quote of this swap. The answer says in"
                " percent what changed since.",
                pattern=DIGEST_PATTERN,
            ),
        ]
        | None
    ) = None


class SwapParams(PricedParams):
    """An order to make (spec 2.3)."""

    model_config = ConfigDict(title="SwapRequest")

    to: Destination
    session_id: SessionId | None = None
    refund_address: RefundAddress | None = None
    webhook: WebhookField = None
    quote_digest: (
        Annotated[
            str,
            Field(
                description="As quote answered it: the order is refused if its terms would be worse"
                " than those of that quote.",
                pattern=DIGEST_PATTERN,
            ),
        ]
        | None
    ) = None


class StatusParams(CallParams):
    """Which order, and optionally the destination that it must have."""

    order_id: OrderId
    verify: (
        Annotated[str, Field(description="The order's destination, if it is to be checked.")] | None
    ) = None
    wait_sec: WaitSec = 0
    since_cursor: (
        Annotated[
            int,
            Field(
                description="cursor of the answer before: with waitSec, answer once the order has"
                " changed since.",
                ge=0,
                le=2**53 - 1,
            ),
            WHOLE,
        ]
        | None
    ) = None


class EventsParams(CallParams):
    """Which order's events, from where on, and how long to wait for the next one."""

    model_config = ConfigDict(title="EventsRequest")

    order_id: OrderId
    after: Annotated[
        int, Field(description="The cursor of the answer before; 0: from the first event.", ge=0,
                   le=2**53 - 1), WHOLE,
    ] = 0  # fmt: skip
    wait_sec: WaitSec = 0


class CancelParams(CallParams):
    """Which order to end, and the session that it was made in."""

    model_config = ConfigDict(title="CancelRequest")

    order_id: OrderId
    session_id: SessionId


class ListParams(CallParams):
    """Which session's orders, and which page of them."""

    model_config = ConfigDict(title="ListRequest")

    session_id: (
        Annotated[
            str,
            Field(
                description="A UUID of version 4 that ties the agent's calls together; without"
                " it, the orders of the client whose token comes with the call.",
                json_schema_extra={"format": "uuid", "pattern": UUID_PATTERN},
            ),
        ]
        | None
    ) = None
    after: (
        Annotated[
            str,
            Field(
                description="The orderId after which the page begins: nextAfter of the last page.",
                json_schema_extra={"pattern": ORDER_ID_PATTERN},
            ),
        ]
        | None
    ) = None
    limit: Annotated[int, Field(description="The most orders of a page.", ge=1, le=100), WHOLE] = 20


_TRANSACTION: Json = {
    "properties": {name: {} for name in sorted(TRANSACTION_KEYS)},
    "additionalProperties": False,
}


class CheckParams(CallParams):
    """A payment that is about to be signed: one of transaction, paymentUri, or the four that
    describe it.
    """

    model_config = ConfigDict(title="CheckRequest")

    order_id: OrderId
    transaction: Annotated[
        Annotated[dict[str, Any], Field(json_schema_extra=_TRANSACTION)] | str | None,
        Field(
            description="An unsigned EVM transaction as JSON (to, data, value, chainId), as an"
            " object or its text; or the calldata alone, with chain and contract beside it."
            " Calldata is not safe to send without these two. A signed one is refused unread."
        ),
    ] = None
    payment_uri: (
        Annotated[str, Field(description="A monero: or an EIP-681 URI.", max_length=1024)] | None
    ) = None
    address: (
        Annotated[str, Field(description="Where the money is to go.", max_length=128)] | None
    ) = None
    amount: (
        Annotated[
            str,
            Field(
                description="What is to be sent, as a decimal string. What can't be read as one is"
                " answered as unreadable.",
                max_length=LONGEST_AMOUNT,
            ),
        ]
        | None
    ) = None
    asset: Annotated[Literal["XMR", "USDC"], Field(description="Of the amount.")] | None = None
    chain: (
        Annotated[
            str | int,
            Field(
                description="The network as fundingInstructions name it, or its chainId. Needed for"
                " USDC, unless the transaction or the URI names its chain."
            ),
            WHOLE,
        ]
        | None
    ) = None
    contract: (
        Annotated[
            str,
            Field(
                description="The token's contract that is called. Calldata needs it.",
                max_length=128,
            ),
        ]
        | None
    ) = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse signed transactions and private keys in every field: errors echo what came."""
        for name, value in given.items():
            require_no_secret(name, "params")
            if name == "transaction":
                require_unsigned(value)
            else:
                require_no_secret(value, name[:LONGEST_NAME])
        return given


class DeliveriesParams(CallParams):
    """Which order's webhook, and the session that it was made in."""

    model_config = ConfigDict(title="WebhookDeliveriesRequest")

    order_id: OrderId
    session_id: SessionId


class FundingParams(CallParams):
    """Which order to pay, and the signed payment; without one the answer says what to sign."""

    model_config = ConfigDict(title="FundingRequest")

    order_id: OrderId
    payment: Annotated[
        Annotated[dict[str, Any], Field(json_schema_extra=describe_payment)] | str | None,
        Field(
            description="PaymentPayload of x402, version 2, scheme exact by EIP-3009: as an"
            " object, or as the header PAYMENT-SIGNATURE has it."
        ),
    ] = None


class RefundAddressParams(CallParams):
    """Where a refund goes that waits for an address, of an order that was made without one."""

    model_config = ConfigDict(title="RefundAddressRequest")

    order_id: OrderId
    session_id: SessionId
    address: Annotated[
        str,
        Field(description="The user's own address on the network of the deposit.", max_length=256),
    ]


class SupportParams(CallParams):
    """A ticket to open (spec 2.3). With the order's own sessionId, walletAddress sets where a
    refund goes that waits for an address. With ticketId and ticketSecret, one more message for the
    operator.
    """

    model_config = ConfigDict(title="SupportRequest")

    message: Annotated[
        str,
        Field(description="What happened and what is asked for.", min_length=1, max_length=8000),
    ]
    category: Annotated[
        str, Field(description="A word that sorts tickets.", min_length=1, max_length=64)
    ] = "agent"
    order_id: OrderId | None = None
    session_id: SessionId | None = None
    wallet_address: (
        Annotated[
            str,
            Field(
                description="The user's own address on the network of the deposit, for a refund"
                " that waits for one.",
                max_length=256,
            ),
        ]
        | None
    ) = None
    ticket_id: TicketId | None = None
    ticket_secret: TicketSecret | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:  # noqa: ARG003 - the base class's parameter
        """A message to a ticket names nothing of a new one, and the other way round."""
        text, nothing = {"type": "string"}, {"const": None}
        return [
            {
                "properties": {
                    "ticketId": text,
                    "ticketSecret": text,
                    "orderId": nothing,
                    "sessionId": nothing,
                    "walletAddress": nothing,
                },
                "required": ["ticketId", "ticketSecret"],
            },
            {"properties": {"ticketId": nothing, "ticketSecret": nothing}},
        ]


class TicketParams(CallParams):
    """A ticket to read."""

    model_config = ConfigDict(title="TicketRequest")

    ticket_id: TicketId
    ticket_secret: TicketSecret


class FundParams(CallParams):
    """A simulated deposit; ``amount`` is what is still due if left out."""

    model_config = ConfigDict(title="FundRequest")

    order_id: OrderId
    amount: Amount | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:  # noqa: ARG003 - the base class's parameter
        """The order says which asset is sent."""
        return [{"properties": {"amount": narrowing.amount(XMR, USDC)}}]


class FaultParams(CallParams):
    """A simulated fault."""

    model_config = ConfigDict(title="FaultRequest")

    fault: Annotated[
        Literal[tuple(kind.value for kind in FaultKind)],  # type: ignore[valid-type] # from one list
        Field(description="What goes wrong."),
    ]
    order_id: OrderId | None = None
    seconds: (
        Annotated[
            int,
            Field(description="How far the clock moves, for advance_clock.", ge=1, le=31_536_000),
            WHOLE,
        ]
        | None
    ) = None
    rate: Annotated[str, Field(description="USDC per XMR, for set_rate.")] | None = None

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:  # noqa: ARG003 - the base class's parameter
        """Return the cases by what a fault needs."""
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
