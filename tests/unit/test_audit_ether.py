"""The hot wallet's ether: the expected balance from its transactions, and the calls needed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.audit.check import check
from rpcsvc.audit.evm_chain import ByHand, EvmReceipts, MinedTransaction, each
from rpcsvc.audit.records import Annotated, Annotation, AuditReport, Difference, Ether, EvmFacts
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, TimedOut
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmTransaction, Receipt
from tests.chain_options import evm_network
from tests.unit.audit_world import ARBITRUM, HOT, OPERATOR, U2X, WEI, World

NETWORK = evm_network(ARBITRUM, 42161, OPERATOR, failed_after=10)
SUBJECT = f"the ether of the hot wallet on {ARBITRUM}"
LOST = "0x" + "99" * 32


# --- the sum ---------------------------------------------------------------------------------


def lived(*steps: tuple[str, int]) -> World:
    """A world with payments and fills at some cost, and the operator's own transactions."""
    world = World()
    for kind, wei in steps:
        if kind == "fill":
            world.fill()
            world.spent[world.payments[-1].txids[0]] = wei
        else:
            world.ether_by_hand(wei, wei // 3, wei % 5)
    return world


def audited(world: World, **ether: Any) -> AuditReport:
    facts = replace(world.evm(), ether=replace(world.ether(), **ether))
    return check(world.books(), None, [facts])


steps = st.lists(st.tuples(st.sampled_from(("fill", "hand")), st.integers(0, 10**18)), max_size=12)


@given(steps, st.integers(-3, 3))
def test_each_wei_beyond_fees_and_transfers_is_reported(
    some: list[tuple[str, int]], planted: int
) -> None:
    world = lived(*some)
    found = audited(world, balance=world.ether().balance + planted).differences
    kinds = {-1: ["ether"], 0: [], 1: ["ether_income"]}[(planted > 0) - (planted < 0)]
    assert [(item.kind, item.gap) for item in found] == [(kind, planted) for kind in kinds]


def test_missing_wei_tells_what_to_do() -> None:
    world = lived(("fill", 7))
    (found,) = audited(world, balance=WEI - 8).differences
    assert replace(found, hint="") == Difference(
        "ether", SUBJECT, str(WEI - 7), str(WEI - 8), "wei"
    )
    assert "rpcsvc treasury explain arbitrum TXID --note TEXT" in found.hint
    assert "1 wei less" in found.hint
    assert not found.is_income


def test_annotation_counts_once_its_transaction_is_mined() -> None:
    world = World()
    world.ether_by_hand(5, 3, 2)
    held = world.ether().balance
    assert audited(world).differences == ()
    (found,) = audited(world, balance=held, done=frozenset()).differences
    assert (found.kind, found.gap) == ("ether_income", 2)


def test_transaction_of_ether_alone_is_annotated_in_wei() -> None:
    world = World()
    world.ether_by_hand(5, 3, 2)
    taken, given_ = (item.txid for item in world.annotations)
    assert audited(world).annotated == (
        Annotated(ARBITRUM, taken, 5, 0, "wei", "to the cold wallet"),
        Annotated(ARBITRUM, given_, 0, 5, "wei", "for gas (2 wei of it by your word)"),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replaced": True}, "is not on the chain"),
        ({"cost_unknown": frozenset((LOST,))}, f"the whole fee of 1 transactions, such as {LOST}"),
    ],
)
def test_what_can_not_be_added_up_is_noted_and_no_difference(
    change: dict[str, Any], said: str
) -> None:
    report = audited(World(), balance=1, **change)
    assert report.differences == ()
    (note,) = report.notes
    assert said in note


def test_without_an_opening_balance_nothing_is_compared() -> None:
    world = World()
    for books, facts in (
        (replace(world.books(), openings={}), world.evm()),
        (world.books(), replace(world.evm(), ether=None)),
    ):
        report = check(books, None, [facts])
        assert report.differences == ()
        assert len(report.notes) == 1
        assert "not on record yet" in report.notes[0]


# --- calls to the node -------------------------------------------------------------------------


def receipt(txid: str, block: int, **fields: Any) -> Receipt:
    return dataclasses.replace(Receipt(txid, True, block, "0x", 3, 7, ()), **fields)


class Node(EvmClient):
    """A node with these receipts and transactions; ``asked`` counts the calls."""

    def __init__(self, *receipts: Receipt) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.receipts = {item.txid: item for item in receipts}
        self.made: dict[str, EvmTransaction] = {}
        self.asked: Counter[str] = Counter()

    async def receipt(self, txid: str) -> Receipt | None:
        self.asked[txid] += 1
        return self.receipts.get(txid)

    async def transaction(self, txid: str) -> EvmTransaction | None:
        self.asked[f"made {txid}"] += 1
        return self.made.get(txid)


