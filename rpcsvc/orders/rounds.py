"""Repeats work that is done for each network. Work that hangs delays none of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from rpcsvc.errors import Unavailable

log = structlog.get_logger(__name__)

# Work by a name of its own.
Works = Mapping[str, Callable[[], Awaitable[None]]]


async def repeat(
    find: Callable[[], Awaitable[Works]], pause_ms: int, note: Callable[[str], None]
) -> None:
    """Start the work that ``find`` returns, again and again with a pause, until cancelled.

    Work that is still under way is not started a second time. A failure ends nothing else: the
    reason of errors.Unavailable goes to ``note``, any other is logged.
    """
    under_way = set[str]()

    async def attempt(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Unavailable as reason:
            note(reason.message)
        except Exception:
            log.exception("background_work_failed")

    async def start() -> None:
        for name, work in (await find()).items():
            if name not in under_way:
                under_way.add(name)
                task = group.create_task(attempt(work), name=name)
                task.add_done_callback(lambda ended: under_way.discard(ended.get_name()))

    async with asyncio.TaskGroup() as group:
        while True:
            await attempt(start)
            await asyncio.sleep(pause_ms / 1000)
