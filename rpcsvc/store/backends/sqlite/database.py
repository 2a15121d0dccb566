"""The database file: owner lock, one writer, one reader, checkpoints, read-only snapshots.

``write`` returns after the commit is on disk (WAL, ``synchronous=FULL``). Writes that wait at the
same time share one transaction and so one fsync, on a connection with a thread of its own. Reads
are look-ups on a read-only connection in the caller's thread (docs/adr/0002-sqlite.md has the
figures); from one commit to the next they share a read transaction, for SNAPSHOT_SECONDS at most.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiosqlite
import orjson
import structlog
from msgspec import Struct
from typing_extensions import override

from rpcsvc.clock import SystemClock
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.store.backends.sqlite.migrations import migrate, other_schema, require_usable
from rpcsvc.store.database import (
    BooksUnreadable,
    CommitObserver,
    Database,
    DatabaseInUse,
    DatabaseUnusable,
    Query,
    Row,
    StaleWrite,
    Statement,
    Tables,
)
from rpcsvc.store.group_commit import GroupCommit, StatementRows
from rpcsvc.store.schema import NEWEST

log = structlog.get_logger(__name__)

MAX_ROWS = 64

_PLACE: Final = re.compile(r"(?P<many>\bIN )?:(?P<name>[a-z]\w*)")
_INSERT: Final = re.compile(
    r"(?P<head>INSERT INTO .+? VALUES )(?P<row>\(.+?\))(?P<tail>(?: ON CONFLICT .+)?)", re.DOTALL
)

UNAVAILABLE: Final = (
    "The order book can't be written or read right now; nothing was changed."
    " Try again, with the same idempotency key if the call had one."
)

# A row dirties about two pages of 4 KiB, so this is some 32 MiB of log from one move to the next;
# more often would write the pages that many orders share more often.
ROWS_BETWEEN = 4_000
# Frames (pages in the log) that are few enough to be moved while the writer waits.
FEW_FRAMES = 1_000
# A log longer than this (32 MiB) is restarted; a shorter one keeps growing.
LONG_LOG_FRAMES = 8_000
MOST_PASSES = 5

# How long the writer, and every write behind it, waits for readers of other processes.
READERS_WAIT_MS = 50

_PASSIVE = "PRAGMA wal_checkpoint(PASSIVE)"
_RESTART = "PRAGMA wal_checkpoint(RESTART)"

DATABASE_NAME = "rpcsvc.db"
LOCK_NAME = "rpcsvc.lock"
BUSY_TIMEOUT_MS = 2_000
# The first version with IS [NOT] DISTINCT FROM.
OLDEST_SQLITE = (3, 39)
# How long after a failed commit the writer tests whether it can write again.
PROBE_SECONDS = 0.5
# How long reads may miss what others wrote.
SNAPSHOT_SECONDS = 1.0
# The most of the file that reads go through a mapping for: as much as SQLite ever maps (ADR 2).
MAPPED_BYTES = 0x7FFF_0000
_DAMAGED = (
    "The database file is damaged. Stop the service, and restore a backup or repair the file."
)

_WRITER_PRAGMAS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}",
    # Keeps the statement journal of multi-row statements in memory; else each group writes a file.
    "PRAGMA temp_store = MEMORY",
    # KiB. A full group dirties 13 MiB: what does not fit is written to the log before its commit.
    "PRAGMA cache_size = -16384",
    "PRAGMA wal_autocheckpoint = 0",  # the Checkpointer does it while the writer runs
)

# A commit that changes nothing and writes a page all the same: the schema's version over itself.
_PROBE = f"PRAGMA user_version = {NEWEST}"


# --- queries and reads ---------------------------------------------------------------------------


class SqliteQuery(NamedTuple):
    """SQL with ``?``, and the order of its values.

    ``insert``: the parts of an INSERT of given values: before its row, the row, and after it.
    """

    text: str
    bind: Callable[[Mapping[str, Any]], Sequence[Any]]
    insert: tuple[str, str, str] | None


@lru_cache(maxsize=1024)
def compiled(sql: str) -> SqliteQuery:
    """The SQL for SQLite. ``bind`` raises KeyError if a value is missing."""
    places = [(found["name"], found["many"] is not None) for found in _PLACE.finditer(sql)]
    text = _PLACE.sub(_mark, sql)
    found = _INSERT.fullmatch(text)
    return SqliteQuery(
        text,
        _binder(places),
        None if found is None else (found["head"], found["row"], found["tail"]),
    )


def inserts(insert: tuple[str, str, str], count: int) -> Iterator[tuple[str, int, int]]:
    """Statements that insert ``count`` rows, each with its first row and its number of rows.

    Sizes are powers of two, so few statements are prepared.
    """
    start = 0
    while start < count:
        size = min(MAX_ROWS, 1 << ((count - start).bit_length() - 1))
        yield _of_rows(insert, size), start, size
        start += size


@lru_cache(maxsize=512)
def _of_rows(insert: tuple[str, str, str], size: int) -> str:
    head, row, tail = insert
    return head + ", ".join([row] * size) + tail


def _mark(found: re.Match[str]) -> str:
    return "?" if found["many"] is None else "IN (SELECT value FROM json_each(?))"


def _binder(places: list[tuple[str, bool]]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    names = [name for name, _ in places]
    if any(many for _, many in places):
        return lambda values: [
            orjson.dumps(list(values[name])).decode() if many else values[name]
            for name, many in places
        ]
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: [values[name] for name in names]


class SqliteReader(Tables):
    """Reads over a connection in autocommit mode, within one read transaction.

    Taking the locks of WAL mode for each read would cost as much as the read itself.
    """

    def __init__(self, reader: sqlite3.Connection) -> None:
        self._reader = reader
        self._reader.row_factory = sqlite3.Row
        self._is_damaged = False

    @override
    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        text, bind, _ = compiled(sql)
        try:
            self._hold_snapshot()
            return self._reader.execute(text, bind(values)).fetchall()
        except sqlite3.Error as error:
            raise self._reported(error) from error

    @override
    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        text, bind, _ = compiled(sql)
        try:
            self._hold_snapshot()
            return self._reader.execute(text, bind(values)).fetchone()
        except sqlite3.Error as error:
            raise self._reported(error) from error

    @override
    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        return [await self.fetch(each.sql, **each.values) for each in queries]

    def _reported(self, error: sqlite3.Error) -> Exception:
        """The error for the caller of a failed read; a damaged file is logged."""
        if isinstance(error, sqlite3.OperationalError):
            return unavailable(error)
        self._note_damage(error)
        return error

    def _note_damage(self, error: Exception) -> None:
        """Remember that the file is damaged, if the error says so: nothing repairs it."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) and not self._is_damaged:
            self._is_damaged = True
            report("critical", "database_damaged", reason=str(error))

    def _hold_snapshot(self) -> None:
        """Keep the read transaction open for further reads."""
        if not self._reader.in_transaction:
            self._reader.execute("BEGIN")


