"""The XMR side on real daemons: starting, addresses, deposits, the wallet's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rpcsvc.domain.states import DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports import Observation
from rpcsvc.settlement.onchain.monero.ledger import Threshold
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from tests.regtest.daemons import (
    SPENDABLE_AGE,
    Miner,
    Monerod,
    WalletRpc,
    kill_and_reopen,
    new_wallet,
    run_apart,
)
from tests.regtest.treasury import (
    OPTIONS,
    XMR,
    Treasury,
    add_account,
    bank_of,
    payer_of,
    signed_to,
    treasury,
)

pytestmark = pytest.mark.slow  # the quick tests must stay quick

SEEN, CONFIRMED, REMOVED = DepositState.SEEN, DepositState.CONFIRMED, DepositState.REMOVED


@pytest.fixture(scope="module")
def killable(monerod: Monerod, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WalletRpc]:
    """A wallet daemon that tests share and leave running."""
    with WalletRpc(tmp_path_factory.mktemp("killable"), monerod) as daemon:
        run_apart(new_wallet(daemon))
        yield daemon


@pytest.fixture
async def side(killable: WalletRpc, miner: Miner, tmp_path: Path) -> AsyncIterator[Treasury]:
    """A side on an account without money."""
    account, _ = await add_account(killable)
    async with treasury(killable, tmp_path, account=account) as made:
        yield made


@pytest.fixture
async def own(wallet_rpc: WalletRpc, miner: Miner, tmp_path: Path) -> AsyncIterator[Treasury]:
    """A side on a new wallet."""
    await new_wallet(wallet_rpc)
    async with treasury(wallet_rpc, tmp_path) as made:
        yield made


class Stagenet(WalletRpc):
    """A wallet daemon for another network than its node's."""

    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--stagenet"]


async def states(side: Treasury) -> list[DepositState]:
    """One pass, committed: the states that changed."""
    return [item.state for item in await side.reconcile()]


# --- starting ----------------------------------------------------------------------------------


async def test_a_side_starts_ready_with_addresses_and_fees(side: Treasury) -> None:
    assert side.side.health().ok, side.side.health()
    side.side.require_ready()
    assert side.side.fee("arbitrum") > 0
    assert side.side.names("arbitrum").network == "monero-regtest"


async def test_a_node_on_another_network_is_refused(side: Treasury) -> None:
    async with treasury(side.rpc, side.data_dir, replace(OPTIONS, nettype="stagenet")) as other:
        assert "wrong network" in (other.side.health().detail or "")
        with pytest.raises(Unavailable):
            other.side.deposit_address()


async def test_a_wallet_of_another_network_is_refused(
    monerod: Monerod, miner: Miner, tmp_path: Path
) -> None:
    with Stagenet(tmp_path / "wallets", monerod) as rpc:
        await new_wallet(rpc)
        async with treasury(rpc, tmp_path) as other:
            assert "the wallet is of stagenet" in (other.side.health().detail or "")
            with pytest.raises(Unavailable):
                other.side.require_ready()
            assert other.ledger.wallet() is None


async def test_a_swapped_wallet_is_refused_at_a_start_and_in_the_middle(own: Treasury) -> None:
    await new_wallet(own.rpc, "another")
    with pytest.raises(Unavailable):
        await own.sign(own.transfer(await own.wallet.primary_address()))
    assert "another wallet" in (own.side.health().detail or "")
    assert await own.side.observe() == Observation()
    async with own.again() as later:
        assert "another wallet" in (later.side.health().detail or "")
        with pytest.raises(Unavailable):
            later.side.require_ready()


async def test_a_dead_wallet_is_reported_and_its_return_noticed(side: Treasury) -> None:
    await asyncio.to_thread(side.rpc.kill)
    assert await side.side.observe() == Observation()
    assert "wallet is down" in (side.side.health().detail or "")
    await asyncio.to_thread(side.rpc.start)
    await side.side.maintain()
    assert side.side.health().ok, side.side.health()  # it opened the wallet file itself


async def test_a_locked_wallet_is_reported(side: Treasury) -> None:
    await side.wallet.close()
    side.use(replace(OPTIONS, wallet_file=None))
    async with side.again() as later:
        assert "locked" in (later.side.health().detail or "")


# --- addresses ---------------------------------------------------------------------------------


async def test_addresses_are_handed_out_once_also_after_kills(side: Treasury) -> None:
    given = {side.side.deposit_address() for _ in range(5)}
    assert len(given) == 5
    await kill_and_reopen(side.rpc, side.wallet)
    async with side.again(in_order=False) as later:
        more = {later.side.deposit_address() for _ in range(5)}
        assert given.isdisjoint(more)
        for address in given | more:
            assert await later.wallet.index_of(address) is not None


