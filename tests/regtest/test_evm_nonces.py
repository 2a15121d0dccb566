"""A hot wallet that has sent what is not on record: a stolen key, or an older copy of the database.

Nothing more is signed before the operator has looked; then payouts go on above what was sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports import Outcome
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan
from rpcsvc.settlement.onchain.evm.node_types import Submission
from rpcsvc.store.sqlite import Statement
from tests.regtest.daemons import Anvil, mined
from tests.regtest.evm_till import ETHER, GWEI, HOT, KEYS, NETWORK, OTHERS, USDC, Till, till
from tests.regtest.token import Token

pytestmark = pytest.mark.slow  # the quick tests must stay quick

USER = OTHERS.address(0)


@pytest.fixture
async def own(anvil: Anvil, token: Token, tmp_path: Path) -> AsyncIterator[Till]:
    """A hot wallet with 1 ether and 1,000 USDC."""
    await token.controls.set_ether(HOT, ETHER)
    await token.mint(HOT, 1000 * USDC)
    async with till(anvil, token, tmp_path) as made:
        yield made


async def spend_nonce(own: Till, nonce: int) -> str:
    """What someone else does with the same key; the transaction's id."""
    plan = TransactionPlan(own.network.chain_id, nonce, HOT, 21_000, 50 * GWEI, GWEI)
    result = await own.token.client.submit(KEYS.signer(0).sign(plan).raw)
    assert result.submission is Submission.ACCEPTED
    return result.txid


async def test_nonces_that_others_used_pause_payouts_and_are_skipped_once_they_go_on(
    own: Till,
) -> None:
    await own.paid(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 1))
    transfer = own.transfer(USER)
    for _ in range(2):
        with pytest.raises(Unavailable, match="not on record"):
            await own.payments.prepare(transfer)
    assert any("something else sends" in told for told in own.payments.conditions())
    reason = own.switch.reason() or ""
    assert "hot wallet on arbitrum that the database does not know: run rpcsvc audit" in reason
    assert own.ledger.payment(transfer.transfer_id) is None

    own.switch.resume()
    paid = await own.paid(transfer)
    assert own.payment(paid).nonce == 2
    assert own.payments.conditions() == []
    assert (await own.settle(paid)).outcome is Outcome.SETTLED
    assert await own.token.balance(USER) == 2 * USDC
    assert own.switch.reason() is None


async def test_what_the_operator_was_told_of_is_remembered_and_what_comes_after_is_told_anew(
    own: Till,
) -> None:
    await own.paid(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 1))
    async with own.again() as later:
        await later.payments.first_look()
        assert later.switch.reason() is not None
        assert later.payments.conditions() != []
        later.switch.resume()
        await later.payments.first_look()
        assert later.payments.conditions() == []
    async with own.again() as later:
        await later.payments.first_look()
        assert later.switch.reason() is None
        await mined(later.token.client, await spend_nonce(later, 2))
        with pytest.raises(Unavailable, match="not on record"):
            await later.payments.prepare(later.transfer(USER))
        assert later.switch.reason() is not None
        later.switch.resume()
        assert later.payment(await later.paid(later.transfer(USER))).nonce == 3


async def test_during_the_operators_own_pause_nobody_was_told(own: Till) -> None:
    await own.paid(own.transfer(USER))
    await mined(own.token.client, await spend_nonce(own, 1))
    own.switch.pause("another reason")
    async with own.again() as later:
        await later.payments.first_look()
        assert later.switch.reason() == "another reason"
        assert later.payments.conditions() != []
        later.switch.resume()
        with pytest.raises(Unavailable, match="not on record"):
            await later.payments.prepare(later.transfer(USER))
        assert "does not know" in (later.switch.reason() or "")


async def test_a_wallet_that_was_used_before_the_service_pays_and_pauses_nothing(
    own: Till,
) -> None:
    for nonce in range(2):
        await mined(own.token.client, await spend_nonce(own, nonce))
    transfer = await own.paid(own.transfer(USER))
    assert own.payment(transfer).nonce == 2
    assert own.switch.reason() is None


async def test_a_copy_from_before_the_first_payout_is_seen_as_one(own: Till) -> None:
    await own.payments.first_look()
    await mined(own.token.client, await spend_nonce(own, 0))
    with pytest.raises(Unavailable, match="not on record"):
        await own.payments.prepare(own.transfer(USER))


async def test_a_transaction_that_the_operator_explained_pauses_nothing(own: Till) -> None:
    await own.paid(own.transfer(USER))
    txid = await spend_nonce(own, 1)
    await mined(own.token.client, txid)
    note = "INSERT INTO explained_transactions (network, txid, note, at) VALUES (?, ?, 'me', 1)"
    await own.database.write([Statement(note, (NETWORK, txid))])
    assert own.payment(await own.paid(own.transfer(USER))).nonce == 2
    await mined(own.token.client, await spend_nonce(own, 3))
    with pytest.raises(Unavailable, match="not on record"):
        await own.payments.prepare(own.transfer(USER))


async def test_a_sweep_waits_for_the_operator_too(own: Till) -> None:
    await own.paid(own.transfer(USER))
    await own.give(1, 5 * USDC)
    await mined(own.token.client, await spend_nonce(own, 1))
    for _ in range(2):
        await own.sweeps.maintain()
    assert await own.token.client.nonce(HOT) == 2
    assert own.switch.reason() is not None
    own.switch.resume()
    await own.sweeps.maintain()
    assert await own.token.client.nonce(HOT) == 3
