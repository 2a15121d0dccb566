"""Replicas on one PostgreSQL, one wallet and one chain."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

from rpcsvc.settlement.onchain.wiring import KEY_FILE
from tests.e2e.cluster import is_ready, reads, settles
from tests.e2e.processes import Crash, Server, until
from tests.postgres import value_of
from tests.regtest.trading import Trader


class OnchainReplicas:
    """Replicas of a trader's service, each with its own data directory and payment journal."""

    def __init__(self, trader: Trader, url: str) -> None:
        self._trader = trader
        self._home = trader.stack.data_dir.parent
        self._url = url
        self.all: list[Server] = []

    def start(self, name: str, crash: Crash | None = None, module: str = "rpcsvc") -> Server:
        folder = self._home / name
        if not folder.exists():
            folder.mkdir(mode=0o700)
            shutil.copy(self._trader.stack.data_dir / KEY_FILE, folder / KEY_FILE)
        made = Server(folder, crash=crash, environ=self._environ(), module=module)
        self.all.append(made)
        return made

    def in_turn(self) -> Iterator[str]:
        """Three names for ever, from the last one that was started: it has settled last."""
        last = self.all[-1].data_dir.name if self.all else "first"
        return cycle([last, *(name for name in ("first", "second", "third") if name != last)])

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
        return await value_of(self._url, sql)

    async def end_lease(self) -> None:
        """Have the lease end now, by the database's clock; its holder does not know."""
        await self.value("UPDATE leases SET expires_at = 0")

    async def keep_lease(self) -> None:
        """Have nobody else take the lease for an hour, whatever its holder does."""
        await self.value("UPDATE leases SET expires_at = now_ms() + 3600000")

    async def stopped(self, at: Server) -> None:
        """Mine until it is paused or dead."""

        async def is_there() -> bool:
            await self._trader.stack.mine_in_time()
            return is_stopped(at)

        await until(is_there)

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


def is_stopped(at: Server) -> bool:
    """Whether it is paused, or dead."""
    if at.is_dead:
        return True
    try:
        stat = Path(f"/proc/{at.pid}/stat").read_text()
    except FileNotFoundError:  # it has died since
        return True
    return stat.rpartition(")")[2].split()[0] == "T"
