"""An upstream's answers, validated: types, amounts, times, statuses, and above all the addresses.

A deposit address must be good for the network on which the user pays, and a payout address must be
the one that was asked for. What is wrong raises UpstreamBroken, which names the field and never
quotes its value. Fields that the specification does not have are ignored. An unknown status is
UNKNOWN, never guessed: a wrong guess would tell a user that money has arrived.
Sources: spec 2.4 (fields), spec 3.2 and 3.3 (statuses), and spellings of the public API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from enum import Enum
from typing import Any, Final, Literal, TypeVar

from rpcsvc.domain.addresses import (
    MoneroNetwork,
    parse_evm_address,
    parse_monero_address,
    same_address,
)
from rpcsvc.domain.bridge import BridgeStatus
from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.domain.money import MAX_UNITS, USDC, XMR
from rpcsvc.domain.order import OrderStatus
from rpcsvc.errors import InvalidDestination
from rpcsvc.settlement.upstream import requests
from rpcsvc.settlement.upstream.exchange import UpstreamAnswer
from rpcsvc.settlement.upstream.failures import UpstreamBroken


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


_WHITESPACE: Final = " \t\r\n"


def order_status(text: str) -> OrderReading:
    """The order status that ``text`` spells, without regard to case and outer spaces."""
    return _ORDER.get(_plain(text), UNKNOWN)


def bridge_status(text: str) -> BridgeReading:
    """The bridge status that ``text`` spells, without regard to case and outer spaces."""
    return _BRIDGE.get(_plain(text), UNKNOWN)


def _plain(text: str) -> str:
    # Lower-casing turns some other scripts' letters into ASCII ones (U+212A becomes k).
    return text.strip(_WHITESPACE).lower() if text.isascii() else ""


# --- what is answered ------------------------------------------------------------------------
# Amounts are atomic units, times are ms since the epoch, other numbers are exact decimals.


@dataclass(frozen=True, slots=True)
class UpstreamHealth:
    """Health of spec 2.4. ``status``: ok or degraded."""

    status: str
    version: str
    time: int
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamChain:
    """Chain of spec 2.4; chain id 0 is Monero."""

    chain_id: int
    name: str
    native_token: str
    min_swap_usd: Decimal


@dataclass(frozen=True, slots=True)
class UpstreamChains:
    """The chains that the upstream offers."""

    chains: tuple[UpstreamChain, ...]
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class IntegratorFee:
    """integratorFee of spec 2.4. ``amount`` in atomic units."""

    percent: Decimal
    amount: int
    amount_usd: Decimal


@dataclass(frozen=True, slots=True)
class UpstreamQuote:
    """Quote response of spec 2.4. ``estimated_seconds`` is rounded up."""

    from_amount: int
    from_amount_usd: Decimal
    from_symbol: str
    to_amount: int
    to_amount_usd: Decimal
    to_symbol: str
    estimated_seconds: int
    min_received: int
    integrator_fee: IntegratorFee | None
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamOrder:
    """Order create response of spec 2.4. ``status_text`` is the upstream's own word."""

    order_id: str
    deposit_address: str = field(repr=False)
    deposit_chain: str
    deposit_chain_id: int
    deposit_token: str
    deposit_token_symbol: str
    deposit_amount: int
    to_address: str = field(repr=False)
    expected_output: int
    expires_at: int
    status: OrderReading
    status_text: str
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamTwap:
    """The twap object of spec 2.4."""

    enabled: bool
    status: str
    chunks_completed: int
    chunks_total: int
    filled_qty: Decimal
    total_qty: Decimal
    chunk_size_usd: Decimal
    interval_ms: Decimal
    estimated_time_remaining_ms: Decimal


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """Order (GET by id) of spec 2.4, and the refund address of another rpcsvc's BFF.

    ``status_text`` is the upstream's own word.
    """

    order_id: str
    status: OrderReading
    status_text: str
    deposit_address: str = field(repr=False)
    deposit_token_symbol: str
    deposit_amount: int
    deposit_chain_id: int
    to_address: str = field(repr=False)
    expected_output: int
    deposit_tx_hash: str | None
    actual_output: int | None
    error_message: str | None
    refund_tx_hash: str | None
    created_at: int
    completed_at: int | None
    twap: UpstreamTwap | None
    refund_address: str | None = field(repr=False)
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamListItem:
    """Order list item of spec 2.4; ``order_id`` is its ``id``."""

    order_id: str
    from_chain_id: int
    from_token_symbol: str
    from_amount: int
    to_chain_id: int
    to_token_symbol: str
    to_amount_expected: int
    to_address: str = field(repr=False)
    status: OrderReading
    status_text: str
    created_at: int
    completed_at: int | None


