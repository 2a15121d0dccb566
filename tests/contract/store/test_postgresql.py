"""PostgreSQL only: lost connections, other processes on the database, schema migration."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import asyncpg
import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.postgresql import reader
from rpcsvc.store.backends.postgresql.database import MOST_TRIES, PostgresqlDatabase
from rpcsvc.store.backends.postgresql.reader import Connection, PostgresqlReader, connect
from rpcsvc.store.backends.postgresql.schema import check_server, statements, translated
from rpcsvc.store.backends.sqlite.migrations import migrate
from rpcsvc.store.database import (
    DatabaseUnusable,
    Query,
    StaleWrite,
    Statement,
    StoreConflict,
    insert,
    update,
)
from rpcsvc.store.schema import NEWEST, UnknownSchema, scripts
from tests.contract.store.cutting import COMMIT, Proxy, proxied
from tests.e2e.processes import TIMEOUT_SECONDS
from tests.postgres import new_database, own_server

ADD = insert("sandbox_settings", ("name", "value"))
RAISE = update("sandbox_settings", ("value",), "name = :name AND value < :value")
ONE = "SELECT value FROM sandbox_settings WHERE name = :name"
ALL = "SELECT name, value FROM sandbox_settings ORDER BY name"


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - it may be anything
            await asyncio.sleep(0.01)


def add(name: str, value: int = 1) -> list[Statement]:
    return [Statement(ADD, {"name": name, "value": value})]


@pytest.fixture
async def url(postgres: Callable[[], str]) -> AsyncIterator[str]:
    async with new_database(postgres()) as made:
        yield made


@pytest.fixture
async def cut(url: str) -> AsyncIterator[tuple[Proxy, PostgresqlDatabase]]:
    async with proxied(url) as (proxy, through):
        database = await PostgresqlDatabase.open(through)
        yield proxy, database
        await database.close()


async def names(database: PostgresqlDatabase) -> list[str]:
    return [row["name"] for row in await database.fetch(ALL)]


async def test_reader_closes_what_is_opened_for_a_gone_caller(url: str) -> None:
    """A read that still opens its first connection ends before the reader is closed."""
    opened: list[Connection] = []

    async def opening() -> Connection:
        opened.append(await connect(url))
        return opened[-1]

    opener = PostgresqlReader(opening)
    caller = asyncio.create_task(opener.fetch(ALL))
    await asyncio.sleep(0)
    caller.cancel()
    await opener.close()
    assert [each.is_closed() for each in opened] == [True]


async def test_nothing_is_prepared_inside_a_transaction(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is paused between Parse and Sync would keep its locks for ever."""
    begun, get = list[tuple[str, bool]](), asyncpg.Connection._get_statement

    async def noted(self: Any, query: str, *args: Any, **more: Any) -> Any:
        begun.append((query, self.is_in_transaction()))
        return await get(self, query, *args, **more)

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", noted)
    database = await PostgresqlDatabase.open(url)
    begun.clear()
    await database.write([
        *add("first"),
        Statement(RAISE, {"name": "first", "value": 2}, finds=True),
        Statement(ONE, {"name": "first"}, finds=True),
    ])  # fmt: skip
    assert await names(database) == ["first"]
    await database.close()
    writes = [(text, inside) for text, inside in begun if "sandbox_settings" in text]
    assert len(writes) >= 3
    assert not any(inside for _, inside in writes), writes


async def test_bytes_are_stored_uncompressed(url: str) -> None:
    await (await PostgresqlDatabase.open(url)).close()
    connection = await connect(url)
    storage = await connection.fetch(
        "SELECT DISTINCT attstorage::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
        " WHERE atttypid = 'bytea'::regtype AND relkind = 'r'"
        " AND relnamespace = current_schema()::regnamespace"
    )
    await connection.close()
    assert [row[0] for row in storage] == ["e"]


# --- reads and writes together -------------------------------------------------------------------


