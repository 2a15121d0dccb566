"""The schema of a database file: made once, migrated by number, another program's refused."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase
from rpcsvc.store.backends.sqlite.maintenance import check_database, damage_of
from rpcsvc.store.backends.sqlite.migrations import migrate
from rpcsvc.store.schema import APPLICATION_ID, NEWEST, UnknownSchema, scripts

# As of the last version before the first release: a number, and no application id.
OLD = "CREATE TABLE orders (view BLOB); PRAGMA user_version = 31"
OTHERS = "CREATE TABLE orders (id)"
MARKED_BY_ANOTHER = "PRAGMA application_id = 7"
NEWER = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {NEWEST + 1}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / DATABASE_NAME


def make(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)


async def _open(data_dir: Path) -> None:
    await (await SqliteDatabase.open(data_dir)).close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (OLD, "layout 31 of a version before the first release.* fresh data directory"),
        (OTHERS, "a database of another program"),
        (MARKED_BY_ANOTHER, "a database of another program"),
        (NEWER, f"version {NEWEST + 1}; this version of the service has {NEWEST}"),
    ],
)
def test_schema_of_another_kind_is_refused(path: Path, script: str, reason: str) -> None:
    """At the start, by ``db check`` and by a restore; the file is not changed."""
    make(path, script)
    before = path.read_bytes()
    with pytest.raises(UnknownSchema, match=reason):
        asyncio.run(_open(path.parent))
    (problem,) = check_database(path.parent)
    assert "so the books were not checked" in problem
    damage = damage_of(path)
    assert damage is not None
    assert damage in problem
    assert path.read_bytes() == before


def test_migrate_makes_a_marked_database_once(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        assert migrate(database) == [name for _, name, _ in scripts()]
        assert migrate(database) == []
        assert database.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert database.execute("PRAGMA user_version").fetchone() == (NEWEST,)


def test_schema_says_what_each_table_is_for() -> None:
    """Each table and view has a comment above it."""
    created = [
        (above, line)
        for _, _, sql in scripts()
        for above, line in pairwise(sql.splitlines())
        if line.startswith(("CREATE TABLE", "CREATE VIEW"))
    ]
    assert len(created) > 20
    assert [line for above, line in created if not above.startswith("-- ")] == []
