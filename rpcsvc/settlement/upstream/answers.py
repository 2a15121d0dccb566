"""An upstream's answers as strict models: types, amounts, times, statuses, and above all addresses.

A deposit address must be good for the network on which the user pays, and a payout address must be
the requested one. A wrong answer raises UpstreamBroken, which names the field and never quotes its
value. Fields that the specification does not have are ignored. An unknown status is UNKNOWN, never
guessed: a wrong guess would report money that has not arrived.

Amounts are atomic units, times are ms since the epoch, other numbers are exact decimals.
Sources: spec 2.4 (fields), spec 3.2 and 3.3 (statuses), and spellings of the public API.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from enum import Enum
from typing import Annotated, Any, Final, Literal, Self

from msgspec import Struct
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    StrictBool,
    ValidationError,
)
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import override

from rpcsvc.domain.addresses import (
    MoneroNetwork,
    parse_evm_address,
    parse_monero_address,
    same_address,
)
from rpcsvc.domain.bridge import BridgeStatus
from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.domain.money import MAX_UNITS, USDC, XMR, decimal_pattern
from rpcsvc.domain.order import OrderStatus
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import InvalidDestination
from rpcsvc.settlement.upstream.requests import UpstreamRequest
from rpcsvc.settlement.upstream.transport import UpstreamAnswer, UpstreamBroken

_LONGEST_TEXT: Final = 512
_MOST_ITEMS: Final = 1_000
_UNITS: Final = re.compile(r"0|[1-9][0-9]{0,77}", re.ASCII)
_DECIMAL: Final = re.compile(decimal_pattern(40, 40), re.ASCII)
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)

_WHITESPACE: Final = " \t\r\n"
_WANTED: Final = {
    "model_type": "an object",
    "tuple_type": "an array",
    "bool_type": "true or false",
}
_TYPES: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (bool, "a boolean"),
    ((int, float), "a number"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)


class PayableNetworks(Struct, frozen=True):
    """The networks and addresses at which this service's users may be asked to pay.

    ``monero``: mainnet only, unless the upstream is a sandbox. ``forbidden`` holds lower-case EVM
    addresses that no payer may be sent to, such as the token contracts.
    """

    monero: Collection[MoneroNetwork] = (MoneroNetwork.MAINNET,)
    forbidden: Collection[str] = ()


def is_id(text: str) -> bool:
    """Return whether ``text`` can be an upstream's id: safe in a path and in a log line."""
    return _ID.fullmatch(text) is not None


# --- statuses --------------------------------------------------------------------------------


