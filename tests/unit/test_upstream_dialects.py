"""Both dialects: requests, validation of answers, and errors for callers."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcsvc import errors
from rpcsvc.domain.addresses import MoneroNetwork, stagenet_subaddress
from rpcsvc.domain.bridge import BridgeStatus
from rpcsvc.domain.chains import load_chains
from rpcsvc.domain.money import USDC, XMR, Money
from rpcsvc.domain.order import OrderStatus, TwapPlan
from rpcsvc.domain.pricing import Direction
from rpcsvc.settings_onchain import chains_toml
from rpcsvc.settlement.upstream import answers, transport
from rpcsvc.settlement.upstream.answers import UNKNOWN, PayableNetworks, bridge_status, order_status
from rpcsvc.settlement.upstream.calls import Dialect, Upstream
from rpcsvc.settlement.upstream.client import Timing, UpstreamClient
from rpcsvc.settlement.upstream.limits import Breaker, Budget
from rpcsvc.settlement.upstream.requests import UpstreamRequest as Asked
from rpcsvc.settlement.upstream.transport import ClientOptions, UpstreamAnswer, base_url
from rpcsvc.settlement.upstream.wiring import BFF, V1
from rpcsvc.store.changes import Ticket
from tests.contract import upstream_server as does

EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MIXED_EVM = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
TOKEN = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
STAGENET = stagenet_subaddress(b"\x11" * 64)
MAINNET_ONLY = PayableNetworks(forbidden=frozenset({TOKEN.lower()}))
TIME = "2026-01-02T03:04:05.678Z"
TIME_MS = 1_767_323_045_678
ORDER_ID = "ord_0123456789ABCDEFGHJKMNPQRS"

ARBITRUM = load_chains(chains_toml(None)).resolve("arbitrum")
X2U = Asked(
    Direction.XMR_TO_USDC,
    ARBITRUM,
    Money(800_000_000_000, XMR),
    EVM,
    session_id="3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90",
    twap=TwapPlan(chunk_units=250_000_000, interval_ms=5_000),
)
U2X = Asked(Direction.USDC_TO_XMR, ARBITRUM, Money(150_000_000, USDC), MONERO)

CHAINS = {
    "chains": [
        {"chainId": 0, "name": "Monero", "nativeToken": "XMR", "minSwapUsd": 10},
        {"chainId": 42161, "name": "Arbitrum", "nativeToken": "ETH", "minSwapUsd": 10.5},
    ]
}
QUOTE = {
    "fromAmount": "800000000000",
    "fromAmountUsd": "128.00",
    "fromSymbol": "XMR",
    "toAmount": "127500000",
    "toAmountUsd": "127.50",
    "toSymbol": "USDC",
    "estimatedTime": 1199.5,
    "minReceived": "126225000",
    "integratorFee": {"percent": 0.5, "amount": "640000", "amountUsd": "0.64"},
}
ORDER = {
    "orderId": ORDER_ID,
    "depositAddress": MONERO,
    "depositChain": "monero",
    "depositChainId": 0,
    "depositToken": "XMR",
    "depositTokenSymbol": "XMR",
    "depositAmount": "800000000000",
    "toAddress": EVM,
    "expectedOutput": "127500000",
    "expiresAt": TIME,
    "status": "awaiting_deposit",
}
STATUS = {
    "orderId": ORDER_ID,
    "status": "executing_swap",
    "depositAddress": MONERO,
    "depositTokenSymbol": "XMR",
    "depositAmount": "800000000000",
    "depositChainId": 0,
    "toAddress": EVM,
    "expectedOutput": "127500000",
    "depositTxHash": "ab" * 32,
    "actualOutput": "127500000",
    "errorMessage": "a line\nand another",
    "refundTxHash": "cd" * 32,
    "createdAt": TIME,
    "completedAt": TIME,
    "twap": {
        "enabled": True,
        "status": "active",
        "chunksCompleted": 1,
        "chunksTotal": 4,
        "filledQty": 0.2,
        "totalQty": 0.8,
        "chunkSizeUsd": 250,
        "intervalMs": 5000,
        "estimatedTimeRemainingMs": 15000,
    },
}
TICKET = {"ticketId": "tkt_1", "createdAt": TIME}
RATES = {
    "rates": [{"exchange": "one", "rate": 158.25, "eta": "20 min"}],
    "wagyuRate": {"rate": 160, "eta": "15 min"},
}
BRIDGE_DEPOSIT = {
    "orderId": "br-1",
    "depositAddress": MONERO,
    "destination": EVM,
    "expiresAt": TIME,
}
BRIDGE_WITHDRAW = {
    "orderId": "br-2",
    "depositAddress": MIXED_EVM,
    "destination": MONERO,
    "expiresAt": TIME,
}
BRIDGE_ORDER = {
    "id": "br-1",
    "type": "deposit",
    "status": "pending_confirmations",
    "amount": "800000000000",
    "confirmations": 3,
    "requiredConfirmations": 10,
    "tx_in": "ab" * 32,
    "tx_out": "cd" * 32,
    "failure_reason": "none",
    "created_at": TIME,
    "completed_at": TIME,
}


@dataclass(frozen=True)
class Shape:
    """A valid answer, its reader, and the fields that may be null or missing."""

    sample: dict[str, Any]
    read: Callable[[UpstreamAnswer], Any]
    nullable: frozenset[str] = frozenset()


SHAPES: dict[str, Shape] = {
    "chains": Shape(CHAINS, answers.UpstreamChains.read),
    "quote": Shape(QUOTE, lambda a: answers.quote(a, X2U), frozenset({"integratorFee"})),
    "order": Shape(ORDER, lambda a: answers.order(a, X2U, MAINNET_ONLY)),
    "status": Shape(
        STATUS,
        lambda a: answers.status(a, ORDER_ID, MAINNET_ONLY),
        frozenset(
            {
                "depositTxHash",
                "actualOutput",
                "errorMessage",
                "refundTxHash",
                "completedAt",
                "twap",
            }
        ),
    ),
    "ticket": Shape(TICKET, answers.UpstreamTicket.read),
    "bridge rates": Shape(RATES, answers.UpstreamBridgeRates.read),
    "bridge deposit": Shape(
        BRIDGE_DEPOSIT, lambda a: answers.bridge_order(a, EVM, MAINNET_ONLY, pays_monero=True)
    ),
    "bridge withdraw": Shape(
        BRIDGE_WITHDRAW,
        lambda a: answers.bridge_order(a, MONERO, MAINNET_ONLY, pays_monero=False),
    ),
    "bridge order": Shape(
        BRIDGE_ORDER,
        lambda a: answers.bridge_status_of(a, "br-1"),
        frozenset({"tx_in", "tx_out", "failure_reason", "completed_at"}),
    ),
}

Path = tuple[str | int, ...]


def paths(value: Any, at: Path = ()) -> list[Path]:
    """Every field of a sample, nested ones included."""
    if isinstance(value, dict):
        own = [(*at, key) for key in value]
        return own + [p for key, inner in value.items() for p in paths(inner, (*at, key))]
    if isinstance(value, list):
        return [p for i, inner in enumerate(value) for p in paths(inner, (*at, i))]
    return []


def spelled(path: Path) -> str:
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return text.removeprefix(".")


def changed(sample: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(sample)
    inner: Any = copied
    for step in path[:-1]:
        inner = inner[step]
    if value is LEFT_OUT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copied


LEFT_OUT = object()
FIELDS = [(name, path) for name, shape in SHAPES.items() for path in paths(shape.sample)]
field_by_field = pytest.mark.parametrize(
    ("name", "path"), FIELDS, ids=[f"{n}: {spelled(p)}" for n, p in FIELDS]
)


def read(name: str, value: Any) -> Any:
    return SHAPES[name].read(UpstreamAnswer(value, json.dumps(value).encode()))


def original(name: str, path: Path) -> Any:
    value: Any = SHAPES[name].sample
    for step in path:
        value = value[step]
    return value


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_good_answer_is_read_in_full_and_kept(name: str) -> None:
    found = read(name, SHAPES[name].sample)

    assert json.loads(found.raw) == SHAPES[name].sample


@pytest.mark.parametrize("name", SHAPES)
def test_fields_beyond_the_specification_are_passed_over(name: str) -> None:
    sample = SHAPES[name].sample

    assert read(name, {**sample, "more": {"deep": [1]}}) is not None


@field_by_field
def test_a_field_that_is_missing_or_null_is_named(name: str, path: Path) -> None:
    shape = SHAPES[name]
    for value in (LEFT_OUT, None):
        answer = changed(shape.sample, path, value)
        if spelled(path) in shape.nullable:
            read(name, answer)
        else:
            with pytest.raises(transport.UpstreamBroken) as caught:
                read(name, answer)
            assert caught.value.field == spelled(path)
            assert not caught.value.may_have_acted


WRONG: tuple[Any, ...] = ("text", 7, -1, 1.5, True, [], {}, "", [None])


@field_by_field
def test_a_field_of_the_wrong_type_is_named(name: str, path: Path) -> None:
    right = original(name, path)
    numbers = (int, float)
    for wrong in WRONG:
        same = type(wrong) is type(right) or (type(wrong) in numbers and type(right) in numbers)
        if same:
            continue
        with pytest.raises(transport.UpstreamBroken) as caught:
            read(name, changed(SHAPES[name].sample, path, wrong))
        assert (caught.value.field or "").startswith(spelled(path))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"))
    | st.sampled_from(
        [TIME, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", MONERO, EVM]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FIELDS), JSON)
def test_any_field_value_is_read_or_named_as_wrong(where: tuple[str, Path], value: Any) -> None:
    name, path = where
    try:
        read(name, changed(SHAPES[name].sample, path, value))
    except transport.UpstreamBroken as error:
        assert error.field is not None


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("quote", "estimatedTime", 1e300),
        ("bridge order", "confirmations", 2.0**63),
        ("order", "expiresAt", "0001-01-01T00:00:00+14:00"),
        ("status", "completedAt", "9999-12-31T23:59:59-14:00"),
    ],
)
def test_value_beyond_our_range_is_named(name: str, field: str, value: Any) -> None:
    with pytest.raises(transport.UpstreamBroken) as caught:
        read(name, changed(SHAPES[name].sample, (field,), value))
    assert caught.value.field == field


@given(st.sampled_from(sorted(SHAPES)), JSON)
def test_whatever_an_answer_is_it_is_read_or_broken(name: str, value: Any) -> None:
    with pytest.raises(transport.UpstreamBroken):
        read(name, value)


@pytest.mark.parametrize(
    "amount",
    [
        "",
        " 1",
        "1 ",
        "+1",
        "-1",
        "01",
        "1.0",
        "1e6",
        "0x10",
        "1_000",
        "1,000",
        "\u0661",
        "9" * 79,
        "NaN",
    ],
)
def test_an_amount_is_digits_and_nothing_else(amount: str) -> None:
    with pytest.raises(transport.UpstreamBroken) as caught:
        read("order", {**ORDER, "expectedOutput": amount})

    assert caught.value.field == "expectedOutput"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("order", "depositAmount", "0"),
        ("quote", "toAmount", "0"),
        ("quote", "fromAmount", "800000000001"),
        ("quote", "minReceived", "127500001"),
        ("quote", "fromAmountUsd", "1e3"),
        ("order", "depositChainId", 42161),
        ("order", "orderId", "../orders"),
        ("order", "orderId", ".."),
        ("order", "orderId", "a b"),
        ("order", "orderId", "x" * 129),
        ("order", "toAddress", MIXED_EVM),
        ("order", "toAddress", EVM[:-1]),
        ("order", "expiresAt", "2026-01-02T03:04:05"),
        ("order", "expiresAt", "2026-01-02"),
        ("order", "expiresAt", "tomorrow"),
        ("order", "status", "awaiting\x00deposit"),
        ("status", "orderId", "ord_ANOTHER"),
        ("chains", "chains", [{}] * 1001),
        ("bridge deposit", "destination", MIXED_EVM),
        ("bridge order", "id", "br-2"),
        ("bridge order", "type", "swap"),
        ("bridge order", "confirmations", -1),
        ("bridge order", "confirmations", 1.5),
    ],
)
def test_answer_to_another_question_is_refused(name: str, field: str, value: Any) -> None:
    with pytest.raises(transport.UpstreamBroken) as caught:
        read(name, {**SHAPES[name].sample, field: value})

    assert (caught.value.field or "").startswith(field)


def flipped(address: str) -> str:
    return address[:-1] + ("1" if address[-1] != "1" else "2")


@pytest.mark.parametrize(
    ("chain_id", "address"),
    [
        (0, flipped(MONERO)),
        (0, STAGENET),
        (0, EVM),
        (0, "monero:" + MONERO),
        (0, MONERO + " "),
        (42161, MONERO),
        (42161, MIXED_EVM.replace("A", "a", 1)),
        (42161, "0x" + "0" * 40),
        (42161, TOKEN),
        (42161, TOKEN.lower()),
        (42161, EVM[:-1]),
    ],
)
def test_deposit_address_of_wrong_form_or_network_is_refused(chain_id: int, address: str) -> None:
    request = X2U if chain_id == 0 else U2X
    answer = {
        **ORDER,
        "depositChainId": chain_id,
        "depositAddress": address,
        "toAddress": request.to,
    }
    body = UpstreamAnswer(answer, b"")
    for reader in (
        lambda: answers.order(body, request, MAINNET_ONLY),
        lambda: answers.status(UpstreamAnswer({**STATUS, **answer}, b""), ORDER_ID, MAINNET_ONLY),
    ):
        with pytest.raises(transport.UpstreamBroken) as caught:
            reader()
        assert caught.value.field == "depositAddress"
        assert address.strip() not in caught.value.reason


def test_an_evm_deposit_address_is_returned_with_its_checksum() -> None:
    answer = {
        **ORDER,
        "depositChainId": 42161,
        "depositAddress": MIXED_EVM.lower(),
        "depositTokenSymbol": "USDC",
        "toAddress": MONERO,
    }

    assert (
        answers.order(UpstreamAnswer(answer, b""), U2X, MAINNET_ONLY).deposit_address == MIXED_EVM
    )


def test_sandbox_upstream_may_give_test_network_addresses() -> None:
    sandbox = PayableNetworks(monero=tuple(MoneroNetwork))
    answer = UpstreamAnswer({**ORDER, "depositAddress": STAGENET}, b"")

    assert answers.order(answer, X2U, sandbox).deposit_address == STAGENET


def test_payout_address_is_compared_without_case() -> None:
    found = read("order", {**ORDER, "toAddress": EVM.lower()})

    assert found.to_address == EVM


def test_values_are_exact() -> None:
    quote = read("quote", QUOTE)
    assert (quote.from_amount, quote.to_amount, quote.min_received) == (
        800_000_000_000,
        127_500_000,
        126_225_000,
    )
    assert quote.estimated_seconds == 1200
    fee = quote.integrator_fee
    assert (fee.percent, fee.amount, fee.amount_usd) == (Decimal("0.5"), 640_000, Decimal("0.64"))
    status = read("status", STATUS)
    assert status.created_at == TIME_MS
    assert status.error_message == "a line and another"
    assert status.twap.filled_qty == Decimal("0.2")
    rates = read("bridge rates", RATES)
    assert (rates.wagyu_rate.rate, rates.rates[0].rate) == (Decimal(160), Decimal("158.25"))


def test_what_is_kept_of_an_answer_is_bounded() -> None:
    assert (
        len(answers.UpstreamTicket.read(UpstreamAnswer(TICKET, b"x" * 100_000)).raw)
        == transport.RAW_LIMIT
    )


@pytest.mark.parametrize("name", ["order", "status", "bridge deposit", "bridge withdraw"])
def test_repr_shows_no_address(name: str) -> None:
    reported = repr(read(name, SHAPES[name].sample)) + repr(X2U) + repr(U2X)

    assert not any(address in reported for address in (MONERO, EVM, MIXED_EVM))


# --- statuses --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", OrderStatus)
def test_every_status_of_ours_is_read_as_itself(status: OrderStatus) -> None:
    assert order_status(status.value) is status
    assert order_status(f" {status.value.upper()}\n") is status


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        ("confirming", OrderStatus.DEPOSIT_DETECTED),
        ("swapping", OrderStatus.EXECUTING_SWAP),
        ("complete", OrderStatus.COMPLETED),
        ("success", OrderStatus.COMPLETED),
    ],
)
def test_other_known_spellings_are_read(spelling: str, meaning: OrderStatus) -> None:
    assert order_status(spelling) is meaning


@pytest.mark.parametrize("status", BridgeStatus)
def test_every_bridge_status_is_read_as_itself(status: BridgeStatus) -> None:
    assert bridge_status(f"\t{status.value.title()}") is status


@pytest.mark.parametrize(
    "text",
    [
        "",
        "succeeded",
        "completed!",
        "not_completed",
        "complete d",
        "completing",
        "successful",
        "awaiting deposit",
        "awaiting-deposit",
        "awaitingDeposit",
        "completed\x00",
        "comp\u200bleted",
        "\u2003completed",
        "\uff23omplete",
        "\u017fuccess",
        "1",
        "true",
    ],
)
def test_a_status_that_is_not_known_is_never_guessed(text: str) -> None:
    assert order_status(text) is UNKNOWN
    assert bridge_status(text) is UNKNOWN


@given(st.text())
def test_only_the_known_words_can_mean_success(text: str) -> None:
    known = text.strip(" \t\r\n").lower() in ("completed", "complete", "success")

    assert (order_status(text) is OrderStatus.COMPLETED) == (known and text.isascii())


def test_an_unknown_status_is_kept_in_its_own_word() -> None:
    found = read("status", {**STATUS, "status": "awaiting_karma"})

    assert (found.status, found.status_text) == (UNKNOWN, "awaiting_karma")


# --- calls -----------------------------------------------------------------------------------


class UpstreamRequest:
    """A server on a socket, and the client's calls to it."""

    def __init__(self, server: does.UpstreamServer, dialect: Dialect) -> None:
        self.server = server
        self.dialect = dialect

    async def call(
        self, use: Callable[[Upstream], Awaitable[Any]], answer: Any, status: int = 200
    ) -> Any:
        def now() -> int:
            return 0

        async def sleep(_ms: int) -> None:
            await asyncio.sleep(0)

        self.server.script.append(does.answer(answer, status=status))
        client = UpstreamClient(
            ClientOptions(
                self.dialect.base_url(self.server.url), None, plain_http=False, attempts=1
            ),
            read_error=self.dialect.read_error,
            creations=Budget(5, now=now, sleep=sleep),
            calls=Budget(20, now=now, sleep=sleep),
            prices=Budget(20, now=now, sleep=sleep),
            breaker=Breaker(),
            timing=Timing(now, sleep, lambda: 0.0),
        )
        async with client:
            return await use(Upstream(client, self.dialect, MAINNET_ONLY))


