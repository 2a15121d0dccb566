"""The schema of the databases, and numbered migrations of it: ``NNNN_name.sql``, applied in order,
each in one transaction, never edited once they were released.

A database carries this program's APPLICATION_ID and the number of its last migration.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

# "rpcs" in the header of an SQLite file. Databases from before the first release have none.
APPLICATION_ID: Final = 0x72706373


class UnknownSchema(Exception):
    """A database that this version of the service can't use; the message says what to do."""


def scripts() -> list[tuple[int, str, str]]:
    """Return all migrations as (number, name, SQL), in order."""
    files = (f for f in resources.files(__name__).iterdir() if f.name.endswith(".sql"))
    named = sorted((f.name, f.read_text(encoding="utf-8")) for f in files)
    return [(int(name[:4]), name, sql) for name, sql in named]


# The schema that this version of the service works on.
NEWEST: Final = scripts()[-1][0]


def newer(version: int) -> str:
    """The message for a database of a newer version of the service."""
    return (
        f"the schema is version {version}; this version of the service has {NEWEST}: run the newer"
        " version, or restore a backup"
    )


def older(version: int) -> str:
    """The message for a database that lacks a migration."""
    return f"the schema is version {version}; this version of the service has {NEWEST}"