@dataclass(frozen=True, slots=True)
class UpstreamOrderList:
    """The orders of a session."""

    orders: tuple[UpstreamListItem, ...]
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpstreamTicket:
    """Support ticket response of spec 2.4."""

    ticket_id: str
    created_at: int
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BridgeRate:
    """One exchange's rate, of the bridge rate list of spec 2.4."""

    exchange: str
    rate: Decimal
    eta: str


@dataclass(frozen=True, slots=True)
class BridgeRates:
    """Bridge rate list of spec 2.4; ``wagyu_rate`` is the reference rate."""

    rates: tuple[BridgeRate, ...]
    wagyu_rate: Decimal
    wagyu_eta: str
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BridgeOrder:
    """What a bridge deposit or withdrawal answers (spec 2.4)."""

    order_id: str
    deposit_address: str = field(repr=False)
    destination: str = field(repr=False)
    expires_at: int
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BridgeOrderStatus:
    """Bridge order (GET) of spec 2.4. ``kind``: deposit or withdraw."""

    order_id: str
    kind: str
    status: BridgeReading
    status_text: str
    amount: int
    confirmations: int
    required_confirmations: int
    tx_in: str | None
    tx_out: str | None
    failure_reason: str | None
    created_at: int
    completed_at: int | None
    raw: bytes = field(repr=False)


def json_number(value: Decimal) -> int | float:
    """A number that is not an amount, as it was on the wire: whole ones without a point."""
    return int(value) if value == value.to_integral_value() else float(value)


T = TypeVar("T")


_LONGEST_TEXT: Final = 512


_MOST_ITEMS: Final = 1_000


_UNITS: Final = re.compile(r"0|[1-9][0-9]{0,77}", re.ASCII)


_DECIMAL: Final = re.compile(r"(?:0|[1-9][0-9]{0,39})(?:\.[0-9]{1,40})?", re.ASCII)


_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}", re.ASCII)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Networks:
    """Where this service's users may be asked to pay.

    ``monero``: mainnet only, unless the upstream is a sandbox. ``forbidden`` holds lower-case EVM
    addresses that nobody may be told to pay to, such as the token contracts.
    """

    monero: Collection[MoneroNetwork] = (MoneroNetwork.MAINNET,)
    forbidden: Collection[str] = ()


def is_id(text: str) -> bool:
    """Whether ``text`` can be an upstream's id: safe in a path and in a log line."""
    return _ID.fullmatch(text) is not None


