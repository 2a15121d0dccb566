"""A service whose lease was taken by another process writes nothing and exits."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.e2e.processes import call, server
from tests.e2e.swaps import SWAPS

_STOLEN = "UPDATE leases SET holder = 'another', token = token + 1"


def rows(data_dir: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(data_dir / "rpcsvc.db", isolation_level=None)) as connection:
        return connection.execute(sql).fetchall()


async def test_service_that_lost_its_lease_writes_nothing_and_ends(tmp_path: Path) -> None:
    """The owner lock does not prevent it, as when its file system is gone."""
    data_dir = tmp_path / "data"
    async with server(data_dir) as up:
        assert (await call(up, "swap.create", SWAPS["u2x"]))["ok"]
        rows(data_dir, _STOLEN)
        refused = await call(up, "swap.create", SWAPS["u2x"])
        assert not refused["ok"]
        assert refused["error"]["code"] == "unavailable"
        assert await up.death() == 1
        assert rows(data_dir, "SELECT count(*) FROM orders") == [(1,)]
        assert "lease_lost" in up.log.read_text()


async def test_each_start_of_a_service_takes_the_next_token(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    for started in (1, 2):
        async with server(data_dir) as up:
            assert rows(data_dir, "SELECT name, token FROM leases") == [("settler", started)]
            up.kill()