def unavailable(error: sqlite3.Error) -> Unavailable:
    """The error text for callers. SQLite's own text stays in the log: it can name paths."""
    report("error", "database_unavailable", reason=str(error))
    return Unavailable(UNAVAILABLE)


def report(level: str, event: str, **details: str) -> None:
    """Log an error, if possible.

    A log on the same full disk may fail, too: that must not end the writer, whose callers get the
    error anyway.
    """
    with suppress(OSError):
        getattr(log, level)(event, **details)


# --- checkpoints ---------------------------------------------------------------------------------


class _Progress(NamedTuple):
    """SQLite's answer: whether others blocked the checkpoint, frames in the log, frames moved."""

    busy: int
    frames: int
    moved: int


class Checkpointer:
    """Moves committed pages from the write-ahead log into the database file.

    By default SQLite lets the commit that fills the log do this, and every order that shares the
    commit waits for the whole move: hundreds of milliseconds if the pages lie far apart. Here a
    separate connection moves pages while the writer appends. Only the last step, restarting the
    log, pauses the writer (``wants_restart``), and by then little is left to move.
    """

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._rows = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._is_well = True
        self.wants_restart = False
        self._task = asyncio.create_task(self._run(), name="checkpointer")

    @classmethod
    async def open(cls, path: Path) -> Checkpointer:
        """A checkpointer for the database at ``path``. Raises sqlite3.Error."""
        connection = await aiosqlite.connect(path, isolation_level=None)
        try:
            await connection.execute(f"PRAGMA busy_timeout = {READERS_WAIT_MS}")
            await connection.execute("PRAGMA wal_autocheckpoint = 0")
        except sqlite3.Error:
            await connection.close()  # its thread would keep the process from ending
            raise
        return cls(connection)

    def note(self, rows: int) -> None:
        """Count the rows of a commit; enough of them trigger a move."""
        self._rows += rows
        if self._rows >= ROWS_BETWEEN:
            self._rows = 0
            self._wake.set()

    async def restart(self) -> None:
        """Restart the log. The writer must pause meanwhile, and no read may hold the log.

        A running backup or audit holds it for minutes. Then the log keeps growing, and the next
        move asks again.
        """
        self.wants_restart = False
        with suppress(sqlite3.Error):
            await self._connection.execute_fetchall(_RESTART)

    async def close(self) -> None:
        """Finish a running move and close."""
        self._closing = True
        self._wake.set()
        await self._task
        await self._connection.close()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._closing:
                return
            await self._move()

    async def _move(self) -> None:
        """Move pages until few are left: each pass leaves less for concurrent commits to add."""
        try:
            progress = await self._pass()
            for _ in range(MOST_PASSES - 1):
                if progress.frames - progress.moved <= FEW_FRAMES:
                    break
                progress = await self._pass()
        except sqlite3.Error as error:
            self._report_failure(error)
            return
        self._is_well = True
        self.wants_restart = progress.frames > LONG_LOG_FRAMES

    async def _pass(self) -> _Progress:
        cursor = await self._connection.execute(_PASSIVE)
        row = await cursor.fetchone()
        await cursor.close()
        return _Progress(*row) if row is not None else _Progress(1, 0, 0)

    def _report_failure(self, error: sqlite3.Error) -> None:
        """Log a failure once: commits still go to the log, and the next move is tried as usual."""
        if self._is_well:
            log.warning("checkpoint_failed", reason=str(error))
        self._is_well = False