async def test_read_after_an_answer_gathers_behind_no_lane(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "GATHER_SECONDS", 3_600)
    database = await PostgresqlDatabase.open(url)
    await database.write(add("first"))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        assert [await names(database) for _ in range(3)] == [["first"]] * 3
        one = asyncio.create_task(names(database))
        for _ in range(3):  # until it is asked; the next one gathers meanwhile
            await asyncio.sleep(0)
        assert (await names(database), await one) == (["first"], ["first"])
        assert await names(database) == ["first"]
    await database.close()


async def test_reads_of_one_turn_get_their_own_answers(url: str) -> None:
    database = await PostgresqlDatabase.open(url)
    await database.write([each for n in range(50) for each in add(f"n{n:02}", n)])
    wanted = [f"n{n:02}" for n in range(60)] + ["n07", "n07"]
    rows = await asyncio.gather(*(database.fetch_one(ONE, name=name) for name in wanted))
    assert [row and row["value"] for row in rows] == [*range(50), *[None] * 10, 7, 7]
    listed = "SELECT value FROM sandbox_settings WHERE name IN :names AND value > :above"
    some, more, both = await asyncio.gather(
        database.fetch(f"{listed} ORDER BY value", names=("n01", "n03"), above=1),
        database.fetch(f"{listed} ORDER BY value DESC LIMIT :limit", names=["n01", "n02"], above=0,
                       limit=1),
        database.fetch_together([Query(ALL), Query(ONE, {"name": "n04"})]),
    )  # fmt: skip
    assert [row["value"] for row in some] == [3]
    assert [row["value"] for row in more] == [2]
    assert (len(both[0]), both[1][0]["value"]) == (50, 4)
    await database.close()


async def test_a_bad_read_takes_no_other_down(url: str) -> None:
    database = await PostgresqlDatabase.open(url)
    await database.write(add("a"))
    good, bad, also = await asyncio.gather(
        database.fetch_together([Query(ALL), Query(ONE, {"name": "a"})]),
        database.fetch("SELECT nothing FROM sandbox_settings WHERE name = :name", name="a"),
        database.fetch(ONE, name="a"),
        return_exceptions=True,
    )
    assert isinstance(bad, asyncpg.UndefinedColumnError)
    assert (len(good), also[0]["value"]) == (2, 1)  # type: ignore[arg-type,index]
    await database.close()


async def test_a_bad_write_takes_no_other_down(url: str) -> None:
    database = await PostgresqlDatabase.open(url)
    await database.write(add("there"))
    stale = [*add("never"), Statement(RAISE, {"name": "nobody", "value": 5}, finds=True)]
    done = await asyncio.gather(
        database.write(add("a")),
        database.write([*add("not"), *add("there")]),
        database.write(stale),
        database.write(add("b")),
        return_exceptions=True,
    )
    assert [type(each) for each in done] == [type(None), StoreConflict, StaleWrite, type(None)]
    assert await names(database) == ["a", "b", "there"]
    await database.close()


async def test_reads_together_are_of_one_moment(url: str) -> None:
    """A writer moves a unit back and forth between two rows; their sum never changes."""
    database = await PostgresqlDatabase.open(url)
    await database.write([*add("a", 0), *add("b", 0)])
    move = "UPDATE sandbox_settings SET value = value + :by WHERE name = :name"

    async def write() -> None:
        for n in range(100):
            by = 1 if n % 2 else -1
            await database.write(
                [
                    Statement(move, {"name": "a", "by": by}),
                    Statement(move, {"name": "b", "by": -by}),
                ]
            )

    writing = asyncio.create_task(write())
    seen = set()
    while not writing.done():
        a, b = await database.fetch_together([Query(ONE, {"name": "a"}), Query(ONE, {"name": "b"})])
        seen.add(a[0]["value"] + b[0]["value"])
    await writing
    assert seen == {0}
    await database.close()


# --- a connection that is cut --------------------------------------------------------------------


