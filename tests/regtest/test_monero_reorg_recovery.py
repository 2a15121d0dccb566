"""Recovery from reorgs and from payments that can never be mined, on real daemons."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain.order import Transfer
from rpcsvc.health import Health, Severity, texts_of
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.presence import MoneroPayoutEnd
from rpcsvc.settlement.onchain.monero.records import MoneroPayment, MoneroPaymentState
from rpcsvc.settlement.onchain.unrecorded import NotAdopted
from tests.logs import captured
from tests.regtest.daemons import SPENDABLE_AGE, Miner, pop_blocks
from tests.regtest.payees import Payee, pay, settle
from tests.regtest.treasury import OPTIONS, XMR, Treasury

pytestmark = pytest.mark.slow

RECOVERY_MODULE = "rpcsvc.settlement.onchain.monero.presence"
UNITS = XMR // 20
MORE = XMR + XMR // 2
ACCOUNTS = 9  # each test below may use one up


async def abandoned(own: Treasury, payee: Payee, miner: Miner, node: MonerodClient) -> str:
    """A published payment that the node has abandoned: in its pool, never mined; its transfer's id.

    Its input had just unlocked when blocks were replaced, so it was invalid for a moment.
    """
    await pay(own, await own.prepared(own.transfer(payee.address, UNITS)))
    await miner.mine(SPENDABLE_AGE)  # the change has its tenth block with the newest
    transfer = await own.prepared(own.transfer(payee.address, MORE))
    await pay(own, transfer)
    await pop_blocks(node, 2)
    await miner.mine(5)
    assert (await own.adapter.payments.look_up(transfer)).outcome is Outcome.PENDING
    assert [item.abandoned for item in await node.pool() if item.txid == transfer.txid] == [True]
    return transfer.transfer_id


async def test_payment_that_the_node_dropped_is_published_again(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    name = await abandoned(own, payee, miner, node)
    await own.adapter.maintain()
    await miner.mine(OPTIONS.settled_after)
    payment = await own.ledger.payment(name)
    assert payment is not None
    assert (await node.transactions([payment.txid]))[payment.txid].height is not None
    assert sorted(await payee.received()) == [UNITS, MORE]


async def test_a_node_that_does_not_forget_it_is_the_operators_affair(
    own: Treasury,
    payee: Payee,
    miner: Miner,
    node: MonerodClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = await abandoned(own, payee, miner, node)

    async def refused(_txids: object) -> None:
        raise NodeError("monerod", "flush_txpool", -32601, "Method not found")

    monkeypatch.setattr(own.node, "flush_pool", refused)
    await own.adapter.maintain()
    assert Health.of(await own.adapter.conditions()).ok, "other payments go on"
    assert [name in note for note in texts_of(await own.adapter.conditions(), Severity.NOTE)] == [
        True
    ]
    monkeypatch.undo()
    await miner.mine()
    await own.adapter.maintain()
    await miner.mine()
    await own.adapter.maintain()
    assert texts_of(await own.adapter.conditions(), Severity.NOTE) == []
    assert sorted(await payee.received()) == [UNITS, MORE]


async def test_outputs_held_for_an_impossible_payment_are_freed(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    """A payment of both outputs fails because another transaction has spent one of them."""
    transfer = await own.prepared(own.transfer(payee.address, MORE))
    payment = await own.ledger.payment(transfer.transfer_id)
    assert payment is not None
    assert len(payment.key_images) == 2
    for image in payment.key_images:
        await own.wallet.freeze(image)
    own.options = replace(OPTIONS, failed_after=2)
    async with own.again() as later:
        await later.wallet.thaw(payment.key_images[0])
        address = await later.wallet.primary_address()
        rival = await later.wallet.prepare_sweep(payment.key_images[0], address)
        await node.submit(rival.raw)
        for _ in range(4):
            await miner.mine()
            await pay(later, transfer)
        assert await later.ledger.payments_in(MoneroPaymentState.FAILED)
        await later.adapter.maintain()
        await miner.mine(SPENDABLE_AGE)
        await settle(later, miner, await later.prepared(later.transfer(payee.address, MORE)))
    assert await payee.received() == [MORE]


async def test_settled_payout_that_cannot_return_is_reported(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the new branch another transaction has spent its input: only the operator can pay."""
    logs = captured(monkeypatch, RECOVERY_MODULE)
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    payment = await own.ledger.payment(transfer.transfer_id)
    assert payment is not None
    address = await own.wallet.primary_address()
    rival = await own.wallet.prepare_sweep(payment.key_images[0], address)
    await settle(own, miner, transfer)
    await pop_blocks(node, OPTIONS.settled_after)
    await node.flush_pool()
    await node.submit(rival.raw)
    ending, payment = gone(own), await settled_one(own, transfer)
    for blocks in (1, 1, OPTIONS.tracked_blocks):
        await miner.mine(blocks)
        await own.adapter.maintain()
        reported = Health.of(await own.adapter.conditions()).detail or ""
        assert f"payment {transfer.transfer_id} was settled" in reported
        assert f"rpcsvc payouts close {transfer.transfer_id} --note TEXT" in reported
        first = await ending.end(payment) if blocks == 1 else None
        assert first in (rival.txid, None), "it is not deep yet"
    assert await ending.end(payment) is None
    async with own.again() as later:
        assert "a reorganisation of monero took it away" in (
            Health.of(await later.adapter.conditions()).detail or ""
        )
    assert [item["event"] for item in logs.entries].count("monero_settled_payment_dropped") == 1
    assert await payee.received() == []


