"""PostgreSQL finds the rows of the store's statements by indexes, at a million orders."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules, walk_packages
from types import ModuleType
from typing import Final

import asyncpg
import pytest
import pytest_asyncio

import rpcsvc.settlement
import rpcsvc.store
from rpcsvc.domain.reservations import Admission
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.backends.postgresql.reader import compiled
from rpcsvc.store.orders import OrderStore
from tests.postgres import new_database, own_server
from tests.unit.reserving import Keeper, numbered

pytestmark = [pytest.mark.slow(seconds=100), pytest.mark.asyncio(loop_scope="module")]

ORDERS: Final = 1_000_000
# Rows of a table that no statement but those of SCANS may read as a whole.
LARGE: Final = 50_000
# None of them runs for a request of a client, in a pass of the worker, or at a scrape of /metrics:
# an index would cost each order something, and save a second at a start or in a command.
SCANS: Final = {
    "checks._SIMULATED": "at a start and a take-over, if another engine's wallets are not there",
    "checks._WAITING": "a part of the next one; alone it is never run",
    "checks._UNSERVED": "at a start and a take-over; later only the orders that it found are read",
    "checks._RESERVED": "rpcsvc db check, which reads everything",
    "operator_books._SELECT": "a part of two others, which find their rows by indexes",
    "operator_books._OPEN_ORDERS": "rpcsvc treasury",
    "operator_books._EXTENT": "the restore drill, which counts all orders",
    "operator_books._BY_STATE": "the restore drill, which counts all transfers",
    "operator_books._FLOWS": "rpcsvc treasury plan: a scan if its days are most of the orders",
    "reservations._SELECT_UNFUNDED": "a part of another, which finds its first rows by an index",
    "webhooks._BRING_FORWARD": "at a start, a take-over, and after the clock was set back an hour",
    "webhooks._BOOKED": "a part of two others; the one that clients cause finds rows by an index",
    "webhooks._IN_STATES": "rpcsvc webhooks",
}
PLACES: Final = defaultdict(
    str,
    scanned="expires_at",
    beyond=">",
    open="'created'",
    seq=":seq",
    which="state = 'dead'",
)
_COPIED: Final = {
    "seq": "seq + n",
    "order_id": "'ord_' || upper(substr(md5(n::text), 1, 26))",
    "session_id": "md5('s' || n)",
    "deposit_address": "'0x' || substr(md5('a' || n) || md5('b' || n), 1, 40)",
    "status": "CASE WHEN n % 100 = 0 THEN 'awaiting_deposit' ELSE 'completed' END",
    "version": "CASE WHEN n % 100 = 0 THEN 1 ELSE 2 END",
    "deadline_at": "CASE WHEN n % 100 = 0 THEN created_at + n END",
    "created_at": "created_at + n",
}
_FILL: Final = (
    "INSERT INTO event_log SELECT seq, version, created_at, 'e', status, '{}' FROM orders",
    "INSERT INTO status_views SELECT seq, 'view', NULL, 'key', NULL FROM orders",
    "INSERT INTO idempotency_keys"
    " (namespace, idempotency_key, operation, params, body, created_at, order_seq)"
    " SELECT 'n', md5(order_id), 'swap.create', '{}', 'body', created_at, seq FROM orders",
    "INSERT INTO deposits"
    " (network, txid, output_index, order_id, units, first_seen_at, state, is_dust)"
    " SELECT deposit_network, md5(order_id), 0, order_id, 1, created_at, 'confirmed', 0"
    " FROM orders WHERE seq % 10 = 0",
    "INSERT INTO transfers"
    " (transfer_id, order_id, kind, network, asset, address, units, fee, state, integrator_fee)"
    " SELECT order_id || '/payout/1', order_id, 'payout', payout_network, 'USDC', to_address, 1, 1,"
    " 'settled', 0 FROM orders WHERE seq % 10 = 0",
    "INSERT INTO webhooks"
    " (order_seq, url, receiver, client, failures, due_at, tried_at, has_answered)"
    " SELECT seq, 'https://a.example/', 'a.example', 'c', 0, created_at, created_at, 1 FROM orders"
    " WHERE seq % 10 = 0",
    "INSERT INTO webhook_deliveries (order_seq, version, state, due_at, attempts, tried_at, status)"
    " SELECT order_seq, 1, 'delivered', due_at, 1, due_at, 200 FROM webhooks",
    "INSERT INTO reservations"
    " (order_id, kind, network, units, client, deposit_network, expires_at)"
    " SELECT order_id, 'unfunded', payout_network, 1, 'c', deposit_network, created_at"
    " FROM orders WHERE seq % 10 = 0",
    "INSERT INTO reservations (order_id, kind, network, units)"
    " SELECT order_id, 'funded', payout_network, 1 FROM orders WHERE seq % 5000 = 0",
)


def modules() -> Iterator[ModuleType]:
    """The store's modules, and those of the engines that use the port Tables."""
    for found in iter_modules(rpcsvc.store.__path__, "rpcsvc.store."):
        if not found.ispkg:
            yield import_module(found.name)
    for found in walk_packages(rpcsvc.settlement.__path__, "rpcsvc.settlement."):
        module = import_module(found.name)
        if hasattr(module, "Tables"):
            yield module


