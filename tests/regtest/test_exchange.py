"""A swap each way with the service as a process, on real daemons, counted from the chains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rpcsvc.settlement.onchain.monero import WalletClient
from tests.regtest.daemons import Anvil, Miner, WalletRpc
from tests.regtest.exchange import USDC, XMR, Exchange, create, exchange, reaches
from tests.regtest.token import Token

pytestmark = pytest.mark.slow


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
        yield running


async def test_xmr_becomes_usdc(stack: Exchange) -> None:
    async with stack.serving() as at:
        made = await create(at, direction="x2u", amount="1", to=stack.user.address)
        order = made["data"]["order"]
        await stack.pay_xmr(order["depositAddress"], XMR)
        done = await reaches(stack, at, order["orderId"], "completed")

    assert await stack.token.balance(stack.user.address) == int(done["actualOutput"])
    assert done["actualOutput"] == order["expectedOutput"]


async def test_usdc_becomes_xmr(stack: Exchange, wallet: WalletClient) -> None:
    to = await wallet.primary_address()
    async with stack.serving() as at:
        made = await create(at, direction="u2x", amount="165", to=to)
        order = made["data"]["order"]
        await stack.pay_usdc(order["depositAddress"], 165 * USDC)
        done = await reaches(stack, at, order["orderId"], "completed")

    await wallet.refresh()
    assert sum(output.amount for output in await wallet.outputs()) == int(done["actualOutput"])
    assert done["actualOutput"] == order["expectedOutput"]
