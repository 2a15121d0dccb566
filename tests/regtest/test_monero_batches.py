"""Several transfers in one Monero transaction, on real daemons: each is paid once, and proved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.domain.order import Transfer, TransferState
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.monero.wallet import MOST_DESTINATIONS
from tests.regtest.daemons import Miner
from tests.regtest.payees import Payee, pay, sent
from tests.regtest.treasury import OPTIONS, XMR, Treasury, kill_wallet

pytestmark = pytest.mark.slow

UNITS = XMR // 20
ACCOUNTS = 10  # each test below may use one up


async def due(own: Treasury, payee: Payee, count: int) -> list[Transfer]:
    """Transfers of different amounts to as many addresses of one wallet."""
    made = await payee.wallet.create_addresses(count)
    return [own.transfer(item.address, UNITS + n) for n, item in enumerate(made)]


async def prepared(own: Treasury, transfers: Sequence[Transfer]) -> list[Transfer]:
    """The transfers that one payment pays, as the order layer has them once prepared."""
    first, *companions = transfers
    signed = await own.sign(first, *companions)
    return [
        replace(item, state=TransferState.PREPARED, txid=signed.txid, raw=signed.raw)
        for item in transfers
        if item.transfer_id in signed.transfer_ids
    ]


async def received(payee: Payee) -> dict[str, list[int]]:
    """The amounts that each address of the payee's wallet received, by transaction."""
    await payee.wallet.refresh()
    found: dict[str, list[int]] = {}
    for item in await payee.wallet.transfers(0):
        found.setdefault(item.address, []).append(item.amount)
    return found


def once(transfers: Sequence[Transfer]) -> dict[str, list[int]]:
    """The amounts that the payee must have received."""
    return {item.address: [item.units] for item in transfers}


async def test_full_batch_is_paid_and_proved_one_by_one(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    transfers = await prepared(own, await due(own, payee, MOST_DESTINATIONS + 2))
    assert len(transfers) == MOST_DESTINATIONS
    for item in transfers:
        assert (await pay(own, item)).outcome is Outcome.PENDING
    await miner.mine(OPTIONS.settled_after)
    await own.adapter.observe()  # until the next block is seen, a payment that waits still waits
    for item in transfers:
        assert await own.adapter.payments.look_up(item) == Verdict(Outcome.SETTLED)
    assert await received(payee) == once(transfers)
    assert await sent(own.wallet) == [transfers[0].txid]
    for item in (transfers[0], transfers[-1]):
        receipt = await own.adapter.payments.receipt(item)
        by_proof = await payee.wallet.check_proof(
            receipt["txid"], item.address, receipt["transactionProof"], receipt["proofMessage"]
        )
        assert (by_proof.valid, by_proof.received) == (True, item.units)


async def test_kill_after_signing_pays_the_same_batch(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    transfers = await due(own, payee, 3)
    first = await prepared(own, transfers)
    await kill_wallet(own.rpc)
    async with own.again(in_order=False) as later:
        other = later.transfer((await payee.wallet.create_addresses(1))[0].address, UNITS)
        with pytest.raises(Unavailable, match="earlier XMR payment"):
            await later.sign(other)
        for item in first:
            await pay(later, item)
        await miner.mine(OPTIONS.settled_after)
        assert await received(payee) == once(transfers)


async def test_a_companion_that_can_not_be_paid_stays_behind(own: Treasury, payee: Payee) -> None:
    good, *_ = await due(own, payee, 1)
    bad = [own.transfer(stagenet_subaddress(bytes(range(64)))), own.transfer("4" + "1" * 94)]
    ours = own.transfer(own.adapter.deposit_address())
    again = own.transfer(good.address, UNITS)
    signed = await own.sign(good, *bad, ours, again)
    assert signed.transfer_ids == (good.transfer_id,)


async def test_integrated_address_is_paid_alone_and_splits_no_others(
    own: Treasury, payee: Payee
) -> None:
    """A transaction with a payment id has one recipient: a batch with it would be split up."""
    made = await payee.wallet.rpc.read("make_integrated_address", {})
    integrated = own.transfer(made["integrated_address"], UNITS)
    first, last = await due(own, payee, 2)
    calls = own.count_calls()
    together = await own.sign(first, integrated, last)
    assert together.transfer_ids == (first.transfer_id, last.transfer_id)
    assert calls.count("transfer") == 1
    await pay(own, replace(first, state=TransferState.PREPARED, txid=together.txid,
                           raw=together.raw))  # fmt: skip
    calls.clear()
    alone = await own.sign(integrated, own.transfer(payee.address, UNITS))
    assert (alone.transfer_ids, calls.count("transfer")) == ((integrated.transfer_id,), 1)


async def test_without_money_for_all_the_first_is_paid_alone(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    first, second = await due(own, payee, 2)
    second = replace(second, units=5 * XMR)
    signed = await prepared(own, [first, second])
    assert [item.transfer_id for item in signed] == [first.transfer_id]
    await pay(own, signed[0])
    await miner.mine()
    assert await received(payee) == once([first])


async def test_a_transfer_signed_for_elsewhere_does_not_go_along(
    own: Treasury, payee: Payee
) -> None:
    first, second, third = await due(own, payee, 3)
    alone = await own.prepared(second)
    await pay(own, alone)
    signed = await own.sign(first, second, third)
    assert set(signed.transfer_ids) == {first.transfer_id, third.transfer_id}


async def test_a_payment_that_is_not_mined_for_an_hour_is_in_health(
    own: Treasury, payee: Payee, miner: Miner
) -> None:
    transfer = await own.prepared(own.transfer(payee.address, UNITS))
    await pay(own, transfer)
    assert Health.of(await own.adapter.conditions()).ok
    own.clock.now += 61 * 60 * 1000
    problem = Health.of(await own.adapter.conditions()).detail or ""
    assert transfer.transfer_id in problem
    assert "not mined" in problem
    await miner.mine()
    await own.adapter.payments.look_up(transfer)
    assert Health.of(await own.adapter.conditions()).ok
