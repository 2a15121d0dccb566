"""A full disk and a locked database: a clear answer, nothing half written, and recovery."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rpcsvc.store.sqlite import DATABASE_NAME
from tests.contract.serving import SWAP, serving


async def test_a_full_disk_is_told_and_survived(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first = await served.post("/agent/swap/create", SWAP, idempotency_key="first")
        writer = served.up.database._writer
        pages = await (await writer.execute("PRAGMA page_count")).fetchone()
        assert pages is not None
        # SQLite answers SQLITE_FULL beyond this, as it does when the disk has no room.
        await writer.execute(f"PRAGMA max_page_count = {pages[0]}")
        statuses = set()
        for n in range(40):
            answer = await served.post("/agent/swap/create", SWAP, idempotency_key=f"k{n}")
            statuses.add(answer.status)
        assert 503 in statuses
        assert (answer.status, answer.body["error"]["code"]) == (503, "unavailable")
        assert answer.body["error"]["retryable"] is True
        assert "disk" not in answer.body["error"]["message"]
        assert (await served.client.get("/health")).status == 503
        order_id = first.body["data"]["order"]["orderId"]
        status = await served.http("GET", f"/agent/swap/status/{order_id}")
        assert status.status == 200
        before = served.count("orders")
        assert served.count("idempotency_keys") == before == served.count("order_events")

        await writer.execute("PRAGMA max_page_count = 1000000")
        again = await served.post("/agent/swap/create", SWAP, idempotency_key="k39")
        assert again.status == 200
        assert served.count("orders") == before + 1
        assert (await served.client.get("/health")).status == 200


async def test_a_database_that_another_process_has_locked_is_told_and_survived(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as served:
        with closing(sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            locked = await served.post("/agent/swap/create", SWAP, idempotency_key="k")
            assert (locked.status, locked.body["error"]["code"]) == (503, "unavailable")
            assert (await served.post("/agent/swap/plan", SWAP)).status == 200
            other.execute("ROLLBACK")
        answer = await served.post("/agent/swap/create", SWAP, idempotency_key="k")
        assert answer.status == 200
        assert served.count("orders") == 1


@pytest.mark.parametrize("value", ["9223372036854775808", 1.5, "1e30", 2**63])
def test_a_strict_column_refuses_what_a_loose_one_turns_into_a_real(
    tmp_path: Path, value: object
) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("CREATE TABLE loose (units INTEGER)")
        database.execute("CREATE TABLE strict (units INTEGER) STRICT")
        with pytest.raises((sqlite3.IntegrityError, OverflowError)):
            database.execute("INSERT INTO strict VALUES (?)", (value,))
        if isinstance(value, int):
            return  # the driver itself refuses it for both
        database.execute("INSERT INTO loose VALUES (?)", (value,))
        assert database.execute("SELECT typeof(units) FROM loose").fetchone() == ("real",)
