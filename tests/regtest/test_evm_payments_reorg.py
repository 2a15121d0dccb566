"""Payouts of USDC that are reorganised away, or whose nonce someone else uses with the same key.

What was paid is counted in the balances on the chain, never in the service's database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.states import TransferState
from rpcsvc.orders.ports import Outcome
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm import usdc
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan
from rpcsvc.settlement.onchain.evm.node_types import BlockRef, Receipt, Submission, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import Attempt, PaymentState, Purpose
from tests.regtest.daemons import Anvil, mined
from tests.regtest.evm_till import (
    ETHER,
    GWEI,
    HOT,
    KEYS,
    MINUTE_MS,
    OTHERS,
    USDC,
    Till,
    till,
)
from tests.regtest.token import Token

pytestmark = pytest.mark.slow  # the quick tests must stay quick

USER, FRIEND = OTHERS.address(0), OTHERS.address(1)


@pytest.fixture
async def own(anvil: Anvil, token: Token, tmp_path: Path) -> AsyncIterator[Till]:
    """A hot wallet with 1 ether and 1,000 USDC."""
    await token.controls.set_ether(HOT, ETHER)
    await token.mint(HOT, 1000 * USDC)
    async with till(anvil, token, tmp_path) as made:
        yield made


async def spend_nonce(own: Till, nonce: int, *, gwei: int = 50) -> str:
    """What someone else does with the same key; the transaction's id."""
    plan = TransactionPlan(own.network.chain_id, nonce, HOT, 21_000, gwei * GWEI, GWEI)
    result = await own.token.client.submit(KEYS.signer(0).sign(plan).raw)
    assert result.submission is Submission.ACCEPTED
    return result.txid


# --- reorganisations and others with the same key -----------------------------------------------


async def test_a_payout_that_is_reorganised_away_is_sent_again_with_the_same_bytes(
    own: Till,
) -> None:
    transfer = await own.paid(own.transfer(USER))
    assert (await own.payments.look_up(transfer)).outcome is Outcome.PENDING
    await own.controls.reorganise(1)
    assert await own.token.balance(USER) == 0
    own.clock.now += MINUTE_MS
    await own.payments.maintain()
    await mined(own.token.client, transfer.txid or "")
    assert (await own.settle(transfer)).outcome is Outcome.SETTLED
    assert len(own.payment(transfer).attempts) == 1
    assert await own.token.balance(USER) == USDC


async def test_a_settled_payout_that_a_deep_reorganisation_took_is_published_again(
    own: Till,
) -> None:
    transfer = await own.paid(own.transfer(USER))
    assert (await own.settle(transfer)).outcome is Outcome.SETTLED
    await own.payments.maintain()  # found in its block
    await own.controls.reorganise(4)
    assert await own.token.balance(USER) == 0
    await own.payments.maintain()
    assert len(own.payments.conditions()) == 1
    await mined(own.token.client, transfer.txid or "")
    await own.payments.maintain()
    assert own.payments.conditions() == []
    assert await own.token.balance(USER) == USDC
    assert (await own.settle(transfer)).outcome is Outcome.SETTLED
    receipt = await own.token.client.receipt(transfer.txid or "")
    assert receipt is not None
    assert own.payments.receipt(transfer).block_number == receipt.block_number


@pytest.mark.parametrize("by", ["another transaction", "the blacklist"])
async def test_a_settled_payout_that_can_not_come_back_is_told_for_good(own: Till, by: str) -> None:
    transfer = await own.paid(own.transfer(USER))
    assert (await own.settle(transfer)).outcome is Outcome.SETTLED
    await own.controls.reorganise(4)
    if by == "the blacklist":
        await own.token.blacklist(USER)
        await own.payments.maintain()
        await mined(own.token.client, transfer.txid or "")
    else:
        await mined(own.token.client, await spend_nonce(own, 0))
    for _ in range(3):
        await own.controls.mine(own.network.failed_after)
        await own.payments.maintain()
        assert "was settled" in own.payments.conditions()[0]
    assert own.payment(transfer).state is PaymentState.SETTLED
    async with own.again() as later:
        await later.payments.maintain()
        assert "was settled" in later.payments.conditions()[0]


async def test_a_nonce_used_by_someone_else_with_the_same_key_fails_the_payout_once_deep(
    own: Till,
) -> None:
    transfer = await own.prepared(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 0))
    first = await own.pay(transfer)
    assert (first.outcome, "1 of 5 blocks ago" in first.reason) == (Outcome.UNKNOWN, True)
    await own.controls.mine(3)
    assert (await own.pay(transfer)).outcome is Outcome.UNKNOWN
    await own.controls.mine(1)
    failed = await own.pay(transfer)
    assert (failed.outcome, "has used nonce 0" in failed.reason) == (Outcome.FAILED, True)
    other = await own.paid(own.transfer(FRIEND))
    assert own.payment(other).nonce == 1
    assert (await own.settle(other)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == 0


async def test_a_payout_whose_nonce_is_lost_holds_up_no_other(own: Till) -> None:
    lost = await own.prepared(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 0))
    other = await own.paid(own.transfer(FRIEND))
    assert own.payment(lost).state is PaymentState.PREPARED
    assert (await own.settle(other)).outcome is Outcome.SETTLED
    assert await own.token.balance(FRIEND) == USDC


