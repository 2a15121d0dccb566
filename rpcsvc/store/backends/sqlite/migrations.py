"""Applies migrations to an SQLite file, and says why another file can't be used."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Final

from rpcsvc.store.schema import APPLICATION_ID, NEWEST, UnknownSchema, newer, older, scripts

# Statistics of the indexes after a long run: rows, and rows that share the first columns. Without
# them SQLite rates an index over all rows as high as one over the few that are under way.
_STATISTICS: Final = """
    ANALYZE;
    DELETE FROM sqlite_stat1;
    INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES
        ('orders', 'orders_open_at_upstream', '100 1'),
        ('orders', 'orders_by_deadline', '10000 10'),
        ('evm_deposits', 'evm_deposits', '100000 20000 1 1'),
        ('evm_deposits', 'evm_deposits_watched', '100 20 20'),
        ('evm_deposits', 'evm_deposits_by_block', '100000 20000 1'),
        ('evm_holdings', 'evm_holdings', '100000 20000 1'),
        ('evm_holdings', 'evm_holdings_unswept', '100 20 1'),
        ('evm_sweeps', 'evm_sweeps', '100000 20000 1 1'),
        ('evm_sweeps', 'evm_sweeps_under_way', '100 20 20 1');
    ANALYZE sqlite_schema;
"""

_PARTS: Final = """
    SELECT type, name FROM sqlite_schema
    UNION ALL
    SELECT 'column', t.name || '.' || c.name
    FROM sqlite_schema AS t JOIN pragma_table_info(t.name) AS c WHERE t.type = 'table'
"""


def version_of(connection: sqlite3.Connection) -> int:
    """The number of the last applied migration; 0: none."""
    return int(_pragma(connection, "user_version"))


def refusal(connection: sqlite3.Connection) -> str | None:
    """Return why the service can't open a database and what to do; None if it can, or if it is
    empty.
    """
    application, version = _pragma(connection, "application_id"), version_of(connection)
    if application == APPLICATION_ID:
        if version <= NEWEST:
            return None
        return newer(version)
    if application == 0 and version > 0:
        return (
            f"it has the layout {version} of a version before the first release, which is not read"
            " any more: finish its orders with that version, then start this one with a fresh data"
            " directory"
        )
    if application or connection.execute("SELECT 1 FROM sqlite_schema").fetchone():
        return "it is a database of another program"
    return None


def other_schema(connection: sqlite3.Connection) -> str | None:
    """A clause that says that the schema is not NEWEST; None if it is."""
    if (refused := refusal(connection)) is not None:
        return refused
    version = version_of(connection)
    if version == NEWEST:
        return None
    return older(version)


def gap(connection: sqlite3.Connection) -> str | None:
    """Say what a database lacks of the schema of its version; None if it is whole."""
    version = version_of(connection)
    if version == 0:
        return "it is empty: a backup has the tables of this program"
    with closing(sqlite3.connect(":memory:")) as whole:
        for number, _, sql in scripts():
            if number <= version:
                whole.executescript(sql)
        lacking = _parts(whole) - _parts(connection)
    if not lacking:
        return None
    return f"it is not complete: it lacks the {' '.join(min(lacking))}, and {len(lacking) - 1} more"


def _parts(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Kind and name of tables, columns, views, indexes and triggers."""
    return {(kind, name) for kind, name in connection.execute(_PARTS)}


def require_usable(connection: sqlite3.Connection) -> None:
    """Raise UnknownSchema unless the database can be used, or migrated."""
    refused = refusal(connection)
    if refused is not None:
        raise UnknownSchema(f"The database can't be used: {refused}.")


def migrate(connection: sqlite3.Connection) -> list[str]:
    """Migrate the database; returns the names of the applied migrations.

    ``connection`` must be in autocommit mode. Raises UnknownSchema.
    """
    require_usable(connection)
    version = version_of(connection)
    applied = []
    for number, name, sql in scripts():
        if number > version:
            connection.executescript(
                f"BEGIN IMMEDIATE;\n{sql}\n{_STATISTICS}\n"
                f"PRAGMA application_id = {APPLICATION_ID};\n"
                f"PRAGMA user_version = {number};\nCOMMIT;"
            )
            applied.append(name)
    return applied


def sign(connection: sqlite3.Connection) -> None:
    """Mark a file as this program's; an open transaction is making its tables."""
    for statement in _STATISTICS.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {NEWEST}")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)
