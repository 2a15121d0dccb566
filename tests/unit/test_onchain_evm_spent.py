"""Finding the transaction that has spent a nonce in a block's body, with few calls."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.daemon_rpc import BadAnswer, DaemonEndpoint, DaemonRpc, NodeError
from rpcsvc.settlement.onchain.evm.node import Conditions, read_sent_in
from rpcsvc.settlement.onchain.evm.node_types import (
    Block,
    BlockRef,
    EvmTransaction,
    Receipt,
    SentIn,
    Tag,
)
from rpcsvc.settlement.onchain.evm.presence import (
    EvmPresence,
    Judgement,
    NonceSpender,
    NotFound,
    SpentNonces,
)
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    BlockPoint,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
)
from tests.chain_options import evm_network
from tests.unit.evm_chain import HOT, STRANGER, TOKEN, USER

NONCE = 7
NETWORK = evm_network(
    "arbitrum", 42161, TOKEN, settled_after=20, failed_after=60, block_seconds=0.25
)
A_MINUTE = 240
OURS = ("0xfirst", "0xsecond")
CALL = b"\xa9\x05"


def block(number: int) -> Block:
    return Block(number, f"0x{number}", f"0x{number - 1}", 10 * number, None)


def made(txid: str, data: bytes = b"") -> EvmTransaction:
    return EvmTransaction(txid, HOT, TOKEN, NONCE, 0, data, 1, "0x1")


class Node:
    """A node whose hot wallet sent nonce 7 as ``txid`` in block ``spent_in``.

    It has no transactions by id, and only the ``receipts`` given. ``oldest``: the first block whose
    state it has. ``bodies`` False: blocks are returned empty.
    """

    def __init__(self, txid: str, spent_in: int, top: int) -> None:
        self.rpc = DaemonRpc(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.made, self.spent_in, self.top = made(txid), spent_in, top
        self.oldest = 0
        self.bodies = True
        self.receipts: dict[str, Receipt] = {}
        self.asked: list[str] = []

    async def receipt(self, txid: str) -> Receipt | None:
        return self.receipts.get(txid)

    async def transaction(self, _txid: str) -> None:
        return None

    async def block(self, at: int) -> Block | None:
        return block(at) if at <= self.top else None

    async def nonce(self, address: str, at: BlockRef = Tag.PENDING) -> int:
        self.asked.append("nonce")
        assert address == HOT
        assert isinstance(at, int)
        if at < self.oldest:
            raise NodeError("node", "eth_getTransactionCount", -32000, "missing trie node")
        return NONCE + 3 if at >= self.spent_in else NONCE

    async def sent_in(self, number: int, sender: str) -> SentIn | None:
        self.asked.append("body")
        assert sender == HOT
        here = self.bodies and number == self.spent_in
        return SentIn(block(number), {NONCE: self.made, NONCE + 1: made("0xnext")} if here else {})


class ConnectionStub:
    """A connection whose node passes every check."""

    def __init__(self, client: Node) -> None:
        self.client, self.network, self.problem = client, NETWORK, None

    async def head(self) -> Block:
        return block(self.client.top)

    async def has(self, point: BlockPoint) -> bool:
        return point.number <= self.client.top and point.hash == f"0x{point.number}"


class Rig:
    """Repeats the lookup of one published payment."""

    def __init__(self, node: Node, state: EvmPaymentState = EvmPaymentState.PUBLISHED) -> None:
        order = EvmPaymentOrder("tr_1", EvmPurpose.TRANSFER, USER, 5, TOKEN, CALL, 65_000)
        attempts = tuple(Attempt(txid, "02", n + 1, n + 1, 1) for n, txid in enumerate(OURS))
        self.node = node
        self.payment = EvmPayment(NETWORK.name, HOT, NONCE, order, attempts, 1, state)
        self.conditions = Conditions(NETWORK.name)
        self.presence = EvmPresence(cast("Any", ConnectionStub(node)), self.conditions)

    async def judge(self) -> Judgement:
        judged = await self.presence.judge(self.payment)
        self.payment = judged.payment
        return judged


@pytest.mark.parametrize("txid", OURS)
async def test_one_of_our_own_in_a_block_is_never_a_failure(txid: str) -> None:
    rig = Rig(Node(txid, 4_990, 5_000), EvmPaymentState.PREPARED)
    for _ in range(4):
        judged = await rig.judge()
        assert judged.verdict.outcome is Outcome.UNKNOWN
        assert f"{txid} is in block 4990" in judged.verdict.reason
        assert judged.payment.conflict == BlockPoint(4_990, "0x4990")
        assert judged.payment.state is EvmPaymentState.PUBLISHED
        rig.node.top += 10 * NETWORK.failed_after
    (reported,) = [each.text for each in rig.conditions.present()]
    assert "shows no receipt" in reported


@pytest.mark.parametrize("lacks", ["states", "bodies"])
async def test_payout_without_a_proof_stays_unknown_and_warns(lacks: str) -> None:
    rig = Rig(Node(OURS[0], 4_000, 5_000))
    rig.node.oldest = 5_000 if lacks == "states" else 0
    rig.node.bodies = lacks != "bodies"
    assert (await rig.judge()).verdict.outcome is Outcome.UNKNOWN
    assert rig.conditions.present() == []
    rig.node.top += NETWORK.failed_after
    for _ in range(3):
        assert (await rig.judge()).verdict.outcome is Outcome.UNKNOWN
        (reported,) = [each.text for each in rig.conditions.present()]
        assert "tr_1 on arbitrum can't be proved: nonce 7" in reported
        rig.node.top += 1_000


async def test_another_one_in_a_deep_block_is_a_failure_and_is_named() -> None:
    rig = Rig(Node("0xother", 5_000, 5_000))
    first = (await rig.judge()).verdict
    assert (first.outcome, "1 of 60 blocks ago" in first.reason) == (Outcome.UNKNOWN, True)
    rig.node.top += NETWORK.failed_after - 1
    verdict = (await rig.judge()).verdict
    assert (verdict.outcome, "0xother" in verdict.reason) == (Outcome.FAILED, True)
    assert rig.conditions.present() == []


@pytest.mark.parametrize(
    ("ok", "outcome"),
    [(None, Outcome.UNKNOWN), (True, Outcome.UNKNOWN), (False, Outcome.FAILED)],
)
async def test_unrecorded_copy_that_moved_nothing_fails_the_payout(
    ok: bool | None, outcome: Outcome
) -> None:
    """A replacement at a higher fee, signed after the copy that the database was restored from."""
    rig = Rig(Node("0xraised", 4_000, 5_000))
    rig.node.made = made("0xraised", CALL)
    if ok is not None:
        receipt = Receipt("0xraised", ok, 4_000, "0x4000", 1, 1, ())
        rig.node.receipts["0xraised"] = receipt
    verdict = (await rig.judge()).verdict
    assert verdict.outcome is outcome
    assert "0xraised" in verdict.reason
    reported = ["is not on record" in each.text for each in rig.conditions.present()]
    assert reported == ([] if outcome is Outcome.FAILED else [True])


async def test_what_an_older_release_recorded_is_no_proof() -> None:
    """The record was the newest block at the first lookup, not the one that spent the nonce."""
    rig = Rig(Node(OURS[0], 4_000, 5_000))
    rig.payment = EvmPayment(
        NETWORK.name, HOT, NONCE, rig.payment.order, rig.payment.attempts, 1,
        EvmPaymentState.PUBLISHED, conflict=BlockPoint(4_500, "0x4500"),
    )  # fmt: skip
    assert (await rig.judge()).verdict.outcome is Outcome.UNKNOWN


async def test_nonce_said_to_be_spent_a_block_too_early_is_found() -> None:
    """The node was about to add the block, or another one behind its name had it."""
    rig = Rig(Node("0xother", 5_001, 5_000))
    rig.node.spent_in, rig.node.bodies = 5_000, False
    judged = await rig.judge()
    assert judged.payment.conflict == BlockPoint(5_000, "0x5000")
    rig.node.spent_in, rig.node.bodies, rig.node.top = 5_001, True, 5_002
    judged = await rig.judge()
    assert judged.payment.conflict == BlockPoint(5_001, "0x5001")
    assert "0xother" in judged.verdict.reason


@pytest.mark.parametrize("spent_in", [1, 2, 3, 1_000_000, 349_999_999, 350_000_000])
async def test_the_block_is_found_in_few_questions_however_old_it_is(spent_in: int) -> None:
    node = Node("0xother", spent_in, 350_000_000)
    spent = SpentNonces(cast("Any", ConnectionStub(node)))
    payment, top = Rig(node).payment, block(node.top)
    by = BlockPoint(top.number, top.hash)
    here = NonceSpender(made("0xother"), BlockPoint(spent_in, f"0x{spent_in}"))
    assert await spent.find(payment, by, top) == here
    assert len(node.asked) <= 60
    node.asked.clear()
    assert await spent.find(payment, by, top) == here
    assert node.asked == []


@pytest.mark.parametrize("blocks_ago", [1, 2, 30, 63])
async def test_pruned_node_is_not_asked_for_older_states(
    blocks_ago: int,
) -> None:
    node = Node("0xother", 5_000 - blocks_ago, 5_000)
    node.oldest = 5_000 - 127
    spent = SpentNonces(cast("Any", ConnectionStub(node)))
    found = await spent.find(Rig(node).payment, BlockPoint(5_000, "0x5000"), block(5_000))
    assert isinstance(found, NonceSpender)
    assert found.block.number == 5_000 - blocks_ago


async def test_what_was_not_found_is_looked_for_again_a_minute_later() -> None:
    node = Node("0xother", 4_000, 5_000)
    node.oldest = 5_000
    spent = SpentNonces(cast("Any", ConnectionStub(node)))
    payment, by = Rig(node).payment, BlockPoint(5_000, "0x5000")
    assert isinstance(await spent.find(payment, by, block(5_000)), NotFound)
    node.oldest = 0
    node.asked.clear()
    assert isinstance(await spent.find(payment, by, block(5_000 + A_MINUTE - 1)), NotFound)
    assert node.asked == []
    assert isinstance(await spent.find(payment, by, block(5_000 + A_MINUTE)), NonceSpender)


def answer(transactions: list[Any]) -> dict[str, Any]:
    word = "0x" + "ab" * 32
    members = {"number": "0x5", "hash": word, "parentHash": word, "timestamp": "0x1"}
    return {**members, "transactions": transactions}


def test_of_a_block_only_what_the_account_sent_is_read() -> None:
    txid = "0x" + "CD" * 32
    mine = {"from": HOT.lower(), "to": TOKEN, "nonce": "0x7", "hash": txid, "value": "0x0"}
    mine["input"] = "0x" + CALL.hex()
    strange = {"from": STRANGER, "type": "0x7e"}
    (found,) = read_sent_in("node", answer([strange, mine]), HOT).sent.values()
    assert (found.txid, found.nonce, found.to, found.data) == (txid.lower(), NONCE, TOKEN, CALL)


def test_block_without_full_transactions_is_refused() -> None:
    with pytest.raises(BadAnswer):
        read_sent_in("node", answer(["0x" + "cd" * 32]), HOT)


async def test_fee_of_a_mined_payment_has_its_data_on_l1() -> None:
    rig = Rig(Node(OURS[0], 5_000, 5_000))
    rig.node.receipts[OURS[0]] = Receipt(OURS[0], False, 5_000, "0x5000", 3, 5, (), l1_fee=7)
    mined = (await rig.judge()).payment.inclusion
    assert mined is not None
    assert (mined.l1_fee, mined.fee) == (7, 3 * 5 + 7)
