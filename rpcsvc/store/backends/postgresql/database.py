"""The database on a PostgreSQL server: one writer with group commit, batched reads.

``write`` returns after the commit is durable on the server. A write is READ COMMITTED: each
statement tests what it depends on (a version, a state, a free key). Any number of processes may
open the database; the lease decides who may write (rpcsvc/store/leases.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import asyncpg
import structlog
from typing_extensions import override

from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.store.backends.postgresql.reader import (
    UNAVAILABLE,
    Connection,
    PostgresqlReader,
    compiled,
    connect,
    is_down,
    unavailable,
)
from rpcsvc.store.backends.postgresql.schema import migrate
from rpcsvc.store.database import (
    CommitObserver,
    Database,
    DatabaseUnusable,
    Query,
    Row,
    StaleWrite,
    Statement,
)
from rpcsvc.store.group_commit import GroupCommit, StatementRows

log = structlog.get_logger(__name__)

Prepared: TypeAlias = "asyncpg.prepared_stmt.PreparedStatement[Any]"

# The server resolves serialization failures and deadlocks by failing a write: it is repeated.
MOST_TRIES: Final = 5
# Interval of attempts to reach a lost server, and of probes of a reachable one.
RETRY_SECONDS: Final = 0.5
PROBE_SECONDS: Final = 2.0
# After a holder is gone, another process takes over within this time plus its poll of a second.
LEASE_MS: Final = 10_000
_IDENTITY: Final = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_END_BACKEND: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"
)

_PROBE: Final = Statement("SELECT 1")


class _Session(NamedTuple):
    """The writer's connection, its id on the server, and its prepared statements."""

    connection: Connection
    pid: int
    started: Any
    statements: dict[str, Prepared]

    async def prepare(self, text: str) -> Prepared:
        """Prepare a statement, before any transaction that uses it.

        asyncpg ends a Parse with Flush instead of Sync. The server then takes the connection for
        busy until the next message, so its timeout would not end the transaction of a paused
        process.
        """
        found = self.statements.get(text)
        if found is None:
            found = self.statements[text] = await self.connection.prepare(text)
        return found