# --- the database --------------------------------------------------------------------------------


class BoundRows(Struct, frozen=True):
    """The rows of one statement in a group, their values in order."""

    form: SqliteQuery
    finds: bool
    values: list[Sequence[Any]]


class DataDirInUse(DatabaseInUse):
    """Another process owns the data directory."""


class OwnerLock:
    """An exclusive lock on a data directory, held as long as the process lives.

    On a file and on the directory itself: the file may be removed as if it were stale.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._fds: list[int] = []

    def acquire(self) -> None:
        """Take the lock. Raises DataDirInUse when another process has it."""
        file = os.open(self._data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fds.append(file)
        self._fds.append(os.open(self._data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            for fd in self._fds:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise DataDirInUse(
                f"Another process already serves the data directory {self._data_dir}."
                " Stop it, or give this one its own --data-dir."
            ) from None

    def release(self) -> None:
        """Give the lock back."""
        while self._fds:
            os.close(self._fds.pop())


class GroupConnection(sqlite3.Connection):
    """The writer's connection: ``commit`` runs all of ``group`` as one transaction.

    aiosqlite runs each call in its thread and back. With the transaction inside ``commit``, a group
    costs one such trip, however large it is.
    """

    group: list[BoundRows]

    @override
    def commit(self) -> None:
        try:
            self.execute("BEGIN IMMEDIATE")
            for rows in self.group:
                self._run(rows)
            self.execute("COMMIT")
        except Exception:
            if self.in_transaction:
                self.execute("ROLLBACK")
            raise

    def _run(self, rows: BoundRows) -> None:
        """Run a statement for all rows.

        The thread releases and retakes the interpreter lock at every step of a statement, so rows
        are inserted many to a step.
        """
        (text, _, insert), finds, values = rows.form, rows.finds, rows.values
        if finds and text.startswith("SELECT"):
            for each in {tuple(row) for row in values}:  # once per distinct row
                if self.execute(text, each).fetchone() is None:
                    raise StaleWrite
            return
        if len(values) == 1:
            changed = self.execute(text, values[0]).rowcount
        elif finds or insert is None:
            changed = self.executemany(text, values).rowcount
        else:
            changed = 0
            for many, start, size in inserts(insert, len(values)):
                flat = [value for row in values[start : start + size] for value in row]
                changed += self.execute(many, flat).rowcount
        if finds and changed != len(values):
            raise StaleWrite


class SqliteDatabase(SqliteReader, Database):
    """An open database. Use ``open`` and ``close``; the process must hold the OwnerLock."""

    # A lease never ends: the holder of the owner lock is alone.
    lease_ms: int | None = None

    def __init__(
        self,
        writer: aiosqlite.Connection,
        connection: GroupConnection,
        reader: sqlite3.Connection,
        checkpoints: Checkpointer,
        path: Path,
    ) -> None:
        super().__init__(reader)
        self.path = path
        self._writer = writer
        self._connection = connection
        self._checkpoints = checkpoints
        self._is_restarting = False
        self._loop = asyncio.get_running_loop()
        self._snapshot_end: asyncio.TimerHandle | None = None
        self._failure: str | None = None
        self._probing: asyncio.Task[None] | None = None
        self._group = GroupCommit(self._transact)

    @classmethod
    async def open(cls, data_dir: Path) -> SqliteDatabase:
        """Open (and make or migrate) the database of ``data_dir``.

        Raises DatabaseUnusable and schema.UnknownSchema.
        """
        path = data_dir / DATABASE_NAME
        opening = asyncio.create_task(cls._open(path), name="open database")
        try:
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                # Half open, its threads would call back into a closed event loop.
                await (await opening).close()
                raise
        except sqlite3.Error as error:
            raise DatabaseUnusable(f"the database {path} can't be opened: {error}") from error

    @classmethod
    async def _open(cls, path: Path) -> SqliteDatabase:
        _prepare_file(path)
        made: list[GroupConnection] = []

        def factory(*args: Any, **kwargs: Any) -> GroupConnection:
            made.append(GroupConnection(*args, **kwargs))
            return made[0]

        writer = await aiosqlite.connect(
            path, isolation_level=None, cached_statements=256, factory=factory
        )
        try:
            for pragma in _WRITER_PRAGMAS:
                await writer.execute(pragma)
            await writer.create_function("now_ms", 0, SystemClock().now_ms)
            checkpoints = await Checkpointer.open(path)
            return cls(writer, made[0], open_reader(path), checkpoints, path)
        except sqlite3.Error:
            await writer.close()  # its thread would keep the process from ending
            raise

    @override
    async def close(self) -> None:
        await self._group.close()
        if self._probing is not None:
            self._probing.cancel()
            with suppress(asyncio.CancelledError):
                await self._probing
        await self._checkpoints.close()
        if self._snapshot_end is not None:
            self._snapshot_end.cancel()
        self._reader.close()
        await self._writer.close()

    @override
    def _hold_snapshot(self) -> None:
        # Until a commit or its time limit, and while a commit is under way: reads of one pass see
        # one moment.
        if not self._is_restarting and not self._reader.in_transaction:
            self._reader.execute("BEGIN")
            if self._snapshot_end is None:  # else it ends even sooner, by the timer of one before
                self._snapshot_end = self._loop.call_later(SNAPSHOT_SECONDS, self._end_snapshot)

    def _end_snapshot(self) -> None:
        self._snapshot_end = None
        self._release_snapshot()

    def _release_snapshot(self) -> None:
        """End the read transaction: the next read sees the last commit, and the log can restart."""
        if self._reader.in_transaction:
            self._reader.execute("COMMIT")

    @override
    def health(self) -> Health:
        try:
            self._hold_snapshot()
            self._reader.execute("SELECT 1 FROM orders LIMIT 1").fetchone()
        except sqlite3.Error as error:
            reported = self._reported(error)
            if isinstance(reported, Unavailable):
                return Health(False, reported.message)
            if not self._is_damaged:
                raise
        if self._is_damaged:
            return Health(False, _DAMAGED)
        return Health(self._failure is None, self._failure)

    @override
    def on_commit(self, observer: CommitObserver) -> None:
        self._group.observe = observer

    @override
    async def write(self, statements: Sequence[Statement]) -> None:
        await self._group.write(statements)

    async def _transact(self, rows: list[StatementRows]) -> None:
        if self._checkpoints.wants_restart:
            await self._restart_log()
        group = [_bound(each) for each in rows]
        self._connection.group = group
        try:
            await self._writer.commit()
        except sqlite3.OperationalError as error:
            self._failure = UNAVAILABLE
            if self._probing is None:
                self._probing = asyncio.create_task(self._probe(), name="database probe")
            raise unavailable(error) from error
        except sqlite3.Error as error:
            self._note_damage(error)
            raise
        finally:
            self._release_snapshot()  # before the callers resume: they must see their own commit
        self._failure = None
        self._checkpoints.note(sum(len(rows.values) for rows in group))

    async def _probe(self) -> None:
        """Retry until writing works again.

        Without it an unhealthy service that gets no orders would never recover.
        """
        while self._failure is not None:
            await asyncio.sleep(PROBE_SECONDS)
            # The first failed commit has already logged the cause.
            with suppress(sqlite3.Error):
                await self._writer.execute(_PROBE)
                self._failure = None
                report("info", "database_recovered")
        self._probing = None

    async def _restart_log(self) -> None:
        """Restart the log, while no read of this process holds it."""
        self._release_snapshot()
        self._is_restarting = True
        try:
            await self._checkpoints.restart()
        finally:
            self._is_restarting = False


def _bound(rows: StatementRows) -> BoundRows:
    form = compiled(rows.sql)
    return BoundRows(form, rows.finds, [form.bind(values) for values in rows.values])


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection in autocommit mode, for one thread."""
    reader = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, cached_statements=256
    )
    reader.create_function("now_ms", 0, SystemClock().now_ms)
    reader.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    reader.execute(f"PRAGMA mmap_size = {MAPPED_BYTES}")
    return reader


