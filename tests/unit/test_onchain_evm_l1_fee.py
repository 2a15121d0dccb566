"""The L1 fee of a transaction on an OP-stack chain, and the costs that include it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError, RpcFailure, TimedOut
from rpcsvc.settlement.onchain.evm import keys
from rpcsvc.settlement.onchain.evm.gas import (
    GET_L1_FEE,
    EvmGas,
    GasPrice,
    L1Fee,
    PricedCall,
    l1_fee_call,
    with_l1_margin,
    with_margin,
)
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan, unsigned
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmCall, FeeData, Reverted, Tag
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    EvmNetwork,
    EvmPayment,
    EvmPaymentOrder,
    EvmPurpose,
)
from tests.chain_options import evm_network
from tests.sandbox import ManualClock

TypedTransaction = keys._load("eth_account.typed_transactions.typed_transaction").TypedTransaction

GWEI = 10**9
ORACLE = "0x420000000000000000000000000000000000000F"
TOKEN = "0x0b2C639c533813f4Aa9D7837CAf62653d097Ff85"
HOT = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
NETWORK = evm_network("optimism", 10, TOKEN, l1_fee_oracle=ORACLE)
REFUSAL = NodeError("node", "eth_call", -32000, "header not found")
REVERTED = Reverted(NodeError("node", "eth_call", 3, "execution reverted"))
SILENCE = TimedOut("node", "eth_call", "no answer in time")


class Node(EvmClient):
    """A node with an oracle of ``rate`` wei per byte. ``problem``: raised instead."""

    def __init__(self, rate: int = 10**6) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.rate = rate
        self.problem: RpcFailure | None = None
        self.answer: bytes | None = None
        self.reported: list[bytes] = []

    async def call(self, call: EvmCall, at: Any = Tag.LATEST) -> bytes:
        if call.data == usdc.is_blacklisted(HOT):
            return usdc.uint_word(0)
        if call.to != ORACLE:
            return usdc.uint_word(5)
        if self.problem is not None:
            raise self.problem
        assert call.data[:4] == GET_L1_FEE
        size = int.from_bytes(call.data[36:68], "big")
        self.reported.append(call.data[68 : 68 + size])
        return usdc.uint_word(self.rate * size) if self.answer is None else self.answer

    async def fees(self, top: Block | None = None) -> FeeData:
        return FeeData(GWEI, GWEI // 10)

    async def ether(self, address: str, at: Any = Tag.LATEST) -> int:
        return 10**18

    async def estimate_gas(self, call: EvmCall) -> int:
        return 40_000


NUMBERS = count(7)
MOMENT = FeeData(GWEI, GWEI // 10)


def head() -> Block:
    """The next block."""
    number = next(NUMBERS)
    return Block(number, f"0x{number}", f"0x{number - 1}", 1_800_000_000, GWEI)


class CheckedConnection(EvmConnection):
    """A connection whose node passes every check."""

    async def check(self) -> Block:
        return head()


def connection_to(node: Node, network: EvmNetwork = NETWORK) -> CheckedConnection:
    return CheckedConnection(node, network)


def gas_of(node: Node, network: EvmNetwork = NETWORK) -> EvmGas:
    return EvmGas(connection_to(node, network), HOT, ManualClock())


def order(data: bytes = b"\xa9" * 68, gas: int = 65_000) -> EvmPaymentOrder:
    return EvmPaymentOrder("tr_1", EvmPurpose.TRANSFER, HOT, 7, TOKEN, data, gas)


def waiting(data: bytes, max_fee: int = GWEI) -> EvmPayment:
    attempt = Attempt("0x1", "02", max_fee, 1, 0)
    return EvmPayment("optimism", HOT, 0, order(data, 50_000), (attempt,), 0)


# --- the bytes that the fee is for --------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 55, 56, 68, 255, 256, 70_000])
@pytest.mark.parametrize("numbers", [(0, 1, 0), (127, 128, 127), (2**24 - 1, 2**40 - 1, 2**40 - 1)])
def test_an_unsigned_transaction_is_what_would_be_signed(
    size: int, numbers: tuple[int, int, int]
) -> None:
    nonce, max_fee, tip = numbers
    data = bytes(range(1, 256)) * (size // 255 + 1)
    plan = TransactionPlan(10, nonce, TOKEN, 65_000, max_fee, tip, data[:size], value=nonce)
    fields = {
        "type": 2, "chainId": 10, "nonce": nonce, "to": TOKEN, "gas": 65_000,
        "maxFeePerGas": max_fee, "maxPriorityFeePerGas": tip, "data": data[:size],
        "value": nonce, "accessList": [],
    }  # fmt: skip
    # The signed hash is the keccak of exactly these bytes (EIP-1559).
    assert usdc.keccak256(unsigned(plan)) == bytes(TypedTransaction.from_dict(fields).hash())


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80])
def test_single_data_byte_is_encoded_as_it_would_be_signed(byte: int) -> None:
    plan = TransactionPlan(10, 1, TOKEN, 65_000, 9, 1, bytes([byte]))
    fields = {
        "type": 2, "chainId": 10, "nonce": 1, "to": TOKEN, "gas": 65_000, "maxFeePerGas": 9,
        "maxPriorityFeePerGas": 1, "data": bytes([byte]), "value": 0, "accessList": [],
    }  # fmt: skip
    assert usdc.keccak256(unsigned(plan)) == bytes(TypedTransaction.from_dict(fields).hash())


def test_the_call_is_that_of_the_published_interface() -> None:
    made = l1_fee_call(b"\x02" * 33)
    assert made[:4].hex() == "49948e0e"  # getL1Fee(bytes)
    assert made[4:68] == usdc.uint_word(32) + usdc.uint_word(33)
    assert made[68:] == b"\x02" * 33 + bytes(31)
    assert l1_fee_call(b"")[4:] == usdc.uint_word(32) + usdc.uint_word(0)


# --- asking the oracle --------------------------------------------------------------------------


async def test_oracle_is_given_the_call_itself_and_a_margin_is_added() -> None:
    node = Node(rate=1000)
    fee = await L1Fee(connection_to(node)).of(order())
    (reported,) = node.reported
    assert reported[:1] == b"\x02"
    assert order().data in reported
    assert fee == with_l1_margin(1000 * len(reported))


async def test_what_is_not_known_yet_is_taken_at_its_widest() -> None:
    node = Node()
    await L1Fee(connection_to(node)).of(order())
    later = TransactionPlan(10, 9_999_999, TOKEN, 65_000, 900 * GWEI, 90 * GWEI, order().data)
    assert len(node.reported[0]) >= len(unsigned(later))


async def test_network_without_an_oracle_calls_and_adds_nothing() -> None:
    node = Node()
    node.problem = REFUSAL
    plain = replace(NETWORK, l1_fee_oracle=None)
    assert await L1Fee(connection_to(node, plain)).of(order()) == 0
    assert node.reported == []


@pytest.mark.parametrize("problem", [REFUSAL, REVERTED])
async def test_an_oracle_that_fails_is_unavailable_and_not_zero(problem: NodeError) -> None:
    node = Node()
    node.problem = problem
    with pytest.raises(Unavailable, match=r"optimism.*gives no fee"):
        await L1Fee(connection_to(node)).of(order())


@pytest.mark.parametrize("answer", [b"", b"\x01", bytes(31), bytes(64)])
async def test_an_answer_that_is_no_number_is_unavailable_and_not_zero(answer: bytes) -> None:
    """As with no contract at that address: the call succeeds with an empty result."""
    node = Node()
    node.answer = answer
    with pytest.raises(Unavailable, match="gives no fee"):
        await L1Fee(connection_to(node)).of(order())


async def test_a_node_that_does_not_answer_is_a_connection_problem() -> None:
    node = Node()
    node.problem = SILENCE
    with pytest.raises(TimedOut):
        await L1Fee(connection_to(node)).of(order())


# --- costs that include it ----------------------------------------------------------------------


async def test_a_payout_costs_its_gas_and_its_l1_part() -> None:
    node, plain = Node(), replace(NETWORK, l1_fee_oracle=None)
    gas, without = gas_of(node), gas_of(node, plain)
    await gas.poll(head())
    await without.poll(head())
    assert without.payout_cost() == with_margin(40_000) * (2 * GWEI + GWEI // 10)
    (reported,) = node.reported
    assert gas.payout_cost() - without.payout_cost() == with_l1_margin(10**6 * len(reported))


async def test_an_authorization_costs_more_than_a_payout() -> None:
    node, plain = Node(), replace(NETWORK, l1_fee_oracle=None)
    gas, without = gas_of(node), gas_of(node, plain)
    with pytest.raises(Unavailable):
        gas.authorization_cost()
    await gas.poll(head())
    await without.poll(head())
    more = with_margin(40_000) + with_margin(30_000)
    assert without.authorization_cost() == more * (2 * GWEI + GWEI // 10)
    l1_fee = gas.payout_cost() - without.payout_cost()
    assert gas.authorization_cost() - without.authorization_cost() == 3 * l1_fee > 0


async def test_the_cost_follows_the_oracle() -> None:
    node, clock = Node(rate=0), ManualClock()
    gas = EvmGas(connection_to(node), HOT, clock)
    await gas.poll(head())
    without = gas.payout_cost()
    for rate in (10**6, 10**7):
        node.rate = rate
        clock.now += 10_000
        await gas.poll(head())
        assert gas.payout_cost() - without == with_l1_margin(rate * len(node.reported[-1]))


@pytest.mark.parametrize("problem", [REFUSAL, REVERTED, SILENCE])
async def test_cost_is_unknown_without_the_oracle(problem: RpcFailure) -> None:
    node, clock = Node(), ManualClock()
    gas = EvmGas(connection_to(node), HOT, clock)
    await gas.poll(head())
    assert gas.problem is None
    node.problem = problem
    clock.now += 10_000
    try:
        await gas.poll(head())
    except RpcFailure:
        assert problem is SILENCE
    with pytest.raises(Unavailable, match="fees on optimism are not known"):
        gas.payout_cost()
    assert gas.problem is not None
    node.problem = None
    await gas.poll(head())
    assert gas.problem is None
    assert gas.payout_cost() > 0


async def test_balances_are_known_though_the_oracle_fails() -> None:
    node = Node()
    node.problem = REVERTED
    gas = gas_of(node)
    await gas.poll(head())
    assert gas.hot is not None
    assert (gas.hot.ether, gas.hot.usdc) == (10**18, 5)


async def test_fees_are_asked_for_every_ten_seconds() -> None:
    node, clock = Node(), ManualClock()
    gas = EvmGas(connection_to(node), HOT, clock)
    await gas.poll(head())
    clock.now += 9_999
    await gas.poll(head())
    assert len(node.reported) == 1
    clock.now += 1
    await gas.poll(head())
    assert len(node.reported) == 2


async def test_balances_from_before_a_payment_are_noted_again() -> None:
    node = Node()
    gas = gas_of(node)
    first, lagging, newest, later = head(), head(), head(), head()
    await gas.poll(first)
    await gas.poll(later)
    assert gas.hot is not None
    assert gas.hot.block_number == first.number
    for top in (lagging, newest, later):  # of several nodes behind one address the first one lags
        await gas.poll(top, newest.number)
    assert gas.hot.block_number == newest.number
    assert len(node.reported) == 1


async def test_the_l1_part_counts_towards_the_highest_fee() -> None:
    node = Node()
    l1_part = await L1Fee(connection_to(node)).of(order())
    least = 65_000 * (GWEI + GWEI // 10)
    enough = gas_of(node, replace(NETWORK, highest_fee=least + l1_part))
    assert await enough.first_price(order(), MOMENT) == GasPrice(GWEI + GWEI // 10, GWEI // 10)
    short = gas_of(node, replace(NETWORK, highest_fee=least + l1_part - 1))
    with pytest.raises(Unavailable, match="too dear"):
        await short.first_price(order(), MOMENT)


async def test_l1_part_counts_towards_the_highest_replacement_fee() -> None:
    node, old = Node(), waiting(b"\xa9" * 68, 10 * GWEI)
    l1_part = await L1Fee(connection_to(node)).of(old.order)
    least = 50_000 * 11 * GWEI
    enough = gas_of(node, replace(NETWORK, highest_fee=least + l1_part))
    price = await enough.raised_price(old)
    assert price is not None
    assert price.max_fee == 11 * GWEI
    short = gas_of(node, replace(NETWORK, highest_fee=least + l1_part - 1))
    assert await short.raised_price(old) is None


async def test_a_fee_beyond_all_reason_is_too_dear_and_nothing_else() -> None:
    node = Node()
    node.answer = b"\xff" * 32
    gas = gas_of(node)
    with pytest.raises(Unavailable, match="too dear"):
        await gas.first_price(order(), MOMENT)
    assert await gas.raised_price(waiting(b"")) is None


async def needs(node: Node, *others: EvmPayment) -> int:
    call = PricedCall(order(b"\x01" * 68), GasPrice(3 * GWEI, GWEI))
    first, both = await gas_of(node).needed([call, call], others)
    (alone,) = await gas_of(node).needed([call], others)
    assert (first, both - first) == (alone, await cost_of(node, call, *others))
    return first


async def cost_of(node: Node, call: PricedCall, *others: EvmPayment) -> int:
    """Return the wei that one more call adds: its gas, and L1 data as long as the longest."""
    longest = max((call.order, *(each.order for each in others)), key=lambda it: len(it.data))
    return call.order.gas * call.price.max_fee + await L1Fee(connection_to(node)).of(longest)


async def test_ether_is_needed_for_gas_and_l1_of_all_that_waits() -> None:
    node = Node()
    short, long = waiting(b"\x02" * 4, 2 * GWEI), waiting(b"\x03" * 300, 5 * GWEI)
    gas_of_it = 65_000 * 3 * GWEI
    alone = await L1Fee(connection_to(node)).of(order(b"\x01" * 68))
    assert await needs(node) == gas_of_it + alone
    longest = await L1Fee(connection_to(node)).of(long.order)
    gas_of_all = gas_of_it + 50_000 * 7 * GWEI
    assert await needs(node, short, long) == gas_of_all + 3 * longest


async def test_nothing_is_offered_while_the_oracle_fails() -> None:
    node = Node()
    node.problem = REVERTED
    with pytest.raises(Unavailable, match="gives no fee"):
        await L1Fee(connection_to(node)).of(order())
    with pytest.raises(Unavailable, match="gives no fee"):
        await gas_of(node).first_price(order(), MOMENT)
    with pytest.raises(Unavailable, match="gives no fee"):
        await needs(node)
