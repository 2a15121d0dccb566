"""Connections to PostgreSQL, their failures, and reads over them.

Reads that wait at the same time go out together, equal ones as one query: a round trip costs far
more than finding a row. While one lane waits for an answer, reads gather for the next; another lane
opens only if an answer takes long, so a slow query blocks no other. ``compiled`` writes the shared
SQL for PostgreSQL.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import asyncpg
import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.store.database import DatabaseUnusable, Query, Row

log = structlog.get_logger(__name__)

Connection: TypeAlias = "asyncpg.Connection[Any]"

CONNECT_SECONDS: Final = 5.0
# A statement that takes longer counts as a lost connection.
COMMAND_SECONDS: Final = 30.0
OLDEST_SERVER: Final = 15
UNAVAILABLE: Final = (
    "The database can't be reached right now; nothing was changed. Try again, with the same"
    " idempotency key if the call had one."
)
# PostgreSQL notices within half a minute that a client's machine is gone. It ends the transaction
# of a paused client before the lease that this client may hold expires.
_SERVER_SETTINGS: Final = {
    "application_name": "rpcsvc",
    "default_transaction_isolation": "read committed",
    "idle_in_transaction_session_timeout": "5000",
    "jit": "off",
    "statement_timeout": "25000",
    "tcp_keepalives_count": "3",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_user_timeout": "25000",
}
_REFUSED: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.exceptions.ClientConfigurationError,
)
# The server is stopping, starting, full, or became a standby.
_DOWN: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.TooManyConnectionsError,
)

LANES: Final = 4
# How long reads gather behind a waiting lane before another one is opened.
GATHER_SECONDS: Final = 0.005
MAX_BATCH: Final = 256
_ONE_MOMENT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_PLACE: Final = re.compile(r"(?P<many>\b(?:NOT )?IN )?:(?P<name>[a-z]\w*)")
# PostgreSQL accepts no column as the LIMIT or OFFSET of a subquery.
_BOUNDED: Final = re.compile(r"\b(LIMIT|OFFSET) :")
_ONE_OF: Final = {"IN ": "= ANY(${})", "NOT IN ": "<> ALL(${})"}
# The column of a batched query that says which call a row is for.
CALL: Final = "call_"

Values = tuple[Any, ...]

_TYPES: dict[str, tuple[str, ...]] = {}


# --- connections ---------------------------------------------------------------------------------


async def connect(url: str, **settings: str) -> Connection:
    """Open a connection; integers of any size are read as int.

    Raises DatabaseUnusable if a retry can't help, Unavailable otherwise.
    """
    try:
        connection = await asyncpg.connect(
            url,
            timeout=CONNECT_SECONDS,
            command_timeout=COMMAND_SECONDS,
            statement_cache_size=512,
            max_cached_statement_lifetime=0,
            server_settings=_SERVER_SETTINGS | settings,
        )
    except _REFUSED as error:
        raise DatabaseUnusable(f"the PostgreSQL database refuses the service: {error}") from error
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        raise unavailable(error) from error
    try:
        _require_new_enough(connection)
        # A sum of 64-bit integers is a numeric.
        await connection.set_type_codec(
            "numeric", schema="pg_catalog", encoder=str, decoder=int, format="text"
        )
    except BaseException:
        connection.terminate()
        raise
    return connection


def _require_new_enough(connection: Connection) -> None:
    major = connection.get_server_version().major
    if major < OLDEST_SERVER:
        raise DatabaseUnusable(f"PostgreSQL {major} is too old: {OLDEST_SERVER} is needed")


def is_down(connection: Connection, error: Exception) -> bool:
    """Return whether an error comes from the server or the connection rather than from the
    statement.

    Such a connection is useless, so it is closed.
    """
    if not (connection.is_closed() or isinstance(error, (OSError, asyncio.TimeoutError, *_DOWN))):
        return False
    connection.terminate()
    return True


def unavailable(error: Exception) -> Unavailable:
    """The error for callers. Its cause stays in the log."""
    log.error("database_unavailable", reason=str(error) or type(error).__name__)
    return Unavailable(UNAVAILABLE)


# --- queries -------------------------------------------------------------------------------------


class PostgresqlQuery(NamedTuple):
    """SQL with ``$1``, the values that it takes in order, and which of them are lists.

    ``batches``: ``batched`` can make many calls of it one query.
    """

    text: str
    names: tuple[str, ...]
    lists: frozenset[str]
    batches: bool

    def bind(self, values: Mapping[str, Any]) -> list[Any]:
        """The values in order. Raises KeyError if one is missing."""
        if not self.lists:
            return [values[name] for name in self.names]
        return [list(values[n]) if n in self.lists else values[n] for n in self.names]


@lru_cache(maxsize=1024)
def compiled(sql: str) -> PostgresqlQuery:
    """The SQL for PostgreSQL: a name that occurs twice becomes one parameter."""
    names: list[str] = []
    lists = set()

    def mark(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in names:
            names.append(name)
        place = names.index(name) + 1
        if found["many"] is None:
            return f"${place}"
        lists.add(name)
        return _ONE_OF[found["many"]].format(place)

    text = _PLACE.sub(mark, sql)
    batches = bool(names) and not lists and _BOUNDED.search(sql) is None
    return PostgresqlQuery(text, tuple(names), frozenset(lists), batches)


@lru_cache(maxsize=1024)
def batched(text: str, types: Sequence[str]) -> str:
    """Return one query for many calls of ``text``, whose parameters have these types.

    It takes an array per parameter. Rows of a call keep the order of the query: PostgreSQL runs a
    subquery with ORDER BY for one call after the other.
    """
    arrays = ", ".join(f"${n}::{name}[]" for n, name in enumerate(types, 1))
    columns = ", ".join(f"p{n}" for n in range(1, len(types) + 1))
    inner = re.sub(r"\$(\d+)", r"calls.p\1", text)
    return (
        f"SELECT calls.{CALL}, answers.* FROM unnest({arrays}) WITH ORDINALITY"
        f" AS calls ({columns}, {CALL}) CROSS JOIN LATERAL ({inner}) AS answers"
    )


# --- lanes ---------------------------------------------------------------------------------------


class _Read(NamedTuple):
    queries: Sequence[Query]
    done: asyncio.Future[list[list[Row]]]


class PostgresqlReader:
    """Reads over a few connections, which ``connect`` makes."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._idle: list[Connection] = []
        self._lanes: set[asyncio.Task[None]] = set()
        self._waiting: list[_Read] = []
        self._next_lane: asyncio.Handle | None = None
        self._closing = False

    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        """Return all rows of a query over committed state. Raises errors.Unavailable."""
        return (await self.fetch_together([Query(sql, values)]))[0]

    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        """The first row, or None. Raises errors.Unavailable."""
        return next(iter(await self.fetch(sql, **values)), None)

    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        """The rows of each query, all of one moment. Raises errors.Unavailable."""
        if self._closing:
            raise Unavailable("The service is stopping.")
        loop = asyncio.get_running_loop()
        read = _Read(queries, loop.create_future())
        self._waiting.append(read)
        if self._next_lane is None:
            if self._lanes:
                self._next_lane = loop.call_later(GATHER_SECONDS, self._open_lane)
            else:
                self._next_lane = loop.call_soon(self._open_lane)
        return await read.done

    async def close(self) -> None:
        """Finish pending reads and close the connections. Later reads are refused."""
        self._closing = True
        while self._lanes or self._waiting:
            if not self._lanes:
                self._open_lane()
            await asyncio.wait(self._lanes)
        for connection in self._idle:
            with suppress(OSError, asyncpg.InterfaceError, asyncpg.PostgresError, TimeoutError):
                await connection.close(timeout=1)

    def _open_lane(self) -> None:
        self._next_lane = None
        if self._waiting and len(self._lanes) < LANES:
            lane = asyncio.get_running_loop().create_task(self._run(), name="database reads")
            self._lanes.add(lane)

    async def _run(self) -> None:
        """Answer reads as long as some wait."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                await self._answer(batch)
        finally:
            # Before a reader that was answered continues: its next read must not gather behind a
            # lane that is over, nor wait for the timer of a read that this lane has answered.
            self._lanes -= {asyncio.current_task()}
            if not self._lanes and self._next_lane is not None:
                self._next_lane.cancel()
                self._next_lane = None

    async def _answer(self, batch: list[_Read], *, again: bool = True) -> None:
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
        except Exception as error:  # noqa: BLE001 - the waiters get it
            _fail(batch, error)
            return
        try:
            answers = await _answers(connection, batch)
        except Exception as error:  # noqa: BLE001 - as above
            await self._answer_again(connection, batch, error, again=again)
            return
        self._idle.append(connection)
        for read, answer in zip(batch, answers, strict=True):
            if not read.done.done():
                read.done.set_result(answer)

    async def _answer_again(
        self, connection: Connection, batch: list[_Read], error: Exception, *, again: bool
    ) -> None:
        """Repeat the reads: over a new connection if theirs was lost, else one by one."""
        if is_down(connection, error):
            if again:
                while self._idle:  # the other lanes were most likely lost with it
                    self._idle.pop().terminate()
                await self._answer(batch, again=False)
            else:
                _fail(batch, unavailable(error))
            return
        if connection.is_in_transaction():
            connection.terminate()
        else:
            self._idle.append(connection)
        if len(batch) == 1:
            _fail(batch, error)
            return
        for read in batch:
            await self._answer([read])


async def _answers(connection: Connection, batch: Sequence[_Read]) -> list[list[list[Row]]]:
    """The rows of each query of each read; each distinct SQL text is sent once, with all its
    values.
    """
    found: dict[str, dict[Values, list[Row]]] = {}
    forms = [[(compiled(each.sql), each.values) for each in read.queries] for read in batch]
    places = [[(form, tuple(form.bind(values))) for form, values in read] for read in forms]
    hashed = [[(form.text, _key(form, values)) for form, values in read] for read in places]
    calls: dict[str, tuple[PostgresqlQuery, dict[Values, Values]]] = {}
    for read, keys in zip(places, hashed, strict=True):
        for (form, values), (text, key) in zip(read, keys, strict=True):
            calls.setdefault(text, (form, {}))[1][key] = values
    is_one_moment = any(len(read.queries) > 1 for read in batch)
    if is_one_moment:
        await connection.execute(_ONE_MOMENT)
    for text, (form, values_of) in calls.items():
        found[text] = await _fetch(connection, form, values_of)
    if is_one_moment:
        await connection.execute("COMMIT")
    return [[found[text][key] for text, key in keys] for keys in hashed]


def _key(form: PostgresqlQuery, values: Values) -> Values:
    """Values as a dictionary key."""
    if not form.lists:
        return values
    return tuple(tuple(each) if isinstance(each, list) else each for each in values)


async def _fetch(
    connection: Connection, form: PostgresqlQuery, calls: dict[Values, Values]
) -> dict[Values, list[Row]]:
    """The rows for each of these values."""
    if len(calls) == 1 or not form.batches:
        return {key: await connection.fetch(form.text, *values) for key, values in calls.items()}
    statement = await _prepared(connection, form)
    keys = list(calls)
    found: dict[Values, list[Row]] = {key: [] for key in keys}
    for row in await connection.fetch(statement, *zip(*calls.values(), strict=True)):
        values = dict(row)
        found[keys[values.pop(CALL) - 1]].append(values)
    return found


async def _prepared(connection: Connection, form: PostgresqlQuery) -> str:
    """Prepare the batched query; the server names the types of its parameters."""
    types = _TYPES.get(form.text)
    if types is None:
        parameters = (await connection.prepare(form.text)).get_parameters()
        types = _TYPES[form.text] = tuple(each.name for each in parameters)
    return batched(form.text, types)


def _fail(batch: Sequence[_Read], error: Exception) -> None:
    for read in batch:
        if not read.done.done():
            read.done.set_exception(error)
