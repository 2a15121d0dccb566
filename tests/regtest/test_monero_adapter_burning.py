"""Two deposits with the same one-time key, on real daemons: only one can be spent (burning bug).

A sender makes them by using one transaction key twice. Here a wallet daemon does, whose random
numbers repeat after every start.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from rpcsvc.domain.order import DepositState
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import PreparedPayment
from tests.regtest.daemons import (
    WALLET_NAME,
    WALLET_PASSWORD,
    Miner,
    Monerod,
    WalletRpc,
    new_wallet,
    pop_blocks,
    run_apart,
)
from tests.regtest.treasury import OPTIONS, XMR, Treasury, add_account, treasury

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

CONFIRMED, REMOVED = DepositState.CONFIRMED, DepositState.REMOVED
SEEDS = 6
# The attacker has so many outputs of each amount.
OUTPUTS = 14
SMALL, LARGE = 3 * XMR, 4 * XMR
# Attempts with the same random numbers: how many of them decoys consume is random.
ATTEMPTS = 5

# Opens a file in place of /dev/urandom.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static int opened(const char *name, const char *path, int flags, int mode) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    const char *file = getenv("RANDOM_FILE");
    return real(file && !strcmp(path, "/dev/urandom") ? file : path, flags, mode);
}

#define SHADOW(NAME)                            \
    int NAME(const char *path, int flags, ...) { \
        va_list rest;                           \
        va_start(rest, flags);                  \
        int mode = va_arg(rest, int);           \
        va_end(rest);                           \
        return opened(#NAME, path, flags, mode); \
    }

SHADOW(open)
SHADOW(open64)
"""


class Repeating(WalletRpc):
    """A wallet daemon that gets the same random numbers after each restart."""

    def __init__(self, directory: Path, monerod: Monerod, shim: Path, numbers: Path) -> None:
        super().__init__(directory, monerod)
        self._preload = [f"LD_PRELOAD={shim}", f"RANDOM_FILE={numbers}"]

    @property
    def endpoint(self) -> DaemonEndpoint:
        return DaemonEndpoint(self.name, self.url, serial=True)

    def command(self) -> Sequence[str | Path]:
        # Digest login needs random numbers that differ.
        plain = list(super().command())
        at = plain.index("--rpc-login")
        plain[at : at + 2] = ["--disable-rpc-login"]
        return ["env", *self._preload, *plain]


@dataclass
class Attacker:
    """Someone with many outputs."""

    home: Path
    monerod: Monerod
    shim: Path
    runs: Iterator[int]

    async def twins(self, address: str) -> tuple[PreparedPayment, PreparedPayment]:
        """Two payments of one amount to an address, not published, with one transaction key."""
        for seed in range(1, SEEDS + 1):
            found: dict[tuple[str, int], PreparedPayment] = {}
            for at in range(ATTEMPTS):
                one = await self._sign(seed, SMALL, at, address)
                # The size, and with it the fee, depends on the decoys: amounts may differ.
                twin = found.setdefault((one.tx_key, one.amount), one)
                if twin is not one:
                    return twin, one
        raise AssertionError("no two payments have the same key and amount")

    async def unequal_twins(self, address: str) -> tuple[PreparedPayment, PreparedPayment]:
        """The same, the second one of a larger amount."""
        for seed in range(1, SEEDS + 1):
            small = [await self._sign(seed, SMALL, at, address) for at in range(ATTEMPTS)]
            by_key = {item.tx_key: item for item in small}
            for at in range(ATTEMPTS):
                larger = await self._sign(seed, LARGE, at, address)
                if larger.tx_key in by_key:
                    return by_key[larger.tx_key], larger
        raise AssertionError("no two payments have the same key")

    async def _sign(self, seed: int, amount: int, at: int, address: str) -> PreparedPayment:
        """Spend one of the outputs of that amount, with the random numbers of a seed."""
        numbers = self.home / f"numbers{seed}"
        numbers.write_bytes(bytes([seed]) * 4096)
        directory = self.home / f"run{next(self.runs)}"
        shutil.copytree(self.home / "sender", directory)
        with Repeating(directory, self.monerod, self.shim, numbers) as daemon:
            async with WalletClient(daemon.endpoint) as wallet:
                await wallet.open(WALLET_NAME, WALLET_PASSWORD)
                await wallet.auto_refresh(enabled=False)
                await wallet.refresh()
                free = [
                    item
                    for item in await wallet.outputs()
                    if item.unlocked and item.amount == amount
                ]
                free.sort(key=lambda item: item.global_index)
                return await wallet.prepare_sweep(free[at].key_image, address)


