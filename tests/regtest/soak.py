"""``python -m tests.regtest.soak --seed N --minutes M``: random orders and faults.

During orders in both directions the service and each daemon are killed, answers are lost, delayed
or garbage, and both chains are reorganised, never deeper than the confirmations of a deposit. Then
the faults end, each order is followed to its completion, payouts and money are counted on the
chains, and ``rpcsvc audit`` compares them with the database.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from tests.e2e.processes import Gone, Server
from tests.regtest.daemon_proxy import DaemonProxy, garbage
from tests.regtest.daemons import Daemon, Miner, Monerod, WalletRpc, new_wallet, pop_blocks
from tests.regtest.exchange import CONFIRMATIONS, XMR, reaches
from tests.regtest.faults import well
from tests.regtest.ledger_of_chains import usdc_received
from tests.regtest.token import compiled
from tests.regtest.trading import PaidOrder, Trader, kill_anvil, trading

MOST_OPEN: Final = 4
_DEEPEST: Final = CONFIRMATIONS - 1

# Whether the run may end after so many steps.
Enough = Callable[[int], bool]


@dataclass
class Tally:
    """Counts of orders and faults, and the problems found."""

    orders: int = 0
    faults: int = 0
    double: int = 0
    lost: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.double or self.lost or self.differences)

    def summary(self) -> str:
        return (
            f"orders {self.orders}, faults {self.faults}, double payouts {self.double},"
            f" lost {self.lost}"
        )


class Soak:
    """One run on a stack; the same seed draws the same orders and faults."""

    def __init__(self, trader: Trader, lines: dict[str, DaemonProxy], seed: int) -> None:
        self.trader = trader
        self.stack = trader.stack
        self.lines = lines
        self.tally = Tally()
        self._random = random.Random(seed)
        # How often it is drawn from depends on timing: it must not change the other draws.
        self._luck_of_answers = random.Random(seed)
        self._server: Server | None = None
        self._open: dict[str, tuple[PaidOrder, str]] = {}
        self._faults: list[Callable[[], Awaitable[None]]] = [
            self._kill_service,
            self._kill_daemon,
            self._kill_daemon,
            self._bad_line,
            self._bad_line,
            self._reorganise_monero,
            self._reorganise_evm,
        ]

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    async def run(self, is_enough: Enough) -> Tally:
        """Run random steps until ``is_enough``, then settle and count."""
        self._start()
        await well(self.server)
        try:
            for steps in count():
                if self.tally.orders and is_enough(steps):
                    break
                await self._step()
            await self._settle()
        finally:
            if not self.server.is_dead:
                self.server.kill()
        return self.tally

    async def _step(self) -> None:
        direction = self._random.choice(("x2u", "u2x", None, None))
        if direction is not None and len(self._open) < MOST_OPEN:
            await self._order(direction)
        if self._random.random() < 0.4:
            self.tally.faults += 1
            await self._random.choice(self._faults)()
        for _ in range(self._random.randint(1, 3)):
            await self.stack.mine()
        await self._repay()
        await self._close_completed()

    async def _order(self, direction: str) -> None:
        """Make and pay one more order, unless the service is not ready."""
        with suppress(Gone, AssertionError):
            swap, address = await self.trader.order(self.server, direction)
            await self.trader.pay(direction, address)
            self._open[swap.order_id] = (swap, address)
            self.tally.orders += 1

    async def _repay(self) -> None:
        """Send a user's deposit of USDC again if a reorg has returned it."""
        for swap, address in self._open.values():
            if swap.direction == "u2x" and not await usdc_received(self.stack, address):
                await self.trader.pay(swap.direction, address)

    async def _close_completed(self) -> None:
        for swap, _ in list(self._open.values()):
            if await self.trader.received(swap):
                del self._open[swap.order_id]

    # --- faults --------------------------------------------------------------------------------

    def _start(self) -> None:
        self._server = Server(self.stack.data_dir, environ=self.stack.environ())

    async def _kill_service(self) -> None:
        self.server.kill()
        self._start()

    async def _kill_daemon(self) -> None:
        name = self._random.choice(sorted(self.lines))
        daemon = self._daemon(name)
        if name == "anvil":
            await kill_anvil(self.stack)
        else:
            await asyncio.to_thread(daemon.kill)
        if self._random.random() < 0.3:
            await self._kill_service()
        await asyncio.to_thread(daemon.start)
        await self.stack.miner.reconnect()

    def _daemon(self, name: str) -> Daemon:
        stack = self.stack
        return {"anvil": stack.anvil, "monerod": stack.monerod, "wallet": stack.wallet_rpc}[name]

    async def _bad_line(self) -> None:
        line = self.lines[self._random.choice(sorted(self.lines))]
        match self._random.choice(("garbage", "lose", "late")):
            case "garbage":
                line.change = garbage
            case "lose":
                line.lose = lambda _body: self._luck_of_answers.random() < 0.5
            case _:
                line.delay = 0.3
        await self.stack.mine()
        await asyncio.sleep(1)
        line.clear()

    async def _reorganise_monero(self) -> None:
        depth = self._random.randint(1, _DEEPEST)
        async with self.stack.node as node:
            await pop_blocks(node, depth)
        await self.stack.miner.mine(depth + 1)
        await self.stack.miner.offer_again()

    async def _reorganise_evm(self) -> None:
        await self.stack.controls.reorganise(self._random.randint(1, _DEEPEST))
        await self.stack.controls.mine()

    # --- the end -------------------------------------------------------------------------------

    async def _settle(self) -> None:
        for line in self.lines.values():
            line.clear()
        await self._kill_service()
        await well(self.server)
        await self._repay()
        for swap in self.trader.swaps:
            with suppress(TimeoutError):
                await reaches(self.stack, self.server, swap.order_id, "completed")
        await self.trader.stop(self.server)
        await self._count()

    async def _count(self) -> None:
        await self.stack.mine()
        for swap in self.trader.swaps:
            paid = await self.trader.received(swap)
            self.tally.double += max(0, len(paid) - 1)
            self.tally.lost += paid[:1] != [swap.expected]
        # A deposit that was reorged out is on no chain.
        books = self.trader.books
        books.usdc_in = sum(
            [sum(await usdc_received(self.stack, item)) for item in books.deposit_addresses]
        )
        self.tally.differences = [*await self.trader.differences(), *await self._audited()]

    async def _audited(self) -> list[str]:
        """The findings of ``rpcsvc audit``, which reads the database and all daemons."""
        data_dir = str(self.stack.data_dir)
        command = [sys.executable, "-m", "rpcsvc", "audit", "--data-dir", data_dir]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **self.stack.environ()},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        return [] if process.returncode == 0 else ["audit:", *said.decode().splitlines()]


