"""Runs work on the database of a stopped service, under its owner lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rpcsvc.cli.client import Unreachable
from rpcsvc.cli.context import UsageError, opening
from rpcsvc.cli.operator.service import is_running
from rpcsvc.errors import InputError, Unavailable
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain.adapter import ChainUnusable
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, Database, OwnerLock

T = TypeVar("T")


def with_database(settings: Settings, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    """Do some work on the database, alone. Raises UsageError and Unreachable.

    Nobody else signs, publishes or hands out an address meanwhile.
    """
    configure_logging(settings.log.format, "error")
    if is_running(settings):
        raise UsageError(
            f"A service runs on {settings.data_dir}. Stop it first: while it runs, it is the only"
            " one that writes its database. Nothing was changed."
        )

    async def alone() -> T:
        async with _owned(settings) as database:
            return await work(database)

    try:
        with opening(settings):
            return asyncio.run(alone())
    except (RpcFailure, ChainUnusable) as error:
        raise Unreachable(f"A node or wallet can't be asked: {error}. Nothing was changed.") from (
            error
        )
    except Unavailable as error:
        raise Unreachable(error.message) from error
    except InputError as error:
        raise UsageError(error.message) from error


@asynccontextmanager
async def _owned(settings: Settings) -> AsyncIterator[Database]:
    if not (settings.data_dir / DATABASE_NAME).is_file():
        raise UsageError(f"There is no database in {settings.data_dir}.")
    lock = OwnerLock(settings.data_dir)
    lock.acquire()
    try:
        database = await Database.open(settings.data_dir)
        try:
            yield database
        finally:
            await database.close()
    finally:
        lock.release()
