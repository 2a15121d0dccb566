"""Stuck payouts of USDC are replaced at a higher fee; one attempt pays.

The tests count balances on the chain, never the service's database.
"""

from __future__ import annotations

import pytest

from rpcsvc.domain.order import Transfer
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.evm.node_types import EvmSubmission, EvmSubmissionResult, FeeData
from tests.regtest.evm_payer import (
    FRIEND,
    GWEI,
    HOT,
    MINUTE_MS,
    NETWORK,
    USDC,
    USER,
    EvmPayer,
    each_by,
)

pytestmark = pytest.mark.slow  # the quick tests must stay quick


# --- stuck -------------------------------------------------------------------------------------


async def stuck_payout(payer: EvmPayer) -> Transfer:
    """A payout in the pool, with mining off."""
    await payer.controls.automine(enabled=False)
    transfer = await payer.prepared(payer.transfer(USER))
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    payer.clock.now += MINUTE_MS
    return transfer


async def test_a_stuck_payout_is_replaced_at_its_nonce_for_more(payer: EvmPayer) -> None:
    transfer = await stuck_payout(payer)
    payer.clock.now -= 1
    await payer.follow()
    assert len((await payer.payment(transfer)).attempts) == 1
    payer.clock.now += 1
    await payer.follow()
    first, second = (await payer.payment(transfer)).attempts
    assert second.max_fee * 100 >= first.max_fee * 125
    assert second.tip * 100 >= first.tip * 125
    replaced = await payer.token.client.transaction(second.txid)
    assert replaced is not None
    assert (replaced.nonce, replaced.data) == (0, (await payer.payment(transfer)).order.data)
    await payer.follow()
    assert len((await payer.payment(transfer)).attempts) == 2
    assert (await payer.pay(transfer)).outcome is Outcome.PENDING
    await payer.controls.mine(3)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert (await payer.payments.receipt(transfer))["txid"] == second.txid
    assert await payer.token.balance(USER) == USDC


async def test_the_time_to_a_replacement_begins_with_the_publication(payer: EvmPayer) -> None:
    await payer.controls.automine(enabled=False)
    transfer = await payer.prepared(payer.transfer(USER))
    payer.clock.now += 10 * MINUTE_MS
    await payer.pay(transfer)
    await payer.follow()
    assert len((await payer.payment(transfer)).attempts) == 1
    payer.clock.now += MINUTE_MS
    await payer.follow()
    assert len((await payer.payment(transfer)).attempts) == 2


async def test_what_is_mined_and_not_settled_yet_is_not_replaced(payer: EvmPayer) -> None:
    transfer = await payer.paid(payer.transfer(USER))
    for _ in range(3):
        payer.clock.now += MINUTE_MS
        await payer.follow()
    assert (await payer.payment(transfer)).inclusion is not None
    assert len((await payer.payment(transfer)).attempts) == 1
    assert await payer.payments.conditions() == []


async def test_replaced_attempt_settles_the_payout_as_well(payer: EvmPayer) -> None:
    transfer = await stuck_payout(payer)
    await payer.follow()
    first, second = (await payer.payment(transfer)).attempts
    await payer.controls.drop(second.txid)
    await payer.client.submit(bytes.fromhex(first.raw))
    await payer.controls.mine(3)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert (await payer.payments.receipt(transfer))["txid"] == first.txid
    await payer.follow()
    assert [item.txid for item in await payer.receipts(transfer)] == [first.txid]
    assert await payer.token.balance(USER) == USDC


async def test_a_dropped_payout_comes_back_with_the_same_bytes(payer: EvmPayer) -> None:
    transfer = await stuck_payout(payer)
    await payer.controls.drop(transfer.txid or "")
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.ABSENT
    await payer.follow()
    assert len((await payer.payment(transfer)).attempts) == 1
    await payer.controls.mine(3)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == USDC


