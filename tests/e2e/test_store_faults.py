"""A full disk and a locked database: a clear answer, nothing half written, and recovery."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

import aiohttp
import pytest

from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.audit import audit, count, orders_of
from tests.e2e.processes import (
    Server,
    call,
    call_for_data,
    server,
    until,
    until_over,
)
from tests.e2e.swaps import SWAPS

SLOW_PAYOUTS = {"RPCSVC_SANDBOX__USDC_BLOCK_MS": "1000"}


class Trouble(Protocol):
    """A fault that keeps a server from writing to its database until it is ended."""

    data_dir: Path

    def begin(self, at: Server) -> None: ...

    def end(self, at: Server) -> None: ...


class FullDisk:
    """A file system of its own with no room left: ENOSPC, as SQLite's SQLITE_FULL."""

    def __init__(self, disk: Path) -> None:
        self.data_dir = disk / "data"
        self._ballast = disk / "ballast"

    def begin(self, at: Server) -> None:
        assert not at.is_dead
        with self._ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def end(self, at: Server) -> None:
        assert not at.is_dead
        self._ballast.unlink()


class FileSizeLimit:
    """No file of the server may grow beyond the log of the database: EFBIG, a disk I/O error."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    def begin(self, at: Server) -> None:
        wal = self.data_dir / f"{DATABASE_NAME}-wal"
        self._limit(at, wal.stat().st_size)

    def end(self, at: Server) -> None:
        self._limit(at, resource.RLIM_INFINITY)

    def _limit(self, at: Server, size: int) -> None:
        _, hard = resource.prlimit(at.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(at.pid, resource.RLIMIT_FSIZE, (size, hard))


class Locked:
    """Another process holds the database's write lock."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._other: sqlite3.Connection | None = None

    def begin(self, at: Server) -> None:
        assert not at.is_dead
        other = sqlite3.connect(self.data_dir / DATABASE_NAME, isolation_level=None, timeout=180)
        other.execute("BEGIN IMMEDIATE")
        self._other = other

    def end(self, at: Server) -> None:
        assert not at.is_dead
        if self._other is not None:
            self._other.execute("ROLLBACK")
            self._other.close()


def mounted(disk: Path) -> bool:
    """Mount a small file system; False where that is not permitted."""
    disk.mkdir(mode=0o700)
    mount = shutil.which("mount")
    if mount is None:
        return False
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    return subprocess.run([mount, *options], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    if not mounted(disk):
        pytest.skip("only root may mount a file system; the file size limit stands in for it")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(
    params=[
        "full disk",
        pytest.param("file size limit", marks=pytest.mark.slow),
        pytest.param("locked", marks=pytest.mark.slow),
    ]
)
def trouble(request: pytest.FixtureRequest, tmp_path: Path) -> Trouble:
    if request.param == "full disk":
        return FullDisk(request.getfixturevalue("small_disk"))
    if request.param == "file size limit":
        return FileSizeLimit(tmp_path / "data")
    return Locked(tmp_path / "data")


async def refusal(at: Server) -> tuple[str, dict[str, object]]:
    """Create orders until one is refused; its key and the error."""
    for number in range(100):
        key = f"refused-{number:08}"
        answer = await call(at, "swap.create", {**SWAPS["x2u"], "idempotency-key": key})
        if not answer["ok"]:
            return key, answer["error"]
    raise AssertionError("the store took a hundred orders")


async def over_http(at: Server) -> aiohttp.ClientResponse:
    async with aiohttp.ClientSession() as session:
        url = f"{at.url}/api/v1/agent/swap/create"
        async with session.post(url, json=SWAPS["x2u"]) as response:
            await response.read()
            return response


async def not_well(at: Server) -> bool:
    health = await at.health()
    return health.get("status") == "degraded" and health["http"] == 503


async def test_store_that_cannot_write_reports_it_and_recovers(
    tmp_path: Path, trouble: Trouble
) -> None:
    async with server(trouble.data_dir, log_dir=tmp_path) as at:
        first, _ = await call_for_data(at, "swap.create", SWAPS["x2u"])
        trouble.begin(at)
        key, error = await refusal(at)
        assert (error["code"], error["retryable"]) == ("unavailable", True)
        assert "nothing was changed" in str(error["message"])
        assert "disk" not in str(error["message"]), "SQLite's own words stay in the log"
        response = await over_http(at)
        assert (response.status, "Retry-After" in response.headers) == (503, True)
        assert await not_well(at)
        order_id = first["order"]["orderId"]
        assert (await call(at, "swap.status", {"orderId": order_id}))["ok"]
        assert (await call(at, "swap.quote", _without_to()))["ok"]
        assert audit(trouble.data_dir) == []
        before = count(trouble.data_dir, "orders")

        trouble.end(at)
        # No caller writes meanwhile: load balancers send no orders to a service that is not ready.
        await until(at.is_well)
        keyed = {**SWAPS["x2u"], "idempotency-key": key}
        once, again = [await call_for_data(at, "swap.create", keyed) for _ in range(2)]
        assert once == again
        assert count(trouble.data_dir, "orders") == before + 1
        assert at.stop() == 0
    assert audit(trouble.data_dir) == []


def _without_to() -> dict[str, str]:
    return {name: value for name, value in SWAPS["x2u"].items() if name != "to"}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["deposit", "payout"])
