"""The restore drill: an older copy of the database with the payment journal, counted on the chains.

Since the copy: one XMR transaction that pays two orders, one for an order that awaits its deposit
in the copy, one for an order that the copy lacks, a USDC payout, sweeps, and a split of the XMR
wallet. So single and batched payments, a sweep and maintenance are all in one run. Without the
journal: test_restore_unjournaled.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import Server, until
from tests.regtest.commands import command
from tests.regtest.exchange import USDC, XMR, Exchange, create, reaches, swept
from tests.regtest.ledger_of_chains import usdc_received, xmr_received
from tests.regtest.restoring import (
    copy_before_payouts,
    differences,
    has_split,
    restore_wallet_from_words,
)

pytestmark = pytest.mark.slow


async def ordered(at: Server, direction: str, to: str) -> tuple[str, str]:
    """An order's id and deposit address."""
    amount = "1" if direction == "x2u" else "165"
    order = (await create(at, direction=direction, amount=amount, to=to))["data"]["order"]
    return order["orderId"], order["depositAddress"]


@pytest.mark.parametrize("wallet_is", ["the same", "from its words"])
async def test_restore_with_journal_pays_nobody_twice(
    stack: Exchange, wallet: WalletClient, tmp_path: Path, wallet_is: str
) -> None:
    payees = [(await wallet.create_addresses(1))[0].address for _ in range(4)]
    async with stack.serving() as at:
        batched = [await ordered(at, "u2x", to) for to in payees[:2]]
        to_usdc = await ordered(at, "x2u", stack.user.address)
        awaited = await ordered(at, "u2x", payees[2])
        await command(stack, "payouts", "pause", "--reason", "so that the copy knows no payment")
        for _, address in batched:
            await stack.pay_usdc(address, 165 * USDC)
        await stack.pay_xmr(to_usdc[1], XMR)
        orders = [order for order, _ in (*batched, to_usdc)]
        copy = await copy_before_payouts(stack, at, orders, tmp_path / "copy.db")
        await stack.pay_usdc(awaited[1], 165 * USDC)
        lost = await ordered(at, "u2x", payees[3])
        await stack.pay_usdc(lost[1], 165 * USDC)
        for order, _ in (awaited, lost):
            await reaches(stack, at, order, "completed")
        await swept(stack)
        assert await asyncio.to_thread(at.stop) == 0
    stack.extra["RPCSVC_ONCHAIN__XMR_OUTPUTS"] = "20"
    async with stack.serving() as at:
        await until(lambda: has_split(stack))
        assert await asyncio.to_thread(at.stop) == 0
    stack.extra["RPCSVC_ONCHAIN__XMR_OUTPUTS"] = "0"
    paid = await _paid(stack, wallet, payees)
    assert [len(each) for each in paid[1:]] == [1, 1, 1, 1]

    if wallet_is == "from its words":
        await restore_wallet_from_words(stack)
    restored = await command(stack, "db", "restore", str(copy))
    assert restored.status == 0, restored
    assert f"{lost[0]}/payout/1: its order is lost" in restored.out
    again = await command(stack, "db", "restore", str(copy))
    assert again.status == 0, again
    async with stack.serving() as at:
        for order, _ in (*batched, to_usdc, awaited):
            await reaches(stack, at, order, "completed")
        fresh = await ordered(at, "u2x", payees[0])
        assert fresh[1] != lost[1]
        await swept(stack)
        assert await asyncio.to_thread(at.stop) == 0
    await stack.mine(3)
    assert await _paid(stack, wallet, payees) == paid
    assert await differences(stack) == []


async def _paid(stack: Exchange, wallet: WalletClient, payees: list[str]) -> list[list[int]]:
    """The payments to the user's USDC address and to each XMR address."""
    usdc = await usdc_received(stack, stack.user.address)
    return [usdc, *[await xmr_received(wallet, to) for to in payees]]