async def test_a_write_cut_before_its_commit_is_made_again(
    cut: tuple[Proxy, PostgresqlDatabase],
) -> None:
    proxy, database = cut
    proxy.cut_before = COMMIT
    await database.write(add("a"))
    assert (proxy.cuts, await names(database)) == (1, ["a"])


async def test_a_commit_whose_answer_is_lost_is_looked_up(
    cut: tuple[Proxy, PostgresqlDatabase],
) -> None:
    """Repeating the insert would fail as a conflict, and the caller would get that error."""
    proxy, database = cut
    proxy.cut_after = COMMIT
    await asyncio.gather(database.write(add("a")), database.write(add("b")))
    assert (proxy.cuts, await names(database)) == (1, ["a", "b"])
    await database.write(add("c"))
    assert await names(database) == ["a", "b", "c"]


async def test_a_commit_is_looked_up_once_the_server_is_back(
    cut: tuple[Proxy, PostgresqlDatabase],
) -> None:
    proxy, database = cut
    proxy.cut_after, proxy.closes = COMMIT, True
    writing = asyncio.create_task(database.write(add("a")))
    await until(lambda: not database.health().ok)
    assert not writing.done()
    proxy.closed = False
    await writing
    assert await names(database) == ["a"]


# A trigger that fails a write as the server does: so often, counted over its rolled back tries.
_FAILING = """
CREATE SEQUENCE tries;
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('tries') <= {times} THEN
        RAISE EXCEPTION 'try again' USING ERRCODE = '{code}';
    END IF;
    RETURN NEW; END $$;
CREATE TRIGGER fails BEFORE INSERT ON sandbox_settings FOR EACH ROW EXECUTE FUNCTION fail()
"""


@pytest.mark.parametrize("code", ["40001", "40P01"], ids=["serialization", "deadlock"])
@pytest.mark.parametrize("times", [MOST_TRIES - 1, MOST_TRIES])
async def test_write_that_the_server_resolves_is_repeated(url: str, code: str, times: int) -> None:
    """Up to a bound; nothing of it is kept after that, and the next write goes on."""
    raw, database = await asyncpg.connect(url), await PostgresqlDatabase.open(url)
    try:
        await raw.execute(_FAILING.format(times=times, code=code))
        if times < MOST_TRIES:
            await database.write(add("a"))
        else:
            with pytest.raises(Unavailable):
                await database.write(add("a"))
        assert await raw.fetchval("SELECT last_value FROM tries") == MOST_TRIES
        assert await names(database) == (["a"] if times < MOST_TRIES else [])
        await database.write(add("b"))
        assert database.health().ok
    finally:
        await database.close()
        await raw.execute("DROP FUNCTION fail CASCADE; DROP SEQUENCE tries")
        await raw.close()


async def test_write_in_a_deadlock_with_another_process_is_made_once(url: str) -> None:
    """Each waits for a row that the other has; the server ends one, which is made again."""
    other, database = await asyncpg.connect(url), await PostgresqlDatabase.open(url)
    raised = "UPDATE sandbox_settings SET value = value + 1 WHERE name = :name"
    theirs = raised.replace(":name", "$1")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    try:
        await database.write([*add("a"), *add("b")])
        await other.execute("SET deadlock_timeout = '10min'")  # the service's side finds it first
        async with other.transaction():
            await other.execute(theirs, "b")
            both = [Statement(f"{raised} AND value < 9", {"name": name}) for name in ("a",)]
            both.append(Statement(raised, {"name": "b"}))
            ours = asyncio.create_task(database.write(both))
            looking = await asyncpg.connect(url)
            async with asyncio.timeout(20):
                while not await looking.fetchval(waiting):  # noqa: ASYNC110 - the server's state
                    await asyncio.sleep(0.01)
            await looking.close()
            await other.execute(theirs, "a")
        await ours
        rows = await database.fetch(ALL)
        assert [(row["name"], row["value"]) for row in rows] == [("a", 3), ("b", 3)]
    finally:
        await database.close()
        await other.close()


