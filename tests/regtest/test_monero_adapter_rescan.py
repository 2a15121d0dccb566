"""A wallet restored from its words, on real daemons: deposits beyond its lookahead are found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain.order import DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import Observation
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import until
from tests.regtest.daemons import Miner, WalletRpc, new_wallet
from tests.regtest.treasury import OPTIONS, XMR, Treasury, treasury

pytestmark = pytest.mark.slow

# More than a wallet's lookahead.
MANY = replace(OPTIONS, pool_target=256, pool_low=8)


async def deposit_that_is_missed(adapter: Treasury, miner: Miner) -> str:
    """Stop, pay the newest address, and restore the wallet, whose scan misses the deposit."""
    seed, newest = await adapter.wallet.seed(), await adapter.ledger.highest_address()
    assert newest is not None
    await adapter.end()
    async with (
        WalletClient(adapter.rpc.endpoint) as wallet,
        MonerodClient(miner.monerod.endpoint) as node,
    ):
        height = (await node.info()).height
        txid = await miner.fund(newest.address, XMR)
        await wallet.restore("restored", "", seed, height - 1)
        await wallet.auto_refresh(enabled=False)
        await wallet.refresh()
        assert await wallet.transfers(0) == []
        await wallet.store()
    return txid


async def test_a_rescan_that_a_kill_cut_short_is_made_up_for(
    wallet_rpc: WalletRpc, miner: Miner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await new_wallet(wallet_rpc)
    async with treasury(wallet_rpc, tmp_path, MANY) as adapter:
        txid = await deposit_that_is_missed(adapter, miner)
    rescan = WalletClient.rescan_blockchain
    go_on, is_over = asyncio.Event(), asyncio.Event()

    async def cut_short(wallet: WalletClient) -> None:
        """Kill the wallet daemon during a rescan, which the frozen node keeps from ending."""
        await go_on.wait()
        miner.monerod.freeze()
        try:
            under_way = asyncio.create_task(rescan(wallet))
            await asyncio.to_thread(wallet_rpc.kill)
            await under_way
        finally:
            miner.monerod.thaw()
            is_over.set()

    monkeypatch.setattr(WalletClient, "rescan_blockchain", cut_short)
    restored = replace(MANY, wallet_file="restored", wallet_password="")
    async with treasury(wallet_rpc, tmp_path, restored) as adapter:
        assert "rescanning" in (Health.of(await adapter.adapter.conditions()).detail or "")
        assert await adapter.adapter.observe() == Observation()
        with pytest.raises(Unavailable):
            adapter.adapter.deposit_address()
        go_on.set()
        await is_over.wait()
        assert await adapter.ledger.rescan_due()
        monkeypatch.setattr(WalletClient, "rescan_blockchain", rescan)
        await asyncio.to_thread(wallet_rpc.start)

        async def ready() -> bool:
            await adapter.adapter.maintain()
            return Health.of(await adapter.adapter.conditions()).ok

        await until(ready)
        assert not await adapter.ledger.rescan_due()
        (found,) = await adapter.reconcile()
        assert (found.key.txid, found.state) == (txid, DepositState.CONFIRMED)