class Fields:
    """The fields of one JSON object of an answer. Every method raises UpstreamBroken."""

    def __init__(self, value: object, *, path: str = "") -> None:
        self._path = path
        if not isinstance(value, dict):
            raise self.broken("", f"must be an object, not {_type(value)}")
        self._value: dict[str, Any] = value

    def broken(self, name: str, problem: str) -> UpstreamBroken:
        """The error for a field of this object."""
        where = f"{self._path}.{name}".strip(".")
        return UpstreamBroken(
            f"The upstream's answer is not as agreed: {where or 'it'} {problem}.",
            field=where or None,
        )

    def _get(self, name: str) -> Any:
        if name not in self._value:
            raise self.broken(name, "is missing")
        return self._value[name]

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._value.get(name) is not None

    def text(self, name: str) -> str:
        """A string; not empty, of bounded length, without control characters."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.broken(name, f"must be a string, not {_type(value)}")
        if not value or len(value) > _LONGEST_TEXT:
            raise self.broken(name, f"has {len(value)} characters, not 1 to {_LONGEST_TEXT}")
        if not value.isprintable():
            raise self.broken(name, "has characters that can't be printed")
        return value

    def words(self, name: str) -> str:
        """A sentence for people: cut to size and made printable, since nothing is decided by it."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.broken(name, f"must be a string, not {_type(value)}")
        return "".join(c if c.isprintable() else " " for c in value[:_LONGEST_TEXT])

    def identifier(self, name: str) -> str:
        """An id that is safe in a path and in a log line."""
        value = self.text(name)
        if not is_id(value):
            raise self.broken(name, "is not an id of 1 to 128 letters, digits and ._:-")
        return value

    def units(self, name: str) -> int:
        """An amount: atomic units in a string of digits."""
        value = self.text(name)
        if not _UNITS.fullmatch(value):
            raise self.broken(name, "is not a whole number of smallest units in a string")
        if int(value) > MAX_UNITS:
            raise self.broken(name, "is more than any order can be")
        return int(value)

    def positive_units(self, name: str) -> int:
        """An amount above 0."""
        units = self.units(name)
        if units == 0:
            raise self.broken(name, "is zero")
        return units

    def decimal(self, name: str) -> Decimal:
        """A decimal number in a string, such as an amount in USD."""
        value = self.text(name)
        if not _DECIMAL.fullmatch(value):
            raise self.broken(name, "is not a decimal number in a string")
        return Decimal(value)

    def number(self, name: str) -> Decimal:
        """A JSON number that is not negative, exactly as it was written."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.broken(name, f"must be a number, not {_type(value)}")
        if value < 0:
            raise self.broken(name, "is negative")
        return Decimal(repr(value))

    def whole(self, name: str) -> int:
        """A JSON number that is whole and not negative."""
        value = self.number(name)
        if value != value.to_integral_value():
            raise self.broken(name, "is not a whole number")
        return self.rounded_up(name)

    def rounded_up(self, name: str) -> int:
        """A JSON number that is not negative, rounded up to a whole one that we can write again."""
        value = self.number(name).to_integral_value(ROUND_CEILING)
        if value > MAX_UNITS:
            raise self.broken(name, "is too large")
        return int(value)

    def flag(self, name: str) -> bool:
        """true or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.broken(name, f"must be true or false, not {_type(value)}")
        return value

    def time(self, name: str) -> int:
        """An ISO 8601 time with its offset, as ms since the epoch."""
        value = self.text(name)
        try:
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is not None:
                return (moment.astimezone(UTC) - _EPOCH) // _MILLISECOND
        except (ValueError, OverflowError):
            pass
        raise self.broken(name, "is not an ISO 8601 time with an offset or Z")

    def nullable(self, name: str, read: Callable[[str], T]) -> T | None:
        """A field that may be null or left out."""
        return read(name) if self.has(name) else None

    def inner(self, name: str) -> Fields:
        """An object in this object."""
        return Fields(self._get(name), path=f"{self._path}.{name}".strip("."))

    def items(self, name: str) -> list[Fields]:
        """A list of objects, of bounded length."""
        value = self._get(name)
        if not isinstance(value, list):
            raise self.broken(name, f"must be an array, not {_type(value)}")
        if len(value) > _MOST_ITEMS:
            raise self.broken(name, f"has {len(value)} elements, more than {_MOST_ITEMS}")
        where = f"{self._path}.{name}".strip(".")
        return [Fields(item, path=f"{where}[{at}]") for at, item in enumerate(value)]

    def deposit_address(self, name: str, *, monero: bool, networks: Networks) -> str:
        """An address to which a user may be asked to pay; EVM ones in their EIP-55 form."""
        text = self.text(name)
        try:
            if monero:
                return parse_monero_address(text, field=name, networks=networks.monero).text
            return parse_evm_address(text, field=name, forbidden=networks.forbidden)
        except InvalidDestination as error:
            problem = error.message.removeprefix(name).strip(" .")
            raise self.broken(name, problem) from None

    def same_as_asked(self, name: str, asked: str) -> str:
        """An address that must be the one that was sent."""
        if not same_address(self.text(name), asked):
            raise self.broken(name, "is not the address that was asked for")
        return asked


def _type(value: object) -> str:
    for kinds, name in _TYPES:
        if isinstance(value, kinds):
            return name
    return "null"


_TYPES: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (bool, "a boolean"),
    ((int, float), "a number"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)


# --- swaps -----------------------------------------------------------------------------------


def health(answer: UpstreamAnswer) -> UpstreamHealth:
    """Health of spec 2.4."""
    f = Fields(answer.value)
    return UpstreamHealth(f.text("status"), f.text("version"), f.time("time"), answer.kept)


def network(answer: UpstreamAnswer) -> str:
    """The network that another rpcsvc's capabilities name."""
    return Fields(answer.value).inner("data").identifier("network")


def chains(answer: UpstreamAnswer) -> UpstreamChains:
    """The list of chains."""
    found = tuple(_chain(f) for f in Fields(answer.value).items("chains"))
    return UpstreamChains(found, answer.kept)


