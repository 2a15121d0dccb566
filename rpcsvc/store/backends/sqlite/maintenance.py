"""``rpcsvc db check`` and ``rpcsvc db backup``, over a database and its payment journal.

Both work on the files of a running service and change nothing in them.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rpcsvc.clock import iso8601
from rpcsvc.settlement.onchain.journal.entries import (
    EvmEntry,
    MoneroEntry,
    VoidEntry,
    from_body,
    latest,
)
from rpcsvc.settlement.onchain.journal.files import (
    JournalContents,
    JournalPosition,
    Line,
    Mark,
    read_place,
)
from rpcsvc.store.backends.sqlite.database import BUSY_TIMEOUT_MS, DATABASE_NAME, open_reader
from rpcsvc.store.backends.sqlite.migrations import gap, other_schema, refusal
from rpcsvc.store.checks import BOOKS


class BackupFailed(Exception):
    """No backup was made; the message says why."""


def damage_of(path: Path) -> str | None:
    """Why a file is no backup; None if it is. It may lack the last migrations."""
    if not path.is_file():
        return "there is no such file"
    if (log := log_beside(path)) is not None:
        return log
    try:
        with closing(_open(path)) as reader:
            return refusal(reader) or next(_file_problems(reader), None) or gap(reader)
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


def check_database(data_dir: Path) -> list[str]:
    """All problems of the database file and the books; empty when all is well."""
    return list(_problems(data_dir / DATABASE_NAME))


def backup_database(data_dir: Path, destination: Path) -> list[str]:
    """Copy the database to a new file of mode 0600; returns what ``check_database`` finds in it.

    The copy is durable when this returns. A copy with problems is kept: they are the original's,
    and repairs need a copy. Raises BackupFailed if there is nothing to copy, the destination
    exists, or copying fails; then nothing is left behind.
    """
    source = data_dir / DATABASE_NAME
    if not source.is_file():
        raise BackupFailed(f"There is no database at {source}.")
    _make_new(destination)
    try:
        _copy(source, destination)
        _sync(destination)
        _sync(destination.absolute().parent)
    except BaseException as error:
        destination.unlink(missing_ok=True)
        if isinstance(error, sqlite3.Error | OSError):
            raise BackupFailed(f"{source} could not be copied: {error}.") from error
        raise
    return list(_problems(destination))


def _make_new(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError as error:
        raise BackupFailed(
            f"{path} exists. Name a new file: a backup is never written over."
        ) from error
    except OSError as error:
        raise BackupFailed(f"{path} can't be made: {error.strerror}.") from error


def _copy(source: Path, destination: Path) -> None:
    with closing(open_reader(source)) as reader, closing(sqlite3.connect(destination)) as copy:
        reader.backup(copy)
        # A backup is one file: without this it would need a -wal and -shm beside it to be read.
        copy.execute("PRAGMA journal_mode = DELETE")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _problems(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"there is no database at {path}"
        return
    try:
        with closing(_open(path)) as reader:
            yield from _file_problems(reader)
            wrong_schema = list(_schema_problems(reader))
            yield from wrong_schema or _book_problems(reader)
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


def _file_problems(reader: sqlite3.Connection) -> Iterator[str]:
    for (line,) in reader.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"the file is damaged: {line}"
    for table, row, parent, _ in reader.execute("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} refers to nothing in {parent}"


def _schema_problems(reader: sqlite3.Connection) -> Iterator[str]:
    other = other_schema(reader)
    if other is not None:
        yield f"{other}, so the books were not checked"


def _book_problems(reader: sqlite3.Connection) -> Iterator[str]:
    for problem, query in BOOKS:
        yield from (f"{problem}: {row[0]}" for row in reader.execute(query))


_MARK = "SELECT journal, line, sum FROM payment_journal ORDER BY token DESC LIMIT 1"
_RECORDED = (
    "SELECT 1 FROM monero_payments WHERE txid = ?1 UNION ALL"
    " SELECT 1 FROM evm_attempts WHERE txid = ?1"
)


def check_journal(data_dir: Path, folder: Path, places: Sequence[Path]) -> tuple[list[str], str]:
    """Problems of the journal, and its state in words. The service may be running."""
    # The database first: meanwhile the journal can only grow.
    with closing(open_reader(data_dir / DATABASE_NAME)) as reader:
        row = reader.execute(_MARK).fetchone()
        mark = Mark(row[0], JournalPosition(row[1], row[2])) if row else None
        found = read_place(folder)
        problems = [*_journal_problems(found, mark), *_unrecorded(found.lines, mark, reader)]
    for place in places:
        copy = read_place(place)
        if copy.problem is not None or copy.name != found.name:
            problems.append(f"{place} does not hold the journal: {copy.problem or 'another one'}")
        elif copy.end.line < (mark.at.line if mark else 0):
            problems.append(f"{place} ends at line {copy.end.line} of {found.end.line}")
    return problems, _journal_state(found, mark)


def _journal_problems(found: JournalContents, mark: Mark | None) -> Iterator[str]:
    if found.problem is not None:
        yield f"the payment journal is damaged: {found.problem}"
    if mark is None:
        return
    if found.end.line < mark.at.line:
        yield (
            f"the payment journal ends at line {found.end.line}; the database knows"
            f" {mark.at.line} lines"
        )
    elif found.name != mark.journal or all(line.at != mark.at for line in found.lines):
        yield f"the payment journal is not the database's, which is {mark.journal}"


def _unrecorded(
    lines: Sequence[Line], mark: Mark | None, reader: sqlite3.Connection
) -> Iterator[str]:
    """Journaled payments up to the mark that the database lacks: the two files do not belong
    together.

    Payments that a replay skips on purpose do not count.
    """
    upto = mark.at.line if mark is not None else 0
    known = [(line.at.line, from_body(line.body)) for line in lines if line.at.line <= upto]
    entries = {number: entry for number, entry in known if entry is not None}
    void = {(e.payment_id, e.txid) for e in entries.values() if isinstance(e, VoidEntry)}
    kept = {id(entry) for entry in latest(list(entries.values()), void)}
    for number, entry in entries.items():
        if id(entry) not in kept or not isinstance(entry, MoneroEntry | EvmEntry):
            continue
        txid = _txid(entry)
        is_void = (entry.payment.payment_id, txid) in void
        if not is_void and reader.execute(_RECORDED, (txid,)).fetchone() is None:
            yield f"line {number} of the payment journal is not in the database: {txid}"


def _txid(entry: MoneroEntry | EvmEntry) -> str:
    if isinstance(entry, MoneroEntry):
        return entry.payment.txid
    return entry.payment.attempts[0].txid


def _journal_state(found: JournalContents, mark: Mark | None) -> str:
    if not found.lines:
        return "payment journal: none"
    times = [line.body["at"] for line in found.lines if "at" in line.body]
    behind = found.end.line - (mark.at.line if mark else 0)
    torn = f", {found.torn} bytes of an unfinished line" if found.torn else ""
    return (
        f"payment journal: {found.end.line} lines in {found.files} files, the last payment at"
        f" {iso8601(times[-1])}; the database is {max(behind, 0)} lines behind{torn}"
    )
