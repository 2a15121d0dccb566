"""Payouts of USDC that are reorged out, or whose nonce is used elsewhere with the same key.

The tests count balances on the chain, never the service's database.
"""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.order import Transfer
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm.keys import SignedTransaction, TransactionPlan
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, BlockRef, EvmSubmission, Receipt, Tag
from rpcsvc.settlement.onchain.evm.presence import require_unminable
from rpcsvc.settlement.onchain.evm.records import Attempt, EvmPayment, EvmPaymentState
from rpcsvc.settlement.onchain.unrecorded import NotAdopted
from rpcsvc.store.database import Statement
from tests.regtest.daemons import mined
from tests.regtest.evm_payer import (
    ETHER,
    FRIEND,
    GWEI,
    HOT,
    KEYS,
    MINUTE_MS,
    NETWORK,
    USDC,
    USER,
    EvmPayer,
    adapter_on,
)
from tests.rows import statement

pytestmark = pytest.mark.slow  # the quick tests must stay quick


async def spend_nonce(payer: EvmPayer, nonce: int, *, gwei: int = 50) -> str:
    """Use a nonce outside of the service with the same key; the transaction's id."""
    plan = TransactionPlan(payer.network.chain_id, nonce, HOT, 21_000, gwei * GWEI, GWEI)
    result = await payer.token.client.submit(KEYS.signer(0).sign(plan).raw)
    assert result.submission is EvmSubmission.ACCEPTED
    return result.txid


# --- reorganisations, and the same key elsewhere ------------------------------------------------


