"""The XMR adapter on real daemons: start, addresses, deposits, the wallet's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain.order import DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health, Severity, texts_of
from rpcsvc.orders.ports.wallets import Observation
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.thresholds import Threshold
from tests.regtest.daemons import (
    SPENDABLE_AGE,
    Miner,
    Monerod,
    WalletRpc,
    kill_and_reopen,
    new_wallet,
    pop_blocks,
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
async def adapter(killable: WalletRpc, miner: Miner, tmp_path: Path) -> AsyncIterator[Treasury]:
    """An adapter on an account without money."""
    account, _ = await add_account(killable)
    async with treasury(killable, tmp_path, account=account) as made:
        yield made


@pytest.fixture
async def own(wallet_rpc: WalletRpc, miner: Miner, tmp_path: Path) -> AsyncIterator[Treasury]:
    """An adapter on a new wallet."""
    await new_wallet(wallet_rpc)
    async with treasury(wallet_rpc, tmp_path) as made:
        yield made


class Stagenet(WalletRpc):
    """A wallet daemon for another network than its node's."""

    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--stagenet"]


async def states(adapter: Treasury) -> list[DepositState]:
    """One pass, committed: the states that changed."""
    return [item.state for item in await adapter.reconcile()]


# --- starting ----------------------------------------------------------------------------------


async def test_a_side_starts_ready_with_addresses_and_fees(adapter: Treasury) -> None:
    assert Health.of(await adapter.adapter.conditions()).ok, Health.of(
        await adapter.adapter.conditions()
    )
    adapter.adapter.require_ready()
    assert adapter.adapter.fee() > 0
    assert adapter.adapter.names("arbitrum").network == "monero-regtest"


async def test_a_node_on_another_network_is_refused(adapter: Treasury) -> None:
    async with treasury(
        adapter.rpc, adapter.data_dir, replace(OPTIONS, nettype="stagenet")
    ) as other:
        assert "wrong network" in (Health.of(await other.adapter.conditions()).detail or "")
        with pytest.raises(Unavailable):
            other.adapter.deposit_address()


async def test_a_wallet_of_another_network_is_refused(
    monerod: Monerod, miner: Miner, tmp_path: Path
) -> None:
    with Stagenet(tmp_path / "wallets", monerod) as rpc:
        await new_wallet(rpc)
        async with treasury(rpc, tmp_path) as other:
            assert "the wallet is of stagenet" in (
                Health.of(await other.adapter.conditions()).detail or ""
            )
            with pytest.raises(Unavailable):
                other.adapter.require_ready()
            assert await other.ledger.wallet() is None


async def test_swapped_wallet_is_refused_at_start_and_while_running(own: Treasury) -> None:
    await new_wallet(own.rpc, "another")
    with pytest.raises(Unavailable):
        await own.sign(own.transfer(await own.wallet.primary_address()))
    assert "another wallet" in (Health.of(await own.adapter.conditions()).detail or "")
    assert await own.adapter.observe() == Observation()
    async with own.again() as later:
        assert "another wallet" in (Health.of(await later.adapter.conditions()).detail or "")
        with pytest.raises(Unavailable):
            later.adapter.require_ready()


async def test_a_dead_wallet_is_reported_and_its_return_noticed(adapter: Treasury) -> None:
    await asyncio.to_thread(adapter.rpc.kill)
    assert await adapter.adapter.observe() == Observation()
    assert "wallet is down" in (Health.of(await adapter.adapter.conditions()).detail or "")
    await asyncio.to_thread(adapter.rpc.start)
    await adapter.adapter.maintain()
    assert Health.of(await adapter.adapter.conditions()).ok, Health.of(
        await adapter.adapter.conditions()
    )  # it opened the wallet file itself


async def test_a_locked_wallet_is_reported(adapter: Treasury) -> None:
    await adapter.wallet.close()
    adapter.use(replace(OPTIONS, wallet_file=None))
    async with adapter.again() as later:
        assert "locked" in (Health.of(await later.adapter.conditions()).detail or "")


# --- addresses ---------------------------------------------------------------------------------