ORDER_BODY = {
    "fromChainId": 0,
    "toChainId": 42161,
    "fromToken": "XMR",
    "toToken": TOKEN,
    "fromAmount": "800000000000",
    "toAddress": EVM,
    "sessionId": X2U.session_id,
    "twapConfig": {"chunkSizeUsd": 250, "intervalMs": 5_000},
}
QUOTE_BODY = {
    key: ORDER_BODY[key]
    for key in ("fromChainId", "toChainId", "fromToken", "toToken", "fromAmount")
}
TICKET_REQUEST = Ticket("tkt_0", 0, "agent", "Where is it?", "ord_ours", None, None)
TICKET_BODY = {
    "orderId": ORDER_ID,
    "sessionId": None,
    "walletAddress": None,
    "category": "agent",
    "message": "Where is it?",
}


@dataclass(frozen=True)
class Row:
    """One call, with its request in each dialect."""

    use: Callable[[Upstream], Awaitable[Any]]
    answer: dict[str, Any]
    bff: str | None
    v1: str | None
    body: dict[str, Any] | None = None
    key: str | None = None


CALLS: dict[str, Row] = {
    "chains": Row(lambda u: u.chains(), CHAINS, "GET /bff/v1/chains", "GET /v1/chains"),
    "quote": Row(lambda u: u.quote(X2U), QUOTE, "POST /bff/v1/quote", "POST /v1/quote", QUOTE_BODY),
    "create": Row(
        lambda u: u.create_order(X2U, key="k"),
        ORDER,
        "POST /bff/v1/orders",
        "POST /v1/order",
        ORDER_BODY,
        key="k",
    ),
    "order": Row(
        lambda u: u.order(ORDER_ID),
        STATUS,
        f"GET /bff/v1/orders/{ORDER_ID}",
        f"GET /v1/order/{ORDER_ID}",
    ),
    "ticket": Row(
        lambda u: u.create_ticket(ORDER_ID, TICKET_REQUEST),
        TICKET,
        "POST /bff/v1/support/tickets",
        None,
        TICKET_BODY,
    ),
    "bridge rates": Row(
        lambda u: u.bridge_rates(), RATES, "GET /bff/v1/bridge/rates", "GET /v1/bridge/rates"
    ),
    "bridge deposit": Row(
        lambda u: u.bridge_deposit(EVM, key="k"),
        BRIDGE_DEPOSIT,
        "POST /bff/v1/bridge/deposit",
        "POST /v1/bridge/deposit",
        {"toAddress": EVM},
        key="k",
    ),
    "bridge withdraw": Row(
        lambda u: u.bridge_withdraw(MONERO, key="k"),
        BRIDGE_WITHDRAW,
        "POST /bff/v1/bridge/withdraw",
        "POST /v1/bridge/withdraw",
        {"toAddress": MONERO},
        key="k",
    ),
    "bridge order": Row(
        lambda u: u.bridge_order("br-1"),
        BRIDGE_ORDER,
        "GET /bff/v1/bridge/order/br-1",
        "GET /v1/bridge/order/br-1",
    ),
}


