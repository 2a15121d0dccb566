"""Numbered migrations: ``NNNN_name.sql``, applied in order, each in one transaction, never edited.

A database that was migrated by a newer version of the service is refused.
"""

from __future__ import annotations

import sqlite3
from importlib import resources


class NewerDatabase(Exception):
    """The database was made by a newer version of the service."""


def scripts() -> list[tuple[int, str, str]]:
    """All migrations as (number, name, SQL), in order."""
    files = (f for f in resources.files(__name__).iterdir() if f.name.endswith(".sql"))
    named = sorted((f.name, f.read_text(encoding="utf-8")) for f in files)
    return [(int(name[:4]), name, sql) for name, sql in named]


def migrate(connection: sqlite3.Connection) -> list[str]:
    """Bring the database up to date; returns the names of the migrations applied.

    ``connection`` must be in autocommit mode. Raises NewerDatabase.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    known = scripts()
    if version > known[-1][0]:
        raise NewerDatabase(
            f"The database is at schema {version}; this version of the service knows up to"
            f" {known[-1][0]}. Run the newer version, or restore a backup."
        )
    applied = []
    for number, name, sql in known:
        if number > version:
            connection.executescript(
                f"BEGIN IMMEDIATE;\n{sql}\nPRAGMA user_version = {number};\nCOMMIT;"
            )
            applied.append(name)
    return applied
