"""The schema, and numbered migrations of it: ``NNNN_name.sql``, applied in order, each in one
transaction, never edited once they were released.

A database carries this program's APPLICATION_ID and the number of its last migration.
"""

from __future__ import annotations

import sqlite3
from importlib import resources
from typing import Final

# "rpcs" in the file's header. Databases from before the first release have none.
APPLICATION_ID: Final = 0x72706373


class UnknownSchema(Exception):
    """This version of the service can't use the file; the message says why, and what to do."""


def scripts() -> list[tuple[int, str, str]]:
    """All migrations as (number, name, SQL), in order."""
    files = (f for f in resources.files(__name__).iterdir() if f.name.endswith(".sql"))
    named = sorted((f.name, f.read_text(encoding="utf-8")) for f in files)
    return [(int(name[:4]), name, sql) for name, sql in named]


# The schema that this version of the service works on.
NEWEST: Final = scripts()[-1][0]


def version_of(connection: sqlite3.Connection) -> int:
    """The number of the last migration that was applied to a database; 0: none."""
    return int(_pragma(connection, "user_version"))


def refusal(connection: sqlite3.Connection) -> str | None:
    """Why the service can't open a database, and what to do; None: it can, or it is empty."""
    application, version = _pragma(connection, "application_id"), version_of(connection)
    if application == APPLICATION_ID:
        if version <= NEWEST:
            return None
        return (
            f"the schema is version {version}; this version of the service has {NEWEST}: run the"
            " newer version, or restore a backup"
        )
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
    """That a database is at another schema than NEWEST, as a clause; None when it is not."""
    if (refused := refusal(connection)) is not None:
        return refused
    version = version_of(connection)
    if version == NEWEST:
        return None
    return f"the schema is version {version}; this version of the service has {NEWEST}"


def require_usable(connection: sqlite3.Connection) -> None:
    """Raise UnknownSchema unless the database can be used, or migrated."""
    refused = refusal(connection)
    if refused is not None:
        raise UnknownSchema(f"The database can't be used: {refused}.")


def migrate(connection: sqlite3.Connection) -> list[str]:
    """Bring the database up to date; returns the names of the migrations applied.

    ``connection`` must be in autocommit mode. Raises UnknownSchema.
    """
    require_usable(connection)
    version = version_of(connection)
    applied = []
    for number, name, sql in scripts():
        if number > version:
            connection.executescript(
                f"BEGIN IMMEDIATE;\n{sql}\nPRAGMA application_id = {APPLICATION_ID};\n"
                f"PRAGMA user_version = {number};\nCOMMIT;"
            )
            applied.append(name)
    return applied


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)