@pytest.mark.parametrize("dialect", [BFF, V1], ids=["bff", "v1"])
@pytest.mark.parametrize("row", CALLS.values(), ids=CALLS)
async def test_every_call_is_sent_as_its_dialect_has_it(dialect: Dialect, row: Row) -> None:
    target = row.bff if dialect is BFF else row.v1
    async with does.running() as server:
        asked = UpstreamRequest(server, dialect)
        if target is None:
            with pytest.raises(transport.NeverSent, match="has no call"):
                await asked.call(row.use, row.answer)
            return
        found = await asked.call(row.use, row.answer)

        (seen,) = server.seen
        assert f"{seen.method} {seen.target}" == target
        assert (seen.json if seen.body else None) == row.body
        assert seen.headers.get("idempotency-key") == (row.key if dialect is BFF else None)
        assert json.loads(found.raw) == row.answer


@pytest.mark.parametrize("dialect", [BFF, V1], ids=["bff", "v1"])
@pytest.mark.parametrize("order_id", ["../health", "a/b", "", "a?b", "é", "..", "x" * 129])
async def test_an_id_that_no_upstream_gives_is_not_sent(dialect: Dialect, order_id: str) -> None:
    async with does.running() as server:
        for use in (
            lambda u: u.order(order_id),
            lambda u: u.bridge_order(order_id),
        ):
            with pytest.raises(transport.NotAnId):
                await UpstreamRequest(server, dialect).call(use, {})

        assert not server.seen


