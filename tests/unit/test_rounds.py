"""Work that is repeated for each network."""

from __future__ import annotations

import asyncio
from collections import Counter

from structlog.testing import capture_logs

from rpcsvc.errors import Unavailable
from rpcsvc.orders.rounds import Works, repeat


async def test_repeat_starts_no_work_that_is_under_way() -> None:
    started = Counter[str]()

    async def hangs() -> None:
        started["hangs"] += 1
        await asyncio.Event().wait()

    async def ends() -> None:
        started["ends"] += 1

    async def find() -> Works:
        if started["ends"] == 3:
            task.cancel()
        return {"hangs": hangs, "ends": ends}

    task = asyncio.create_task(repeat(find, 0, print))
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert started["hangs"] == 1


async def test_failure_of_work_ends_nothing_else() -> None:
    """A failure to find work included."""
    often, reasons = asyncio.Event(), list[str]()
    failures, done = iter((Unavailable("no database"), KeyError("a bug"))), Counter[str]()

    async def fails() -> None:
        done["fails"] += 1
        if done["fails"] == 3:
            often.set()
        raise KeyError("a bug")

    async def lasts() -> None:
        await often.wait()
        task.cancel()

    async def find() -> Works:
        if (failure := next(failures, None)) is not None:
            raise failure
        return {"fails": fails, "lasts": lasts}

    with capture_logs() as logs:
        task = asyncio.create_task(repeat(find, 0, reasons.append))
        await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert done["fails"] >= 3
    assert reasons == ["no database"]
    assert {line["event"] for line in logs} == {"background_work_failed"}