def gone(own: Treasury) -> MoneroPayoutEnd:
    """The check of ``rpcsvc payouts close``, on the adapter's own wallet."""
    connection = MoneroConnection(own.node, own.adapter_wallet, own.ledger, own.options)

    async def annotate(_txid: str) -> None:
        pass

    return MoneroPayoutEnd(connection, own.ledger, own.clock, own.options, annotate)


async def settled_one(own: Treasury, transfer: Transfer) -> MoneroPayment:
    payment = await own.ledger.payment(transfer.transfer_id)
    assert payment is not None
    return payment


async def test_end_refuses_a_payout_that_may_be_mined_yet(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    await settle(own, miner, transfer)
    payment = await settled_one(own, transfer)
    with pytest.raises(NotAdopted, match=r"is in block \d+"):
        await gone(own).end(payment)
    await pop_blocks(node, OPTIONS.settled_after)
    with pytest.raises(NotAdopted, match="is in the node's pool"):
        await gone(own).end(payment)
    await node.flush_pool()
    with pytest.raises(NotAdopted, match="the node said: accepted"):
        await gone(own).end(payment)
    await miner.mine()
    assert await payee.received() == [UNITS]


async def test_end_spends_the_inputs_of_an_undisplaced_payout(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    """The node refuses the bytes permanently, as when one of its decoys is gone."""
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    payment = await settled_one(own, transfer)
    await own.adapter.payments.publish(transfer)
    await node.flush_pool()
    await own.wallet.freeze(payment.key_images[0])
    dead = replace(payment, raw="00" + payment.raw[2:])  # bytes that no node takes
    rival = await gone(own).end(dead)
    assert rival is not None
    await miner.mine(OPTIONS.failed_after)
    assert (await own.adapter.payments.look_up(transfer)).outcome is Outcome.FAILED
    assert await gone(own).end(dead) is None
    assert await payee.received() == []


@pytest.mark.parametrize("settled", [False, True])
async def test_payout_with_inputs_locked_again_is_mined_later(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient, settled: bool
) -> None:
    """The node refuses it for some blocks. The same bytes are submitted until it is accepted."""
    await pay(own, await own.prepared(own.transfer(payee.address, UNITS)))
    await miner.mine(SPENDABLE_AGE)  # the change has its tenth block with the newest
    transfer = await own.prepared(own.transfer(payee.address, MORE))
    blocks = OPTIONS.settled_after if settled else 1
    await pay(own, transfer)
    await miner.mine(blocks)
    outcome = (await own.adapter.payments.look_up(transfer)).outcome
    assert outcome is (Outcome.SETTLED if settled else Outcome.PENDING)
    await pop_blocks(node, blocks + 2)
    await node.flush_pool()
    if settled:
        await own.adapter.maintain()
        assert await node.transactions([transfer.txid or ""]) == {}, "it is refused"
    else:
        refused = await pay(own, transfer)
        assert (refused.outcome, "invalid" in refused.reason) == (Outcome.UNKNOWN, True)
    await miner.mine(blocks + 2)
    await own.adapter.maintain()
    if not settled:
        assert (await pay(own, transfer)).outcome is Outcome.PENDING
    await miner.mine(OPTIONS.settled_after)
    assert (await own.adapter.payments.look_up(transfer)).outcome is Outcome.SETTLED
    await own.adapter.maintain()
    assert Health.of(await own.adapter.conditions()).ok
    assert sorted(await payee.received()) == [UNITS, MORE]
