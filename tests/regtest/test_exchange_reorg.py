"""A deep reorg drops a deposit and its settled sweep while the service runs.

Counted on the chain: the deposit is swept once. An audit in the meantime may pause payouts, until
the operator has looked.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import until
from tests.regtest.commands import command
from tests.regtest.daemons import mined
from tests.regtest.evm_payer import GWEI
from tests.regtest.exchange import USDC, Exchange, create, reaches, swept
from tests.regtest.faults import well
from tests.regtest.restoring import differences

pytestmark = pytest.mark.slow

UNITS = 165 * USDC
FAR = 30  # blocks: deeper than every confirmation setting here


async def deposit_of(stack: Exchange, address: str) -> bytes:
    """The bytes of the user's deposit, to be sent again after a reorganisation."""
    await stack.token.mint(stack.user.address, UNITS)
    plan = TransactionPlan(
        stack.anvil.chain_id, await stack.evm.nonce(stack.user.address), stack.token.address,
        200_000, 50 * GWEI, GWEI, usdc.transfer(address, UNITS),
    )  # fmt: skip
    return stack.user.sign(plan).raw


async def send(stack: Exchange, raw: bytes) -> None:
    answer = await stack.evm.submit(raw)
    assert (await mined(stack.evm, answer.txid)).ok


def sweeps(stack: Exchange) -> list[tuple[str, int, str]]:
    """State, units taken, and payment of each sweep on record."""
    with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as books:
        sql = "SELECT state, taken, payment_id FROM evm_sweeps ORDER BY serial"
        return list(books.execute(sql))


async def was_refused(stack: Exchange) -> bool:
    """Whether the first sweep is mined again and reverted."""
    with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as books:
        sql = "SELECT txid FROM evm_attempts WHERE payment_id LIKE 'sweep-%'"
        ((txid,),) = books.execute(sql).fetchall()
    receipt = await stack.evm.receipt(txid)
    return receipt is not None and not receipt.ok


async def look_and_resume(stack: Exchange) -> None:
    """Resume payouts if an audit has found the deposit gone, for as long as it was away."""
    reason = PauseSwitch(stack.data_dir).reason()
    if reason is not None:
        assert "deposit_lost" in reason
        assert (await command(stack, "payouts", "resume")).status == 0


async def test_deposit_reorged_with_its_sweep_is_swept_again(
    stack: Exchange, wallet: WalletClient
) -> None:
    stack.extra["RPCSVC_ONCHAIN__AUDIT_SECONDS"] = "1"
    async with stack.serving() as at:
        to = await wallet.primary_address()
        made = (await create(at, direction="u2x", amount="165", to=to))["data"]["order"]
        deposit = await deposit_of(stack, made["depositAddress"])
        before = await stack.controls.snapshot()
        await send(stack, deposit)
        await reaches(stack, at, made["orderId"], "completed")
        await swept(stack)
        held = await stack.token.balance(stack.treasury)

        await stack.controls.revert(before)
        await stack.controls.mine(FAR)
        await until(lambda: was_refused(stack))
        await send(stack, deposit)

        async def is_home() -> bool:
            await stack.mine_in_time()
            await look_and_resume(stack)
            return [state for state, *_ in sweeps(stack)] == ["void", "done"]

        await until(is_home, seconds=60)
        assert await stack.token.balance(made["depositAddress"]) == 0
        assert await stack.token.balance(stack.treasury) == held
        await look_and_resume(stack)
        await well(at)
        assert PauseSwitch(stack.data_dir).reason() is None
        assert await asyncio.to_thread(at.stop) == 0
    assert await differences(stack) == []