class PostgresqlDatabase(Database):
    """An open database. Use ``open`` and ``close``."""

    lease_ms: int | None = LEASE_MS

    def __init__(self, url: str, session: _Session, writer: int) -> None:
        self.url = url
        self._session = session
        self._writer = writer
        self._number = 0
        self._failure: str | None = None
        self._closing = False
        self._reader = PostgresqlReader(self._connect_reader)
        self._group = GroupCommit(self._transact)
        self._probing = asyncio.create_task(self._probe(), name="database probe")

    @classmethod
    async def open(cls, url: str) -> PostgresqlDatabase:
        """Open (and make or migrate) the database of a URL.

        Raises DatabaseUnusable and schema.UnknownSchema.
        """
        try:
            session = await _new_session(url)
        except Unavailable as error:
            reason = error.__cause__
            raise DatabaseUnusable(
                f"the PostgreSQL database can't be reached: {reason or error.message}"
            ) from error
        connection = session.connection
        try:
            applied = await migrate(connection)
            writer = await connection.fetchval(
                "INSERT INTO rpcsvc_writers (number) VALUES (0) RETURNING writer"
            )
        except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
            connection.terminate()
            raise DatabaseUnusable(f"the PostgreSQL database can't be used: {error}") from error
        except BaseException:
            connection.terminate()
            raise
        if applied:
            log.info("database_migrated", migrations=applied)
        return cls(url, session, int(writer))

    @override
    async def close(self) -> None:
        self._closing = True
        await self._group.close()
        self._probing.cancel()
        with suppress(asyncio.CancelledError):
            await self._probing
        await self._reader.close()
        with suppress(OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError):
            await self._session.connection.close(timeout=1)

    @override
    def health(self) -> Health:
        return Health(self._failure is None, self._failure)

    # --- reading -------------------------------------------------------------------------------

    @override
    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        return await self._reader.fetch(sql, **values)

    @override
    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        return await self._reader.fetch_one(sql, **values)

    @override
    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        return await self._reader.fetch_together(queries)

    async def _connect_reader(self) -> Connection:
        """Open a connection for reads; none while the writer has lost its own."""
        if self._failure is not None:
            raise Unavailable(UNAVAILABLE)
        return await connect(self.url, default_transaction_read_only="on")

    # --- writing -------------------------------------------------------------------------------

    @override
    def on_commit(self, observer: CommitObserver) -> None:
        self._group.observe = observer

    @override
    async def write(self, statements: Sequence[Statement]) -> None:
        await self._group.write(statements)

    async def _transact(self, rows: list[StatementRows]) -> None:
        for left in reversed(range(MOST_TRIES)):
            if self._session.connection.is_closed():
                await self._reconnect()
            session = self._session
            connection = session.connection
            try:
                await self._commit(session, rows)
            except (asyncpg.SerializationError, asyncpg.DeadlockDetectedError) as error:
                await _roll_back(connection)
                if not left:
                    raise unavailable(error) from error
            except Unavailable:
                raise
            except Exception as error:
                if not is_down(connection, error):
                    await _roll_back(connection)
                    raise
                if not left:
                    raise unavailable(error) from error
            else:
                self._failure = None
                return

    async def _commit(self, session: _Session, rows: list[StatementRows]) -> None:
        """Run one transaction, with a number by which its outcome can be looked up later."""
        connection = session.connection
        steps = [await _step(session, each) for each in rows]
        number = self._number = self._number + 1
        await connection.execute(
            f"BEGIN; UPDATE rpcsvc_writers SET number = {number} WHERE writer = {self._writer}"
        )
        for step in steps:
            await step()
        try:
            await connection.execute("COMMIT")
        except Exception as error:
            if not is_down(connection, error):
                raise
            if not await self._is_committed(number):
                raise

    async def _is_committed(self, number: int) -> bool:
        """Return whether a group whose COMMIT got no answer was committed.

        A transaction that still runs locks the row, so this waits for its end. It also waits until
        the server can be reached: the caller must get the true outcome, never a guess.
        """
        log.warning("commit_outcome_unknown", group=number)
        while True:
            try:
                await self._reconnect()
                kept = await self._session.connection.fetchval(
                    "SELECT number FROM rpcsvc_writers WHERE writer = $1 FOR UPDATE", self._writer
                )
            except Unavailable:
                if self._closing:
                    raise
            except Exception as error:
                if not is_down(self._session.connection, error):
                    raise
            else:
                log.warning("commit_outcome_learned", group=number, committed=kept == number)
                return bool(kept == number)
            await asyncio.sleep(RETRY_SECONDS)

    # --- connecting ----------------------------------------------------------------------------

    async def _reconnect(self) -> None:
        """A new session for the writer. Raises errors.Unavailable."""
        try:
            self._session = await _next_session(self.url, self._session)
        except Unavailable as error:
            self._failure = error.message
            raise
        except DatabaseUnusable as error:
            self._failure = UNAVAILABLE
            raise unavailable(error) from error
        if self._failure is not None:
            log.info("database_recovered")
        self._failure = None

    async def _probe(self) -> None:
        """Detect that the server is gone, and that it is back."""
        while True:
            await asyncio.sleep(RETRY_SECONDS if self._failure else PROBE_SECONDS)
            with suppress(Unavailable):
                await self._group.write([_PROBE])


async def _step(session: _Session, rows: StatementRows) -> Callable[[], Awaitable[None]]:
    """An action that executes a statement for its rows; the statement is already prepared."""
    form = compiled(rows.sql)
    bound = [form.bind(each) for each in rows.values]
    if not rows.finds:
        return partial((await session.prepare(form.text)).executemany, bound)
    if form.text.startswith("SELECT"):
        return partial(_lock, await session.prepare(f"{form.text} FOR SHARE"), bound)
    return partial(_change, await session.prepare(f"{form.text} RETURNING 1"), bound)


async def _lock(statement: Prepared, bound: list[list[Any]]) -> None:
    """Lock each row until the commit. Raises StaleWrite if one is not found."""
    for each in {tuple(row) for row in bound}:  # once per distinct row
        if await statement.fetchrow(*each) is None:
            raise StaleWrite


async def _change(statement: Prepared, bound: list[list[Any]]) -> None:
    """Raises StaleWrite when one changes no row."""
    if len(await statement.fetchmany(bound)) != len(bound):
        raise StaleWrite


async def _roll_back(connection: Connection) -> None:
    """Roll back a failed transaction; if that fails too, close the connection."""
    try:
        await connection.execute("ROLLBACK")
    except Exception as error:  # noqa: BLE001 - the next write makes a new connection
        log.warning("rollback_failed", reason=str(error))
        connection.terminate()


async def _new_session(url: str) -> _Session:
    connection = await connect(url)
    try:
        pid, started = await connection.fetchrow(_IDENTITY)
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        connection.terminate()
        raise unavailable(error) from error
    except BaseException:
        connection.terminate()
        raise
    return _Session(connection, pid, started, {})


async def _next_session(url: str, before: _Session) -> _Session:
    """A session that replaces a lost one of this process.

    The server may not have noticed the loss yet, so the old session is terminated there first.
    """
    session = await _new_session(url)
    try:
        await session.connection.execute(_END_BACKEND, before.pid, before.started)
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        session.connection.terminate()
        raise unavailable(error) from error
    except BaseException:
        session.connection.terminate()
        raise
    return session