async def test_reorged_payout_is_resent_with_the_same_bytes(
    payer: EvmPayer,
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.PENDING
    await payer.controls.reorganise(1)
    assert await payer.token.balance(USER) == 0
    payer.clock.now += MINUTE_MS
    await payer.follow()
    await mined(payer.token.client, transfer.txid or "")
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    assert len((await payer.payment(transfer)).attempts) == 1
    assert await payer.token.balance(USER) == USDC


async def test_settled_payout_lost_to_a_deep_reorg_is_republished(
    payer: EvmPayer,
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    await payer.follow()  # found in its block
    await payer.controls.reorganise(4)
    assert await payer.token.balance(USER) == 0
    await payer.follow()
    assert len(await payer.payments.conditions()) == 1
    await mined(payer.token.client, transfer.txid or "")
    await payer.follow()
    assert await payer.payments.conditions() == []
    assert await payer.token.balance(USER) == USDC
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    receipt = await payer.token.client.receipt(transfer.txid or "")
    assert receipt is not None
    assert (await payer.payments.receipt(transfer))["block"] == receipt.block_number


async def test_refusal_about_one_payment_keeps_no_other_waiting(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that lags, of several behind one address, refuses questions about new blocks."""
    gone = await payer.paid(payer.transfer(USER))
    assert (await payer.settle(gone)).outcome is Outcome.SETTLED
    await payer.follow()  # found in its block
    await payer.controls.automine(enabled=False)
    await payer.controls.reorganise(4)
    for _ in range(2):
        await payer.pay(await payer.prepared(payer.transfer(USER)))
    seen, verdict = list[str](), payer.payments.verdict

    async def refused(payment: EvmPayment, top: Block | None = None) -> Verdict:
        seen.append(payment.payment_id)
        if payment.payment_id == "tr_2":
            raise NodeError("node", "eth_getTransactionCount", -32000, "header not found")
        return await verdict(payment, top)

    monkeypatch.setattr(payer.payments, "verdict", refused)
    with pytest.raises(NodeError, match="header not found"):
        await payer.follow()
    assert seen == ["tr_2", "tr_3", "tr_1"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_settled_payout_that_is_not_mined_again_is_replaced(
    payer: EvmPayer, restarted: bool
) -> None:
    """Its node takes it and relays nothing, or fees rose: the nonces after it would wait."""
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    await payer.follow()  # found in its block
    await payer.controls.automine(enabled=False)
    await payer.controls.reorganise(4)
    await payer.follow()
    await payer.follow()
    payer.clock.now += MINUTE_MS - 1
    await payer.follow()
    assert len((await payer.payment(transfer)).attempts) == 1
    payer.clock.now += 1
    await payer.follow()
    first, second = (await payer.payment(transfer)).attempts
    assert (second.max_fee > first.max_fee, second.tip > first.tip) == (True, True)
    assert (await payer.payment(transfer)).state is EvmPaymentState.SETTLED
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(payer.again()) if restarted else payer
        await own.controls.mine(own.network.settled_after)
        assert len(await own.receipts(transfer)) == 1
        await own.follow()
        assert await own.payments.conditions() == []
        assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
        assert await own.token.balance(USER) == USDC
        await own.controls.automine(enabled=True)
        other = await own.paid(own.transfer(FRIEND))
        assert (await own.payment(other)).nonce == 1
        assert (await own.settle(other)).outcome is Outcome.SETTLED


async def test_late_node_takes_no_settled_payout_away(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node shows neither the payout, nor its nonce as spent, nor its block."""
    await payer.controls.mine()
    before = await payer.token.client.block()
    assert before is not None
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    block = payer.client.block

    async def old_block(at: BlockRef = Tag.LATEST) -> Block | None:
        number = before.number if at is Tag.LATEST else at
        return await block(number) if isinstance(number, int) and number <= before.number else None

    async def unknown(_txid: str) -> None:
        return None

    with monkeypatch.context() as late:
        late.setattr(payer.client, "block", old_block)
        late.setattr(payer.client, "receipt", unknown)
        late.setattr(payer.client, "transaction", unknown)
        await payer.follow()
    assert await payer.payments.conditions() == []
    assert (await payer.payment(transfer)).inclusion is not None


async def test_settled_payout_that_is_refused_rests_between_tries(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    await payer.follow()  # found in its block
    await payer.controls.reorganise(4)
    submitted = payer.refuse(monkeypatch)
    for _ in range(100):
        await payer.follow()
        payer.clock.now += 2000
    raised = [62, 62, 122, 122, 182, 182]
    assert submitted == sorted([0, 4, 12, 28, 60, 120, 180, *raised])
    assert "was settled and a reorganisation" in (await payer.payments.conditions())[0].text
    monkeypatch.undo()
    payer.clock.now += MINUTE_MS
    await payer.follow()
    await mined(payer.token.client, (await payer.payment(transfer)).latest.txid)


async def test_settled_payout_deep_again_before_a_check_is_silent(
    payer: EvmPayer,
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    await payer.controls.reorganise(4)
    await payer.token.client.submit(bytes.fromhex((await payer.payment(transfer)).attempts[0].raw))
    await mined(payer.token.client, transfer.txid or "")
    await payer.controls.mine(payer.network.settled_after)
    await payer.follow()
    assert await payer.payments.conditions() == []
    receipt = await payer.token.client.receipt(transfer.txid or "")
    assert receipt is not None
    assert (await payer.payments.receipt(transfer))["block"] == receipt.block_number


@pytest.mark.parametrize("by", ["another transaction", "the blacklist"])
async def test_settled_payout_that_cannot_return_is_reported(payer: EvmPayer, by: str) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    connection, payment = (
        EvmConnection(payer.token.client, payer.network),
        await payer.payment(transfer),
    )
    with pytest.raises(NotAdopted, match="is on the chain"):
        await require_unminable(connection, payment)
    await payer.controls.reorganise(4)
    with pytest.raises(NotAdopted, match="nonce 0 of the hot wallet is not spent yet"):
        await require_unminable(connection, payment)
    if by == "the blacklist":
        await payer.token.blacklist(USER)
        await payer.follow()
        await mined(payer.token.client, transfer.txid or "")
    else:
        await mined(payer.token.client, await spend_nonce(payer, 0))
    with pytest.raises(NotAdopted, match="it may be mined yet"):
        await require_unminable(connection, payment)
    for _ in range(3):
        await payer.controls.mine(payer.network.failed_after)
        await payer.follow()
        reported = f"rpcsvc payouts close {transfer.transfer_id} --note TEXT"
        assert reported in (await payer.payments.conditions())[0].text
    assert (await payer.payment(transfer)).state is EvmPaymentState.SETTLED
    async with payer.again() as later:
        await later.follow()
        assert "was settled" in (await later.payments.conditions())[0].text
        await require_unminable(EvmConnection(later.token.client, later.network), payment)
        await later.database.write([closed_by_hand(transfer)])
        await later.controls.mine(1)
    async with payer.again() as closed:
        await closed.follow()
        assert await closed.payments.conditions() == []


def closed_by_hand(transfer: Transfer) -> Statement:
    """The row that ``rpcsvc payouts close`` writes."""
    row = (transfer.transfer_id, transfer.txid, "gone", 1, "kid", "signature")
    return statement("INSERT INTO closed_by_hand VALUES (?, ?, ?, ?, ?, ?)", row)


async def without_funding(payer: EvmPayer, *, settled: bool) -> Transfer:
    """A payout that was reorged out together with the deposit of its USDC."""
    before = await payer.controls.snapshot()
    await payer.token.mint(HOT, 1000 * USDC)
    transfer = await payer.prepared(payer.transfer(USER, 1500 * USDC))
    await payer.pay(transfer)
    await mined(payer.token.client, transfer.txid or "")
    outcome = (await payer.settle(transfer) if settled else await payer.pay(transfer)).outcome
    assert outcome is (Outcome.SETTLED if settled else Outcome.PENDING)
    await payer.controls.revert(before)
    await payer.controls.mine(4 * payer.network.failed_after)
    return transfer


async def test_payout_reorged_with_its_usdc_fails_and_moves_nothing(
    payer: EvmPayer,
) -> None:
    """Its order is then refunded. The next payout has the next nonce."""
    transfer = await without_funding(payer, settled=False)
    await payer.follow()
    assert not (await mined(payer.token.client, transfer.txid or "")).ok
    await payer.controls.mine(payer.network.failed_after)
    failed = await payer.payments.look_up(transfer)
    assert (failed.outcome, "the token refused it" in failed.reason) == (Outcome.FAILED, True)
    other = await payer.paid(payer.transfer(FRIEND))
    assert (await payer.settle(other)).outcome is Outcome.SETTLED
    assert (await payer.token.balance(USER), await payer.token.balance(FRIEND)) == (0, USDC)
    assert await payer.payments.conditions() == []


@pytest.mark.parametrize("settled", [False, True])
async def test_payout_whose_usdc_returns_first_pays_by_the_same_bytes(
    payer: EvmPayer, settled: bool
) -> None:
    transfer = await without_funding(payer, settled=settled)
    await payer.token.mint(HOT, 1000 * USDC)
    await payer.follow()
    await mined(payer.token.client, transfer.txid or "")
    assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    await payer.follow()
    assert await payer.payments.conditions() == []
    assert await payer.token.balance(USER) == 1500 * USDC


async def test_settled_payout_refused_for_lack_of_usdc_is_reported(payer: EvmPayer) -> None:
    """Its nonce is spent: only the operator can pay the user."""
    transfer = await without_funding(payer, settled=True)
    await payer.follow()
    assert not (await mined(payer.token.client, transfer.txid or "")).ok
    await payer.token.mint(HOT, 1000 * USDC)
    await payer.controls.mine(4 * payer.network.failed_after)
    await payer.follow()
    assert "was settled" in (await payer.payments.conditions())[0].text
    assert (await payer.payment(transfer)).state is EvmPaymentState.SETTLED
    assert await payer.token.balance(USER) == 0


@pytest.mark.parametrize("settled", [False, True])
async def test_a_payout_waits_for_ether_that_was_reorganised_away(
    payer: EvmPayer, settled: bool
) -> None:
    """The operator's top-up of ether was reorged out, too: health asks for ether."""
    transfer = await payer.paid(payer.transfer(USER))
    if settled:
        assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    await payer.controls.reorganise(1 + settled * payer.network.settled_after)
    await payer.controls.set_ether(HOT, 0)
    for _ in range(3):
        payer.clock.now += MINUTE_MS
        await payer.follow()
    assert await payer.token.client.receipt(transfer.txid or "") is None
    async with adapter_on(payer, payer.network) as adapter:
        await adapter.networks[NETWORK].maintain()
        assert "short of ether" in (Health.of(await adapter.conditions()).detail or "")
    await payer.controls.set_ether(HOT, ETHER)
    payer.clock.now += MINUTE_MS
    await payer.follow()
    await payer.controls.mine(payer.network.settled_after)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED
    await payer.follow()
    assert await payer.payments.conditions() == []
    assert await payer.token.balance(USER) == USDC


async def test_nonce_used_with_the_same_key_fails_the_payout_once_deep(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 0))
    first = await payer.pay(transfer)
    assert (first.outcome, "1 of 5 blocks ago" in first.reason) == (Outcome.UNKNOWN, True)
    await payer.controls.mine(3)
    assert (await payer.pay(transfer)).outcome is Outcome.UNKNOWN
    await payer.controls.mine(1)
    failed = await payer.pay(transfer)
    assert (failed.outcome, "has used nonce 0" in failed.reason) == (Outcome.FAILED, True)
    other = await payer.paid(payer.transfer(FRIEND))
    assert (await payer.payment(other)).nonce == 1
    assert (await payer.settle(other)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == 0


async def test_failed_payment_is_never_republished_after_a_reorg(
    payer: EvmPayer,
) -> None:
    """By then the deposit is being refunded."""
    transfer = await payer.prepared(payer.transfer(USER))
    before = await payer.controls.snapshot()
    await mined(payer.token.client, await spend_nonce(payer, 0))
    await payer.controls.mine(payer.network.failed_after)
    assert (await payer.pay(transfer)).outcome is Outcome.FAILED
    await payer.controls.revert(before)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.ABSENT
    verdict = await payer.payments.publish(transfer)
    assert (verdict.outcome, "not published" in verdict.reason) == (Outcome.UNKNOWN, True)
    payer.clock.now += MINUTE_MS
    await payer.follow()
    assert await payer.token.client.transaction(transfer.txid or "") is None
    assert (await payer.payment(transfer)).state is EvmPaymentState.FAILED
    assert "later payments wait for nonce 0" in (await payer.payments.conditions())[0].text
    await mined(payer.token.client, await spend_nonce(payer, 0))
    await payer.follow()
    assert not await payer.payments.conditions()


async def test_a_payout_whose_nonce_is_lost_holds_up_no_other(payer: EvmPayer) -> None:
    lost = await payer.prepared(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 0))
    other = await payer.paid(payer.transfer(FRIEND))
    assert (await payer.payment(lost)).state is EvmPaymentState.PREPARED
    assert (await payer.settle(other)).outcome is Outcome.SETTLED
    assert await payer.token.balance(FRIEND) == USDC


async def test_taken_nonce_freed_by_a_reorg_is_used(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 0))
    assert (await payer.pay(transfer)).outcome is Outcome.UNKNOWN
    await payer.controls.reorganise(1)
    await payer.controls.mine(2)
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await payer.require_settled(transfer)
    assert await payer.token.balance(USER) == USDC


async def test_transaction_that_moved_nothing_is_no_payout(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    await payer.controls.mine(5)
    monkeypatch.setattr(usdc, "TRANSFER_TOPIC", bytes(32))  # as if the event were another's
    verdict = await payer.payments.look_up(transfer)
    assert (verdict.outcome, "shows no such transfer" in verdict.reason) == (Outcome.UNKNOWN, True)
    await payer.follow()
    (reported,) = [each.text for each in await payer.payments.conditions()]
    assert transfer.transfer_id in reported
    assert "the token shows no such transfer" in reported
    monkeypatch.undo()
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED
    await payer.follow()
    assert await payer.payments.conditions() == []


# --- lookups during a reorganisation ------------------------------------------------------------


async def test_payment_mined_between_two_queries_is_not_displaced(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    await payer.controls.mine(payer.network.failed_after)
    real = payer.client.receipt
    answers: list[str] = []

    async def late(txid: str) -> Receipt | None:
        answers.append(txid)
        return None if len(answers) == 1 else await real(txid)

    async def unknown(_: str) -> None:
        return None

    monkeypatch.setattr(payer.client, "receipt", late)
    monkeypatch.setattr(payer.client, "transaction", unknown)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED


async def test_receipt_of_a_block_off_the_chain_settles_nothing(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    await payer.controls.mine(payer.network.failed_after)
    real = payer.client.receipt

    async def stale(txid: str) -> Receipt | None:
        found = await real(txid)
        return None if found is None else dataclasses.replace(found, block_hash="0x" + "ab" * 32)

    with monkeypatch.context() as patched:
        patched.setattr(payer.client, "receipt", stale)
        verdict = await payer.payments.look_up(transfer)
    assert (verdict.outcome, "replaced" in verdict.reason) == (Outcome.PENDING, True)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED


async def test_a_conflict_is_counted_again_when_its_block_is_replaced(payer: EvmPayer) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 0))
    await payer.controls.mine(2)
    assert "3 of 5 blocks ago" in (await payer.pay(transfer)).reason
    await payer.controls.reorganise(3)
    await mined(payer.token.client, await spend_nonce(payer, 0))
    assert "1 of 5 blocks ago" in (await payer.pay(transfer)).reason
    await payer.controls.mine(4)
    assert (await payer.pay(transfer)).outcome is Outcome.FAILED


async def test_old_use_of_a_nonce_is_found_in_its_block(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    other = await spend_nonce(payer, 0)
    await mined(payer.token.client, other)
    await payer.controls.mine(100)
    failed = await payer.pay(transfer)
    assert (failed.outcome, other in failed.reason) == (Outcome.FAILED, True)
    assert "101 blocks ago" in failed.reason


def forgets(payer: EvmPayer, patched: pytest.MonkeyPatch, *, states: bool) -> None:
    """The node has pruned receipts and transactions, with or without the states of old blocks."""
    real = payer.client.nonce

    async def unknown(_: str) -> None:
        return None

    async def newest_only(address: str, at: BlockRef = Tag.PENDING) -> int:
        top = await payer.token.client.block()
        if isinstance(at, int) and top is not None and at < top.number:
            raise NodeError("node", "eth_getTransactionCount", -32000, "missing trie node")
        return await real(address, at)

    patched.setattr(payer.client, "receipt", unknown)
    patched.setattr(payer.client, "transaction", unknown)
    if states:
        patched.setattr(payer.client, "nonce", newest_only)


@pytest.mark.parametrize(
    ("states", "said"), [(False, "shows no receipt"), (True, "missing trie node")]
)
async def test_mined_payout_survives_a_node_that_has_dropped_it(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch, states: bool, said: str
) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    await payer.controls.mine(2)
    with monkeypatch.context() as patched:
        forgets(payer, patched, states=states)
        assert (await payer.payments.look_up(transfer)).outcome is Outcome.UNKNOWN
        assert await payer.payments.conditions() == []  # the node may only be lagging
        for _ in range(3):
            await payer.controls.mine(3 * payer.network.failed_after)
            payer.clock.now += MINUTE_MS
            verdict = await payer.pay(transfer)
            assert (verdict.outcome, said in verdict.reason) == (Outcome.UNKNOWN, True)
            await payer.follow()
            (reported,) = [each.text for each in await payer.payments.conditions()]
            assert transfer.transfer_id in reported
            assert said in reported
    assert len((await payer.payment(transfer)).attempts) == 1
    await payer.follow()
    assert await payer.payments.conditions() == []
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == USDC


async def test_pruned_node_still_answers_what_was_asked_in_time(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 0))
    assert (await payer.pay(transfer)).outcome is Outcome.UNKNOWN
    await payer.controls.mine(50)
    async with payer.again() as later:
        forgets(later, monkeypatch, states=True)
        assert (await later.pay(transfer)).outcome is Outcome.FAILED


async def raised_elsewhere(payer: EvmPayer, transfer: Transfer) -> SignedTransaction:
    """An unrecorded replacement of the payout at a higher fee, mined."""
    order = (await payer.payment(transfer)).order
    plan = TransactionPlan(
        payer.network.chain_id, 0, order.contract, order.gas, 50 * GWEI, 5 * GWEI, order.data
    )
    raised = KEYS.signer(0).sign(plan)
    await payer.token.client.submit(raised.raw)
    await mined(payer.token.client, raised.txid)
    return raised


async def test_raised_attempt_unknown_to_an_older_copy_is_no_failure(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    raised = await raised_elsewhere(payer, transfer)
    await payer.controls.mine(3 * payer.network.failed_after)
    verdict = await payer.pay(transfer)
    assert (verdict.outcome, raised.txid in verdict.reason) == (Outcome.UNKNOWN, True)
    (reported,) = [each.text for each in await payer.payments.conditions()]
    assert "makes the same payout" in reported
    attempt = Attempt(raised.txid, raised.raw.hex(), 50 * GWEI, 5 * GWEI, payer.clock.now)
    await payer.ledger.add_attempt(await payer.payment(transfer), attempt)  # as adopting it does
    assert (await payer.pay(transfer)).outcome is Outcome.SETTLED
    assert await payer.payments.conditions() == []
    assert await payer.token.balance(USER) == USDC


async def test_unprovable_payout_holds_no_usdc_and_no_sweep(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER, 600 * USDC))
    await raised_elsewhere(payer, transfer)
    await payer.controls.mine(payer.network.failed_after)
    assert (await payer.pay(transfer)).outcome is Outcome.UNKNOWN
    rest = await payer.paid(payer.transfer(FRIEND, 400 * USDC))
    assert (await payer.settle(rest)).outcome is Outcome.SETTLED
    address = await payer.give(2, 5 * USDC)
    await payer.follow()
    await payer.sweep()
    await payer.controls.mine()
    assert await payer.token.balance(address) == 0
    assert "makes the same payout" in (await payer.payments.conditions())[0].text


async def test_failure_of_a_record_that_changed_is_not_reported(payer: EvmPayer) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 0))
    assert (await payer.pay(transfer)).outcome is Outcome.UNKNOWN
    await payer.controls.mine(payer.network.failed_after)
    stale = replace(await payer.payment(transfer), published_at=1)
    verdict = await payer.payments.verdict(stale)
    assert verdict.outcome is Outcome.UNKNOWN
    assert (await payer.payment(transfer)).state is EvmPaymentState.PUBLISHED


async def test_settled_payouts_are_compared_by_block_and_only_once(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        transfer = await payer.paid(payer.transfer(USER))
        assert (await payer.settle(transfer)).outcome is Outcome.SETTLED
    asked: list[object] = []
    real = payer.client.rpc.act

    async def counted(method: str, *rest: Any, **more: Any) -> Any:
        asked.append(method)
        return await real(method, *rest, **more)

    monkeypatch.setattr(payer.client.rpc, "act", counted)
    await payer.follow()
    first = len(asked)
    await payer.follow()
    assert "eth_getTransactionReceipt" not in asked
    assert len(asked) - first < first