class Unknown(Enum):
    """The type of UNKNOWN, so that a type checker knows it from a status."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN
OrderReading = OrderStatus | Literal[Unknown.UNKNOWN]
BridgeReading = BridgeStatus | Literal[Unknown.UNKNOWN]

_ORDER: Final[dict[str, OrderStatus]] = {
    **{status.value: status for status in OrderStatus},
    "confirming": OrderStatus.DEPOSIT_DETECTED,
    "swapping": OrderStatus.EXECUTING_SWAP,
    "complete": OrderStatus.COMPLETED,
    "success": OrderStatus.COMPLETED,
}
_BRIDGE: Final[dict[str, BridgeStatus]] = {
    **{status.value: status for status in BridgeStatus},
    "confirming": BridgeStatus.PENDING_CONFIRMATIONS,
    "complete": BridgeStatus.COMPLETED,
    "success": BridgeStatus.COMPLETED,
}


def order_status(text: str) -> OrderReading:
    """The order status that ``text`` spells, without regard to case and outer spaces."""
    return _ORDER.get(_plain(text), UNKNOWN)


def bridge_status(text: str) -> BridgeReading:
    """The bridge status that ``text`` spells, without regard to case and outer spaces."""
    return _BRIDGE.get(_plain(text), UNKNOWN)


def _plain(text: str) -> str:
    # Lower-casing turns some other scripts' letters into ASCII ones (U+212A becomes k).
    return text.strip(_WHITESPACE).lower() if text.isascii() else ""


# --- types of fields -------------------------------------------------------------------------


def _wrong(problem: str) -> PydanticCustomError:
    return PydanticCustomError("answer", "{problem}", {"problem": problem})


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(f"must be a string, not {_type(value)}")
    return value


def _text(value: Any) -> str:
    text = _string(value)
    if not text or len(text) > _LONGEST_TEXT:
        raise _wrong(f"has {len(text)} characters, not 1 to {_LONGEST_TEXT}")
    if not text.isprintable():
        raise _wrong("has characters that can't be printed")
    return text


def _sentence(value: Any) -> str:
    return "".join(c if c.isprintable() else " " for c in _string(value)[:_LONGEST_TEXT])


def _identifier(text: str) -> str:
    if not is_id(text):
        raise _wrong("is not an id of 1 to 128 letters, digits and ._:-")
    return text


def _units(value: Any) -> int:
    text = _text(value)
    if not _UNITS.fullmatch(text):
        raise _wrong("is not a whole number of smallest units in a string")
    if int(text) > MAX_UNITS:
        raise _wrong("is more than any order can be")
    return int(text)


def _positive(units: int) -> int:
    if units == 0:
        raise _wrong("is zero")
    return units


def _decimal(value: Any) -> Decimal:
    text = _text(value)
    if not _DECIMAL.fullmatch(text):
        raise _wrong("is not a decimal number in a string")
    return Decimal(text)


def _number(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(f"must be a number, not {_type(value)}")
    if value < 0:
        raise _wrong("is negative")
    return Decimal(repr(value))


def _rounded_up(number: Decimal) -> int:
    whole = number.to_integral_value(ROUND_CEILING)
    if whole > MAX_UNITS:
        raise _wrong("is too large")
    return int(whole)


def _whole(number: Decimal) -> int:
    if number != number.to_integral_value():
        raise _wrong("is not a whole number")
    return _rounded_up(number)


def _time(value: Any) -> int:
    text = _text(value)
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return (moment.astimezone(UTC) - _EPOCH) // _MILLISECOND
    except (ValueError, OverflowError):
        pass
    raise _wrong("is not an ISO 8601 time with an offset or Z")


# Not empty, of bounded length, without control characters.
Text = Annotated[str, PlainValidator(_text)]
# For people: cut to size and made printable, since nothing is decided by it.
Sentence = Annotated[str, PlainValidator(_sentence)]
# Safe in a path and in a log line.
Identifier = Annotated[Text, AfterValidator(_identifier)]
# Atomic units in a string of digits.
Units = Annotated[int, PlainValidator(_units)]
PositiveUnits = Annotated[Units, AfterValidator(_positive)]
# A decimal number in a string, such as an amount in USD.
DecimalText = Annotated[Decimal, PlainValidator(_decimal)]
# A JSON number that is not negative, exactly as it was written.
Number = Annotated[Decimal, PlainValidator(_number)]
Whole = Annotated[int, PlainValidator(lambda value: _whole(_number(value)))]
RoundedUp = Annotated[int, PlainValidator(lambda value: _rounded_up(_number(value)))]
# An ISO 8601 time with its offset.
Time = Annotated[int, PlainValidator(_time)]


class Part(BaseModel):
    """An object in an answer."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel)


class ParsedAnswer(Part):
    """An answer. ``raw`` holds its bytes for audit, bounded."""

    _raw: bytes = PrivateAttr(default=b"")

    @property
    def raw(self) -> bytes:
        """The answer's bytes, bounded."""
        return self._raw

    @override
    def model_post_init(self, context: bytes, /) -> None:
        self._raw = context

    @classmethod
    def read(cls, answer: UpstreamAnswer) -> Self:
        """Validate an answer. Raises UpstreamBroken that names the first wrong field."""
        try:
            return cls.model_validate(answer.value, context=answer.kept)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise _broken(_spelled(first["loc"]), _problem(first)) from None


# --- answers ---------------------------------------------------------------------------------


class _OfferedOperation(Part):
    operation: Text


class _Offered(Part):
    network: Identifier
    operations: tuple[_OfferedOperation, ...] = ()


class Capabilities(ParsedAnswer):
    """The network and operations of another rpcsvc, from its capabilities."""

    data: _Offered

    @property
    def takes_signatures(self) -> bool:
        """Whether its USDC orders can be paid by a signed authorization."""
        return any(each.operation == "swap.fund" for each in self.data.operations)


class UpstreamChain(Part):
    """Chain of spec 2.4; chain id 0 is Monero."""

    chain_id: Whole
    name: Text
    native_token: Text
    min_swap_usd: Number


class UpstreamChains(ParsedAnswer):
    """The chains that the upstream offers."""

    chains: Annotated[tuple[UpstreamChain, ...], Field(max_length=_MOST_ITEMS)]


class UpstreamIntegratorFee(Part):
    """integratorFee of spec 2.4. ``amount`` in atomic units."""

    percent: Number
    amount: Units
    amount_usd: DecimalText


class UpstreamQuote(ParsedAnswer):
    """Quote response of spec 2.4, and the gas that another rpcsvc has put in the price.

    ``estimated_seconds`` is rounded up; ``funding_gas`` in USDC units.
    """

    from_amount: Units
    from_amount_usd: DecimalText
    from_symbol: Text
    to_amount: PositiveUnits
    to_amount_usd: DecimalText
    to_symbol: Text
    estimated_seconds: RoundedUp = Field(alias="estimatedTime")
    min_received: Units
    integrator_fee: UpstreamIntegratorFee | None = None
    funding_gas: Units = 0


