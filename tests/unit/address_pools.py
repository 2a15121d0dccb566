"""Takes addresses from a pool, of either adapter."""

from __future__ import annotations

import asyncio

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.addresses import EvmAddressPool
from rpcsvc.settlement.onchain.monero.addresses import AddressPool


async def take(pool: AddressPool | EvmAddressPool, count: int) -> list[str]:
    """As orders do, at their own pace."""
    taken: list[str] = []
    while len(taken) < count:
        try:
            taken.append(pool.take())
        except Unavailable:
            await pool.refill()
        await asyncio.sleep(0)
    return taken
