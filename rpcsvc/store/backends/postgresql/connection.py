"""Opens connections to PostgreSQL and classifies their failures."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeAlias

import asyncpg
import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.store.database import DatabaseUnusable

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
    """Whether an error comes from the server or the connection rather than from the statement.

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