@pytest.mark.parametrize("dialect", [BFF, V1], ids=["bff", "v1"])
async def test_order_with_a_bad_deposit_address_is_recorded_and_hidden(
    dialect: Dialect,
) -> None:
    async with does.running() as server:
        with pytest.raises(transport.UpstreamOutcomeUnknown) as caught:
            await UpstreamRequest(server, dialect).call(
                lambda u: u.create_order(X2U, key="k"), {**ORDER, "depositAddress": flipped(MONERO)}
            )

    assert caught.value.upstream_id == ORDER_ID
    assert json.loads(caught.value.raw)["orderId"] == ORDER_ID
    assert isinstance(caught.value.__cause__, transport.UpstreamBroken)
    assert caught.value.__cause__.field == "depositAddress"


async def test_only_the_bff_honours_keys_so_only_it_resumes() -> None:
    async with does.running() as server:
        resumed = await UpstreamRequest(server, BFF).call(
            lambda u: u.create_order(X2U, key="k", resumed=True), ORDER
        )
        assert resumed.order_id == ORDER_ID
        with pytest.raises(ValueError, match="idempotency key"):
            await UpstreamRequest(server, V1).call(
                lambda u: u.create_order(X2U, key="k", resumed=True), ORDER
            )
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("url", "bff", "v1"),
    [
        ("https://a.example", "https://a.example", "https://a.example/v1"),
        ("https://a.example/", "https://a.example", "https://a.example/v1"),
        ("https://a.example/api", "https://a.example/api", "https://a.example/api"),
        ("https://a.example/bff/v1/", "https://a.example", "https://a.example/bff/v1/"),
    ],
)
def test_an_address_is_the_sites_or_that_of_its_api(url: str, bff: str, v1: str) -> None:
    assert (BFF.base_url(url), V1.base_url(url)) == (bff, v1)