@pytest.fixture(scope="module")
def attacker(monerod: Monerod, miner: Miner, tmp_path_factory: pytest.TempPathFactory) -> Attacker:
    home = tmp_path_factory.mktemp("attacker")
    source, shim = home / "shim.c", home / "shim.so"
    source.write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    with WalletRpc(home / "sender", monerod) as daemon:
        run_apart(_funded(daemon, miner))
    return Attacker(home, monerod, shim, count())


async def _funded(daemon: WalletRpc, miner: Miner) -> None:
    await new_wallet(daemon)
    async with WalletClient(daemon.endpoint) as wallet:
        address = await wallet.primary_address()
        await miner.fund(address, *[SMALL] * OUTPUTS)
        await miner.fund(address, *[LARGE] * OUTPUTS)
        await wallet.refresh()
        await wallet.store()
        await wallet.close()


@pytest.fixture
async def adapter(killable: WalletRpc, miner: Miner, tmp_path: Path) -> AsyncIterator[Treasury]:
    account, _ = await add_account(killable)
    async with treasury(killable, tmp_path, account=account) as made:
        yield made


async def spendable(adapter: Treasury) -> int:
    """The wallet's spendable balance, all of it deposits of orders."""
    await adapter.wallet.refresh()
    return (await adapter.wallet.balance()).total


async def test_two_deposits_with_one_key_in_one_block_count_once(
    adapter: Treasury, miner: Miner, node: MonerodClient, attacker: Attacker
) -> None:
    one, two = await attacker.twins(adapter.adapter.deposit_address())
    for each in (one, two):
        await node.submit(each.raw)
    seen = await adapter.reconcile()
    assert {item.key.txid for item in seen} == {one.txid, two.txid}
    assert sum(item.units for item in seen) == one.amount + two.amount
    await miner.mine(OPTIONS.required_confirmations(6 * XMR) + 1)
    reported = {item.state: item for item in await adapter.reconcile()}
    assert set(reported) == {CONFIRMED, REMOVED}
    assert reported[CONFIRMED].units == await spendable(adapter)
    async with adapter.again() as later:
        await miner.mine(2)
        assert await later.reconcile() == []


async def test_second_deposit_with_a_confirmed_output_key_is_void(
    adapter: Treasury, miner: Miner, node: MonerodClient, attacker: Attacker
) -> None:
    one, two = await attacker.twins(adapter.adapter.deposit_address())
    await node.submit(one.raw)
    await adapter.reconcile()
    await miner.mine(3)
    (confirmed,) = await adapter.reconcile()
    assert (confirmed.key.txid, confirmed.state) == (one.txid, CONFIRMED)
    await node.submit(two.raw)
    assert await adapter.reconcile() == []
    await miner.mine(OPTIONS.tracked_blocks)
    assert await adapter.reconcile() == []
    assert confirmed.units == await spendable(adapter)


async def test_of_a_larger_second_one_the_difference_is_counted(
    adapter: Treasury, miner: Miner, node: MonerodClient, attacker: Attacker
) -> None:
    one, larger = await attacker.unequal_twins(adapter.adapter.deposit_address())
    await node.submit(one.raw)
    await miner.mine(3)
    (confirmed,) = await adapter.reconcile()
    assert (confirmed.key.txid, confirmed.state) == (one.txid, CONFIRMED)
    await node.submit(larger.raw)
    await adapter.reconcile()
    await miner.mine(OPTIONS.tracked_blocks)
    (difference,) = await adapter.reconcile()
    assert (difference.key.txid, difference.state) == (larger.txid, CONFIRMED)
    assert confirmed.units + difference.units == await spendable(adapter) == larger.amount


async def test_two_deposits_with_one_key_count_once_after_a_reorg(
    adapter: Treasury, miner: Miner, node: MonerodClient, attacker: Attacker
) -> None:
    one, two = await attacker.twins(adapter.adapter.deposit_address())
    await node.submit(one.raw)
    await miner.mine(1)
    await node.submit(two.raw)
    await miner.mine(6)
    (confirmed,) = await adapter.reconcile()
    assert (confirmed.key.txid, confirmed.state) == (one.txid, CONFIRMED)
    await pop_blocks(node, 7)
    await adapter.reconcile()
    await node.flush_pool()
    await node.submit(two.raw)
    await miner.mine(1)
    await node.submit(one.raw)
    await miner.mine(7)
    reported = {item.key.txid: item for item in await adapter.reconcile()}
    assert {txid: item.state for txid, item in reported.items()} == {
        one.txid: REMOVED,
        two.txid: CONFIRMED,
    }
    assert reported[two.txid].units == await spendable(adapter)
