"""Payouts of USDC on a real EVM node: exactly once, over lost answers, kills and reorgs.

The tests count balances on the chain, never the service's database.
"""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.events import ImpossibleTransition
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import Outcome, TransferRejected, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, TimedOut
from rpcsvc.settlement.onchain.evm.adapter import RESTING_MS
from rpcsvc.settlement.onchain.evm.node_types import (
    Block,
    BlockRef,
    EvmCall,
    EvmSubmission,
    EvmSubmissionResult,
    Tag,
)
from tests.bench.node_calls import SUBMIT, Exchanges
from tests.recording import Recorder, record_calls
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
    each_by,
)

pytestmark = pytest.mark.slow  # the quick tests must stay quick


# --- without faults ----------------------------------------------------------------------------


async def test_a_payout_pays_exactly_its_units_and_can_be_proved(payer: EvmPayer) -> None:
    transfer = await payer.prepared(payer.transfer(USER, 7 * USDC))
    assert await payer.token.client.transaction(transfer.txid or "") is None
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.ABSENT
    with pytest.raises(Unavailable, match="not settled"):
        await payer.payments.receipt(transfer)
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    number = (await mined(payer.token.client, transfer.txid or "")).block_number
    verdict = await payer.payments.look_up(transfer)
    assert verdict.reason == "1 of 3 confirmations"
    assert verdict.settles_at == number + 2
    with pytest.raises(Unavailable, match="not settled"):
        await payer.payments.receipt(transfer)
    assert await payer.settle(transfer) == Verdict(Outcome.SETTLED)
    assert await payer.token.balance(USER) == 7 * USDC
    assert await payer.token.balance(HOT) == 993 * USDC
    proof = await payer.payments.receipt(transfer)
    receipt = await payer.token.client.receipt(proof["txid"])
    mined_at = await payer.inclusion(transfer)
    assert receipt is not None
    assert mined_at.log_position is not None
    event = receipt.logs[mined_at.log_position]
    assert (event.log_index, event.address) == (proof["logIndex"], payer.token.address)
    paid = usdc.TransferEvent(HOT, USER, 7 * USDC)
    assert usdc.read_transfer(event.topics, event.data) == paid
    shown = (proof["address"], proof["amount"], proof["block"])
    assert shown == (USER, "7", receipt.block_number)
    assert mined_at.fee == ETHER - await payer.token.client.ether(HOT)
    assert mined_at.fee < payer.network.highest_fee


async def test_the_same_transfer_is_signed_once(payer: EvmPayer) -> None:
    transfer = payer.transfer(USER)
    first = await payer.sign(transfer)
    payer.clock.now += MINUTE_MS
    assert await payer.sign(transfer) == first
    assert len(await payer.live()) == 1


async def test_the_same_bytes_again_in_pool_and_chain_pay_once(payer: EvmPayer) -> None:
    await payer.controls.automine(enabled=False)
    transfer = await payer.prepared(payer.transfer(USER))
    for _ in range(2):
        assert (await payer.payments.publish(transfer)).outcome is Outcome.PENDING
    raw = bytes.fromhex((await payer.payment(transfer)).attempts[0].raw)
    assert (await payer.client.submit(raw)).submission is EvmSubmission.KNOWN
    assert (await payer.payments.look_up(transfer)).reason == "waits to be mined"
    await payer.controls.mine(3)
    for _ in range(2):
        assert (await payer.payments.publish(transfer)).outcome is Outcome.SETTLED
    assert (await payer.client.submit(raw)).submission is EvmSubmission.NONCE_TOO_LOW
    assert await payer.token.balance(USER) == USDC


