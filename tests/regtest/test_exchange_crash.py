"""kill -9 of the service at every step of a swap of XMR for USDC; afterwards one payout.

During one order the service is killed at several points in turn, and restarted after each: a chain
of points needs one order only. Payouts are counted on the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.e2e.processes import Crash
from tests.regtest.crash_steps import STEPS
from tests.regtest.trading import Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
CHAINS: dict[str, list[Crash]] = {
    "before each step's commit": [(step, "before", 1) for step in STEPS],
    "after each step's commit": [(step, "after", 1) for step in STEPS],
    "around the deposit": [
        ("monero deposit", "before", 1),
        ("monero deposit", "after", 1),
        ("monero acknowledge", "before", 1),
        ("monero acknowledge", "after", 1),
    ],
    "from signing to publishing": [
        ("engine prepare", "before", 1),
        ("evm record", "before", 1),
        ("evm record", "after", 1),
        ("engine publish", "before", 1),
        ("evm publish", "before", 1),
    ],
    "once it is signed and on record": [("engine prepare", "after", 1)],
    # The next start adopts the payment: it is not signed again.
    "between its journal line and its commit": [("evm journal", "after", 1)],
    "from publishing to its note": [
        ("evm publish", "after", 1),
        ("evm note", "before", 1),
        ("evm note", "after", 1),
    ],
}


@pytest.mark.parametrize("crashes", CHAINS.values(), ids=CHAINS)
async def test_a_service_that_is_killed_again_and_again_pays_usdc_once(
    trader: Trader, crashes: Sequence[Crash]
) -> None:
    await trader.through("x2u", crashes)
    await trader.check()