def statements() -> Iterator[tuple[str, str]]:
    """Return each constant of these modules that reads or changes rows: name and SQL.

    Not those to which a table is appended.
    """
    for module in modules():
        for name, value in vars(module).items():
            for text in _texts(value) if name.isupper() else ():
                if re.match(r"\s*(SELECT|UPDATE|DELETE|INSERT)\b", text) and not text.endswith(
                    "FROM"
                ):
                    yield f"{module.__name__.rpartition('.')[2]}.{name}", text


def _texts(value: object) -> list[str]:
    several = list(value.values()) if isinstance(value, Mapping) else value
    found = several if isinstance(several, list) or type(several) is tuple else [several]
    return [text for each in found if isinstance(text := getattr(each, "sql", each), str)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connection() -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection to a database with so many orders."""
    with own_server() as server:
        async with new_database(server.url) as url:
            database = await PostgresqlDatabase.open(url)
            await Keeper(OrderStore(database, lambda: "key")).open(numbered(1), Admission("a"))
            await database.close()
            opened = await asyncpg.connect(url)
            await _fill(opened)
            yield opened
            await opened.close()


async def _fill(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """Copies of one order, and rows that refer to them."""
    await connection.execute(
        "SET session_replication_role = replica; TRUNCATE event_log, status_views, reservations"
    )
    columns = await connection.fetch(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attnum > 0"
        " AND attgenerated = ''"
    )
    names = [row["attname"] for row in columns]
    values = ", ".join(_COPIED.get(name, name) for name in names)
    await connection.execute(
        f"INSERT INTO orders ({', '.join(names)})"
        f" SELECT {values} FROM orders, generate_series(1, {ORDERS - 1}) AS n"
    )
    for sql in _FILL:
        await connection.execute(sql)
    await connection.execute("ANALYZE; SET plan_cache_mode = force_generic_plan")


async def test_no_statement_reads_a_large_table_as_a_whole(
    connection: asyncpg.Connection[asyncpg.Record],
) -> None:
    large = await connection.fetch(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND reltuples > $1", LARGE
    )
    scan = re.compile(rf"Seq Scan on ({'|'.join(row['relname'] for row in large)})\b")
    scanning, checked = set(), 0
    for number, (name, sql) in enumerate(statements()):
        text = compiled(sql.format_map(PLACES) if "{" in sql else sql).text
        places = max(map(int, re.findall(r"\$(\d+)", text)), default=0)
        await connection.execute(f"PREPARE s{number} AS {text}")
        values = f"({', '.join(['NULL'] * places)})" if places else ""
        plan = await connection.fetch(f"EXPLAIN EXECUTE s{number}{values}")
        checked += 1
        if scan.search("\n".join(row[0] for row in plan)):
            scanning.add(name)
    assert {row["relname"] for row in large} >= {"orders", "event_log", "deposits", "reservations"}
    assert checked > 200
    assert scanning == SCANS.keys()