async def test_a_stop_in_order_gives_unused_addresses_back(side: Treasury) -> None:
    used = side.side.deposit_address()
    async with side.again() as later:
        following = await later.wallet.index_of(later.side.deposit_address())
        before = await later.wallet.index_of(used)
        assert before is not None
        assert following == (before.major, before.minor + 1)


async def test_addresses_run_out_with_a_reason_and_are_refilled(side: Treasury) -> None:
    given = [side.side.deposit_address() for _ in range(OPTIONS.reserve)]
    await side.side.maintain()
    given += [side.side.deposit_address() for _ in range(OPTIONS.reserve)]
    assert len(set(given)) == len(given)
    with pytest.raises(Unavailable, match="deposit address"):
        for _ in range(OPTIONS.pool_target):
            side.side.deposit_address()


async def test_a_database_older_than_the_wallet_gives_no_address_out_again(side: Treasury) -> None:
    (unknown,) = await side.wallet.create_addresses(1)
    await side.wallet.store()
    async with side.again() as later:
        fresh = await later.wallet.index_of(later.side.deposit_address())
        assert fresh is not None
        assert fresh.minor > unknown.index.minor


async def test_a_wallet_that_lost_addresses_makes_the_same_again(own: Treasury) -> None:
    seed, rpc = await own.wallet.seed(), own.rpc
    last = [own.side.deposit_address() for _ in range(3)][-1]
    await own.wallet.restore("restored", "", seed, (await own.wallet.height()) - 1)
    async with own.again() as later:
        assert later.rpc is rpc
        assert later.side.health().ok, later.side.health()
        assert await later.wallet.index_of(last) is not None
        assert later.side.deposit_address() != last


# --- deposits ----------------------------------------------------------------------------------


async def test_a_deposit_is_seen_confirmed_and_then_left_alone(
    side: Treasury, miner: Miner, node: MonerodClient
) -> None:
    txid = await miner.pay(at := side.side.deposit_address(), 2 * XMR, XMR)
    (seen,) = await side.reconcile()
    assert (seen.state, seen.units, seen.address) == (SEEN, 3 * XMR, at)
    assert (seen.key.network, seen.key.txid) == ("monero", txid)
    assert seen.first_seen_at == side.clock.now
    await miner.mine(2)
    assert await side.reconcile() == []
    assert side.side.confirmations(seen.key) == 2
    await miner.mine()
    (confirmed,) = await side.reconcile()
    assert confirmed == replace(seen, state=CONFIRMED)
    assert await side.reconcile() == []
    await miner.mine(OPTIONS.tracked_blocks)
    assert await side.reconcile() == []
    assert side.ledger.deposits_to_watch(10**9) == []


async def test_a_larger_deposit_takes_longer_also_in_parts(side: Treasury, miner: Miner) -> None:
    at = side.side.deposit_address()
    for _ in range(2):
        await miner.pay(at, 3 * XMR)
        await miner.mine(1)
    await miner.mine(3)
    assert await states(side) == [SEEN, SEEN]
    await miner.mine(2)
    assert await states(side) == [CONFIRMED, CONFIRMED]


async def test_what_was_not_acknowledged_is_shown_again_with_its_first_time(
    side: Treasury, miner: Miner
) -> None:
    await miner.pay(side.side.deposit_address(), XMR)
    (shown,) = (await side.side.observe()).sightings
    await side.side.acknowledge([])
    await miner.mine()
    side.clock.now += 5000
    async with side.again(in_order=False) as later:
        assert (await later.side.observe()).sightings == [shown]
        assert shown.first_seen_at == side.clock.now - 5000


async def test_a_cold_start_catches_up(side: Treasury, miner: Miner) -> None:
    await side.reconcile()
    at = side.side.deposit_address()
    async with side.again(before=lambda: miner.fund(at, XMR)) as later:
        assert await states(later) == [CONFIRMED]


async def test_a_deposit_in_another_block_after_a_reorganisation_goes_back_to_seen(
    side: Treasury, miner: Miner, node: MonerodClient
) -> None:
    txid = await miner.pay(side.side.deposit_address(), XMR)
    await miner.mine(3)
    (confirmed,) = await side.reconcile()
    assert confirmed.state is CONFIRMED
    await node.pop_blocks(3)
    assert await states(side) == [SEEN]
    await miner.mine(5)
    assert await states(side) == [CONFIRMED]
    height = (await node.transactions([txid]))[txid].height
    assert side.side.confirmations(confirmed.key) == (await node.info()).height - (height or 0)