def _prepare_file(path: Path) -> None:
    """Make the file with mode 0600, switch it to WAL, migrate it."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise DatabaseUnusable(f"SQLite {sqlite3.sqlite_version} is too old: 3.39 is needed")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        require_usable(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        applied = migrate(connection)
    finally:
        connection.close()
    if applied:
        log.info("database_migrated", migrations=applied)


# --- snapshots -----------------------------------------------------------------------------------


class Snapshot(SqliteReader):
    """A read transaction, as Tables for stores and ledgers; it refuses writes.

    While it is open, the log of the running service can't restart: keep it short.
    """

    @override
    async def write(self, statements: Sequence[Statement]) -> None:
        raise Unavailable(f"A snapshot is only read, and {len(statements)} statements came.")


@contextmanager
def snapshot(data_dir: Path) -> Iterator[Snapshot]:
    """Open a snapshot of the committed state while the block lasts. Raises BooksUnreadable."""
    path = data_dir / DATABASE_NAME
    if not path.is_file():
        raise BooksUnreadable(f"There is no database at {path}.")
    try:
        with closing(open_reader(path)) as reader:
            _require_known_schema(path, reader)
            yield Snapshot(reader)
    except (sqlite3.Error, Unavailable) as error:
        reason = error.__cause__ or error
        raise BooksUnreadable(f"{path} can't be read: {reason}.") from error


@contextmanager
def empty_snapshot() -> Iterator[Snapshot]:
    """An empty database, for use before the first start."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(connection)
        yield Snapshot(connection)


def _require_known_schema(path: Path, reader: sqlite3.Connection) -> None:
    other = other_schema(reader)
    if other is not None:
        raise BooksUnreadable(
            f"{path} can't be read: {other}. Use the version that the service runs; a start of the"
            " service brings an older database up to date."
        )