async def test_a_deferred_constraint_is_a_conflict_and_not_unknown(url: str) -> None:
    database = await PostgresqlDatabase.open(url)
    event = insert("effects", ("order_id", "kind", "subject"))
    with pytest.raises(StoreConflict, match="foreign key"):
        await database.write(
            [Statement(event, {"order_id": "none", "kind": "fill_chunk", "subject": "1"})]
        )
    assert database.health().ok
    await database.close()


async def test_without_its_server_the_database_is_unavailable(
    cut: tuple[Proxy, PostgresqlDatabase],
) -> None:
    proxy, database = cut
    await database.write(add("a"))
    proxy.closed = True
    proxy.cut_all()
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await database.write(add("b"))
        with pytest.raises(Unavailable):
            await database.fetch(ALL)
    assert "postgres" not in caught.value.message
    assert not database.health().ok
    proxy.closed = False
    await until(lambda: database.health().ok)
    assert await names(database) == ["a"]
    await database.write(add("b"))
    assert await names(database) == ["a", "b"]


async def test_a_server_that_crashes_and_recovers_loses_no_write() -> None:
    with own_server(fsync="on") as server:
        database = await PostgresqlDatabase.open(server.url)
        written: list[str] = []
        stopping = asyncio.Event()

        async def write() -> None:
            for n in range(100_000):
                if stopping.is_set():
                    return
                try:
                    await database.write(add(f"n{n:05}"))
                except Unavailable:
                    await asyncio.sleep(0.01)
                    continue
                written.append(f"n{n:05}")

        writing = asyncio.create_task(write())
        await until(lambda: len(written) > 20)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        before = len(written)
        await until(lambda: len(written) > before + 20)
        stopping.set()
        await writing
        assert await names(database) == written
        await database.close()


# --- one process, one schema ---------------------------------------------------------------------


async def test_processes_on_one_database_keep_each_others_commits(url: str) -> None:
    first, second = await PostgresqlDatabase.open(url), await PostgresqlDatabase.open(url)
    await first.write(add("a"))
    await second.write(add("b"))
    third = await PostgresqlDatabase.open(url)
    assert await names(first) == await names(third) == ["a", "b"]
    for database in (first, second, third):
        await database.close()


async def test_commit_is_looked_up_though_others_have_started(
    url: str, cut: tuple[Proxy, PostgresqlDatabase]
) -> None:
    proxy, database = cut
    other = await PostgresqlDatabase.open(url)
    proxy.cut_after = COMMIT
    await database.write(add("a"))
    assert await names(other) == ["a"]
    await other.close()


async def test_an_unreachable_server_is_said_at_the_start() -> None:
    with pytest.raises(DatabaseUnusable, match="can't be reached") as caught:
        await PostgresqlDatabase.open("postgresql://rpcsvc:hush@127.0.0.1:1/rpcsvc")
    assert "hush" not in str(caught.value)