async def test_lost_bytes_that_the_node_refuses_rest_between_tries(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await payer.controls.automine(enabled=False)
    transfer = await payer.prepared(payer.transfer(USER))
    await payer.pay(transfer)
    await payer.controls.drop(transfer.txid or "")
    submitted = payer.refuse(monkeypatch)
    for _ in range(25):
        await payer.follow()
        payer.clock.now += 2000
    assert submitted == [0, 4, 12, 28]
    monkeypatch.undo()
    payer.clock.now += 10_000
    await payer.follow()
    await payer.controls.mine(3)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED


async def test_the_nonce_of_a_dropped_payout_is_not_given_to_the_next(payer: EvmPayer) -> None:
    first = await stuck_payout(payer)
    await payer.controls.drop(first.txid or "")
    assert await payer.token.client.nonce(HOT) == 0
    second = await payer.prepared(payer.transfer(FRIEND))
    assert (await payer.payment(second)).nonce == 1
    await payer.pay(second)
    await payer.follow()
    await payer.controls.mine(3)
    for item in (first, second):
        assert (await payer.payments.look_up(item)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == await payer.token.balance(FRIEND) == USDC


async def test_those_behind_the_stuck_one_wait_with_their_fees(payer: EvmPayer) -> None:
    first = await stuck_payout(payer)
    second = await payer.prepared(payer.transfer(FRIEND))
    await payer.pay(second)
    payer.clock.now += MINUTE_MS
    await payer.follow()
    assert [len((await payer.payment(item)).attempts) for item in (first, second)] == [2, 1]
    await payer.controls.mine(3)
    for item in (first, second):
        assert (await payer.payments.look_up(item)).outcome is Outcome.SETTLED


def submitted(payer: EvmPayer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the transactions that are submitted to the node from now on."""
    txids: list[str] = []
    real = payer.client.submit

    async def noted(raw: bytes) -> EvmSubmissionResult:
        answer = await real(raw)
        txids.append(answer.txid)
        return answer

    monkeypatch.setattr(payer.client, "submit_each", each_by(noted))
    return txids


async def test_payment_behind_the_stuck_one_is_resent_each_period(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block producers may lack it though the node has it. The same bytes, so the same fee."""
    await stuck_payout(payer)
    second = await payer.prepared(payer.transfer(FRIEND))
    await payer.pay(second)
    given = submitted(payer, monkeypatch)
    for _ in range(3):
        payer.clock.now += MINUTE_MS
        await payer.follow()
        await payer.follow()
    assert given.count(second.txid or "") == 3
    assert len((await payer.payment(second)).attempts) == 1
    await payer.controls.mine(3)
    assert (await payer.payments.look_up(second)).outcome is Outcome.SETTLED


async def test_one_that_may_cost_no_more_is_handed_over_again(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await stuck_payout(payer)
    while not payer.payments.board.present():
        await payer.follow()
        payer.clock.now += MINUTE_MS
    given = submitted(payer, monkeypatch)
    for _ in range(2):
        await payer.follow()
        payer.clock.now += MINUTE_MS
        assert "more than highest_fee allows" in payer.payments.board.present()[0].text
    assert given == [(await payer.payment(transfer)).latest.txid] * 2


async def test_outgrown_fee_is_raised_behind_the_next_payment_too(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await stuck_payout(payer)
    second = await payer.prepared(payer.transfer(FRIEND))
    await payer.pay(second)
    payer.clock.now += MINUTE_MS

    async def spike() -> FeeData:
        return FeeData(20 * GWEI, GWEI)

    monkeypatch.setattr(payer.client, "fees", spike)
    await payer.follow()
    for item in (first, second):
        assert (await payer.payment(item)).latest.max_fee >= 21 * GWEI


async def test_fees_that_the_network_has_outgrown_are_raised_for_all(payer: EvmPayer) -> None:
    first = await stuck_payout(payer)
    second = await payer.prepared(payer.transfer(FRIEND))
    await payer.pay(second)
    payer.clock.now += MINUTE_MS
    await payer.controls.drop(first.txid or "")
    await payer.controls.drop(second.txid or "")
    await payer.controls.set_next_base_fee(20 * GWEI)
    await payer.controls.mine()
    await payer.follow()
    for item in (first, second):
        assert (await payer.payment(item)).latest.max_fee >= 20 * GWEI
    await payer.controls.mine(3)
    for item in (first, second):
        assert (await payer.payments.look_up(item)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == await payer.token.balance(FRIEND) == USDC


async def test_replacement_stays_below_the_fee_cap_and_warns(
    payer: EvmPayer,
) -> None:
    transfer = await stuck_payout(payer)
    assert await payer.payments.conditions() == []
    for _ in range(30):
        await payer.follow()
        payer.clock.now += MINUTE_MS
    payment = await payer.payment(transfer)
    assert 2 < len(payment.attempts) < 30
    assert payment.most_fee <= payer.network.highest_fee
    overdue, reported = [each.text for each in await payer.payments.conditions()]
    assert transfer.transfer_id in reported
    assert f"payment {transfer.transfer_id} on {NETWORK} is signed" in overdue
    assert "since 2027-01-15T08:00:00.000Z" in overdue
    await payer.controls.mine(3)
    await payer.follow()
    assert await payer.payments.conditions() == []
    assert await payer.token.balance(USER) == USDC


async def test_a_refused_replacement_leaves_the_first_in_force(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await stuck_payout(payer)

    async def underpriced(raw: bytes) -> EvmSubmissionResult:
        return EvmSubmissionResult(EvmSubmission.REPLACEMENT_UNDERPRICED, "0x", "underpriced")

    with monkeypatch.context() as patched:
        patched.setattr(payer.client, "submit_each", each_by(underpriced))
        await payer.follow()
    assert len((await payer.payment(transfer)).attempts) == 2
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.PENDING
    await payer.controls.mine(3)
    assert (await payer.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == USDC


async def test_kill_between_replacement_and_publish_pays_one(
    payer: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await stuck_payout(payer)
    with monkeypatch.context() as patched:
        patched.setattr(payer.client, "submit_each", None)
        with pytest.raises(TypeError):
            await payer.follow()
    async with payer.again() as later:
        assert len((await later.payment(transfer)).attempts) == 2
        later.clock.now += MINUTE_MS
        await later.follow()
        await later.controls.mine(3)
        assert (await later.payments.look_up(transfer)).outcome is Outcome.SETTLED
        assert len(await later.receipts(transfer)) == 1
        assert await later.token.balance(USER) == USDC
