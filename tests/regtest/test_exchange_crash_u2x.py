"""kill -9 of the service at every step of a swap of USDC for XMR; afterwards one payout.

As in test_exchange_crash.py. The wallet daemon has state of its own, and may be killed together
with the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from tests.e2e.processes import Crash, Gone
from tests.regtest.crash_steps import STEPS
from tests.regtest.exchange import reaches
from tests.regtest.trading import DEATH_SECONDS, Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHAINS: dict[str, list[Crash]] = {
    "before each step's commit": [(step, "before", 1) for step in STEPS],
    "after each step's commit": [(step, "after", 1) for step in STEPS],
    "around the deposit": [
        ("evm deposit", "before", 1),
        ("evm deposit", "after", 1),
        ("evm acknowledge", "before", 1),
        ("evm acknowledge", "after", 1),
    ],
    "from signing to publishing": [
        ("monero record", "before", 1),
        ("monero record", "after", 1),
        ("monero mark", "before", 1),
        ("monero mark", "after", 1),
        ("monero note", "before", 1),
        ("monero note", "after", 1),
    ],
    # The next start adopts the payment: it is not signed again.
    "between its journal line and its commit": [("monero journal", "after", 1)],
    "between the sweep's journal line and its commit": [("sweep journal", "after", 1)],
    "before the relay": [("monero relay", "before", 1)],
    "after the relay, before the wallet stores": [("monero relay", "after", 1)],
    "after the wallet has stored": [("monero relayed", "after", 1)],
    "around the sweep": [
        ("sweep record", "before", 1),
        ("sweep record", "after", 1),
        ("sweep publish", "before", 1),
        ("sweep publish", "after", 1),
    ],
}


@pytest.mark.parametrize("crashes", CHAINS.values(), ids=CHAINS)
async def test_a_service_that_is_killed_again_and_again_pays_xmr_once(
    trader: Trader, crashes: Sequence[Crash]
) -> None:
    await trader.through("u2x", crashes)
    await trader.check()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_kill_of_service_and_wallet_at_the_relay_pays_once(trader: Trader, when: str) -> None:
    async with trader.stack.serving(("monero relay", when, 1)) as at:
        swap = await trader.order_and_pay(at, "u2x")
        with suppress(Gone):
            await reaches(trader.stack, at, swap.order_id, "completed")
        await at.death(DEATH_SECONDS)
        await asyncio.to_thread(trader.stack.wallet_rpc.kill)
    await asyncio.to_thread(trader.stack.wallet_rpc.start)
    async with trader.stack.serving() as at:
        # Another payment meanwhile: a wallet that has lost the first may spend its inputs again.
        await trader.order_and_pay(at, "u2x")
        await trader.finish(at)
        await trader.stop(at)
    await trader.check()
