"""Group commit: writes that wait at the same time share one transaction.

A failed write does not fail the others: each of its group is then retried in its own transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog
from msgspec import Struct

from rpcsvc.errors import Unavailable
from rpcsvc.store.database import CommitObserver, StaleWrite, Statement, StoreConflict, unobserved

log = structlog.get_logger(__name__)

MAX_GROUP = 512


class StatementRows(Struct, frozen=True):
    """The rows of one statement in a group. ``finds``: each must change a row."""

    sql: str
    finds: bool
    values: list[Mapping[str, Any]]


class _Write(Struct, frozen=True):
    statements: Sequence[Statement]
    done: asyncio.Future[None]


class GroupCommit:
    """Collects writes into groups, which ``transact`` commits: all rows of a group, or none.

    ``transact`` raises Unavailable if no write can be committed now; the whole group gets it. Any
    other error belongs to one write: it gets StaleWrite unchanged, everything else as
    StoreConflict.
    """

    def __init__(self, transact: Callable[[list[StatementRows]], Awaitable[None]]) -> None:
        self._transact = transact
        self._waiting: list[_Write] = []
        self._wake = asyncio.Event()
        self._closing = False
        self.observe: CommitObserver = unobserved
        self._task = asyncio.create_task(self._run(), name="group-commit")

    async def write(self, statements: Sequence[Statement]) -> None:
        """Commit the statements. Raises Unavailable, StaleWrite and StoreConflict."""
        if self._closing:
            raise Unavailable("The service is stopping.")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Write(statements, done))
        self._wake.set()
        await done  # if the caller is cancelled, its statements are committed all the same

    async def close(self) -> None:
        """Finish the writes that wait. Later writes are refused."""
        self._closing = True
        self._wake.set()
        await self._task

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._gather()
                group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
                await self._commit(group)
            if self._closing:
                return

    async def _gather(self) -> None:
        """Yield to other tasks as long as each pass of the event loop adds writes to the group."""
        found = 0
        while found < len(self._waiting) < MAX_GROUP:
            found = len(self._waiting)
            await asyncio.sleep(0)

    async def _commit(self, group: list[_Write]) -> None:
        began = time.perf_counter()
        try:
            if rows := rows_of(each for write in group for each in write.statements):
                await self._transact(rows)
        except Unavailable as error:
            _fail(group, error)
        except Exception as error:  # noqa: BLE001 - the waiters get it, and the next group goes on
            if len(group) == 1:
                _fail(group, _refusal(error))
                return
            for write in group:
                await self._commit([write])
        else:
            self.observe(len(group), time.perf_counter() - began)
            for write in group:
                if not write.done.done():
                    write.done.set_result(None)


def rows_of(statements: Iterable[Statement]) -> list[StatementRows]:
    """Group statements by text, in order of first use; those that others refer to come first."""
    found: dict[tuple[str, bool], StatementRows] = {}
    for each in sorted(statements, key=_comes_later):
        rows = found.get((each.sql, each.finds))
        if rows is None:
            rows = found[each.sql, each.finds] = StatementRows(each.sql, each.finds, [])
        rows.values.append(each.values)
    return list(found.values())


def _comes_later(statement: Statement) -> bool:
    return not statement.first


def _refusal(error: Exception) -> Exception:
    """The error for the caller of a write that can't be committed."""
    if isinstance(error, StaleWrite):
        return error
    with suppress(OSError):  # a log on a full disk must not end the writer
        log.error("write_refused", reason=str(error), kind=type(error).__name__)
    conflict = StoreConflict(str(error))
    conflict.__cause__ = error
    return conflict


def _fail(group: list[_Write], error: Exception) -> None:
    for write in group:
        if not write.done.done():
            write.done.set_exception(error)
