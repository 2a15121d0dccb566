"""kill -9 of the service at every step of a fee replacement, and of a split of XMR.

Sweeps: test_exchange_crash_u2x.py. No other maintenance is signed on an EVM network: deposit
addresses need no gas, and ether comes from the operator.
"""

from __future__ import annotations

from typing import Final

import pytest

from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Crash, Server, until
from tests.regtest.exchange import reaches
from tests.regtest.ledger_of_chains import xmr_wallet
from tests.regtest.restoring import count_splits
from tests.regtest.trading import DEATH_SECONDS, Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

XMR_OUTPUTS: Final = "RPCSVC_ONCHAIN__XMR_OUTPUTS"
RAISE: Final[list[Crash]] = [
    ("raise record", "before", 1),
    ("raise journal", "after", 1),
    ("raise record", "after", 1),
    ("raise publish", "before", 1),
    ("raise publish", "after", 1),
]
# The target number of outputs: one transaction makes all or most of the missing ones.
SPLITS: Final[dict[str, tuple[str, list[Crash]]]] = {
    "from signing to the relay": (
        "15",
        [
            ("upkeep record", "before", 1),
            ("upkeep record", "after", 1),
            ("upkeep relayed", "before", 1),
        ],
    ),
    "after the relay": ("21", [("upkeep relayed", "after", 1)]),
    # The next start adopts it, and publishes these bytes.
    "between its journal line and its commit": ("27", [("upkeep journal", "after", 1)]),
}


async def until_dead(trader: Trader, at: Server, *, evm: bool) -> None:
    async def is_dead() -> bool:
        await trader.stack.mine_in_time(evm=evm)
        return at.is_dead

    await until(is_dead, seconds=DEATH_SECONDS)


async def test_service_killed_while_it_raises_a_fee_pays_once(trader: Trader) -> None:
    stack = trader.stack
    async with stack.starting(("engine publish", "before", 1)) as at:
        await at.ready()
        swap = await trader.order_and_pay(at, "x2u")
        await until_dead(trader, at, evm=True)
    await stack.controls.automine(enabled=False)
    for crash in RAISE:
        async with stack.starting(crash) as at:
            await until_dead(trader, at, evm=False)
    await stack.controls.automine(enabled=True)
    async with stack.serving() as at:
        await reaches(stack, at, swap.order_id, "completed")
        await trader.stop(at)
    await trader.check()
    await trader.audit()


@pytest.mark.parametrize(("outputs", "crashes"), SPLITS.values(), ids=SPLITS)
async def test_service_killed_while_it_splits_outputs_pays_itself_once(
    trader: Trader, outputs: str, crashes: list[Crash]
) -> None:
    stack = trader.stack
    before = set((await xmr_wallet(stack)).sent)
    splits = count_splits(stack) if (stack.data_dir / DATABASE_NAME).exists() else 0
    stack.extra[XMR_OUTPUTS] = outputs
    for crash in crashes:
        async with stack.starting(crash) as at:
            await until_dead(trader, at, evm=True)

    async def is_split() -> bool:
        await stack.mine_in_time()
        return count_splits(stack) > splits

    async with stack.serving() as at:
        await until(is_split, seconds=DEATH_SECONDS)
        await trader.stop(at)
    del stack.extra[XMR_OUTPUTS]
    assert len(set((await xmr_wallet(stack)).sent) - before) == 1
    # A split reaches no user; there is no other difference.
    left = await trader.differences()
    assert [text for text in left if not text.startswith("transactions of the XMR wallet")] == []
    await trader.audit()
