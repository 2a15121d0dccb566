"""Takes addresses from the pool of either adapter."""

from __future__ import annotations

import asyncio

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.addresses import EvmAddressPool
from rpcsvc.settlement.onchain.monero.addresses import AddressPool


async def take(pool: AddressPool | EvmAddressPool, count: int) -> list[str]:
    """Take addresses one by one, as orders do, and let the pool refill between them."""
    taken: list[str] = []
    while len(taken) < count:
        try:
            taken.append(pool.take())
        except Unavailable:
            await pool.refill()
        await asyncio.sleep(0)
    return taken