def _chain(f: Fields) -> UpstreamChain:
    return UpstreamChain(
        chain_id=f.whole("chainId"),
        name=f.text("name"),
        native_token=f.text("nativeToken"),
        min_swap_usd=f.number("minSwapUsd"),
    )


def quote(answer: UpstreamAnswer, request: requests.QuoteBody) -> UpstreamQuote:
    """A quote; it must be for the amount that was asked."""
    f = Fields(answer.value)
    result = UpstreamQuote(
        from_amount=f.units("fromAmount"),
        from_amount_usd=f.decimal("fromAmountUsd"),
        from_symbol=f.text("fromSymbol"),
        to_amount=f.positive_units("toAmount"),
        to_amount_usd=f.decimal("toAmountUsd"),
        to_symbol=f.text("toSymbol"),
        estimated_seconds=f.rounded_up("estimatedTime"),
        min_received=f.units("minReceived"),
        integrator_fee=f.nullable("integratorFee", lambda name: _fee(f.inner(name))),
        raw=answer.kept,
    )
    if result.from_amount != request.from_amount:
        raise f.broken("fromAmount", "is not the amount that was asked for")
    if result.min_received > result.to_amount:
        raise f.broken("minReceived", "is more than toAmount")
    return result


def _fee(f: Fields) -> IntegratorFee:
    return IntegratorFee(f.number("percent"), f.units("amount"), f.decimal("amountUsd"))


def order(answer: UpstreamAnswer, request: requests.OrderBody, networks: Networks) -> UpstreamOrder:
    """A new order; it must be for the network and the addresses that were asked.

    An upstream that dropped the refund address would refund to somebody else.
    """
    f = Fields(answer.value)
    chain_id = f.whole("depositChainId")
    if chain_id != request.from_chain_id:
        raise f.broken("depositChainId", "is not the chain that was asked for")
    if request.refund_address is not None:
        f.same_as_asked("refundAddress", request.refund_address)
    status = f.text("status")
    return UpstreamOrder(
        order_id=f.identifier("orderId"),
        deposit_address=_deposit_address(f, chain_id, networks),
        deposit_chain=f.text("depositChain"),
        deposit_chain_id=chain_id,
        deposit_token=_deposit_token(f, request.from_token),
        deposit_token_symbol=_deposit_symbol(f, chain_id),
        deposit_amount=f.positive_units("depositAmount"),
        to_address=f.same_as_asked("toAddress", request.to_address),
        expected_output=f.positive_units("expectedOutput"),
        expires_at=f.time("expiresAt"),
        status=order_status(status),
        status_text=status,
        raw=answer.kept,
    )


def status(answer: UpstreamAnswer, order_id: str, networks: Networks) -> StatusAnswer:
    """An order as it stands; it must be the one that was asked for."""
    f = Fields(answer.value)
    _require_same(f, "orderId", order_id)
    text = f.text("status")
    chain_id = f.whole("depositChainId")
    return StatusAnswer(
        order_id=order_id,
        status=order_status(text),
        status_text=text,
        deposit_address=_deposit_address(f, chain_id, networks),
        deposit_token_symbol=f.text("depositTokenSymbol"),
        deposit_amount=f.units("depositAmount"),
        deposit_chain_id=chain_id,
        to_address=f.text("toAddress"),
        expected_output=f.units("expectedOutput"),
        deposit_tx_hash=f.nullable("depositTxHash", f.text),
        actual_output=f.nullable("actualOutput", f.units),
        error_message=f.nullable("errorMessage", f.words),
        refund_tx_hash=f.nullable("refundTxHash", f.text),
        created_at=f.time("createdAt"),
        completed_at=f.nullable("completedAt", f.time),
        twap=f.nullable("twap", lambda name: _twap(f.inner(name))),
        refund_address=f.nullable("refundAddress", f.text),
        raw=answer.kept,
    )


def _deposit_address(f: Fields, chain_id: int, networks: Networks) -> str:
    monero = chain_id == MONERO_CHAIN_ID
    return f.deposit_address("depositAddress", monero=monero, networks=networks)


def _deposit_token(f: Fields, asked: str) -> str:
    """The token, however it is named; if by its contract, by the one that the user is told."""
    token = f.text("depositToken")
    if token[:2] in ("0x", "0X") and not same_address(token, asked):
        raise f.broken("depositToken", "is not the token that was asked for")
    return token