class UpstreamOrder(ParsedAnswer):
    """Order create response of spec 2.4. ``status_text`` is the upstream's own word.

    ``funding_gas`` as in a quote.
    """

    order_id: Identifier
    deposit_address: Text = Field(repr=False)
    deposit_chain: Text
    deposit_chain_id: Whole
    deposit_token: Text
    deposit_token_symbol: Text
    deposit_amount: PositiveUnits
    to_address: Text = Field(repr=False)
    expected_output: PositiveUnits
    expires_at: Time
    status_text: Text = Field(alias="status")
    refund_address: Any = Field(default=None, repr=False)
    funding_gas: Units = 0

    @property
    def status(self) -> OrderReading:
        """Our status for the upstream's."""
        return order_status(self.status_text)


class UpstreamTwap(Part):
    """The twap object of spec 2.4."""

    enabled: StrictBool
    status: Text
    chunks_completed: Whole
    chunks_total: Whole
    filled_qty: Number
    total_qty: Number
    chunk_size_usd: Number
    interval_ms: Number
    estimated_time_remaining_ms: Number


class StatusAnswer(ParsedAnswer):
    """Order (GET by id) of spec 2.4; the refund address and amount due of another rpcsvc's BFF."""

    order_id: Identifier
    status_text: Text = Field(alias="status")
    deposit_address: Text = Field(repr=False)
    deposit_token_symbol: Text
    deposit_amount: Units
    deposit_chain_id: Whole
    to_address: Text = Field(repr=False)
    expected_output: Units
    deposit_tx_hash: Text | None = None
    actual_output: Units | None = None
    error_message: Sentence | None = None
    refund_tx_hash: Text | None = None
    created_at: Time
    completed_at: Time | None = None
    twap: UpstreamTwap | None = None
    refund_address: Text | None = Field(default=None, repr=False)
    amount_due: PositiveUnits | None = None

    @property
    def status(self) -> OrderReading:
        """Our status for the upstream's."""
        return order_status(self.status_text)


class UpstreamTicket(ParsedAnswer):
    """Support ticket response of spec 2.4."""

    ticket_id: Identifier
    created_at: Time


class UpstreamBridgeRate(Part):
    """One exchange's rate, of the bridge rate list of spec 2.4."""

    exchange: Text
    rate: Number
    eta: Text


class UpstreamReferenceRate(Part):
    """The bridge's reference rate."""

    rate: Number
    eta: Text


class UpstreamBridgeRates(ParsedAnswer):
    """Bridge rate list of spec 2.4."""

    rates: Annotated[tuple[UpstreamBridgeRate, ...], Field(max_length=_MOST_ITEMS)]
    wagyu_rate: UpstreamReferenceRate


class BridgeOrder(ParsedAnswer):
    """The answer to a bridge deposit or withdrawal (spec 2.4)."""

    order_id: Identifier
    deposit_address: Text = Field(repr=False)
    destination: Text = Field(repr=False)
    expires_at: Time


class BridgeOrderStatus(ParsedAnswer):
    """Bridge order (GET) of spec 2.4. ``kind``: deposit or withdraw."""

    order_id: Identifier = Field(alias="id")
    kind: Text = Field(alias="type")
    status_text: Text = Field(alias="status")
    amount: Units
    confirmations: Whole
    required_confirmations: Whole
    tx_in: Text | None = Field(default=None, alias="tx_in")
    tx_out: Text | None = Field(default=None, alias="tx_out")
    failure_reason: Sentence | None = Field(default=None, alias="failure_reason")
    created_at: Time = Field(alias="created_at")
    completed_at: Time | None = Field(default=None, alias="completed_at")

    @property
    def status(self) -> BridgeReading:
        """Our status for the upstream's."""
        return bridge_status(self.status_text)


# --- reading: the answer must fit the request ------------------------------------------------


def quote(answer: UpstreamAnswer, request: UpstreamRequest) -> UpstreamQuote:
    """A quote; it must be for the amount that was asked."""
    found = UpstreamQuote.read(answer)
    if request.is_exact:
        _require_exact("toAmount", found.to_amount, request)
        _require_exact("minReceived", found.min_received, request)
    elif found.from_amount != request.amount.units:
        raise _broken("fromAmount", "is not the amount that was asked for")
    if found.min_received > found.to_amount:
        raise _broken("minReceived", "is more than toAmount")
    _require_gas(found.funding_gas, found.from_amount, request)
    return found


