"""Replicas on one PostgreSQL, and HAProxy before them. ``make cluster`` runs the demo over it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import aiohttp
import asyncpg

from rpcsvc.clock import SystemClock
from rpcsvc.ids import system_random
from rpcsvc.local_secret import local_secret
from rpcsvc.signing import KEYS_DIR, KeyRing
from tests.e2e.processes import Server, free_port, until
from tests.postgres import new_database, own_server, value_of

CONFIG: Final = Path(__file__).parents[2] / "config/haproxy.cfg"
REPLICAS: Final = 3
# Without a token /rpc refuses requests that come through a load balancer.
TOKEN: Final = "a token of the cluster"


class Replicas:
    """Server processes on one database, each with a data directory of its own.

    A supervisor starts another for each that ends below ``supervised``. They run ``module``.
    """

    def __init__(
        self, url: str, folder: Path, environ: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.url = url
        self.folder = folder
        self.environ = {
            "RPCSVC_DATABASE_URL": url,
            "RPCSVC_SITE_URL": "http://127.0.0.1:8080",
            **environ,
        }
        self.all: list[Server] = []
        self._first = folder / "first"
        self._first.mkdir(mode=0o700)
        KeyRing.load_or_create(self._first / KEYS_DIR, SystemClock(), system_random)
        local_secret(self._first, system_random)
        self.supervised = 0
        self.module = "rpcsvc"
        self.is_new = False

    def start(self, **environ: str) -> Server:
        data_dir = self.folder / f"replica{len(self.all)}"
        shutil.copytree(self._first, data_dir)  # its keys, as docs/operate/cluster.md says
        made = Server(
            data_dir,
            environ={**self.environ, **environ},
            log_dir=self.folder,
            module=self.module,
            is_new=self.is_new,
        )
        self.all.append(made)
        return made

    @property
    def alive(self) -> list[Server]:
        """The replicas that run. With a supervisor, missing ones are started."""
        for _ in range(self.supervised - sum(not each.is_dead for each in self.all)):
            self.start()
        return [each for each in self.all if not each.is_dead]

    async def start_ready(self) -> Server:
        """A replica that takes orders; the first one settles, too."""
        made = self.start()
        assert await made.ready()
        return made

    async def holder(self, besides: tuple[Server, ...] = ()) -> Server:
        """The replica that settles, once one does and is ready."""

        async def ready() -> Server | None:
            alive, token = self.alive, self.environ.get("AGENT_RPC_TOKEN")
            holder = await self._holder_pid()
            for each in alive:
                if each.pid == holder and each not in besides and await settles(each, token):
                    return each
            return None

        try:
            return await until(ready)
        except TimeoutError:
            logs = [f"{each.pid}: {each.log.read_text()[-2000:]}" for each in self.all]
            raise AssertionError("no replica is ready:\n" + "\n".join(logs)) from None

    async def _holder_pid(self) -> int | None:
        with suppress(asyncpg.PostgresError, OSError):  # its server may be down, or have no tables
            holder = await self.value("SELECT holder FROM leases WHERE expires_at > now_ms()")
            return None if holder is None else int(holder.split(":")[1])
        return None

    async def value(self, sql: str) -> Any:
        return await value_of(self.url, sql)

    async def end_lease(self) -> None:
        """Have the lease end now. Its holder is dead: nobody renews it."""
        await self.value("UPDATE leases SET expires_at = now_ms()")

    def kill(self) -> None:
        for each in self.all:
            if not each.is_dead:
                os.kill(each.pid, signal.SIGCONT)
                each.kill()


@asynccontextmanager
async def replicas(
    server: str,
    folder: Path,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    is_own: bool = False,
) -> AsyncIterator[Replicas]:
    """Replicas on a database of their own; ``is_own``: on a server that ends with the test."""
    async with new_database(server, empty=is_own) as url:
        made = Replicas(url, folder, environ)
        try:
            yield made
        finally:
            made.kill()


async def is_ready(at: Server) -> bool:
    """Whether /readyz succeeds. A paused process accepts the connection and never answers."""
    try:
        async with asyncio.timeout(2):
            return (await at.health("/readyz")).get("http") == 200
    except TimeoutError:
        return False


async def settles(at: Server, token: str | None) -> bool:
    """Whether it is ready and holds the lease.

    For a moment after it took the lease a replica still answers as before, then it closes its
    connections.
    """
    if not await is_ready(at):
        return False
    headers = {} if token is None else {"x-agent-rpc-token": token}
    with suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{at.url}/metrics", headers=headers) as response,
        ):
            return "rpcsvc_lease_held 1.0" in await response.text()
    return False


async def reads(at: Server) -> bool:
    """Whether it answers reads of orders."""
    return (await at.health("/readyz/reads")).get("http") == 200


class Balancer(NamedTuple):
    """HAProxy as clients reach it."""

    url: str

    async def takes_orders(self) -> bool:
        """Whether it has found the replicas that are ready; it probes them one after another."""
        async with aiohttp.ClientSession() as session:
            for _ in range(REPLICAS):
                try:
                    async with session.get(f"{self.url}/readyz") as response:
                        if response.status != 200:
                            return False
                except aiohttp.ClientError:
                    return False
        return True


@contextmanager
def balancer(port: int, servers: list[Server]) -> Iterator[Balancer]:
    """HAProxy with the configuration that is shipped, before these servers."""
    addresses = {
        f"RPCSVC_REPLICA_{number}": f"127.0.0.1:{each.port}"
        for number, each in enumerate(servers, 1)
    }
    bind = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        ["haproxy", "-db", "-f", str(CONFIG)],
        env={**os.environ, **addresses, "RPCSVC_BIND": bind},
    )
    try:
        yield Balancer(f"http://{bind}")
    finally:
        process.kill()
        process.wait()


class Cluster(NamedTuple):
    """Three replicas that are up, and the balancer before them."""

    replicas: Replicas
    front: Balancer


@asynccontextmanager
async def cluster(server: str, folder: Path) -> AsyncIterator[Cluster]:
    """A cluster on a database of its own."""
    port = free_port()
    async with new_database(server) as url:
        environ = {"RPCSVC_SITE_URL": f"http://127.0.0.1:{port}", "AGENT_RPC_TOKEN": TOKEN}
        made = Replicas(url, folder, environ)
        made.is_new = True
        try:
            assert await made.start().ready()
            for each in [made.start() for _ in range(REPLICAS - 1)]:
                await until(partial(reads, each))
            with balancer(port, made.all) as front:
                await until(front.takes_orders)
                yield Cluster(made, front)
        finally:
            made.kill()


async def _demo(front: Balancer) -> None:
    words = [sys.executable, "-m", "rpcsvc", "demo", "--url", front.url]
    running = await asyncio.create_subprocess_exec(
        *words, env={**os.environ, "AGENT_RPC_TOKEN": TOKEN}
    )
    if await running.wait() != 0:
        raise SystemExit("the demo failed")


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


async def _main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="rpcsvc-cluster-") as folder,
        own_server() as server,
    ):
        _say("PostgreSQL, three replicas and HAProxy start")
        async with cluster(server.url, Path(folder)) as up:
            _say(f"the demo over {up.front.url}")
            await _demo(up.front)
            struck = await up.replicas.holder()
            _say(f"kill -9 of the replica that settles, process {struck.pid}")
            struck.kill()
            began = time.monotonic()
            await until(up.front.takes_orders)
            seconds = time.monotonic() - began
            _say(f"orders are taken again after {seconds:.1f} s; the demo once more")
            await _demo(up.front)


if __name__ == "__main__":
    asyncio.run(_main())