def _deposit_symbol(f: Fields, chain_id: int) -> str:
    """The symbol of the token that the user is told to pay: another would be sent in vain."""
    symbol = f.text("depositTokenSymbol")
    asked = XMR if chain_id == MONERO_CHAIN_ID else USDC
    if symbol.upper() != asked.symbol:
        raise f.broken("depositTokenSymbol", f"is not {asked.symbol}")
    return symbol


def _require_same(f: Fields, name: str, asked: str) -> None:
    if f.identifier(name) != asked:
        raise f.broken(name, "is not the order that was asked for")


def _twap(f: Fields) -> UpstreamTwap:
    return UpstreamTwap(
        enabled=f.flag("enabled"),
        status=f.text("status"),
        chunks_completed=f.whole("chunksCompleted"),
        chunks_total=f.whole("chunksTotal"),
        filled_qty=f.number("filledQty"),
        total_qty=f.number("totalQty"),
        chunk_size_usd=f.number("chunkSizeUsd"),
        interval_ms=f.number("intervalMs"),
        estimated_time_remaining_ms=f.number("estimatedTimeRemainingMs"),
    )


def order_list(answer: UpstreamAnswer) -> UpstreamOrderList:
    """The orders of a session."""
    found = tuple(_list_item(f) for f in Fields(answer.value).items("orders"))
    return UpstreamOrderList(found, answer.kept)


def _list_item(f: Fields) -> UpstreamListItem:
    text = f.text("status")
    return UpstreamListItem(
        order_id=f.identifier("id"),
        from_chain_id=f.whole("from_chain_id"),
        from_token_symbol=f.text("from_token_symbol"),
        from_amount=f.units("from_amount"),
        to_chain_id=f.whole("to_chain_id"),
        to_token_symbol=f.text("to_token_symbol"),
        to_amount_expected=f.units("to_amount_expected"),
        to_address=f.text("to_address"),
        status=order_status(text),
        status_text=text,
        created_at=f.time("created_at"),
        completed_at=f.nullable("completed_at", f.time),
    )


def ticket(answer: UpstreamAnswer) -> UpstreamTicket:
    """A support ticket."""
    f = Fields(answer.value)
    return UpstreamTicket(f.identifier("ticketId"), f.time("createdAt"), answer.kept)


# --- the bridge ------------------------------------------------------------------------------


def bridge_rates(answer: UpstreamAnswer) -> BridgeRates:
    """The bridge's rates and its reference rate."""
    f = Fields(answer.value)
    reference = f.inner("wagyuRate")
    return BridgeRates(
        rates=tuple(_bridge_rate(rate) for rate in f.items("rates")),
        wagyu_rate=reference.number("rate"),
        wagyu_eta=reference.text("eta"),
        raw=answer.kept,
    )


def _bridge_rate(f: Fields) -> BridgeRate:
    return BridgeRate(f.text("exchange"), f.number("rate"), f.text("eta"))


def bridge_order(
    answer: UpstreamAnswer, to_address: str, networks: Networks, *, pays_monero: bool
) -> BridgeOrder:
    """A new bridge order. ``pays_monero``: the user pays XMR, as for a bridge deposit."""
    f = Fields(answer.value)
    return BridgeOrder(
        order_id=f.identifier("orderId"),
        deposit_address=f.deposit_address("depositAddress", monero=pays_monero, networks=networks),
        destination=f.same_as_asked("destination", to_address),
        expires_at=f.time("expiresAt"),
        raw=answer.kept,
    )


def bridge_status_of(answer: UpstreamAnswer, order_id: str) -> BridgeOrderStatus:
    """A bridge order as it stands; it must be the one that was asked for."""
    f = Fields(answer.value)
    _require_same(f, "id", order_id)
    kind, text = f.text("type"), f.text("status")
    if kind not in ("deposit", "withdraw"):
        raise f.broken("type", "is neither deposit nor withdraw")
    return BridgeOrderStatus(
        order_id=order_id,
        kind=kind,
        status=bridge_status(text),
        status_text=text,
        amount=f.units("amount"),
        confirmations=f.whole("confirmations"),
        required_confirmations=f.whole("requiredConfirmations"),
        tx_in=f.nullable("tx_in", f.text),
        tx_out=f.nullable("tx_out", f.text),
        failure_reason=f.nullable("failure_reason", f.words),
        created_at=f.time("created_at"),
        completed_at=f.nullable("completed_at", f.time),
        raw=answer.kept,
    )