async def test_addresses_are_handed_out_once_also_after_kills(adapter: Treasury) -> None:
    given = {adapter.adapter.deposit_address() for _ in range(5)}
    assert len(given) == 5
    await kill_and_reopen(adapter.rpc, adapter.wallet)
    async with adapter.again(in_order=False) as later:
        more = {later.adapter.deposit_address() for _ in range(5)}
        assert given.isdisjoint(more)
        for address in given | more:
            assert await later.wallet.index_of(address) is not None


async def test_a_stop_in_order_gives_unused_addresses_back(adapter: Treasury) -> None:
    used = adapter.adapter.deposit_address()
    async with adapter.again() as later:
        following = await later.wallet.index_of(later.adapter.deposit_address())
        before = await later.wallet.index_of(used)
        assert before is not None
        assert following == (before.major, before.minor + 1)


async def test_addresses_run_out_with_a_reason_and_are_refilled(adapter: Treasury) -> None:
    given = [adapter.adapter.deposit_address() for _ in range(OPTIONS.reserve)]
    await adapter.adapter.maintain()
    given += [adapter.adapter.deposit_address() for _ in range(OPTIONS.reserve)]
    assert len(set(given)) == len(given)
    with pytest.raises(Unavailable, match="deposit address"):
        for _ in range(OPTIONS.pool_target):
            adapter.adapter.deposit_address()


async def test_database_older_than_the_wallet_reuses_no_address(
    adapter: Treasury,
) -> None:
    (unknown,) = await adapter.wallet.create_addresses(1)
    await adapter.wallet.store()
    async with adapter.again() as later:
        fresh = await later.wallet.index_of(later.adapter.deposit_address())
        assert fresh is not None
        assert fresh.minor > unknown.index.minor


async def test_a_wallet_that_lost_addresses_makes_the_same_again(own: Treasury) -> None:
    seed, rpc = await own.wallet.seed(), own.rpc
    last = [own.adapter.deposit_address() for _ in range(3)][-1]
    await own.wallet.restore("restored", "", seed, (await own.wallet.height()) - 1)
    async with own.again() as later:
        assert later.rpc is rpc
        assert Health.of(await later.adapter.conditions()).ok, Health.of(
            await later.adapter.conditions()
        )
        assert await later.wallet.index_of(last) is not None
        assert later.adapter.deposit_address() != last


# --- deposits ----------------------------------------------------------------------------------