@pytest.mark.parametrize("url", ["https://a.example?key=k", "https://a.example/#part"])
def test_address_with_a_query_and_no_path_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no user, query or fragment"):
        base_url(ClientOptions(BFF.base_url(url), None, plain_http=False))


# --- errors ----------------------------------------------------------------------------------


async def refusal(dialect: Dialect, status: int, body: Any) -> errors.ServiceError:
    async with does.running() as server:

        async def use(upstream: Upstream) -> errors.ServiceError:
            with pytest.raises(transport.UpstreamRefused) as caught:
                await upstream.quote(X2U)
            return upstream.service_error(caught.value)

        found = await UpstreamRequest(server, dialect).call(use, body, status)
        assert isinstance(found, errors.ServiceError)
        return found


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("amount_below_minimum", 400, errors.AmountBelowMinimum),
        ("amount_above_maximum", 400, errors.AmountAboveMaximum),
        ("unsupported_chain", 400, errors.UnsupportedChain),
        ("unsupported_token", 400, errors.UnsupportedToken),
        ("invalid_destination", 400, errors.InvalidDestination),
        ("order_not_found", 404, errors.OrderNotFound),
        ("verification_failed", 403, errors.VerificationFailed),
        ("invalid_input", 400, errors.Unavailable),
        ("idempotency_conflict", 409, errors.Unavailable),
        ("unauthorized", 401, errors.Unavailable),
        ("rate_limited", 429, errors.Unavailable),
        ("something_new", 400, errors.Unavailable),
    ],
)
async def test_caller_sees_what_it_can_mend_or_else_unavailable(
    code: str, status: int, kind: type[errors.ServiceError]
) -> None:
    body = {"error": {"code": code, "message": "Too little.", "details": {"minimum": "0.1"}}}

    found = await refusal(BFF, status, body)

    assert type(found) is kind
    if isinstance(found, errors.InputError):
        assert found.message == "Too little."
        assert found.details == {"minimum": "0.1"}
    if isinstance(found, errors.Unavailable):
        assert "Too little" not in found.message
        assert found.retry_after == 5


