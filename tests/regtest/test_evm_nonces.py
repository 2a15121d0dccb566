"""A hot wallet with unrecorded outgoing transactions: a stolen key, or an older database copy.

Payouts are paused until the operator resumes them; then they continue with the next free nonce.
"""

from __future__ import annotations

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan
from rpcsvc.settlement.onchain.evm.node_types import EvmSubmission
from tests.regtest.daemons import mined
from tests.regtest.evm_payer import GWEI, HOT, KEYS, NETWORK, USDC, USER, EvmPayer
from tests.rows import statement

pytestmark = pytest.mark.slow  # the quick tests must stay quick


async def spend_nonce(payer: EvmPayer, nonce: int) -> str:
    """Use a nonce outside of the service with the same key; the transaction's id."""
    plan = TransactionPlan(payer.network.chain_id, nonce, HOT, 21_000, 50 * GWEI, GWEI)
    result = await payer.token.client.submit(KEYS.signer(0).sign(plan).raw)
    assert result.submission is EvmSubmission.ACCEPTED
    return result.txid


async def test_nonces_used_elsewhere_pause_payouts_and_are_skipped(
    payer: EvmPayer,
) -> None:
    await payer.paid(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 1))
    transfer = payer.transfer(USER)
    for _ in range(2):
        with pytest.raises(Unavailable, match="not on record"):
            await payer.sign(transfer)
    assert any("something else sends" in each.text for each in await payer.payments.conditions())
    reason = payer.switch.reason() or ""
    assert "hot wallet on arbitrum that the database does not know: run rpcsvc audit" in reason
    assert await payer.ledger.payment(transfer.transfer_id) is None

    payer.switch.resume()
    paid = await payer.paid(transfer)
    assert (await payer.payment(paid)).nonce == 2
    assert await payer.payments.conditions() == []
    assert (await payer.settle(paid)).outcome is Outcome.SETTLED
    assert await payer.token.balance(USER) == 2 * USDC
    assert payer.switch.reason() is None


async def test_acknowledged_nonces_are_remembered_new_ones_reported(
    payer: EvmPayer,
) -> None:
    await payer.paid(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 1))
    async with payer.again() as later:
        await later.payments.reconcile()
        assert later.switch.reason() is not None
        assert await later.payments.conditions() != []
        later.switch.resume()
        await later.payments.reconcile()
        assert await later.payments.conditions() == []
    async with payer.again() as later:
        await later.payments.reconcile()
        assert later.switch.reason() is None
        await mined(later.token.client, await spend_nonce(later, 2))
        with pytest.raises(Unavailable, match="not on record"):
            await later.sign(later.transfer(USER))
        assert later.switch.reason() is not None
        later.switch.resume()
        assert (await later.payment(await later.paid(later.transfer(USER)))).nonce == 3


async def test_nothing_is_reported_during_the_operators_pause(payer: EvmPayer) -> None:
    await payer.paid(payer.transfer(USER))
    await mined(payer.token.client, await spend_nonce(payer, 1))
    payer.switch.pause("another reason")
    async with payer.again() as later:
        await later.payments.reconcile()
        assert later.switch.reason() == "another reason"
        assert await later.payments.conditions() != []
        later.switch.resume()
        with pytest.raises(Unavailable, match="not on record"):
            await later.sign(later.transfer(USER))
        assert "does not know" in (later.switch.reason() or "")


async def test_wallet_used_before_the_service_pays_without_a_pause(
    payer: EvmPayer,
) -> None:
    for nonce in range(2):
        await mined(payer.token.client, await spend_nonce(payer, nonce))
    transfer = await payer.paid(payer.transfer(USER))
    assert (await payer.payment(transfer)).nonce == 2
    assert payer.switch.reason() is None


async def test_a_copy_from_before_the_first_payout_is_seen_as_one(payer: EvmPayer) -> None:
    await payer.payments.reconcile()
    await mined(payer.token.client, await spend_nonce(payer, 0))
    with pytest.raises(Unavailable, match="not on record"):
        await payer.sign(payer.transfer(USER))


async def test_annotated_transaction_pauses_nothing(payer: EvmPayer) -> None:
    await payer.paid(payer.transfer(USER))
    txid = await spend_nonce(payer, 1)
    await mined(payer.token.client, txid)
    note = "INSERT INTO annotated_transactions (network, txid, note, at) VALUES (?, ?, 'me', 1)"
    await payer.database.write([statement(note, (NETWORK, txid))])
    assert (await payer.payment(await payer.paid(payer.transfer(USER)))).nonce == 2
    await mined(payer.token.client, await spend_nonce(payer, 3))
    with pytest.raises(Unavailable, match="not on record"):
        await payer.sign(payer.transfer(USER))


async def test_a_sweep_waits_for_the_operator_too(payer: EvmPayer) -> None:
    await payer.paid(payer.transfer(USER))
    await payer.give(1, 5 * USDC)
    await mined(payer.token.client, await spend_nonce(payer, 1))
    for _ in range(2):
        await payer.sweep()
    assert await payer.token.client.nonce(HOT) == 2
    assert payer.switch.reason() is not None
    payer.switch.resume()
    payer.clock.now += 4000  # a refused sweep rests
    await payer.sweep()
    assert await payer.token.client.nonce(HOT) == 3