async def test_a_database_of_another_program_is_refused(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("UPDATE rpcsvc_schema SET application = 7")
        with pytest.raises(UnknownSchema, match="another program"):
            await PostgresqlDatabase.open(url)
        await connection.execute("UPDATE rpcsvc_schema SET application = $1", 0x72706373)
        await connection.execute("UPDATE rpcsvc_schema SET version = $1", NEWEST + 1)
        with pytest.raises(UnknownSchema, match=f"version {NEWEST + 1}"):
            await PostgresqlDatabase.open(url)
        assert "so the books were not checked" in (await check_server(url))[0]
        await connection.execute("ALTER TABLE rpcsvc_schema RENAME TO other")
        with pytest.raises(UnknownSchema, match="another program"):
            await PostgresqlDatabase.open(url)
        await connection.execute("ALTER TABLE other RENAME TO rpcsvc_schema")
    finally:
        await connection.execute(f"UPDATE rpcsvc_schema SET version = {NEWEST}")
        await connection.close()


async def test_processes_that_start_together_migrate_once(postgres: Callable[[], str]) -> None:
    async with new_database(postgres(), empty=True) as url:
        opened = await asyncio.gather(*(PostgresqlDatabase.open(url) for _ in range(4)))
        await opened[0].write(add("a"))
        for each in opened:
            assert await names(each) == ["a"]
            await each.close()
        assert await check_server(url) == []


async def test_both_databases_have_the_same_schema(url: str) -> None:
    """Tables and columns, constraints, indexes and triggers, by name and by number."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as lite:
        migrate(lite)
        ours = _sqlite_schema(lite)
    connection = await asyncpg.connect(url)
    try:
        theirs = await _postgresql_schema(connection)
    finally:
        await connection.close()
    assert ours == theirs
    assert len(ours) > 30


def _sqlite_schema(lite: sqlite3.Connection) -> dict[str, Any]:
    found = {}
    tables = "SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    for table, sql in lite.execute(tables).fetchall():
        indexes = "SELECT name FROM sqlite_schema WHERE type = ? AND tbl_name = ? AND sql > ''"
        rows = lite.execute(f"PRAGMA table_xinfo({table})").fetchall()
        keys = {row[1] for row in rows if row[5]}
        found[table] = {
            "columns": {row[1]: bool(row[3]) or row[1] in keys for row in rows},
            "keys": keys,
            "foreign": {row[3] for row in lite.execute(f"PRAGMA foreign_key_list({table})")},
            "checks": sql.count("CHECK ("),
            "indexes": {row[0] for row in lite.execute(indexes, ("index", table))},
            "triggers": {row[0] for row in lite.execute(indexes, ("trigger", table))},
            "unique": sum(
                row[3] == "u" for row in lite.execute(f"PRAGMA index_list({table})").fetchall()
            ),
        }
    return found


async def _postgresql_schema(connection: Any) -> dict[str, Any]:
    found = {}
    for (table,) in await connection.fetch(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname NOT LIKE 'rpcsvc%'"
        " AND relnamespace = 'public'::regnamespace"
    ):
        rows = await connection.fetch(
            "SELECT attname, attnotnull FROM pg_attribute"
            " WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped",
            table,
        )
        constraints = await connection.fetch(
            "SELECT contype::text AS kind, (SELECT array_agg(attname::text) FROM pg_attribute"
            "  WHERE attrelid = conrelid AND attnum = ANY(conkey)) AS columns"
            " FROM pg_constraint WHERE conrelid = $1::text::regclass",
            table,
        )
        of = {
            kind: [row["columns"] for row in constraints if row["kind"] == kind] for kind in "pfcu"
        }
        found[table] = {
            "columns": {row["attname"]: row["attnotnull"] for row in rows},
            "keys": {name for columns in of["p"] for name in columns},
            "foreign": {name for columns in of["f"] for name in columns},
            "checks": len(of["c"]),
            "indexes": {
                row[0]
                for row in await connection.fetch(
                    "SELECT i.relname FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid"
                    " WHERE x.indrelid = $1::text::regclass AND NOT EXISTS"
                    " (SELECT 1 FROM pg_constraint c WHERE c.conindid = x.indexrelid"
                    "  AND c.contype IN ('p', 'u'))",
                    table,
                )
            },
            "triggers": {
                row[0]
                for row in await connection.fetch(
                    "SELECT tgname FROM pg_trigger WHERE tgrelid = $1::text::regclass"
                    " AND NOT tgisinternal",
                    table,
                )
            },
            "unique": len(of["u"]),
        }
    return found


def test_every_statement_of_the_schema_is_translated() -> None:
    for _, _, script in scripts():
        texts = translated(script)
        assert len([t for t in texts if "CREATE TRIGGER" in t]) == script.count("\nCREATE TRIGGER")
        assert len(texts) >= len(list(statements(script)))
        assert not [t for t in texts if "STRICT" in t or "RAISE(" in t or "INTEGER" in t]
