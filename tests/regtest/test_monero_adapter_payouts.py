"""Payouts of XMR on real daemons: exactly once, over kills between any two steps.

The tests count payments in the payee's wallet, never in the service's database.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.domain.events import ImpossibleTransition
from rpcsvc.domain.money import XMR as XMR_ASSET
from rpcsvc.domain.money import format_units
from rpcsvc.domain.order import Transfer
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import LacksFunds, Outcome, TransferRejected
from rpcsvc.settlement.onchain.daemon_rpc import RpcOutcomeUnknown
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.records import MoneroPayment, MoneroPaymentState
from rpcsvc.settlement.onchain.monero.wallet_types import Destination
from rpcsvc.store.database import StoreConflict
from tests.recording import Recorder
from tests.regtest.daemons import SPENDABLE_AGE, Miner, pop_blocks
from tests.regtest.payees import Payee, pay, sent, settle
from tests.regtest.treasury import (
    OPTIONS,
    XMR,
    Treasury,
    kill_wallet,
)

pytestmark = pytest.mark.slow  # the quick tests must stay quick

UNITS = XMR // 7
ACCOUNTS = 25  # each test below may use one up


# --- without faults ----------------------------------------------------------------------------


async def test_a_payout_pays_exactly_its_units_and_can_be_proved(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    assert await node.transactions([transfer.txid or ""]) == {}
    assert (await own.adapter.payments.look_up(transfer)).outcome is Outcome.ABSENT
    with pytest.raises(Unavailable, match="not settled"):
        await own.adapter.payments.receipt(transfer)
    await settle(own, miner, transfer)
    assert await payee.received() == [UNITS]
    receipt = await own.adapter.payments.receipt(transfer)
    by_key = await payee.wallet.check_key(receipt["txid"], receipt["transactionKey"], payee.address)
    assert by_key.received == UNITS
    assert receipt["amount"] == format_units(UNITS, XMR_ASSET)
    by_proof = await payee.wallet.check_proof(
        receipt["txid"], payee.address, receipt["transactionProof"], receipt["proofMessage"]
    )
    assert (by_proof.valid, by_proof.received) == (True, UNITS)
    paid = await own.ledger.payment(transfer.transfer_id)
    assert paid is not None
    assert 0 < paid.fee <= transfer.fee


async def test_payout_takes_the_lowest_rate_unless_another_waits(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    await own.adapter.maintain()
    first = await own.prepared(own.transfer(payee.address, UNITS))
    await pay(own, first)
    own.clock.now += 21 * 60 * 1000
    second = await own.prepared(own.transfer(payee.address, UNITS))
    await pay(own, second)
    lowest, raised, *_ = (await node.fees()).per_byte
    in_pool = {item.txid: item for item in await node.pool()}
    for transfer, rate in ((first, lowest), (second, raised)):
        made = in_pool[transfer.txid or ""]
        assert made.fee == rate * made.weight < transfer.fee
    await miner.mine(OPTIONS.settled_after)
    assert await payee.received() == [UNITS, UNITS]


async def test_republishing_in_pool_and_chain_pays_once_without_ghost(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    for _ in range(2):
        assert (await own.adapter.payments.publish(transfer)).outcome is Outcome.PENDING
    await miner.mine(OPTIONS.settled_after)
    for _ in range(2):
        assert (await own.adapter.payments.publish(transfer)).outcome is Outcome.SETTLED
    await miner.mine(SPENDABLE_AGE)
    assert await sent(own.wallet) == [transfer.txid]
    payment = await own.ledger.payment(transfer.transfer_id)
    assert payment is not None
    assert (await own.wallet.balance()).total == 2 * XMR - UNITS - payment.fee
    assert await payee.received() == [UNITS]


async def test_destination_that_can_not_be_paid_is_rejected(own: Treasury) -> None:
    stagenet = stagenet_subaddress(bytes(range(64)))
    ours = own.adapter.deposit_address(), await own.wallet.primary_address()
    for address in (stagenet, "4" + "1" * 94, *ours):
        with pytest.raises(TransferRejected, match="destination"):
            await own.sign(own.transfer(address))
    assert await own.live_payments() == []


async def test_a_wallet_without_enough_unlocked_money_may_pay_later(
    own: Treasury, payee: Payee
) -> None:
    with pytest.raises(LacksFunds, match="lacks 3 XMR"):
        await own.sign(own.transfer(payee.address, 5 * XMR))
    assert Health.of(await own.adapter.conditions()).ok


async def test_a_payment_that_costs_too_much_is_not_made(own: Treasury, payee: Payee) -> None:
    transfer = own.transfer(payee.address)
    own.use(replace(OPTIONS, highest_fee=1))
    async with own.again() as later:
        calls = later.count_calls()
        with pytest.raises(Unavailable, match="fee"):
            await later.sign(transfer)
        assert "transfer" not in calls, "the wallet would work on it for nothing"
        with pytest.raises(Unavailable, match="fee"):
            later.adapter.fee()
        assert "nothing is paid" in (Health.of(await later.adapter.conditions()).detail or "")
        assert await later.live_payments() == []


# --- one at a time -----------------------------------------------------------------------------


async def test_second_payment_is_signed_after_the_first_is_published(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    first = await own.prepared(own.transfer(payee.address, UNITS))
    second = own.transfer(payee.address, 2 * UNITS)
    with pytest.raises(Unavailable, match="earlier XMR payment"):
        await own.sign(second)
    assert Health.of(await own.adapter.conditions()).ok
    own.clock.now += 11 * 60 * 1000
    assert first.transfer_id in (Health.of(await own.adapter.conditions()).detail or "")
    async with own.again(in_order=False) as later:
        with pytest.raises(Unavailable, match="earlier XMR payment"):
            await later.sign(second)
        await pay(later, first)
        await pay(later, await later.prepared(second))
        await miner.mine(OPTIONS.settled_after)
        assert sorted(await payee.received()) == [UNITS, 2 * UNITS]


async def test_database_refuses_second_payment_and_reused_key_image(
    own: Treasury, payee: Payee
) -> None:
    transfer = await own.prepared(own.transfer(payee.address))
    first = await own.ledger.payment(transfer.transfer_id)
    assert first is not None
    second = replace(first, payment_id="tr_x", txid="ab" * 32, key_images=("cd" * 32,))
    with pytest.raises(StoreConflict):
        await own.ledger.add_payment(second)
    await pay(own, transfer)
    with pytest.raises(StoreConflict):
        await own.ledger.add_payment(replace(second, key_images=first.key_images))
    await own.ledger.add_payment(second)


async def test_concurrent_transfers_spend_different_outputs_in_turn(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    transfers = [own.transfer(payee.address, UNITS + n) for n in range(2)]
    results = await asyncio.gather(*(own.sign(item) for item in transfers), return_exceptions=True)
    assert sorted(type(item).__name__ for item in results) == ["PreparedTransfer", "Unavailable"]


async def test_a_payout_that_its_order_refuses_keeps_nothing_back(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    """The order is cancelled during signing: the bytes are dropped and their outputs unfrozen."""
    refused, other = own.transfer(payee.address, UNITS), own.transfer(payee.address, 2 * UNITS)
    with pytest.raises(ImpossibleTransition):
        await own.adapter.payments.prepare(
            refused, [], Recorder(ImpossibleTransition("it is cancelled")), {}
        )
    assert await own.live_payments() == []
    await pay(own, await own.prepared(other))
    await miner.mine(OPTIONS.settled_after)
    assert await payee.received() == [2 * UNITS]


# --- killed between any two steps --------------------------------------------------------------


async def test_kill_after_prepare_committed_pays_the_same_bytes(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    """The order layer has no record of them yet, and prepares the transfer again."""
    transfer = own.transfer(payee.address, UNITS)
    first = await own.prepared(transfer)
    await kill_wallet(own.rpc)
    async with own.again(in_order=False) as later:
        again = await later.prepared(transfer)
        assert again == first
        await settle(later, miner, again)
    assert await payee.received() == [UNITS]


async def test_kill_between_signing_and_commit_loses_nothing(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    transfer = own.transfer(payee.address, UNITS)
    await own.wallet.prepare([Destination(payee.address, UNITS)])
    async with own.again(in_order=False) as later:
        await settle(later, miner, await later.prepared(transfer))
    assert await payee.received() == [UNITS]


async def test_kill_between_relay_and_store_pays_once(
    own: Treasury, payee: Payee, miner: Miner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wallet loses the payment and would spend its inputs again: the next one uses others."""
    transfer = await own.prepared(own.transfer(payee.address, UNITS))

    async def killed() -> None:
        await asyncio.to_thread(own.rpc.kill)
        raise RpcOutcomeUnknown("wallet", "store", "killed")

    monkeypatch.setattr(own.adapter_wallet, "store", killed)
    assert (await own.adapter.payments.publish(transfer)).outcome is Outcome.PENDING
    await asyncio.to_thread(own.rpc.start)
    async with own.again(in_order=False) as later:
        second = await later.prepared(later.transfer(payee.address, 2 * UNITS))
        payments = [await later.ledger.payment(item.transfer_id) for item in (transfer, second)]
        images = [set(item.key_images) for item in payments if item]
        assert images[0].isdisjoint(images[1])
        await pay(later, second)
        await settle(later, miner, transfer)
        assert sorted(await payee.received()) == [UNITS, 2 * UNITS]
        receipt = await later.adapter.payments.receipt(transfer)
        by_key = await payee.wallet.check_key(
            receipt["txid"], receipt["transactionKey"], payee.address
        )
        assert by_key.received == UNITS


