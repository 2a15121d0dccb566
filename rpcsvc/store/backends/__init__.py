"""The databases that the queries run on: SQLite in the data directory, or a PostgreSQL server."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.database import Database, DatabaseUnusable

EXTRA_MISSING: Final = (
    "database_url needs a package that is not installed. Run: pip install 'rpcsvc[postgres]'"
)


async def open_database(data_dir: Path, url: str | None) -> Database:
    """The database of a URL, or else that of the data directory; made or migrated, and owned.

    Raises DatabaseUnusable, DatabaseInUse and schema.UnknownSchema.
    """
    if url is None:
        return await SqliteDatabase.open(data_dir)
    try:
        from rpcsvc.store.backends.postgresql import database as postgresql  # noqa: PLC0415 - of an extra
    except ImportError as error:
        raise DatabaseUnusable(EXTRA_MISSING) from error
    return await postgresql.PostgresqlDatabase.open(url)
