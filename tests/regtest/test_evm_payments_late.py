"""Payouts of USDC that wait too long and are replaced for a higher fee; one attempt pays.

What was paid is counted in the balances on the chain, never in the service's database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rpcsvc.domain.order import Transfer
from rpcsvc.orders.ports import Outcome
from rpcsvc.settlement.onchain.evm.node_types import FeeData, Submission, SubmissionResult
from tests.regtest.daemons import Anvil
from tests.regtest.evm_till import (
    ETHER,
    GWEI,
    HOT,
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


# --- stuck -------------------------------------------------------------------------------------


async def stuck_payout(own: Till) -> Transfer:
    """In the pool, where nothing is mined."""
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER))
    assert (await own.pay(transfer)).outcome is Outcome.PENDING
    own.clock.now += MINUTE_MS
    return transfer


async def test_a_stuck_payout_is_replaced_at_its_nonce_for_more(own: Till) -> None:
    transfer = await stuck_payout(own)
    own.clock.now -= 1
    await own.payments.maintain()
    assert len(own.payment(transfer).attempts) == 1
    own.clock.now += 1
    await own.payments.maintain()
    first, second = own.payment(transfer).attempts
    assert second.max_fee * 100 >= first.max_fee * 125
    assert second.tip * 100 >= first.tip * 125
    replaced = await own.token.client.transaction(second.txid)
    assert replaced is not None
    assert (replaced.nonce, replaced.data) == (0, own.payment(transfer).order.data)
    await own.payments.maintain()
    assert len(own.payment(transfer).attempts) == 2
    assert (await own.pay(transfer)).outcome is Outcome.PENDING
    await own.controls.mine(3)
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert own.payments.receipt(transfer).txid == second.txid
    assert await own.token.balance(USER) == USDC


async def test_the_time_to_a_replacement_begins_with_the_publication(own: Till) -> None:
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER))
    own.clock.now += 10 * MINUTE_MS
    await own.pay(transfer)
    await own.payments.maintain()
    assert len(own.payment(transfer).attempts) == 1
    own.clock.now += MINUTE_MS
    await own.payments.maintain()
    assert len(own.payment(transfer).attempts) == 2


async def test_the_attempt_that_was_replaced_settles_the_payout_as_well(own: Till) -> None:
    transfer = await stuck_payout(own)
    await own.payments.maintain()
    first, second = own.payment(transfer).attempts
    await own.controls.drop(second.txid)
    await own.client.submit(bytes.fromhex(first.raw))
    await own.controls.mine(3)
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert own.payments.receipt(transfer).txid == first.txid
    await own.payments.maintain()
    assert [item.txid for item in await own.receipts(transfer)] == [first.txid]
    assert await own.token.balance(USER) == USDC


async def test_a_dropped_payout_comes_back_with_the_same_bytes(own: Till) -> None:
    transfer = await stuck_payout(own)
    await own.controls.drop(transfer.txid or "")
    assert (await own.payments.look_up(transfer)).outcome is Outcome.ABSENT
    await own.payments.maintain()
    assert len(own.payment(transfer).attempts) == 1
    await own.controls.mine(3)
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == USDC


async def test_the_nonce_of_a_dropped_payout_is_not_given_to_the_next(own: Till) -> None:
    first = await stuck_payout(own)
    await own.controls.drop(first.txid or "")
    assert await own.token.client.nonce(HOT) == 0
    second = await own.prepared(own.transfer(FRIEND))
    assert own.payment(second).nonce == 1
    await own.pay(second)
    await own.payments.maintain()
    await own.controls.mine(3)
    for item in (first, second):
        assert (await own.payments.look_up(item)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == await own.token.balance(FRIEND) == USDC


async def test_those_behind_the_stuck_one_wait_with_their_fees(own: Till) -> None:
    first = await stuck_payout(own)
    second = await own.prepared(own.transfer(FRIEND))
    await own.pay(second)
    own.clock.now += MINUTE_MS
    await own.payments.maintain()
    assert [len(own.payment(item).attempts) for item in (first, second)] == [2, 1]
    await own.controls.mine(3)
    for item in (first, second):
        assert (await own.payments.look_up(item)).outcome is Outcome.SETTLED


async def test_a_price_that_the_network_has_outgrown_is_raised_behind_the_next_too(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await stuck_payout(own)
    second = await own.prepared(own.transfer(FRIEND))
    await own.pay(second)
    own.clock.now += MINUTE_MS

    async def spike() -> FeeData:
        return FeeData(20 * GWEI, GWEI)

    monkeypatch.setattr(own.client, "fees", spike)
    await own.payments.maintain()
    for item in (first, second):
        assert own.payment(item).latest.max_fee >= 21 * GWEI


async def test_fees_that_the_network_has_outgrown_are_raised_for_all(own: Till) -> None:
    first = await stuck_payout(own)
    second = await own.prepared(own.transfer(FRIEND))
    await own.pay(second)
    own.clock.now += MINUTE_MS
    await own.controls.drop(first.txid or "")
    await own.controls.drop(second.txid or "")
    await own.controls.set_next_base_fee(20 * GWEI)
    await own.controls.mine()
    await own.payments.maintain()
    for item in (first, second):
        assert own.payment(item).latest.max_fee >= 20 * GWEI
    await own.controls.mine(3)
    for item in (first, second):
        assert (await own.payments.look_up(item)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == await own.token.balance(FRIEND) == USDC


async def test_a_replacement_never_costs_more_than_allowed_and_the_operator_is_told(
    own: Till,
) -> None:
    transfer = await stuck_payout(own)
    for _ in range(30):
        await own.payments.maintain()
        own.clock.now += MINUTE_MS
    payment = own.payment(transfer)
    assert 2 < len(payment.attempts) < 30
    assert payment.most_fee <= own.network.highest_fee
    (told,) = own.payments.conditions()
    assert transfer.transfer_id in told
    assert own.payments.stuck() == transfer.transfer_id
    await own.controls.mine(3)
    await own.payments.maintain()
    assert own.payments.stuck() is None
    assert own.payments.conditions() == []
    assert await own.token.balance(USER) == USDC


async def test_a_refused_replacement_leaves_the_first_in_force(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await stuck_payout(own)

    async def underpriced(raw: bytes) -> SubmissionResult:
        return SubmissionResult(Submission.REPLACEMENT_UNDERPRICED, "0x", "underpriced")

    with monkeypatch.context() as patched:
        patched.setattr(own.client, "submit", underpriced)
        await own.payments.maintain()
    assert len(own.payment(transfer).attempts) == 2
    assert (await own.payments.look_up(transfer)).outcome is Outcome.PENDING
    await own.controls.mine(3)
    assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == USDC


async def test_killed_between_a_replacement_and_its_publication_one_is_paid(
    own: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await stuck_payout(own)
    with monkeypatch.context() as patched:
        patched.setattr(own.client, "submit", None)
        with pytest.raises(TypeError):
            await own.payments.maintain()
    async with own.again() as later:
        assert len(later.payment(transfer).attempts) == 2
        later.clock.now += MINUTE_MS
        await later.payments.maintain()
        await later.controls.mine(3)
        assert (await later.payments.look_up(transfer)).outcome is Outcome.SETTLED
        assert len(await later.receipts(transfer)) == 1
        assert await later.token.balance(USER) == USDC
