"""Blocks that come while monerod answers: what it misses then is not gone.

A proxy mines between monerod's look into its chain and the one into its pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rpcsvc.domain.order import DepositState
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import Observation, Outcome
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from tests.regtest.daemon_proxy import BetweenLooks, DaemonProxy
from tests.regtest.daemons import Miner, WalletRpc
from tests.regtest.payees import Payee, pay
from tests.regtest.treasury import XMR, Treasury, treasury

pytestmark = pytest.mark.slow  # the quick tests must stay quick

SEEN, CONFIRMED, REMOVED = DepositState.SEEN, DepositState.CONFIRMED, DepositState.REMOVED
ACCOUNTS = 3  # each test below uses one up


@dataclass
class Moving:
    """An adapter on an account with money, and the blocks between the looks of its node."""

    own: Treasury
    blocks: BetweenLooks


@pytest.fixture
async def moving(
    killable: WalletRpc, accounts: list[int], miner: Miner, node: MonerodClient, tmp_path: Path
) -> AsyncIterator[Moving]:
    line = DaemonProxy(miner.monerod.url)
    line.stand_in = blocks = BetweenLooks(miner.monerod.url, miner.mine)
    at = DaemonEndpoint("monerod", line.url)
    async with (
        line.open(),
        treasury(killable, tmp_path, account=accounts.pop(), monerod=at) as own,
    ):
        await own.adapter.maintain()
        yield Moving(own, blocks)


async def test_deposit_mined_between_two_looks_stays(moving: Moving, miner: Miner) -> None:
    own, blocks = moving.own, moving.blocks
    txid = await miner.pay(own.adapter.deposit_address(), XMR)
    assert [item.state for item in await own.reconcile()] == [SEEN]
    blocks.left = 1
    assert await own.reconcile() == []
    assert blocks.missed == [txid]
    await miner.mine(2)
    assert [item.state for item in await own.reconcile()] == [CONFIRMED]


async def test_deposit_stays_while_every_look_meets_a_block(
    moving: Moving, miner: Miner, node: MonerodClient
) -> None:
    """The deposit is nowhere, and the node never says so twice at the same top."""
    own, blocks = moving.own, moving.blocks
    await miner.pay(own.adapter.deposit_address(), XMR)
    assert [item.state for item in await own.reconcile()] == [SEEN]
    await node.flush_pool()
    blocks.left = 100
    for _ in range(3):
        assert await own.adapter.observe() == Observation()
        await own.adapter.acknowledge([])
    assert len(blocks.missed) > 3
    assert Health.of(await own.adapter.conditions()).ok, (
        "blocks that come fast are no fault of the node"
    )
    blocks.left = 0
    assert [item.state for item in await own.reconcile()] == [REMOVED]


async def test_payout_mined_between_two_looks_is_not_sent_again(
    moving: Moving, miner: Miner, payee: Payee
) -> None:
    own, blocks = moving.own, moving.blocks
    transfer = await own.prepared(own.transfer(payee.address))
    await pay(own, transfer)
    calls = own.count_calls()
    blocks.left = 1
    verdict = await own.adapter.payments.publish(transfer)
    assert blocks.missed == [transfer.txid]
    assert (verdict.outcome, verdict.reason) == (Outcome.PENDING, "1 of 3 confirmations")
    assert "/send_raw_transaction" not in calls