async def test_details_of_a_refusal_are_passed_on_when_they_are_plain() -> None:
    details = {
        "field": "toToken",
        "allowed": ["XMR", "USDC"],
        "received": "DOGE",
        "deep": {"a": 1},
        "long": "x" * 200,
        "many": ["x"] * 100,
        "rate": 1.5,
    }
    body = {"error": {"code": "unsupported_token", "message": "No.", "details": details}}

    found = await refusal(BFF, 400, body)

    assert isinstance(found, errors.UnsupportedToken)
    assert (found.field, found.allowed, found.received) == ("toToken", ["XMR", "USDC"], "DOGE")
    assert found.details is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"error": "text"},
        {"error": {}},
        {"error": {"code": 1, "message": "x"}},
        {"error": {"code": "x"}},
        {"error": {"code": "", "message": ""}},
    ],
)
def test_error_of_another_form_is_no_bff_error(body: Any) -> None:
    assert BFF.read_error(body) is None


@pytest.mark.parametrize("body", [{}, [], "error", {"error": ""}, {"error": None}, {"error": {}}])
def test_error_of_another_form_is_no_v1_error(body: Any) -> None:
    assert V1.read_error(body) is None


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, "Amount below minimum of $10", errors.AmountBelowMinimum),
        (400, "Minimum swap is 10 USD", errors.AmountBelowMinimum),
        (422, "amount too small", errors.AmountBelowMinimum),
        (400, "Amount exceeds maximum", errors.AmountAboveMaximum),
        (400, "Unsupported chain: 5", errors.UnsupportedChain),
        (400, "network is not supported", errors.UnsupportedChain),
        (400, "token not supported", errors.UnsupportedToken),
        (400, "Invalid toAddress", errors.InvalidDestination),
        (400, "Invalid destination address", errors.InvalidDestination),
        (404, "Order not found", errors.OrderNotFound),
        (404, "Not found", errors.Unavailable),
        (400, "Amount below minimum or above maximum", errors.Unavailable),
        (400, "Unsupported token for chain", errors.Unavailable),
        (400, "Bad request", errors.Unavailable),
        (403, "amount too small", errors.Unavailable),
        (429, "Too many requests, minimum order interval", errors.Unavailable),
    ],
)
async def test_known_v1_text_gets_our_wording(
    status: int, text: str, kind: type[errors.ServiceError]
) -> None:
    found = await refusal(V1, status, {"error": text})

    assert type(found) is kind
    assert text not in found.message


