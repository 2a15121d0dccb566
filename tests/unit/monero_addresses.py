"""Deposit addresses of a wallet."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from rpcsvc.settlement.onchain.daemon_rpc import NodeError, TimedOut
from rpcsvc.settlement.onchain.monero.addresses import AddressPool
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Subaddress, SubaddressIndex, WalletCode
from tests.chain_options import monero_options

OPTIONS = monero_options(pool_target=100, pool_low=60, reserve=8)


class AddressWallet:
    """Addresses as monero-wallet-rpc makes them; ``kill`` drops those that are not stored."""

    def __init__(self) -> None:
        self.made = self.stored = 0
        self.spelling = "8w"
        self.rescans = 0
        self.failures = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.scans = asyncio.Event()

    def kill(self) -> None:
        self.made = self.stored

    async def create_addresses(self, count: int) -> list[Subaddress]:
        assert 1 <= count <= 64
        if self.failures and 100 < self.made < 150:
            self.failures -= 1
            raise TimedOut("wallet", "create_address", "no answer")
        first = self.made + 1
        self.made += count
        return [self._at(minor) for minor in range(first, self.made + 1)]

    async def store(self) -> None:
        self.stored = self.made

    async def addresses(self, indices: list[int]) -> list[Subaddress]:
        if max(indices) > self.made:
            raise NodeError("wallet", "get_address", WalletCode.NO_SUCH_ADDRESS, "beyond")
        return [self._at(minor) for minor in indices]

    async def rescan_blockchain(self) -> None:
        self.scans.set()
        await self.may_end.wait()
        if self.failures:
            self.failures -= 1
            raise TimedOut("wallet", "rescan_blockchain", "no answer")
        self.rescans += 1

    def _at(self, minor: int) -> Subaddress:
        return Subaddress(SubaddressIndex(0, minor), f"{self.spelling}{minor}")


async def pool_of(wallet: Any, ledger: MoneroLedger) -> AddressPool:
    pool = AddressPool(cast("WalletClient", wallet), ledger, OPTIONS)
    await pool.reconcile()
    await pool.refill()
    return pool