async def test_a_store_that_cannot_write_amid_a_settlement_pays_once(
    tmp_path: Path, trouble: Trouble, moment: str
) -> None:
    environ = SLOW_PAYOUTS if moment == "payout" else None
    async with server(trouble.data_dir, log_dir=tmp_path, environ=environ) as at:
        made, _ = await call_for_data(at, "swap.execute", SWAPS["x2u"])
        order_id = made["order"]["orderId"]
        await call_for_data(at, "sandbox.fund", {"orderId": order_id})
        if moment == "payout":
            await until_payout_is_in_the_pool(trouble.data_dir)
        trouble.begin(at)

        async def is_noticed() -> bool:
            return await not_well(at) or set(orders_of(trouble.data_dir).values()) == {"completed"}

        await until(is_noticed)
        assert orders_of(trouble.data_dir) != {order_id: "completed"}
        trouble.end(at)
        assert (await until_over(at, order_id))["state"] == "completed"
        await until(at.is_well)
        assert at.stop() == 0
    assert count(trouble.data_dir, "sandbox_transactions WHERE kind = 'transfer'") == 1
    assert audit(trouble.data_dir) == []


async def until_payout_is_in_the_pool(data_dir: Path) -> None:
    async def is_there() -> bool:
        return count(data_dir, "sandbox_transactions WHERE kind = 'transfer'") > 0

    await until(is_there)


async def test_a_log_on_the_full_disk_takes_nothing_else_down(small_disk: Path) -> None:
    trouble = FullDisk(small_disk)
    async with server(trouble.data_dir, log_dir=small_disk) as at:
        made, _ = await call_for_data(at, "swap.execute", SWAPS["x2u"])
        order_id = made["order"]["orderId"]
        await call_for_data(at, "sandbox.fund", {"orderId": order_id})
        trouble.begin(at)
        for number in range(60):  # enough to fill the last block of the log, too
            answer = await call(at, "swap.create", SWAPS["x2u"])
            assert answer["ok"] or answer["error"]["code"] == "unavailable", f"{number}: {answer}"
        trouble.end(at)
        assert (await until_over(at, order_id))["state"] == "completed"
        assert at.stop() == 0
    assert audit(trouble.data_dir) == []


async def test_server_refuses_to_start_on_a_full_disk_and_says_why(
    tmp_path: Path, small_disk: Path
) -> None:
    trouble = FullDisk(small_disk)
    trouble.data_dir.mkdir(mode=0o700)
    with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    refused = Server(trouble.data_dir, log_dir=tmp_path)
    assert await refused.death() == 2
    reported = refused.log.read_text()
    assert "database or disk is full" in reported
    assert "Traceback" not in reported
    (small_disk / "ballast").unlink()
    async with server(trouble.data_dir, log_dir=tmp_path) as at:
        assert (await call(at, "swap.execute", SWAPS["x2u"]))["ok"]
        assert at.stop() == 0
    assert audit(trouble.data_dir) == []


@pytest.mark.parametrize("value", ["9223372036854775808", 1.5, "1e30", 2**63])
def test_strict_column_refuses_what_a_loose_one_makes_a_real(tmp_path: Path, value: object) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("CREATE TABLE loose (units INTEGER)")
        database.execute("CREATE TABLE strict (units INTEGER) STRICT")
        with pytest.raises((sqlite3.IntegrityError, OverflowError)):
            database.execute("INSERT INTO strict VALUES (?)", (value,))
        if isinstance(value, int):
            return  # the driver itself refuses it for both
        database.execute("INSERT INTO loose VALUES (?)", (value,))
        assert database.execute("SELECT typeof(units) FROM loose").fetchone() == ("real",)