async def soak(home: Path, miner: Miner, payees: WalletRpc, seed: int, is_enough: Enough) -> Tally:
    """One run in a directory of its own."""
    async with trading(home, miner, payees, compiled()) as trader, AsyncExitStack() as opened:
        stack = trader.stack
        await miner.fund(await _primary(trader), *[3 * XMR] * 10)
        trader.books.xmr += 30 * XMR
        # No reorganisation of the run takes away the money that the wallets begin with.
        await stack.mine(CONFIRMATIONS)
        lines = {
            name: await opened.enter_async_context(DaemonProxy(daemon.url).open())
            for name, daemon in (
                ("anvil", stack.anvil), ("monerod", stack.monerod), ("wallet", stack.wallet_rpc)
            )
        }  # fmt: skip
        stack.extra |= {
            "RPCSVC_ONCHAIN__NODES": f"arbitrum={lines['anvil'].url}",
            "RPCSVC_ONCHAIN__MONEROD_URL": lines["monerod"].url,
            "RPCSVC_ONCHAIN__WALLET_URL": lines["wallet"].url,
        }
        return await Soak(trader, lines, seed).run(is_enough)


async def _primary(trader: Trader) -> str:
    async with trader.stack.wallet as wallet:
        return await wallet.primary_address()


async def main() -> int:
    """Run with daemons of its own; the exit status tells whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.regtest.soak")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, ExitStack() as daemons:
        root = Path(home)
        monerod = daemons.enter_context(Monerod(root / "monerod"))
        bank = daemons.enter_context(WalletRpc(root / "bank", monerod))
        payees = daemons.enter_context(WalletRpc(root / "payees", monerod))
        miner = Miner(monerod, bank)
        await miner.begin()
        await new_wallet(payees)
        (root / "exchange").mkdir(mode=0o700)
        end = time.monotonic() + options.minutes * 60
        tally = await soak(
            root / "exchange", miner, payees, options.seed, lambda _steps: time.monotonic() > end
        )
    for line in tally.differences:
        print(line)
    print(tally.summary())
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
