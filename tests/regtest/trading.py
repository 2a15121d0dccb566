"""Users who order, pay once and wait, over faults of the service.

Each has a destination of its own, so that payouts are counted on the chain, order by order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from rpcsvc.ids import system_random
from rpcsvc.settlement.onchain.evm.keys import EvmSigner
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import Crash, Gone, Server, until
from tests.regtest.commands import command
from tests.regtest.daemons import Anvil, Miner, WalletRpc, new_wallet
from tests.regtest.exchange import USDC, XMR, Exchange, create, exchange, reaches
from tests.regtest.ledger_of_chains import Books, usdc_received, xmr_payments, xmr_received
from tests.regtest.token import deploy

DEATH_SECONDS = 300


@dataclass
class PaidOrder:
    """An order that was paid for. ``to``: its destination, which no other order has."""

    direction: str
    order_id: str
    to: str
    expected: int


@dataclass
class Trader:
    """Makes orders on a stack; ``payee`` is the users' XMR wallet."""

    stack: Exchange
    payee: WalletClient
    books: Books
    swaps: list[PaidOrder] = field(default_factory=list)

    async def order(self, at: Server, direction: str) -> tuple[PaidOrder, str]:
        """A new unfunded order and its deposit address. Raises Gone."""
        to = await self._address(direction)
        amount = "1" if direction == "x2u" else "165"
        made = await create(at, direction=direction, amount=amount, to=to)
        order = made["data"]["order"]
        swap = PaidOrder(direction, order["orderId"], to, int(order["expectedOutput"]))
        self.swaps.append(swap)
        return swap, str(order["depositAddress"])

    async def order_and_pay(self, at: Server, direction: str) -> PaidOrder:
        """Order and pay. Raises Gone only before the order is made."""
        swap, address = await self.order(at, direction)
        await self.pay(direction, address)
        return swap

    async def pay(self, direction: str, address: str) -> None:
        """Pay the amount of an order: 1 XMR, or 165 USDC."""
        if direction == "x2u":
            await self.stack.pay_xmr(address, XMR)
            self.books.xmr_in += XMR
        else:
            self.books.deposit_addresses.add(address)
            await self.stack.pay_usdc(address, 165 * USDC)
            self.books.usdc_in += 165 * USDC

    async def finish(self, at: Server, *swaps: PaidOrder) -> None:
        """Follow these orders, or all, to their completion."""
        for swap in swaps or self.swaps:
            await reaches(self.stack, at, swap.order_id, "completed")

    def abandon(self, swap: PaidOrder) -> None:
        """Expect no payout for the order: its deposit is in the wallet and owed to the user."""
        self.swaps.remove(swap)

    async def through(self, direction: str, crashes: Sequence[Crash]) -> PaidOrder:
        """One order during which the service is killed at each point in turn and restarted."""
        swap = None
        for crash in crashes:
            async with self.stack.serving(crash) as at:
                with suppress(Gone):
                    swap = swap or await self.order_and_pay(at, direction)
                    await reaches(self.stack, at, swap.order_id, "completed")
                await at.death(DEATH_SECONDS)  # a point that is never reached would time out here
        async with self.stack.serving() as at:
            assert swap is not None
            await self.finish(at, swap)
            await self.stop(at)
        return swap

    async def stop(self, at: Server) -> None:
        """Stop the service with SIGTERM, in a thread: the proxies to its daemons keep running."""
        assert await asyncio.to_thread(at.stop) == 0

    async def check(self) -> None:
        """Require exactly one payout for each order, and no missing money, by the chains.

        The service must not be running.
        """
        await self.stack.mine(1)
        for swaps in self._by_payee():
            paid, expected = await self.received(swaps[0]), [swap.expected for swap in swaps]
            assert sorted(paid) == sorted(expected), (paid, swaps)
        assert await self.differences() == []

    async def audit(self) -> None:
        """Require that ``rpcsvc audit`` finds no difference."""
        said = await command(self.stack, "audit")
        assert said.status == 0, said.out

    def _by_payee(self) -> list[list[PaidOrder]]:
        """Orders grouped by payee address, which two refunds of an order share."""
        found: dict[str, list[PaidOrder]] = {}
        for swap in self.swaps:
            found.setdefault(swap.to, []).append(swap)
        return list(found.values())

    async def differences(self) -> list[str]:
        """The money that is not accounted for. The service must not be running."""
        out = {"x2u": 0, "u2x": 0}
        for swap, *_ in self._by_payee():
            out[swap.direction] += sum(await self.received(swap))
        self.books.usdc_out, self.books.xmr_out = out["x2u"], out["u2x"]
        self.books.payments = len(await xmr_payments(self.payee, {swap.to for swap in self.swaps}))
        return await self.books.differences()

    async def received(self, swap: PaidOrder) -> list[int]:
        """The payments to an order's destination."""
        if swap.direction == "x2u":
            return await usdc_received(self.stack, swap.to)
        return await xmr_received(self.payee, swap.to)

    async def _address(self, direction: str) -> str:
        if direction == "x2u":
            return EvmSigner(system_random(32)).address
        return (await self.payee.create_addresses(1))[0].address


@asynccontextmanager
async def trading(
    home: Path, miner: Miner, payees: WalletRpc, token_code: bytes
) -> AsyncIterator[Trader]:
    """Users of a stack in ``home``, which the tests of a module share.

    Anvil keeps its chain in a file, written each second, so that it may be killed.
    """
    state = ("--state", str(home / "anvil.json"), "--state-interval", "1")
    with (
        WalletRpc(home / "wallets", miner.monerod) as wallet_rpc,
        Anvil(home / "anvil", 42161, *state) as anvil,
    ):
        await new_wallet(wallet_rpc)
        async with (
            EvmClient(anvil.endpoint) as evm,
            WalletClient(payees.endpoint) as payee,
            exchange(home, miner, wallet_rpc, anvil, await deploy(evm, token_code)) as stack,
        ):
            payee.account = await payee.create_account()
            yield Trader(stack, payee, await Books.opened(stack))


async def kill_anvil(stack: Exchange) -> None:
    """Kill Anvil once its file has the complete current chain.

    It rewrites the file each second, in place: killed during a write it would not start again.
    """
    head = await stack.evm.block()
    assert head is not None
    file = stack.anvil.directory.parent / "anvil.json"

    async def is_killed() -> bool:
        stack.anvil.freeze()
        if _newest_in(file) >= head.number:
            stack.anvil.kill()
            return True
        stack.anvil.thaw()
        return False

    await until(is_killed)


def _newest_in(file: Path) -> int:
    """The number of the newest block in Anvil's file; -1: the file is missing or incomplete."""
    try:
        return int(orjson.loads(file.read_bytes())["best_block_number"])
    except (FileNotFoundError, orjson.JSONDecodeError):
        return -1
