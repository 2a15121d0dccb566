"""Numbered migrations: ``NNNN_name.sql``, applied in order, each in one transaction, never edited.

A database that was migrated by a newer version of the service is refused.
"""

from __future__ import annotations

import sqlite3
from importlib import resources
from typing import Final


class NewerDatabase(Exception):
    """The database was made by a newer version of the service."""


def scripts() -> list[tuple[int, str, str]]:
    """All migrations as (number, name, SQL), in order."""
    files = (f for f in resources.files(__name__).iterdir() if f.name.endswith(".sql"))
    named = sorted((f.name, f.read_text(encoding="utf-8")) for f in files)
    return [(int(name[:4]), name, sql) for name, sql in named]


# The schema that this version of the service works on.
NEWEST: Final = scripts()[-1][0]


def version_of(connection: sqlite3.Connection) -> int:
    """The number of the last migration that was applied to a database; 0: none."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def other_schema(connection: sqlite3.Connection) -> str | None:
    """That a database is at another schema than NEWEST, as a clause; None when it is not."""
    version = version_of(connection)
    if version == NEWEST:
        return None
    return f"the schema is version {version}; this version of the service has {NEWEST}"


def migrate(connection: sqlite3.Connection) -> list[str]:
    """Bring the database up to date; returns the names of the migrations applied.

    ``connection`` must be in autocommit mode. Raises NewerDatabase.
    """
    version = version_of(connection)
    if version > NEWEST:
        raise NewerDatabase(
            f"The database is at schema {version}; this version of the service knows up to"
            f" {NEWEST}. Run the newer version, or restore a backup."
        )
    applied = []
    for number, name, sql in scripts():
        if number > version:
            connection.executescript(
                f"BEGIN IMMEDIATE;\n{sql}\nPRAGMA user_version = {number};\nCOMMIT;"
            )
            applied.append(name)
    return applied
