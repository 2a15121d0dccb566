"""``rpcsvc db check`` and ``rpcsvc db backup``, over the files of a running service.

Both change nothing in them.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from rpcsvc.durable_files import sync_directory
from rpcsvc.store.backends.sqlite.database import BUSY_TIMEOUT_MS, DATABASE_NAME, open_reader
from rpcsvc.store.backends.sqlite.migrations import gap, other_schema, refusal
from rpcsvc.store.checks import BOOKS, CHECKING, Progress, quiet

# Pages that are copied between two reports of progress: 16 MiB.
_PAGES_AT_ONCE: Final = 4096
PARTIAL: Final = ".partial"


class BackupFailed(Exception):
    """No backup was made; the message says why."""


def damage_of(path: Path) -> str | None:
    """Return why a file is no backup; None if it is. It may lack the last migrations."""
    if not path.is_file():
        return "there is no such file"
    if (log := log_beside(path)) is not None:
        return log
    try:
        with closing(_open(path)) as reader:
            return refusal(reader) or next(_file_problems(reader, quiet), None) or gap(reader)
    except sqlite3.Error as error:
        return f"the file can't be read: {error}"


def log_beside(path: Path) -> str | None:
    """Refuse a file whose last commits are in a log beside it; None if there is no such log."""
    log = path.with_name(f"{path.name}-wal")
    if not log.exists() or log.stat().st_size == 0:
        return None
    return (
        f"its last commits are in {log.name} beside it, and are not restored with it. Make one file"
        f" of both: sqlite3 {path.name} 'PRAGMA wal_checkpoint(TRUNCATE)'"
    )


def check_database(data_dir: Path, progress: Progress = quiet) -> list[str]:
    """Return all problems of the database file and the books; empty when all is well."""
    return list(_problems(data_dir / DATABASE_NAME, progress))


def backup_database(data_dir: Path, destination: Path, progress: Progress = quiet) -> list[str]:
    """Copy the database to a new file of mode 0600; returns what ``check_database`` finds in it.

    The copy is durable when this returns, and gets its name only then: until it is whole it has
    PARTIAL after its name, also when the process is killed. A copy with problems is kept: they are
    the original's, and repairs need a copy. Raises BackupFailed if there is nothing to copy, the
    destination exists, or copying fails: then nothing is left behind. Raises it, too, if the folder
    can't be synced: then the copy is.
    """
    source = data_dir / DATABASE_NAME
    if not source.is_file():
        raise BackupFailed(f"There is no database at {source}.")
    if destination.exists():
        raise _taken(destination)
    partial = destination.with_name(destination.name + PARTIAL)
    _make_new(partial)
    try:
        _copy(source, partial, progress)
        _sync(partial)
        _give_name(partial, destination)
    except FileExistsError as error:
        raise _taken(destination) from error
    except (sqlite3.Error, OSError) as error:
        raise BackupFailed(f"{source} could not be copied: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    try:
        sync_directory(destination.absolute().parent)
    except OSError as error:
        raise BackupFailed(
            f"{destination} is whole, but a power failure may take its name: {error}. Back up to"
            " another folder."
        ) from error
    return list(_problems(destination, progress))


def _give_name(partial: Path, destination: Path) -> None:
    """Name the whole file. Raises FileExistsError, and OSError."""
    try:
        os.link(partial, destination)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if destination.exists():
            raise FileExistsError from None
        partial.rename(destination)


def _taken(destination: Path) -> BackupFailed:
    return BackupFailed(f"{destination} exists. Name a new file: a backup is never written over.")


def _make_new(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError as error:
        raise BackupFailed(
            f"{path} exists: another backup is being made there, or was interrupted. Delete it if"
            " none is."
        ) from error
    except OSError as error:
        raise BackupFailed(f"{path} can't be made: {error.strerror}.") from error


def _copy(source: Path, destination: Path, progress: Progress) -> None:
    def report(_status: int, remaining: int, total: int) -> None:
        progress("copying", total - remaining, total)

    with closing(open_reader(source)) as reader, closing(sqlite3.connect(destination)) as copy:
        # One moment is copied: without a transaction, each write meanwhile would start it again.
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM sqlite_schema").fetchone()
        reader.backup(copy, pages=_PAGES_AT_ONCE, progress=report)
        # A backup is one file: without this it would need a -wal and -shm beside it to be read.
        copy.execute("PRAGMA journal_mode = DELETE")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _problems(path: Path, progress: Progress) -> Iterator[str]:
    if not path.is_file():
        yield f"there is no database at {path}"
        return
    try:
        with closing(_open(path)) as reader:
            yield from _file_problems(reader, progress)
            wrong_schema = list(_schema_problems(reader))
            yield from wrong_schema or _book_problems(reader, progress)
    except sqlite3.Error as error:
        yield f"the file can't be read: {error}"


def _open(path: Path) -> sqlite3.Connection:
    """Open a connection that writes nothing but sees CHECK constraints.

    SQLite omits them from the schema of a file that is opened read-only, and the integrity check
    would then pass rows that violate them.
    """
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection


def _file_problems(reader: sqlite3.Connection, progress: Progress) -> Iterator[str]:
    progress("checking the file", 0, 2)
    for (line,) in reader.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"the file is damaged: {line}"
    progress("checking the file", 1, 2)
    for table, row, parent, _ in reader.execute("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} refers to nothing in {parent}"


def _schema_problems(reader: sqlite3.Connection) -> Iterator[str]:
    other = other_schema(reader)
    if other is not None:
        yield f"{other}, so the books were not checked"


def _book_problems(reader: sqlite3.Connection, progress: Progress) -> Iterator[str]:
    for number, (problem, query) in enumerate(BOOKS):
        progress(CHECKING, number, len(BOOKS))
        yield from (f"{problem}: {row[0]}" for row in reader.execute(query))
