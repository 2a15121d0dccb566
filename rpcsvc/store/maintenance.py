"""Looking after a database from outside: ``rpcsvc db check`` and ``rpcsvc db backup``.

Both work on the database of a running service: they only read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rpcsvc.store.migrations import scripts
from rpcsvc.store.sqlite import DATABASE_NAME, open_reader


class BackupFailed(Exception):
    """No backup was made; the message says why."""


# Each query finds rows that must not be; its first column names the order or transfer.
_BOOKS: tuple[tuple[str, str], ...] = (
    (
        "a deposit is spent on a transfer of another order",
        "SELECT d.order_id FROM deposits d JOIN transfers t USING (transfer_id)"
        " WHERE t.order_id <> d.order_id",
    ),
    (
        "a deposit is spent on a transfer that does not exist",
        "SELECT order_id FROM deposits WHERE transfer_id IS NOT NULL"
        " AND transfer_id NOT IN (SELECT transfer_id FROM transfers)",
    ),
    (
        "an order has more than one payout that is, or may be, paid",
        "SELECT order_id FROM transfers WHERE kind = 'payout'"
        " AND state NOT IN ('failed', 'cancelled') GROUP BY order_id HAVING count(*) > 1",
    ),
    (
        "a refund is not its deposits less the fee",
        "SELECT t.transfer_id FROM transfers t WHERE t.kind = 'refund'"
        " AND t.state NOT IN ('failed', 'cancelled') AND t.units + t.fee <>"
        " (SELECT coalesce(sum(d.units), 0) FROM deposits d WHERE d.transfer_id = t.transfer_id)",
    ),
    (
        "a payout goes to another address than was ordered",
        "SELECT t.transfer_id FROM transfers t JOIN orders o USING (order_id)"
        " WHERE t.kind = 'payout' AND t.address <> o.to_address",
    ),
    (
        "an order is completed without a settled payout",
        "SELECT order_id FROM orders WHERE status = 'completed' AND order_id NOT IN"
        " (SELECT order_id FROM transfers WHERE kind = 'payout' AND state = 'settled')",
    ),
    (
        "an order's history has a gap",
        "SELECT o.order_id FROM orders o LEFT JOIN event_log e ON e.order_seq = o.seq"
        " GROUP BY o.seq HAVING count(e.version) <> o.version OR max(e.version) <> o.version",
    ),
    (
        "a transfer that is not over has no pending effect",
        "SELECT transfer_id FROM transfers WHERE state NOT IN ('settled', 'failed', 'cancelled')"
        " AND transfer_id NOT IN (SELECT transfer_id FROM effects)",
    ),
)


def check_database(data_dir: Path) -> list[str]:
    """Everything that is wrong with the database file or the books; empty when all is well."""
    return list(_problems(data_dir / DATABASE_NAME))


def backup_database(data_dir: Path, destination: Path) -> None:
    """Copy the database to a new file of mode 0600 and check the copy. Raises BackupFailed."""
    source = data_dir / DATABASE_NAME
    if not source.is_file():
        raise BackupFailed(f"There is no database at {source}.")
    try:
        fd = os.open(destination, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise BackupFailed(f"{destination}: {error.strerror}") from error
    try:
        _copy(source, destination)
        os.fsync(fd)
    finally:
        os.close(fd)
    problems = list(_problems(destination))
    if problems:
        raise BackupFailed(f"The copy is not sound: {problems[0]}")


def _copy(source: Path, destination: Path) -> None:
    with closing(open_reader(source)) as reader, closing(sqlite3.connect(destination)) as copy:
        reader.backup(copy)
        # A backup is one file: without this it would need a -wal and -shm beside it to be read.
        copy.execute("PRAGMA journal_mode = DELETE")


def _problems(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"there is no database at {path}"
        return
    with closing(open_reader(path)) as reader:
        yield from _file_problems(reader)
        for problem, query in _BOOKS:
            yield from (f"{problem}: {row[0]}" for row in reader.execute(query))


def _file_problems(reader: sqlite3.Connection) -> Iterator[str]:
    for (line,) in reader.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"the file is damaged: {line}"
    for row in reader.execute("PRAGMA foreign_key_check"):
        yield f"a row of {row[0]} refers to nothing"
    (version,) = reader.execute("PRAGMA user_version").fetchone()
    newest = scripts()[-1][0]
    if version != newest:
        yield f"the schema is version {version}; this version of the service has {newest}"