async def test_a_deposit_that_is_gone_for_good_is_removed_before_the_next_block(
    side: Treasury, miner: Miner, node: MonerodClient
) -> None:
    await miner.mine()
    await miner.pay(side.side.deposit_address(), XMR)
    await miner.mine(3)
    assert await states(side) == [CONFIRMED]
    await node.pop_blocks(3)
    await node.flush_pool()
    # The wallet still shows it, with its old confirmations.
    await side.wallet.refresh()
    assert len(await side.wallet.transfers(0)) == 1
    assert await states(side) == [REMOVED]
    await miner.mine(5)
    assert await states(side) == []


async def test_a_deposit_that_comes_back_is_seen_again_with_its_first_time(
    side: Treasury, miner: Miner, node: MonerodClient
) -> None:
    async with bank_of(miner) as bank:
        paid = await signed_to(bank, {side.side.deposit_address(): XMR})
    await node.submit(paid.raw)
    (first,) = await side.reconcile()
    await node.flush_pool()
    assert await states(side) == [REMOVED]
    side.clock.now += 60_000
    assert await states(side) == []
    await node.submit(paid.raw)
    assert await side.reconcile() == [first]
    await miner.mine(3)
    assert await states(side) == [CONFIRMED]


async def test_a_deposit_spent_twice_in_the_pool_is_removed(
    side: Treasury, miner: Miner, node: MonerodClient
) -> None:
    at = side.side.deposit_address()
    async with payer_of(miner, 5 * XMR) as payer:
        paid, other = await signed_to(payer, {at: XMR}), await signed_to(payer, {at: 2 * XMR})
    assert set(paid.key_images) & set(other.key_images)
    await node.submit(paid.raw)
    assert await states(side) == [SEEN]
    await node.submit(other.raw)
    (gone,) = await side.reconcile()
    assert (gone.key.txid, gone.state) == (paid.txid, REMOVED)
    await miner.mine(3)
    (won,) = await side.reconcile()
    assert (won.key.txid, won.state, won.units) == (paid.txid, CONFIRMED, XMR)


async def test_a_deposit_that_its_sender_locked_waits_for_its_unlocking(
    side: Treasury, miner: Miner, node: MonerodClient
) -> None:
    until = (await node.info()).height + 12
    async with bank_of(miner) as bank:
        await bank.refresh()
        to = {"address": side.side.deposit_address(), "amount": XMR}
        await bank.rpc.act("transfer", {"destinations": [to], "unlock_time": until})
    await miner.mine(10)
    assert await states(side) == [SEEN]
    await miner.mine(2)
    assert await states(side) == [CONFIRMED]


async def test_watching_costs_the_same_for_any_number_of_open_orders(side: Treasury) -> None:
    await side.reconcile()
    calls = side.count_calls()
    await side.reconcile()
    few = len(calls)
    for _ in range(OPTIONS.reserve):
        side.side.deposit_address()
    calls.clear()
    await side.reconcile()
    assert len(calls) == few < 12


# --- the wallet's outputs ----------------------------------------------------------------------


async def test_the_wallet_is_split_into_outputs_and_says_what_it_can_pay(
    side: Treasury, miner: Miner
) -> None:
    await miner.fund(await side.wallet.primary_address(), 10 * XMR)
    side.use(replace(OPTIONS, outputs_target=8, output_units=XMR // 2))
    async with side.again() as later:
        assert later.side.available().max_now < 10 * XMR
        (payment,) = later.live_payments()
        await miner.mine(SPENDABLE_AGE)
        await later.side.maintain()
        now = later.side.available()
        assert now.outputs == 8
        assert now.unlocked == 10 * XMR - payment.fee
        assert 0 < now.max_now < now.unlocked
        await later.side.maintain()
        assert later.live_payments() == []


async def test_many_small_outputs_are_put_together(side: Treasury, miner: Miner) -> None:
    await miner.fund(await side.wallet.primary_address(), *([XMR // 5] * 12))
    side.use(replace(OPTIONS, outputs_target=1, dusty_outputs=10, highest_fee=XMR))
    async with side.again() as later:
        (payment,) = later.live_payments()
        assert len(payment.key_images) == 12
        await miner.mine(SPENDABLE_AGE)
        await later.side.maintain()
        assert later.side.available().outputs <= 2


def test_thresholds_must_rise() -> None:
    with pytest.raises(ValueError, match="rise"):
        replace(OPTIONS, thresholds=(Threshold(0, 10), Threshold(XMR, 5)))


async def test_two_orders_paid_by_one_transaction_are_two_deposits(
    side: Treasury, miner: Miner, node: MonerodClient
) -> None:
    first, second = side.side.deposit_address(), side.side.deposit_address()
    async with bank_of(miner) as bank:
        paid = await signed_to(bank, {first: XMR, second: 2 * XMR})
    await node.submit(paid.raw)
    seen = await side.reconcile()
    assert {item.address: item.units for item in seen} == {first: XMR, second: 2 * XMR}
    assert {item.key.txid for item in seen} == {paid.txid}
    assert len({item.key for item in seen}) == 2