async def test_a_payout_taken_back_that_is_on_the_network_keeps_its_nonce(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await own.prepared(own.transfer(USER))
    await own.client.submit(bytes.fromhex(transfer.raw or ""))
    await mined(own.token.client, transfer.txid or "")
    monkeypatch.setattr(type(own.ledger), "transfer_state", lambda *_: TransferState.CANCELLED)
    await own.payments.maintain()
    assert [item.order.purpose for item in own.live()] == [Purpose.TRANSFER]
    assert own.payment(transfer).state is PaymentState.PUBLISHED


async def test_a_nonce_used_by_someone_else_and_given_back_by_a_reorganisation_is_used(
    own: Till,
) -> None:
    transfer = await own.prepared(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 0))
    assert (await own.pay(transfer)).outcome is Outcome.UNKNOWN
    await own.controls.reorganise(1)
    await own.controls.mine(2)
    assert (await own.pay(transfer)).outcome is Outcome.PENDING
    await mined(own.token.client, transfer.txid or "")
    assert (await own.settle(transfer)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == USDC


async def test_a_transaction_that_moved_nothing_is_not_taken_for_a_payout(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await own.paid(own.transfer(USER))
    await own.controls.mine(5)
    monkeypatch.setattr(usdc, "TRANSFER_TOPIC", bytes(32))  # as if the event were another's
    verdict = await own.payments.look_up(transfer)
    assert (verdict.outcome, "shows no such transfer" in verdict.reason) == (Outcome.UNKNOWN, True)
    await own.payments.maintain()
    (told,) = own.payments.conditions()
    assert transfer.transfer_id in told
    assert "the token shows no such transfer" in told
    monkeypatch.undo()
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
    await own.payments.maintain()
    assert own.payments.conditions() == []


# --- looked at in a bad moment ------------------------------------------------------------------


async def test_mined_between_two_questions_it_is_not_taken_for_displaced(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await own.paid(own.transfer(USER))
    await own.controls.mine(own.network.failed_after)
    real = own.client.receipt
    answers: list[str] = []

    async def late(txid: str) -> Receipt | None:
        answers.append(txid)
        return None if len(answers) == 1 else await real(txid)

    async def unknown(_: str) -> None:
        return None

    monkeypatch.setattr(own.client, "receipt", late)
    monkeypatch.setattr(own.client, "transaction", unknown)
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED


async def test_a_receipt_of_a_block_that_is_not_in_the_chain_settles_nothing(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await own.paid(own.transfer(USER))
    await own.controls.mine(own.network.failed_after)
    real = own.client.receipt

    async def stale(txid: str) -> Receipt | None:
        found = await real(txid)
        return None if found is None else replace(found, block_hash="0x" + "ab" * 32)

    with monkeypatch.context() as patched:
        patched.setattr(own.client, "receipt", stale)
        verdict = await own.payments.look_up(transfer)
    assert (verdict.outcome, "replaced" in verdict.reason) == (Outcome.PENDING, True)
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED


async def test_a_conflict_is_counted_anew_when_its_block_is_replaced(own: Till) -> None:
    transfer = await own.prepared(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 0))
    await own.controls.mine(2)
    assert "3 of 5 blocks ago" in (await own.pay(transfer)).reason
    await own.controls.reorganise(3)
    await mined(own.token.client, await spend_nonce(own, 0))
    assert "1 of 5 blocks ago" in (await own.pay(transfer)).reason
    await own.controls.mine(4)
    assert (await own.pay(transfer)).outcome is Outcome.FAILED


async def test_a_nonce_used_long_before_it_is_noticed_is_found_in_its_block(own: Till) -> None:
    transfer = await own.prepared(own.transfer(USER))
    other = await spend_nonce(own, 0)
    await mined(own.token.client, other)
    await own.controls.mine(100)
    failed = await own.pay(transfer)
    assert (failed.outcome, other in failed.reason) == (Outcome.FAILED, True)
    assert "101 blocks ago" in failed.reason


def forgets(own: Till, patched: pytest.MonkeyPatch, *, states: bool) -> None:
    """The node has thrown receipts and transactions away, and the states of old blocks or not."""
    real = own.client.nonce

    async def unknown(_: str) -> None:
        return None

    async def newest_only(address: str, at: BlockRef = Tag.PENDING) -> int:
        top = await own.token.client.block()
        if isinstance(at, int) and top is not None and at < top.number:
            raise NodeError("node", "eth_getTransactionCount", -32000, "missing trie node")
        return await real(address, at)

    patched.setattr(own.client, "receipt", unknown)
    patched.setattr(own.client, "transaction", unknown)
    if states:
        patched.setattr(own.client, "nonce", newest_only)


@pytest.mark.parametrize(
    ("states", "said"), [(False, "shows no receipt"), (True, "missing trie node")]
)
async def test_a_payout_that_was_mined_is_not_failed_by_a_node_that_has_thrown_it_away(
    own: Till, monkeypatch: pytest.MonkeyPatch, states: bool, said: str
) -> None:
    transfer = await own.paid(own.transfer(USER))
    await own.controls.mine(2)
    with monkeypatch.context() as patched:
        forgets(own, patched, states=states)
        assert (await own.payments.look_up(transfer)).outcome is Outcome.UNKNOWN
        assert own.payments.conditions() == []  # it may only be late
        for _ in range(3):
            await own.controls.mine(3 * own.network.failed_after)
            own.clock.now += MINUTE_MS
            verdict = await own.pay(transfer)
            assert (verdict.outcome, said in verdict.reason) == (Outcome.UNKNOWN, True)
            await own.payments.maintain()
            (told,) = own.payments.conditions()
            assert transfer.transfer_id in told
            assert said in told
    assert len(own.payment(transfer).attempts) == 1
    await own.payments.maintain()
    assert own.payments.conditions() == []
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == USDC


async def test_a_node_without_old_states_still_shows_what_it_was_asked_in_time(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await own.prepared(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 0))
    assert (await own.pay(transfer)).outcome is Outcome.UNKNOWN
    await own.controls.mine(50)
    async with own.again() as later:
        forgets(later, monkeypatch, states=True)
        assert (await later.pay(transfer)).outcome is Outcome.FAILED


async def test_a_raised_attempt_that_an_older_copy_does_not_have_is_no_failure(own: Till) -> None:
    transfer = await own.prepared(own.transfer(USER))
    order = own.payment(transfer).order
    plan = TransactionPlan(
        own.network.chain_id, 0, order.contract, order.gas, 50 * GWEI, 5 * GWEI, order.data
    )
    raised = KEYS.signer(0).sign(plan)
    await own.token.client.submit(raised.raw)
    await mined(own.token.client, raised.txid)
    await own.controls.mine(3 * own.network.failed_after)
    verdict = await own.pay(transfer)
    assert (verdict.outcome, raised.txid in verdict.reason) == (Outcome.UNKNOWN, True)
    (told,) = own.payments.conditions()
    assert "makes the same payout" in told
    attempt = Attempt(raised.txid, raised.raw.hex(), 50 * GWEI, 5 * GWEI, own.clock.now)
    await own.ledger.add_attempt(own.payment(transfer), attempt)  # as adopting it does
    assert (await own.pay(transfer)).outcome is Outcome.SETTLED
    assert own.payments.conditions() == []
    assert await own.token.balance(USER) == USDC


async def test_a_failure_found_while_the_record_changed_is_not_told(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await own.prepared(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 0))
    assert (await own.pay(transfer)).outcome is Outcome.UNKNOWN
    await own.controls.mine(own.network.failed_after)
    stale = replace(own.payment(transfer), published_at=1)
    verdict = await own.payments._publisher.verdict(stale)
    assert verdict.outcome is Outcome.UNKNOWN
    assert own.payment(transfer).state is PaymentState.PREPARED


async def test_settled_payouts_are_compared_by_block_and_only_once(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        transfer = await own.paid(own.transfer(USER))
        assert (await own.settle(transfer)).outcome is Outcome.SETTLED
    asked: list[object] = []
    real = own.client.rpc.act

    async def counted(method: str, *rest: Any, **more: Any) -> Any:
        asked.append(method)
        return await real(method, *rest, **more)

    monkeypatch.setattr(own.client.rpc, "act", counted)
    await own.payments.maintain()
    first = len(asked)
    await own.payments.maintain()
    assert "eth_getTransactionReceipt" not in asked
    assert len(asked) - first < first


async def test_a_gap_that_can_not_be_filled_in_a_gas_spike_is_told_and_filled_later(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    await own.prepared(own.transfer(USER))
    monkeypatch.setattr(type(own.ledger), "transfer_state", lambda *_: TransferState.CANCELLED)
    await own.controls.set_next_base_fee(1000 * GWEI)
    await own.controls.mine()
    await own.payments.maintain()
    assert "can't be filled yet" in own.payments.conditions()[0]
    await own.controls.set_next_base_fee(GWEI)
    await own.controls.mine()
    await own.payments.maintain()
    assert own.payments.conditions() == []
    assert [item.order.purpose for item in own.live()] == [Purpose.FILL]