async def test_several_payouts_wait_for_one_block_and_each_is_paid(payer: EvmPayer) -> None:
    await payer.controls.automine(enabled=False)
    transfers = []
    for n in range(1, 5):
        transfers.append(await payer.prepared(payer.transfer(USER, n * USDC)))
        assert (await payer.pay(transfers[-1])).outcome is Outcome.PENDING
    assert [item.nonce for item in await payer.live()] == [0, 1, 2, 3]
    await payer.controls.mine(3)
    for item in transfers:
        assert (await payer.payments.look_up(item)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == 10 * USDC
    assert len({(await payer.payments.receipt(item))["logIndex"] for item in transfers}) == 4
    assert {(await payer.inclusion(item)).log_position for item in transfers} == {0}


async def test_two_at_once_get_no_nonce_in_common(payer: EvmPayer) -> None:
    transfers = [payer.transfer(USER, n * USDC) for n in (1, 2)]
    results = await asyncio.gather(
        *(payer.sign(item) for item in transfers), return_exceptions=True
    )
    assert sorted(type(item).__name__ for item in results) == ["PreparedTransfer", "Unavailable"]


# --- refused before signing --------------------------------------------------------------------


async def test_destination_that_can_not_be_paid_is_rejected(payer: EvmPayer) -> None:
    wrong = USER.swapcase().replace("0X", "0x")
    zero = "0x" + "0" * 40
    for address in (payer.token.address, zero, HOT, KEYS.address(1), wrong, USER[:-1], "4" * 95):
        with pytest.raises(TransferRejected, match="destination"):
            await payer.sign(payer.transfer(address))
    await payer.token.blacklist(USER)
    with pytest.raises(TransferRejected, match="blacklist"):
        await payer.sign(payer.transfer(USER))
    assert await payer.live() == []


async def test_payee_and_balance_explain_an_estimate_that_is_refused(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some nodes have words of their own for a call that reverts."""

    async def refused(_call: EvmCall) -> int:
        raise NodeError("node", "eth_estimateGas", -32015, "VM execution error.")

    monkeypatch.setattr(payer.client, "estimate_gas", refused)
    with pytest.raises(Unavailable, match="The USDC wallet on arbitrum lacks"):
        await payer.sign(payer.transfer(USER, 1001 * USDC))
    with pytest.raises(Unavailable, match="settled right now"):
        await payer.sign(payer.transfer(USER))
    await payer.token.blacklist(USER)
    with pytest.raises(TransferRejected, match="blacklist"):
        await payer.sign(payer.transfer(USER))


async def test_nothing_is_signed_while_the_token_is_paused(payer: EvmPayer) -> None:
    await payer.token.pause()
    with pytest.raises(Unavailable, match="paused"):
        await payer.sign(payer.transfer(USER))
    await payer.token.unpause()
    await payer.sign(payer.transfer(USER))


async def test_payout_just_signed_is_handed_over_at_once(payer: EvmPayer) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    calls = list[str]()
    record_calls(payer.client.rpc, calls)
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    assert calls[0] == SUBMIT


async def test_payout_waits_while_the_token_is_frozen_for_the_wallet(
    payer: EvmPayer,
) -> None:
    await payer.token.blacklist(HOT)
    with pytest.raises(Unavailable, match="refuses this payment just now"):
        await payer.sign(payer.transfer(USER))
    assert await payer.live() == []


async def test_payout_frozen_after_signing_is_published_when_unfrozen(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await payer.token.pause()
    payer.clock.now += 1_000  # the check before the signature no longer serves
    verdict = await payer.pay(transfer)
    assert (verdict.outcome, "paused" in verdict.reason) == (Outcome.UNKNOWN, True)
    assert await payer.token.client.nonce(HOT) == 0
    await payer.token.unpause()
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await payer.require_settled(transfer)


async def test_unmined_units_are_not_reserved_twice(payer: EvmPayer) -> None:
    await payer.controls.automine(enabled=False)
    first = await payer.prepared(payer.transfer(USER, 600 * USDC))
    await payer.pay(first)
    with pytest.raises(Unavailable, match="The USDC wallet on arbitrum lacks"):
        await payer.sign(payer.transfer(USER, 600 * USDC))
    second = await payer.prepared(payer.transfer(USER, 400 * USDC))
    await payer.pay(second)
    await payer.controls.mine(3)
    assert await payer.token.balance(USER) == 1000 * USDC


async def test_payout_is_handed_over_after_few_exchanges(payer: EvmPayer) -> None:
    await payer.connection.check()
    made = Exchanges()
    with made.counted():
        await payer.pay(await payer.prepared(payer.transfer(USER)))
    handed_over = next(n for n, methods in enumerate(made.sent) if SUBMIT in methods)
    assert handed_over == 2
    calls = [method for methods in made.sent[: handed_over + 1] for method in methods]
    assert len(calls) == 9


async def test_late_node_signs_no_payout_over_the_balance(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node lacks the block with a payout that does not count as owed any more."""
    await payer.controls.mine()
    before = await payer.token.client.block()
    assert before is not None
    first = await payer.paid(payer.transfer(USER, 700 * USDC))
    await payer.payments.look_up(first)
    call, block = payer.client.call, payer.client.block

    async def old_call(what: EvmCall, at: BlockRef = Tag.LATEST) -> bytes:
        return await call(what, before.number if at is Tag.LATEST else at)

    async def old_block(at: BlockRef = Tag.LATEST) -> Block | None:
        return await block(before.number if at is Tag.LATEST else at)

    async def old_estimate(_: EvmCall) -> int:
        return 65_000

    second = payer.transfer(FRIEND, 700 * USDC)
    with monkeypatch.context() as late:
        late.setattr(payer.client, "call", old_call)
        late.setattr(payer.client, "block", old_block)
        late.setattr(payer.client, "estimate_gas", old_estimate)
        with pytest.raises(Unavailable, match="lags"):
            await payer.sign(second)
    with pytest.raises(Unavailable, match="The USDC wallet on arbitrum lacks"):
        await payer.sign(second)


async def test_without_ether_nothing_is_signed_until_there_is_some(payer: EvmPayer) -> None:
    await payer.controls.set_ether(HOT, 10**9)
    transfer = payer.transfer(USER)
    with pytest.raises(Unavailable, match="lacks ether"):
        await payer.sign(transfer)
    await payer.controls.set_ether(HOT, ETHER)
    assert (await payer.settle(await payer.paid(transfer))).outcome is Outcome.SETTLED


async def test_ether_lost_after_signing_delays_the_payout_only(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await payer.controls.set_ether(HOT, 1)
    verdict = await payer.pay(transfer)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "insufficient_funds" in verdict.reason
    await payer.controls.set_ether(HOT, ETHER)
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await payer.require_settled(transfer)
    assert await payer.token.balance(USER) == USDC


async def test_nothing_is_signed_in_a_gas_spike(payer: EvmPayer) -> None:
    await payer.controls.set_next_base_fee(100 * GWEI)
    await payer.controls.mine()
    with pytest.raises(Unavailable, match="too dear"):
        await payer.sign(payer.transfer(USER))
    await payer.controls.set_next_base_fee(GWEI)
    await payer.controls.mine()
    await payer.sign(payer.transfer(USER))


async def test_a_node_of_another_network_is_not_asked_to_pay(payer: EvmPayer) -> None:
    async with payer.again(lambda network: replace(network, chain_id=1)) as wrong:
        with pytest.raises(Unavailable, match="can't be settled"):
            await wrong.sign(wrong.transfer(USER))
        assert (wrong.connection.problem or "").startswith("wrong network")
        assert await wrong.live() == []


async def test_a_transfer_of_another_network_is_not_paid_here(payer: EvmPayer) -> None:
    with pytest.raises(LookupError, match="ethereum"):
        await payer.sign(replace(payer.transfer(USER), network="ethereum"))


# --- lost answers and kills --------------------------------------------------------------------


async def test_a_lost_answer_does_not_pay_twice(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = payer.client.submit
    sent: list[str] = []

    async def submit_and_lose(raw: bytes) -> EvmSubmissionResult:
        sent.append((await real(raw)).txid)
        raise TimedOut("node", "eth_sendRawTransaction", "no answer in time")

    monkeypatch.setattr(payer.client, "submit_each", each_by(submit_and_lose))
    transfer = await payer.prepared(payer.transfer(USER))
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await payer.require_settled(transfer)
    assert sent == [transfer.txid]
    assert await payer.token.balance(USER) == USDC


async def test_an_answer_that_lies_does_not_pay_twice(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = payer.client.submit

    async def submit_and_deny(raw: bytes) -> EvmSubmissionResult:
        return EvmSubmissionResult(
            EvmSubmission.NONCE_TOO_LOW, (await real(raw)).txid, "nonce too low"
        )

    monkeypatch.setattr(payer.client, "submit_each", each_by(submit_and_deny))
    transfer = await payer.prepared(payer.transfer(USER))
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await payer.require_settled(transfer)
    assert await payer.token.balance(USER) == USDC


async def test_an_answer_that_was_never_true_pays_later(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deny(raw: bytes) -> EvmSubmissionResult:
        return EvmSubmissionResult(EvmSubmission.REFUSED, "0x", "txpool is full")

    transfer = await payer.prepared(payer.transfer(USER))
    with monkeypatch.context() as patched:
        patched.setattr(payer.client, "submit_each", each_by(deny))
        verdict = await payer.pay(transfer)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "txpool is full" in verdict.reason
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await mined(payer.token.client, transfer.txid or "")
    assert await payer.token.balance(USER) == USDC


async def test_kill_between_prepare_and_publish_pays_the_bytes_once(
    payer: EvmPayer,
) -> None:
    transfer = payer.transfer(USER)
    first = await payer.sign(transfer)
    async with payer.again() as later:
        with pytest.raises(Unavailable, match="earlier payment"):
            await later.sign(later.transfer(FRIEND))
        signed = await later.sign(transfer)
        assert signed == first
        ready = replace(transfer, txid=signed.txid, raw=signed.raw)
        assert (await later.pay(ready)).outcome is Outcome.PENDING
        await mined(later.token.client, signed.txid)
        await later.paid(later.transfer(FRIEND))
        assert (await later.settle(ready)).outcome is Outcome.SETTLED
        assert await later.token.balance(USER) == USDC
        assert await later.token.balance(FRIEND) == USDC


async def test_kill_after_the_node_took_it_repeats_no_payout(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await payer.client.submit(bytes.fromhex((await payer.payment(transfer)).attempts[0].raw))
    await mined(payer.token.client, transfer.txid or "")
    async with payer.again() as later:
        monkeypatch.setattr(later.client, "submit_each", None)  # calling it would fail
        assert (await later.pay(transfer)).outcome is Outcome.PENDING
        assert (await later.settle(transfer)).outcome is Outcome.SETTLED
        assert await later.token.balance(USER) == USDC


async def test_dead_node_proves_nothing_and_the_payout_resumes(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    payer.anvil.freeze()
    try:
        payer.client.rpc.endpoint = replace(payer.client.rpc.endpoint, total_seconds=0.2)
        with pytest.raises(Unavailable, match="can't be settled"):
            await payer.pay(transfer)
    finally:
        payer.anvil.thaw()
    payer.client.rpc.endpoint = replace(payer.client.rpc.endpoint, total_seconds=30)
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await mined(payer.token.client, transfer.txid or "")
    assert await payer.token.balance(USER) == USDC


async def test_a_record_that_is_not_ours_is_left_alone(payer: EvmPayer) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    for strange in (
        replace(transfer, txid="0x00"),
        payer.transfer(USER),
    ):
        with pytest.raises(LookupError, match="not the recorded one"):
            await payer.payments.publish(strange)
    with pytest.raises(LookupError, match="another recipient or amount"):
        await payer.sign(replace(transfer, units=2 * USDC))
    assert await payer.token.client.nonce(HOT) == 0


# --- refused by its order ----------------------------------------------------------------------


async def test_a_payout_that_its_order_refuses_uses_no_nonce(payer: EvmPayer) -> None:
    """The order is cancelled during signing: the bytes are dropped and leave no nonce gap."""
    refused = payer.transfer(USER)
    with pytest.raises(ImpossibleTransition):
        await payer.payments.prepare(
            refused, [], Recorder(ImpossibleTransition("it is cancelled")), {}
        )
    assert await payer.payments.recorded(refused) is None
    other = await payer.paid(payer.transfer(FRIEND))
    assert (await payer.payment(other)).nonce == 0
    assert (await payer.settle(other)).outcome is Outcome.SETTLED
    assert (await payer.token.balance(USER), await payer.token.balance(FRIEND)) == (0, USDC)


# --- refused by the token after it was published ------------------------------------------------


async def test_payout_blacklisted_before_mining_fails_once_deep(
    payer: EvmPayer,
) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    await payer.token.blacklist(USER)
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await mined(payer.token.client, transfer.txid or "")
    waiting = await payer.payments.look_up(transfer)
    assert (waiting.outcome, "refused it" in waiting.reason) == (Outcome.PENDING, True)
    await payer.controls.mine(payer.network.failed_after)
    failed = await payer.payments.look_up(transfer)
    assert (failed.outcome, "refused it" in failed.reason) == (Outcome.FAILED, True)
    with pytest.raises(TransferRejected, match="failed"):
        await payer.sign(replace(transfer, txid=None, raw=None))
    refund = await payer.paid(payer.transfer(FRIEND))
    assert (await payer.settle(refund)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == 0
    assert await payer.token.balance(FRIEND) == USDC


async def test_a_failure_that_is_reorganised_away_was_none(payer: EvmPayer) -> None:
    transfer = await payer.prepared(payer.transfer(USER))
    before = await payer.controls.snapshot()
    await payer.token.blacklist(USER)
    await payer.pay(transfer)
    await mined(payer.token.client, transfer.txid or "")
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.PENDING
    await payer.controls.revert(before)
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await payer.require_settled(transfer)
    assert await payer.token.balance(USER) == USDC


# --- fees, balances and health -----------------------------------------------------------------


async def test_no_order_is_taken_while_the_hot_wallet_is_blacklisted(payer: EvmPayer) -> None:
    async with adapter_on(payer, payer.network) as adapter:
        assert adapter.networks[NETWORK].fee() > 0
        await payer.token.blacklist(HOT)
        payer.clock.now += RESTING_MS
        await adapter.networks[NETWORK].maintain()
        with pytest.raises(Unavailable, match="can't be sent right now"):
            adapter.networks[NETWORK].fee()
        assert "the hot wallet is on the blacklist of USDC" in (
            Health.of(await adapter.conditions()).detail or ""
        )


async def test_payout_cost_and_hot_balances_are_of_the_last_refresh(
    payer: EvmPayer,
) -> None:
    assert payer.payments.gas.hot is None
    with pytest.raises(Unavailable, match="not known yet"):
        payer.payments.gas.payout_cost()
    await payer.refresh()
    held = payer.payments.gas.hot
    assert held is not None
    assert (held.ether, held.usdc) == (ETHER, 1000 * USDC)
    estimated = payer.payments.gas.payout_cost()
    transfer = await payer.paid(payer.transfer(USER))
    await payer.settle(transfer)
    cost = (await payer.inclusion(transfer)).fee
    assert cost < estimated < 10 * cost


async def test_an_empty_hot_wallet_still_has_fees(payer: EvmPayer) -> None:
    await payer.paid(payer.transfer(USER, 1000 * USDC))
    await payer.refresh()
    assert payer.payments.gas.payout_cost() > 0
    held = payer.payments.gas.hot
    assert held is not None
    assert held.usdc == 0


async def test_holdings_follow_a_payout_that_ends_between_two_rounds(payer: EvmPayer) -> None:
    async with adapter_on(payer, payer.network) as adapter:
        payout = await payer.paid(payer.transfer(USER, 990 * USDC))
        assert (await payer.settle(payout)).outcome is Outcome.SETTLED
        payer.clock.now += 1_000
        await adapter.networks[NETWORK].maintain()
        assert adapter.networks[NETWORK].holdings().free == 10 * USDC
