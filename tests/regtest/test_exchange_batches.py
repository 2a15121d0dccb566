"""Payouts that are due together are signed together, also over kills.

Counted on the chain: each user is paid once, in XMR by as few transactions as possible.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress

import pytest

from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Crash, Gone, Server, until
from tests.regtest.exchange import reaches, status
from tests.regtest.ledger_of_chains import xmr_payments
from tests.regtest.trading import DEATH_SECONDS, PaidOrder, Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ORDERS = 4
CHAINS: dict[str, list[Crash]] = {
    "around the signing": [("monero record", "before", 1), ("monero record", "after", 1)],
    "around the commit": [("TransferPrepared", "before", 1), ("TransferPrepared", "after", 1)],
    "before the relay": [("monero relay", "before", 1)],
    "after the relay, before the wallet stores": [("monero relay", "after", 1)],
    "after the first of them is settled": [("TransferSettled", "after", 1)],
}


EVM_CHAINS: dict[str, list[Crash]] = {
    "around the line": [("evm record", "before", 1), ("evm journal", "after", 1)],
    "around the mark": [("evm mark", "before", 1), ("evm mark", "after", 1)],
    "after they are handed over": [("evm publish", "after", 1), ("TransferSettled", "after", 1)],
}


async def all_due(trader: Trader, direction: str = "u2x") -> list[PaidOrder]:
    """Orders with confirmed deposits, whose payouts were paused until all were due."""
    switch = PauseSwitch(trader.stack.data_dir)
    async with trader.stack.serving() as at:
        orders = [await trader.order(at, direction) for _ in range(ORDERS)]
        switch.pause("the test wants them all at once")
        for _, address in orders:
            await trader.pay(direction, address)
        for swap, _ in orders:
            await until_due(trader, at, swap)
        await trader.stop(at)
    switch.resume()
    return [swap for swap, _ in orders]


async def until_due(trader: Trader, at: Server, swap: PaidOrder) -> None:
    async def is_due() -> bool:
        await trader.stack.mine_in_time()
        return bool((await status(at, swap.order_id))["status"] == "deposit_confirmed")

    await until(is_due, seconds=DEATH_SECONDS)


async def paid_by(trader: Trader, swaps: Sequence[PaidOrder]) -> int:
    """The number of transactions that paid the orders."""
    return len(await xmr_payments(trader.payee, {swap.to for swap in swaps}))


async def test_payouts_that_are_due_together_leave_in_one_transaction(trader: Trader) -> None:
    swaps = await all_due(trader)
    async with trader.stack.serving() as at:
        await trader.finish(at, *swaps)
        await trader.stop(at)
    assert await paid_by(trader, swaps) == 1
    await trader.check()
    with closing(sqlite3.connect(trader.stack.data_dir / DATABASE_NAME)) as books:
        (stored,) = books.execute(
            "SELECT count(*), count(DISTINCT txid), sum(length(raw)) FROM transfers"
        )
        (signed,) = books.execute(
            "SELECT count(*), sum(length(raw) > 1000) FROM monero_payments"
            " WHERE purpose = 'transfer'"
        )
    assert (stored, signed) == ((ORDERS, 1, 0), (1, 1))


async def kill_and_finish(
    trader: Trader, crashes: Sequence[Crash], swaps: Sequence[PaidOrder]
) -> None:
    """Kill the service at each crash point in turn, then let it finish the swaps."""
    for crash in crashes:
        async with trader.stack.starting(crash) as at:  # it may be killed before it is ready
            with suppress(Gone):
                await at.ready()
                await reaches(trader.stack, at, swaps[0].order_id, "completed")
            await at.death(DEATH_SECONDS)
    async with trader.stack.serving() as at:
        await trader.finish(at, *swaps)
        await trader.stop(at)


@pytest.mark.parametrize("crashes", CHAINS.values(), ids=CHAINS)
async def test_a_service_killed_while_it_pays_several_pays_each_once(
    trader: Trader, crashes: Sequence[Crash]
) -> None:
    swaps = await all_due(trader)
    await kill_and_finish(trader, crashes, swaps)
    assert await paid_by(trader, swaps) == 1
    await trader.check()


@pytest.mark.parametrize("crashes", EVM_CHAINS.values(), ids=EVM_CHAINS)
async def test_service_killed_while_it_pays_several_in_usdc_pays_once(
    trader: Trader, crashes: Sequence[Crash]
) -> None:
    swaps = await all_due(trader, "x2u")
    await kill_and_finish(trader, crashes, swaps)
    await trader.check()
    with closing(sqlite3.connect(trader.stack.data_dir / DATABASE_NAME)) as books:
        made = books.execute(
            "SELECT nonce, prepared_at FROM evm_payments WHERE purpose = 'transfer'"
            " ORDER BY nonce DESC LIMIT ?",
            (ORDERS,),
        ).fetchall()
    assert made[0][0] - made[-1][0] == ORDERS - 1, "no nonce between them is another's"