def head(number: int) -> Block:
    return Block(number, "0x", "0x", 0, None)


async def test_deep_transactions_are_asked_once_young_ones_again() -> None:
    node = Node(receipt("deep", 90), receipt("young", 91), receipt("later", 101))
    receipts = EvmReceipts(NETWORK, node)
    for _ in range(2):
        found, later = await receipts.mined(("deep", "young", "later", "nowhere"), head(100))
        assert found == {
            "deep": MinedTransaction(90, True, 21),
            "young": MinedTransaction(91, True, 21),
        }
        assert later == {"later"}
    assert node.asked == {"deep": 1, "young": 2, "later": 2, "nowhere": 2}
    assert receipts.knows("deep")
    await receipts.start_again()
    assert not receipts.knows("deep")


@pytest.mark.parametrize(
    ("fields", "oracle", "cost"),
    [
        ({"ok": False}, None, 21),
        ({"l1_fee": 5}, OPERATOR, 26),
        ({"l1_fee": 0}, OPERATOR, 21),
        ({}, OPERATOR, None),
        ({"l1_fee": 5, "operator_fee_scalar": 1}, OPERATOR, None),
    ],
)
async def test_the_cost_is_gas_and_the_fee_for_l1_or_not_known(
    fields: dict[str, Any], oracle: str | None, cost: int | None
) -> None:
    node = Node(receipt("a", 1, **fields))
    receipts = EvmReceipts(replace(NETWORK, l1_fee_oracle=oracle), node)
    found, _ = await receipts.mined(("a",), head(1))
    assert found["a"].cost == cost


def made(txid: str, sender: str, to: str | None, value: int) -> EvmTransaction:
    return EvmTransaction(txid, sender, to, 4, value, b"", 1, "0x")


@pytest.mark.parametrize(
    ("sender", "to", "ok", "wanted"),
    [
        (HOT, OPERATOR, True, (4, 9, 0)),
        (HOT.upper().replace("X", "x"), None, True, (4, 9, 0)),
        (HOT, HOT, True, (4, 0, 0)),
        (HOT, OPERATOR, False, (4, 0, 0)),
        (OPERATOR, HOT, True, (None, 0, 9)),
        (OPERATOR, HOT, False, (None, 0, 0)),
        (OPERATOR, OPERATOR, True, (None, 0, 0)),
    ],
)
async def test_ether_sent_along_goes_where_the_chain_says(
    sender: str, to: str | None, ok: bool, wanted: tuple[int | None, int, int]
) -> None:
    node = Node(receipt("a", 80, ok=ok))
    node.made["a"] = made("a", sender, to, 9)
    receipts = EvmReceipts(NETWORK, node)
    for _ in range(2):
        found = await receipts.by_hand(("a", "nowhere"), HOT, head(100))
        assert found == {"a": ByHand(MinedTransaction(80, ok, 21), *wanted)}
    assert (node.asked["a"], node.asked["made a"]) == (1, 1)


async def test_failure_is_raised_when_all_reads_have_ended() -> None:
    ended: list[str] = []

    async def ask(item: str) -> str:
        ended.append(item)
        if item == "b":
            raise TimedOut("node", "x", "no answer")
        return item

    with pytest.raises(TimedOut):
        await each("abc", ask)
    assert ended == ["a", "b", "c"]
    assert await each("ac" * 20, ask) == [("a", "a"), ("c", "c")] * 20


def test_facts_without_ether_belong_to_a_network_without_opening() -> None:
    assert EvmFacts(ARBITRUM, 1, 1, (), {}, 0, 0).ether is None
    assert Ether(1).spent == {}


# --- transactions that an older copy of the database lacks ---------------------------------------


def test_lost_sweep_is_named_by_its_cost_without_a_record() -> None:
    world = World()
    order = world.keep(world.deposit(world.order(U2X), 10**8))
    world.sweep(order)
    (lost,) = world.payments
    cost = world.spent.pop(lost.txids[0])
    world.payments.clear()
    facts = replace(world.evm(), ether=Ether(WEI - cost))
    found = {item.kind: item for item in check(world.books(), None, [facts]).differences}
    assert {*found} == {"ether", "unrecorded_transaction"}, "the sweep was found done since"
    assert found["ether"].gap == -cost
    assert f"Not on record: {lost.txids[0]}." in found["ether"].hint

    world.annotations.append(Annotation(ARBITRUM, lost.txids[0], "a sweep since the copy"))
    world.annotated[lost.txids[0]] = facts.nonce - 1
    world.spent[lost.txids[0]] = cost
    assert audited(world).differences == ()