async def test_a_deposit_is_seen_confirmed_and_then_left_alone(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    txid = await miner.pay(at := adapter.adapter.deposit_address(), 2 * XMR, XMR)
    (seen,) = await adapter.reconcile()
    assert (seen.state, seen.units, seen.address) == (SEEN, 3 * XMR, at)
    assert (seen.key.network, seen.key.txid) == ("monero", txid)
    assert seen.first_seen_at == adapter.clock.now
    await miner.mine(2)
    assert await adapter.reconcile() == []
    assert await adapter.adapter.confirmations(seen.key) == 2
    await miner.mine()
    (confirmed,) = await adapter.reconcile()
    assert confirmed == replace(seen, state=CONFIRMED)
    assert await adapter.reconcile() == []
    await miner.mine(OPTIONS.tracked_blocks)
    assert await adapter.reconcile() == []
    assert await adapter.ledger.deposits_to_watch(10**9) == []


async def test_a_larger_deposit_takes_longer_also_in_parts(adapter: Treasury, miner: Miner) -> None:
    at = adapter.adapter.deposit_address()
    for _ in range(2):
        await miner.pay(at, 3 * XMR)
        await miner.mine(1)
    await miner.mine(3)
    assert await states(adapter) == [SEEN, SEEN]
    await miner.mine(2)
    assert await states(adapter) == [CONFIRMED, CONFIRMED]


async def test_unacknowledged_deposit_reappears_with_its_first_time(
    adapter: Treasury, miner: Miner
) -> None:
    await miner.pay(adapter.adapter.deposit_address(), XMR)
    (shown,) = (await adapter.adapter.observe()).sightings
    await adapter.adapter.acknowledge([])
    await miner.mine()
    adapter.clock.now += 5000
    async with adapter.again(in_order=False) as later:
        assert (await later.adapter.observe()).sightings == [shown]
        assert shown.first_seen_at == adapter.clock.now - 5000


async def test_a_cold_start_catches_up(adapter: Treasury, miner: Miner) -> None:
    await adapter.reconcile()
    at = adapter.adapter.deposit_address()
    async with adapter.again(before=lambda: miner.fund(at, XMR)) as later:
        assert await states(later) == [CONFIRMED]


async def test_deposit_in_another_block_after_a_reorg_is_seen_again(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    txid = await miner.pay(adapter.adapter.deposit_address(), XMR)
    await miner.mine(3)
    (confirmed,) = await adapter.reconcile()
    assert confirmed.state is CONFIRMED
    await pop_blocks(node, 3)
    assert await states(adapter) == [SEEN]
    await miner.mine(5)
    assert await states(adapter) == [CONFIRMED]
    height = (await node.transactions([txid]))[txid].height
    assert await adapter.adapter.confirmations(confirmed.key) == (await node.info()).height - (
        height or 0
    )


async def test_deposit_is_confirmed_by_its_block_on_the_chain(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    """Its former block proves nothing once that is replaced."""
    async with bank_of(miner) as bank:
        paid = await signed_to(bank, {adapter.adapter.deposit_address(): XMR})
    await node.submit(paid.raw)
    await miner.mine(2)
    assert await states(adapter) == [SEEN]
    calls, chain = adapter.count_calls(), adapter.adapter.connection
    places: list[dict[str, int]] = []
    for _ in range(2):
        await miner.mine()
        assert await states(adapter) == [CONFIRMED]
        assert (calls.count("get_block"), calls.count("get_block_headers_range")) == (1, 2)
        info, found = await node.info(), await node.transactions([paid.txid])
        places.append({paid.txid: found[paid.txid].height or 0})
        assert [await chain.is_on_chain(each, info) for each in places] == [
            each == places[-1] for each in places
        ]
        await pop_blocks(node, 3)
        assert await chain.hashes_below(info, [info.height - 3]) is None
        await node.flush_pool([paid.txid])
        await miner.mine()
        await node.submit(paid.raw)
        await miner.mine(2)
        assert await states(adapter) == [SEEN]
        calls.clear()


async def test_gone_deposit_is_removed_before_the_next_block(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    await miner.mine()
    await miner.pay(adapter.adapter.deposit_address(), XMR)
    await miner.mine(3)
    assert await states(adapter) == [CONFIRMED]
    await pop_blocks(node, 3)
    await node.flush_pool()
    # The wallet still shows it, with its old confirmations.
    await adapter.wallet.refresh()
    assert len(await adapter.wallet.transfers(0)) == 1
    assert await states(adapter) == [REMOVED]
    await miner.mine(5)
    assert await states(adapter) == []


async def test_returning_deposit_is_seen_with_its_first_time(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    async with bank_of(miner) as bank:
        paid = await signed_to(bank, {adapter.adapter.deposit_address(): XMR})
    await node.submit(paid.raw)
    (first,) = await adapter.reconcile()
    await node.flush_pool()
    assert await states(adapter) == [REMOVED]
    adapter.clock.now += 60_000
    assert await states(adapter) == []
    await node.submit(paid.raw)
    assert await adapter.reconcile() == [first]
    await miner.mine(3)
    assert await states(adapter) == [CONFIRMED]


async def test_a_deposit_spent_twice_in_the_pool_is_removed(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    at = adapter.adapter.deposit_address()
    async with payer_of(miner, 5 * XMR) as payer:
        paid, other = await signed_to(payer, {at: XMR}), await signed_to(payer, {at: 2 * XMR})
    assert set(paid.key_images) & set(other.key_images)
    await node.submit(paid.raw)
    assert await states(adapter) == [SEEN]
    await node.submit(other.raw)
    (gone,) = await adapter.reconcile()
    assert (gone.key.txid, gone.state) == (paid.txid, REMOVED)
    await miner.mine(3)
    (won,) = await adapter.reconcile()
    assert (won.key.txid, won.state, won.units) == (paid.txid, CONFIRMED, XMR)


async def test_deposit_with_a_lock_time_waits_for_its_unlock(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    until = (await node.info()).height + 12
    async with bank_of(miner) as bank:
        await bank.refresh()
        to = {"address": adapter.adapter.deposit_address(), "amount": XMR}
        await bank.rpc.act("transfer", {"destinations": [to], "unlock_time": until})
    await miner.mine(10)
    assert await states(adapter) == [SEEN]
    await miner.mine(2)
    assert await states(adapter) == [CONFIRMED]


async def test_watching_costs_the_same_for_any_number_of_open_orders(adapter: Treasury) -> None:
    await adapter.reconcile()
    calls = adapter.count_calls()
    await adapter.reconcile()
    few = len(calls)
    for _ in range(OPTIONS.reserve):
        adapter.adapter.deposit_address()
    calls.clear()
    await adapter.reconcile()
    assert len(calls) == few < 12


# --- the wallet's outputs ----------------------------------------------------------------------


async def test_wallet_is_split_into_outputs_and_reports_capacity(
    adapter: Treasury, miner: Miner
) -> None:
    await miner.fund(await adapter.wallet.primary_address(), 10 * XMR)
    adapter.use(replace(OPTIONS, outputs_target=8, output_units=XMR // 2))
    async with adapter.again() as later:
        assert later.adapter.available().max_now < 10 * XMR
        (payment,) = await later.live_payments()
        await miner.mine(SPENDABLE_AGE)
        await later.adapter.maintain()
        now = later.adapter.available()
        assert now.outputs == 8
        assert now.unlocked == 10 * XMR - payment.fee
        assert 0 < now.max_now < now.unlocked
        await later.adapter.maintain()
        assert await later.live_payments() == []


async def test_many_small_outputs_are_put_together(adapter: Treasury, miner: Miner) -> None:
    await miner.fund(await adapter.wallet.primary_address(), *([XMR // 5] * 12))
    adapter.use(replace(OPTIONS, outputs_target=1, dusty_outputs=10, highest_fee=XMR))
    async with adapter.again() as later:
        (payment,) = await later.live_payments()
        assert len(payment.key_images) == 12
        await miner.mine(SPENDABLE_AGE)
        await later.adapter.maintain()
        assert later.adapter.available().outputs <= 2


async def test_outputs_too_dear_to_join_are_not_signed_for(adapter: Treasury, miner: Miner) -> None:
    await miner.fund(await adapter.wallet.primary_address(), *([XMR // 5] * 12))
    adapter.use(replace(OPTIONS, outputs_target=1, dusty_outputs=10))
    async with adapter.again() as later:
        calls = later.count_calls()
        for _ in range(3):
            await later.adapter.maintain()
        assert "transfer" not in calls
        (note,) = texts_of(await later.adapter.conditions(), Severity.NOTE)
        assert "joining 12 outputs of the XMR wallet would take a fee of about 0.04" in note
        assert Health.of(await later.adapter.conditions()).ok, "payouts go on"


def test_thresholds_must_rise() -> None:
    with pytest.raises(ValueError, match="rise"):
        replace(OPTIONS, thresholds=(Threshold(0, 10), Threshold(XMR, 5)))


async def test_two_orders_paid_by_one_transaction_are_two_deposits(
    adapter: Treasury, miner: Miner, node: MonerodClient
) -> None:
    first, second = adapter.adapter.deposit_address(), adapter.adapter.deposit_address()
    async with bank_of(miner) as bank:
        paid = await signed_to(bank, {first: XMR, second: 2 * XMR})
    await node.submit(paid.raw)
    seen = await adapter.reconcile()
    assert {item.address: item.units for item in seen} == {first: XMR, second: 2 * XMR}
    assert {item.key.txid for item in seen} == {paid.txid}
    assert len({item.key for item in seen}) == 2
