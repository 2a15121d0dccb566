"""A service started on an older copy of the database, without any command, pays nobody twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.pause import PauseSwitch
from tests.e2e.processes import Server, until
from tests.regtest.commands import command
from tests.regtest.daemons import Anvil, Miner, WalletRpc
from tests.regtest.exchange import USDC, XMR, Exchange, create, exchange, reaches, status
from tests.regtest.ledger_of_chains import usdc_received, xmr_received
from tests.regtest.restoring import (
    copy_before_payouts,
    differences,
    explain_sweeps,
    restore,
    started,
)
from tests.regtest.token import Token

pytestmark = pytest.mark.slow

WALLETS = {"x2u": "the hot wallet on arbitrum", "u2x": "the Monero wallet"}


@pytest.fixture
async def stack(
    tmp_path: Path,
    miner: Miner,
    wallet_rpc: WalletRpc,
    own_wallet: WalletClient,
    anvil: Anvil,
    token: Token,
) -> AsyncIterator[Exchange]:
    async with exchange(tmp_path, miner, wallet_rpc, anvil, token) as running:
        # No sweeps: an unrecorded one would pause payouts before the XMR wallet's own check does.
        running.extra["RPCSVC_ONCHAIN__SWEEP_USDC"] = "1000"
        yield running


async def stop(at: Server) -> None:
    assert await asyncio.to_thread(at.stop) == 0


async def ordered(stack: Exchange, at: Server, direction: str, to: str) -> str:
    """The id of an order whose deposit was sent."""
    amount = "1" if direction == "x2u" else "165"
    made = await create(at, direction=direction, amount=amount, to=to)
    order = made["data"]["order"]
    if direction == "x2u":
        await stack.pay_xmr(order["depositAddress"], XMR)
    else:
        await stack.pay_usdc(order["depositAddress"], 165 * USDC)
    return str(order["orderId"])


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_payments_unknown_to_the_copy_pause_payouts(
    stack: Exchange, wallet: WalletClient, tmp_path: Path, direction: str
) -> None:
    to = stack.user.address if direction == "x2u" else await wallet.primary_address()

    async def received() -> list[int]:
        return await (usdc_received(stack, to) if direction == "x2u" else xmr_received(wallet, to))

    async with stack.serving() as at:
        first = await ordered(stack, at, direction, to)
        await reaches(stack, at, first, "completed")
        second = await ordered(stack, at, direction, to)
        await command(stack, "payouts", "pause", "--reason", "so that the copy knows no payment")
        copy = await copy_before_payouts(stack, at, [second], tmp_path / "copy.db")
        await stop(at)
    paid = await received()
    await restore(stack, copy)

    switch = PauseSwitch(stack.data_dir)
    async with started(stack) as at:

        async def is_paused() -> bool:
            await stack.mine_in_time()
            return switch.reason() is not None

        await until(is_paused)
        reported = f"{WALLETS[direction]} that the database does not know: run rpcsvc audit, then"

        async def is_reported() -> bool:
            return reported in str(await at.health("/health"))

        await until(is_reported)
        assert (await status(at, second))["status"] == "deposit_confirmed"
        await stack.mine(3)
    assert await received() == paid

    found = await differences(stack)
    (hint,) = [item["hint"] for item in found if item["kind"] == "unrecorded_payment"]
    adopted = await command(stack, *hint.split("rpcsvc ")[1].split())
    assert adopted.status == 0, adopted
    await command(stack, "payouts", "resume")
    async with stack.serving() as at:
        await reaches(stack, at, second, "completed")
        assert switch.reason() is None
        third = await ordered(stack, at, direction, to)
        await reaches(stack, at, third, "completed")
        await stop(at)
    assert len(await received()) == len(paid) + 1
    await explain_sweeps(stack)
    assert await differences(stack) == []
