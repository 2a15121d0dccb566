"""``make regtest-demo``: the whole stack on regtest chains, and a swap each way, step by step.

Everything is real but the money: monerod, monero-wallet-rpc, Anvil with a token that has USDC's
interface, and the service as a process.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import Server, until
from tests.regtest.daemons import Anvil, Miner, Monerod, WalletRpc, missing, new_wallet
from tests.regtest.exchange import (
    STEP_SECONDS,
    USDC,
    XMR,
    Exchange,
    create,
    details,
    exchange,
)
from tests.regtest.token import compiled, deploy


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, flush=True)


@asynccontextmanager
async def stack(directory: Path) -> AsyncIterator[Exchange]:
    """All daemons, on free ports, with money on both chains."""
    async with AsyncExitStack() as opened:
        say("monerod and two wallets, a regtest chain with mined XMR ...")
        monerod = opened.enter_context(Monerod(directory / "monerod"))
        bank = opened.enter_context(WalletRpc(directory / "bank", monerod))
        miner = Miner(monerod, bank)
        await miner.begin()
        wallet = opened.enter_context(WalletRpc(directory / "wallet", monerod))
        await new_wallet(wallet)
        say("anvil, and a token with USDC's interface ...")
        anvil = opened.enter_context(Anvil(directory / "anvil"))
        client = await opened.enter_async_context(EvmClient(anvil.endpoint))
        token = await deploy(client, await asyncio.to_thread(compiled))
        say("the operator's wallets: 30 XMR and 20,000 USDC ...")
        async with exchange(directory, miner, wallet, anvil, token) as made:
            yield made


async def swap(run: Exchange, at: Server, title: str, params: dict[str, Any]) -> None:
    """One swap, with its progress printed."""
    say(f"\n== {title}")
    order = (await create(at, **params))["data"]["order"]
    say(f"order {order['orderId']}: send {params['amount']} to {order['depositAddress']}")
    if params["direction"] == "x2u":
        txid = await run.pay_xmr(order["depositAddress"], int(params["amount"]) * XMR)
    else:
        txid = await run.pay_usdc(order["depositAddress"], int(params["amount"]) * USDC)
    say(f"the user's deposit: {txid}")
    receipt = (await follow(run, at, order["orderId"]))["receipt"]
    say(f"paid out: {receipt['amount']} {receipt['asset']} on {receipt['network']}")
    say(f"the payout: {receipt['txid']}")


async def follow(run: Exchange, at: Server, order_id: str) -> dict[str, Any]:
    """Print each new status and mine a block from time to time until the order is completed."""
    last = "awaiting_deposit"

    async def poll() -> dict[str, Any] | None:
        nonlocal last
        data = await details(at, order_id)
        if data["order"]["status"] != last:
            last = data["order"]["status"]
            say(f"  {last}")
        await run.mine_in_time()
        return data if data["outcome"] else None

    return await until(poll, seconds=STEP_SECONDS)


async def demo(directory: Path) -> None:
    """Both swaps."""
    async with stack(directory) as run:
        async with WalletClient(run.miner.bank.endpoint) as bank:
            to = await bank.primary_address()
        say("the service, with engine onchain ...")
        async with run.serving() as at:
            say(f"it listens on {at.url}")
            one = {"direction": "x2u", "amount": "1", "to": run.user.address}
            await swap(run, at, "1 XMR for USDC on Arbitrum", one)
            two = {"direction": "u2x", "amount": "165", "to": to}
            await swap(run, at, "165 USDC on Arbitrum for XMR", two)
        say("\nBoth orders are completed.")


def main() -> int:
    """Run it in a directory of its own."""
    if lacking := missing():
        say(f"not installed: {', '.join(lacking)}; run tools/regtest/install")
        return 1
    with tempfile.TemporaryDirectory(prefix="rpcsvc-regtest-") as directory:
        asyncio.run(demo(Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