def order(
    answer: UpstreamAnswer, request: UpstreamRequest, networks: PayableNetworks
) -> UpstreamOrder:
    """A new order; it must be for the network, the token and the addresses that were asked.

    An upstream that dropped the refund address would refund to somebody else.
    """
    found = UpstreamOrder.read(answer)
    pays_monero = request.direction is Direction.XMR_TO_USDC
    if found.deposit_chain_id != (MONERO_CHAIN_ID if pays_monero else request.chain.chain_id):
        raise _broken("depositChainId", "is not the chain that was asked for")
    if request.refund_address is not None:
        _require_asked("refundAddress", found.refund_address, request.refund_address)
    address = _deposit_address(found.deposit_address, networks, pays_monero=pays_monero)
    token, symbol = found.deposit_token, (XMR if pays_monero else USDC).symbol
    asked = symbol if pays_monero else request.chain.usdc_contract
    if token[:2] in ("0x", "0X") and not same_address(token, asked):
        raise _broken("depositToken", "is not the token that was asked for")
    if found.deposit_token_symbol.upper() != symbol:  # another would be sent in vain
        raise _broken("depositTokenSymbol", f"is not {symbol}")
    _require_asked("toAddress", found.to_address, request.to)
    _require_gas(found.funding_gas, found.deposit_amount, request)
    if request.is_exact:
        _require_exact("expectedOutput", found.expected_output, request)
    return found.model_copy(update={"deposit_address": address, "to_address": request.to})


def status(answer: UpstreamAnswer, order_id: str, networks: PayableNetworks) -> StatusAnswer:
    """An order's current state; it must be the one that was asked for."""
    found = StatusAnswer.read(answer)
    if found.order_id != order_id:
        raise _broken("orderId", "is not the order that was asked for")
    pays_monero = found.deposit_chain_id == MONERO_CHAIN_ID
    address = _deposit_address(found.deposit_address, networks, pays_monero=pays_monero)
    return found.model_copy(update={"deposit_address": address})


def bridge_order(
    answer: UpstreamAnswer, to_address: str, networks: PayableNetworks, *, pays_monero: bool
) -> BridgeOrder:
    """A new bridge order. ``pays_monero``: the user pays XMR, as for a bridge deposit."""
    found = BridgeOrder.read(answer)
    address = _deposit_address(found.deposit_address, networks, pays_monero=pays_monero)
    _require_asked("destination", found.destination, to_address)
    return found.model_copy(update={"deposit_address": address, "destination": to_address})


def bridge_status_of(answer: UpstreamAnswer, order_id: str) -> BridgeOrderStatus:
    """A bridge order's current state; it must be the one that was asked for."""
    found = BridgeOrderStatus.read(answer)
    if found.order_id != order_id:
        raise _broken("id", "is not the order that was asked for")
    if found.kind not in ("deposit", "withdraw"):
        raise _broken("type", "is neither deposit nor withdraw")
    return found


def _deposit_address(text: str, networks: PayableNetworks, *, pays_monero: bool) -> str:
    """An address to which a user may be asked to pay; EVM ones in their EIP-55 form."""
    field = "depositAddress"
    try:
        if pays_monero:
            return parse_monero_address(text, field=field, networks=networks.monero).text
        return parse_evm_address(text, field=field, forbidden=networks.forbidden)
    except InvalidDestination as error:
        raise _broken(field, error.message.removeprefix(field).strip(" .")) from None


def _require_exact(field: str, units: int, request: UpstreamRequest) -> None:
    if units != request.amount.units:
        raise _broken(field, "is not the amount that has to arrive")


def _require_gas(units: int, deposit: int, request: UpstreamRequest) -> None:
    """Gas is in the price if, and only if, that was asked for; the deposit has to exceed it."""
    if request.pays_gas != (units > 0) or units >= deposit:
        raise _broken("fundingGas", "does not fit what was asked for")


def _require_asked(field: str, value: object, asked: str) -> None:
    if not isinstance(value, str) or not same_address(value, asked):
        raise _broken(field, "is not the address that was asked for")


# --- what is wrong ---------------------------------------------------------------------------


def _broken(field: str, problem: str) -> UpstreamBroken:
    return UpstreamBroken(
        f"The upstream's answer is not as agreed: {field or 'it'} {problem}.", field=field or None
    )


def _spelled(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".")


def _problem(error: ErrorDetails) -> str:
    """A description of a faulty field, without its value."""
    match error["type"]:
        case "answer":
            return error["msg"]
        case "missing":
            return "is missing"
        case "too_long":
            return f"has more than {_MOST_ITEMS} elements"
        case kind:
            wanted = _WANTED.get(kind, "of another type")
            return f"must be {wanted}, not {_type(error['input'])}"


def _type(value: object) -> str:
    for kinds, name in _TYPES:
        if isinstance(value, kinds):
            return name
    return "null"
