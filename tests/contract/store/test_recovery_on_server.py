"""Commands that mend the books of a stopped service, on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.store.backends.copying import to_server
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.leases import SETTLER, Leases
from tests.operator_cli import Cli
from tests.postgres import new_database
from tests.unit.journaled import opened

OK, UNREACHABLE = 0, 3
TXID = "ab" * 32
LONG_MS = 3_600_000
_STATE = "SELECT state FROM transfers"
_CLOSED = "SELECT count(*) FROM closed_by_hand"


@pytest.fixture
async def order(tmp_path: Path) -> Order:
    """An order whose payout of XMR is planned, on SQLite."""
    async with opened(tmp_path) as books:
        return await books.funded(await books.ordered(Direction.USDC_TO_XMR))


@pytest.fixture
async def url(order: Order, tmp_path: Path, postgres: Callable[[], str]) -> AsyncIterator[str]:
    """The same books on a server."""
    async with new_database(postgres(), empty=True) as made:
        await to_server(tmp_path, made, lambda *_: None)
        yield made


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> Cli:
    made = Cli(tmp_path, capsys, "onchain")
    made.environ["RPCSVC_DATABASE_URL"] = url
    return made


async def value(url: str, sql: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def test_payout_is_closed_while_nobody_settles(cli: Cli, order: Order, url: str) -> None:
    name = order.transfers[0].transfer_id
    assert await cli.ask("payouts", "close", name, TXID, "--note", "asked its owner") == OK
    assert (await value(url, _STATE), await value(url, _CLOSED)) == ("settled", 1)
    free = "SELECT expires_at <= now_ms() FROM leases WHERE token > 0"
    assert await value(url, free), "the lease is given back"


async def test_nothing_is_closed_while_a_replica_settles(cli: Cli, order: Order, url: str) -> None:
    database = await PostgresqlDatabase.open(url)
    try:
        assert await Leases(database).take(SETTLER, "replica one", LONG_MS)
    finally:
        await database.close()
    name = order.transfers[0].transfer_id
    closing = cli.ask("payouts", "close", name, TXID, "--note", "asked its owner")
    assert await closing == UNREACHABLE
    assert "A replica settles on this database: replica one." in cli.err.replace("\n", " ")
    assert (await value(url, _STATE), await value(url, _CLOSED)) == ("planned", 0)


async def test_check_of_a_server_tells_its_progress_on_request(cli: Cli) -> None:
    assert await cli.ask("db", "check", "--progress") == OK
    shown = cli.err.splitlines()
    assert shown[0] == "checking the books: 0 %"
    assert shown[-1] == "checking the books: 90 %"
    assert await cli.ask("db", "check") == OK
    assert cli.err == "", "no terminal"
