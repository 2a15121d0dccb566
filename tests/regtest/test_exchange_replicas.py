"""Replicas on one PostgreSQL, one wallet and one chain.

Orders are made at a replica that does not settle. The settler is killed or paused between each pair
of steps of a payout, another replica finishes it, and the resumed one writes nothing more. Payouts
are counted on the chains.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from eth_account import Account

from rpcsvc.ids import system_random
from rpcsvc.settlement.onchain.wiring import KEY_FILE
from tests.e2e.cluster import is_ready, reads, settles
from tests.e2e.processes import Crash, Server, until
from tests.postgres import PostgresqlServer as Postgres
from tests.postgres import new_database, own_server
from tests.regtest.ledger_of_chains import usdc_received
from tests.regtest.trading import Trader
from tests.regtest.x402_payer import VALUE, Payer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Replicas:
    """Replicas of a trader's service, each with its own data directory and payment journal."""

    def __init__(self, trader: Trader, url: str) -> None:
        self._trader = trader
        self._home = trader.stack.data_dir.parent
        self._url = url
        self.all: list[Server] = []

    def start(self, name: str, crash: Crash | None = None) -> Server:
        folder = self._home / name
        if not folder.exists():
            folder.mkdir(mode=0o700)
            shutil.copy(self._trader.stack.data_dir / KEY_FILE, folder / KEY_FILE)
        made = Server(folder, crash=crash, environ=self._environ())
        self.all.append(made)
        return made

    async def standing_by(self, name: str, crash: Crash | None = None) -> Server:
        """A replica that has started while another one settles."""
        made = self.start(name, crash)
        await until(partial(reads, made))
        return made

    async def taking_orders(self, name: str) -> Server:
        """A replica that takes orders while another one settles."""
        made = await self.standing_by(name)
        await until(partial(is_ready, made))
        return made

    async def command(self, name: str, *words: str) -> tuple[int, str, str]:
        """``rpcsvc`` on one replica's data directory: its status, and what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rpcsvc", *words, "--data-dir", str(self._home / name),
            env={**os.environ, **self._environ()}, stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        return int(process.returncode or 0), out.decode(), err.decode()

    async def value(self, sql: str) -> object:
        connection = await asyncpg.connect(self._url)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    async def holds(self, at: Server) -> bool:
        holder = await self.value("SELECT holder FROM leases WHERE expires_at > now_ms()")
        return holder is not None and str(holder).split(":")[1] == str(at.pid)

    def _environ(self) -> dict[str, str]:
        return {**self._trader.stack.environ(), "RPCSVC_DATABASE_URL": self._url}

    async def settling(self, at: Server) -> Server:
        """Wait until it settles and takes orders."""

        async def is_up() -> bool:
            assert not at.is_dead, at.log.read_text()[-3000:]
            await self._trader.stack.mine_in_time()
            return await settles(at, None)

        await until(is_up)
        return at

    def end(self) -> None:
        for each in self.all:
            if not each.is_dead:
                os.kill(each.pid, signal.SIGCONT)
                each.kill()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with own_server() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(trader: Trader, postgres: Postgres) -> AsyncIterator[Replicas]:
    async with new_database(postgres.url, empty=True) as url:
        made = Replicas(trader, url)
        try:
            yield made
        finally:
            made.end()


def is_stopped(at: Server) -> bool:
    """Whether it is paused, or dead."""
    if at.is_dead:
        return True
    state = Path(f"/proc/{at.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


# (direction, point): of a payout in USDC, and of one in XMR.
POINTS: list[tuple[str, Crash]] = [
    ("x2u", ("evm record", "stopped before", 1)),
    ("x2u", ("evm journal", "after", 1)),
    ("u2x", ("monero relay", "stopped after", 1)),
]


async def test_standby_finishes_what_the_settler_began(trader: Trader, replicas: Replicas) -> None:
    plain = await replicas.settling(replicas.start("first"))
    names = ["third", "first"]
    for direction, crash in POINTS:
        struck = await replicas.standing_by("second", crash)
        await trader.stop(plain)
        await replicas.settling(struck)
        plain = await replicas.taking_orders(names[0])
        names.reverse()
        deal = await trader.order_and_pay(plain, direction)

        async def is_struck(at: Server = struck) -> bool:
            await trader.stack.mine_in_time()
            return is_stopped(at)

        await until(is_struck)
        await replicas.settling(plain)
        await trader.finish(plain, deal)
        if not struck.is_dead:
            os.kill(struck.pid, signal.SIGCONT)
            assert await struck.death() == 1, "its lease is lost"
    other = await replicas.taking_orders("second")
    payer = Payer(trader, Account.from_key(system_random(32)), keeps=False)
    await trader.stack.token.mint(payer.account.address, VALUE)
    await payer.run(other)
    assert await trader.stack.token.balance(payer.account.address) == 0
    assert await usdc_received(trader.stack, payer.deposit_address) == [VALUE]
    deal, address = await trader.order(other, "x2u")
    paused = await replicas.command("second", "payouts", "pause", "--reason", "from a standby")
    assert paused[0] == 0, paused
    await trader.pay("x2u", address)

    async def is_refused() -> bool:
        await trader.stack.mine_in_time()
        return "Payouts are paused" in plain.log.read_text()

    await until(is_refused)
    signed = f"SELECT 1 FROM evm_payments WHERE payment_id LIKE '{deal.order_id}/%'"
    assert await replicas.value(signed) is None
    await trader.stop(plain)
    await until(partial(replicas.holds, other))
    resumed = await replicas.command(names[0], "payouts", "resume")
    assert "from a standby" in resumed[1], "the pause outlives the replica that settled"
    await replicas.settling(other)
    await trader.finish(other, deal)
    audit = await replicas.command(names[0], "audit")
    assert audit[0] == 0, audit
    asked = await replicas.command("fourth", "onchain", "init")
    assert "Put the mnemonic back" in asked[1], "a new replica makes no keys of its own"
    assert not (trader.stack.data_dir.parent / "fourth" / KEY_FILE).exists()
    await trader.stop(other)
    await trader.check()
