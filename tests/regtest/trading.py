"""Users who order, pay once and wait, whatever happens to the service meanwhile.

Each has an address of its own to be paid at, so that what was paid is counted on the chain, order
by order.
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
    """An order that was paid for. ``to``: where its payout goes, and nothing else."""

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
    deals: list[PaidOrder] = field(default_factory=list)

    async def order(self, at: Server, direction: str) -> tuple[PaidOrder, str]:
        """An order that is not paid yet, and its deposit address. Raises Gone."""
        to = await self._address(direction)
        amount = "1" if direction == "x2u" else "165"
        made = await create(at, direction=direction, amount=amount, to=to)
        order = made["data"]["order"]
        deal = PaidOrder(direction, order["orderId"], to, int(order["expectedOutput"]))
        self.deals.append(deal)
        return deal, str(order["depositAddress"])

    async def deal(self, at: Server, direction: str) -> PaidOrder:
        """Order, and pay. Raises Gone only before it is ordered."""
        deal, address = await self.order(at, direction)
        await self.pay(direction, address)
        return deal

    async def pay(self, direction: str, address: str) -> None:
        """What an order is for: 1 XMR, or 165 USDC."""
        if direction == "x2u":
            await self.stack.pay_xmr(address, XMR)
            self.books.xmr_in += XMR
        else:
            self.books.deposit_addresses.add(address)
            await self.stack.pay_usdc(address, 165 * USDC)
            self.books.usdc_in += 165 * USDC

    async def finish(self, at: Server, *deals: PaidOrder) -> None:
        """Follow these orders, or all, to their completion."""
        for deal in deals or self.deals:
            await reaches(self.stack, at, deal.order_id, "completed")

    def give_up(self, deal: PaidOrder) -> None:
        """An order that is not paid out: its deposit is the user's, and in the wallet."""
        self.deals.remove(deal)

    async def through(self, direction: str, crashes: Sequence[Crash]) -> PaidOrder:
        """One order with a service that dies at each of these points in turn, and is restarted."""
        deal = None
        for crash in crashes:
            async with self.stack.serving(crash) as at:
                with suppress(Gone):
                    deal = deal or await self.deal(at, direction)
                    await reaches(self.stack, at, deal.order_id, "completed")
                await at.death(DEATH_SECONDS)  # a point that is never reached would time out here
        async with self.stack.serving() as at:
            assert deal is not None
            await self.finish(at, deal)
            await self.stop(at)
        return deal

    async def stop(self, at: Server) -> None:
        """End the service in order. The lines to its daemons go on meanwhile."""
        assert await asyncio.to_thread(at.stop) == 0

    async def check(self) -> None:
        """Exactly one payout for each order, and all money accounted for, by the chains.

        The service must not be running.
        """
        await self.stack.mine(1)
        for deals in self._by_payee():
            paid, expected = await self.received(deals[0]), [deal.expected for deal in deals]
            assert sorted(paid) == sorted(expected), (paid, deals)
        assert await self.differences() == []

    async def audit(self) -> None:
        """The operator's auditor agrees, too."""
        said = await command(self.stack, "audit")
        assert said.status == 0, said.out

    def _by_payee(self) -> list[list[PaidOrder]]:
        """The deals that are paid to one address, such as two refunds of an order, together."""
        found: dict[str, list[PaidOrder]] = {}
        for deal in self.deals:
            found.setdefault(deal.to, []).append(deal)
        return list(found.values())

    async def differences(self) -> list[str]:
        """What of the money is not accounted for. The service must not be running."""
        out = {"x2u": 0, "u2x": 0}
        for deal, *_ in self._by_payee():
            out[deal.direction] += sum(await self.received(deal))
        self.books.usdc_out, self.books.xmr_out = out["x2u"], out["u2x"]
        self.books.payments = len(await xmr_payments(self.payee, {deal.to for deal in self.deals}))
        return await self.books.differences()

    async def received(self, deal: PaidOrder) -> list[int]:
        """The payments that came to a deal's address."""
        if deal.direction == "x2u":
            return await usdc_received(self.stack, deal.to)
        return await xmr_received(self.payee, deal.to)

    async def _address(self, direction: str) -> str:
        if direction == "x2u":
            return EvmSigner(system_random(32)).address
        return (await self.payee.create_addresses(1))[0].address


@asynccontextmanager
async def trading(
    home: Path, miner: Miner, payees: WalletRpc, token_code: bytes
) -> AsyncIterator[Trader]:
    """Users of a stack in ``home``: what one test leaves behind, the next one finds.

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
    """Kill Anvil while its file holds the chain as it is now, whole.

    It writes the file anew each second, in place: killed meanwhile it would not start again.
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
    """The number of the newest block in Anvil's file; -1: it is not there, or half written."""
    try:
        return int(orjson.loads(file.read_bytes())["best_block_number"])
    except (FileNotFoundError, orjson.JSONDecodeError):
        return -1