@pytest.mark.parametrize(
    "error",
    [
        transport.NeverSent("no connection to 10.0.0.7"),
        transport.BudgetSpent("no room", retry_after_ms=12_345),
        transport.BreakerOpen("down"),
        transport.NoAnswer("HTTP 500"),
        transport.UpstreamBroken("depositAddress is bad", field="depositAddress"),
        transport.UpstreamOutcomeUnknown("sent", safe_to_repeat=False),
    ],
)
async def test_other_failures_are_unavailable_and_leak_no_internals(
    error: transport.UpstreamError,
) -> None:
    async with does.running() as server:

        async def use(upstream: Upstream) -> errors.ServiceError:
            return upstream.service_error(error)

        found = await UpstreamRequest(server, BFF).call(use, {})

    assert isinstance(found, errors.Unavailable)
    assert error.reason not in found.message
    assert found.retry_after == (13 if error.retry_after_ms else 5)


async def test_impossible_order_id_is_an_order_not_found() -> None:
    async with does.running() as server:

        async def use(upstream: Upstream) -> errors.ServiceError:
            with pytest.raises(transport.NotAnId) as caught:
                await upstream.bridge_order("../health")
            return upstream.service_error(caught.value)

        assert isinstance(await UpstreamRequest(server, BFF).call(use, {}), errors.OrderNotFound)


def test_only_an_unknown_outcome_may_have_acted() -> None:
    kinds: set[type[transport.UpstreamError]] = {
        transport.NeverSent,
        transport.BudgetSpent,
        transport.BreakerOpen,
        transport.UpstreamRefused,
        transport.NoAnswer,
        transport.UpstreamBroken,
    }

    assert {kind for kind in kinds if kind.may_have_acted} == set()
    assert transport.UpstreamOutcomeUnknown.may_have_acted