@pytest.mark.parametrize("reached", [False, True], ids=["request lost", "reply lost"])
async def test_relay_of_unknown_outcome_pays_once_and_relays_once(
    own: Treasury,
    payee: Payee,
    miner: Miner,
    monkeypatch: pytest.MonkeyPatch,
    reached: bool,
) -> None:
    """Killed during the relay: the state RELAYING says that the wallet may have relayed it."""
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    relay: Any = own.adapter_wallet.relay

    async def cut(metadata: str) -> str:
        if reached:
            await relay(metadata)
        raise asyncio.CancelledError

    monkeypatch.setattr(own.adapter_wallet, "relay", cut)
    with pytest.raises(asyncio.CancelledError):
        await own.adapter.payments.publish(transfer)
    await kill_wallet(own.rpc)
    async with own.again(in_order=False) as later:
        payment = await later.ledger.payment(transfer.transfer_id)
        assert payment is not None
        assert payment.state is MoneroPaymentState.RELAYING
        calls = later.count_calls()
        await settle(later, miner, transfer)
        assert "relay_tx" not in calls
    assert await payee.received() == [UNITS]


async def test_killed_after_publishing_it_is_known_at_the_restart(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    await own.adapter.payments.publish(transfer)
    await kill_wallet(own.rpc)
    async with own.again(in_order=False) as later:
        assert (await later.adapter.payments.look_up(transfer)).outcome is Outcome.PENDING
        await settle(later, miner, transfer)
    assert await payee.received() == [UNITS]


# --- reorganisations ---------------------------------------------------------------------------


async def test_reorged_payout_is_republished_with_the_same_bytes(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    await own.adapter.payments.publish(transfer)
    await miner.mine(2)
    assert (await own.adapter.payments.look_up(transfer)).outcome is Outcome.PENDING
    await pop_blocks(node, 2)
    await node.flush_pool()
    assert (await own.adapter.payments.look_up(transfer)).outcome is Outcome.ABSENT
    calls = own.count_calls()
    await settle(own, miner, transfer)
    assert "relay_tx" not in calls
    assert await payee.received() == [UNITS]
    assert len(await node.transactions([transfer.txid or ""])) == 1


async def test_settled_payout_lost_to_a_deep_reorg_returns(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    await settle(own, miner, transfer)
    await pop_blocks(node, OPTIONS.settled_after)
    await node.flush_pool()
    await own.adapter.maintain()
    assert transfer.transfer_id in (Health.of(await own.adapter.conditions()).detail or "")
    await miner.mine(OPTIONS.settled_after)
    await own.adapter.maintain()
    assert Health.of(await own.adapter.conditions()).ok
    assert await payee.received() == [UNITS]


async def outrun(
    own: Treasury, payee: Payee, node: MonerodClient
) -> tuple[Transfer, MoneroPayment]:
    """A signed payout and its payment; another transaction has spent one of its inputs."""
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    payment = await own.ledger.payment(transfer.transfer_id)
    assert payment is not None
    own_address = await own.wallet.primary_address()
    rival = await own.wallet.prepare_sweep(payment.key_images[0], own_address)
    await node.submit(rival.raw)
    return transfer, payment


async def test_payment_fails_only_when_a_deep_one_spent_its_input(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    transfer, payment = await outrun(own, payee, node)
    assert (await pay(own, transfer)).outcome is Outcome.UNKNOWN
    await miner.mine()
    for _ in range(OPTIONS.failed_after - 1):
        assert (await pay(own, transfer)).outcome is Outcome.UNKNOWN
        await miner.mine()
    failed = await pay(own, transfer)
    assert failed.outcome is Outcome.FAILED
    assert await pay(own, transfer) == failed
    assert await payee.received() == []
    assert await own.ledger.live_key_images(payment.key_images) == set()


async def test_a_rival_that_is_reorganised_away_again_proves_nothing(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    transfer, _ = await outrun(own, payee, node)
    await miner.mine(2)
    assert (await pay(own, transfer)).outcome is Outcome.UNKNOWN
    await pop_blocks(node, 2)
    await node.flush_pool()
    await miner.mine(OPTIONS.failed_after)
    await settle(own, miner, transfer)
    assert await payee.received() == [UNITS]


async def test_a_wallet_ahead_of_its_node_signs_nothing(
    own: Treasury, payee: Payee, miner: Miner, node: MonerodClient
) -> None:
    await miner.mine(2)
    await own.wallet.refresh()
    await pop_blocks(node, 2)
    with pytest.raises(Unavailable, match="same block"):
        await own.sign(own.transfer(payee.address))
    assert "out of sync" in (Health.of(await own.adapter.conditions()).detail or "")
    await miner.mine()
    await own.sign(own.transfer(payee.address))
    assert Health.of(await own.adapter.conditions()).ok
