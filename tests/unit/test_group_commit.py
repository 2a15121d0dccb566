"""Which writes share a transaction (rpcsvc/store/group_commit.py)."""

from __future__ import annotations

import asyncio

from rpcsvc.store.database import Statement
from rpcsvc.store.group_commit import GroupCommit, StatementRows


async def test_group_takes_writes_of_the_next_turns() -> None:
    groups: list[int] = []

    async def transact(rows: list[StatementRows]) -> None:
        groups.append(len(rows[0].values))

    group = GroupCommit(transact)

    async def write_after(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await group.write([Statement("INSERT", {"turns": turns})])

    await asyncio.gather(*(write_after(turns) for turns in range(5)))
    await group.close()
    assert groups == [5]


async def test_lone_write_does_not_wait_for_others() -> None:
    groups: list[int] = []

    async def transact(rows: list[StatementRows]) -> None:
        groups.append(len(rows[0].values))

    group = GroupCommit(transact)
    await group.write([Statement("INSERT")])
    await group.write([Statement("INSERT")])
    await group.close()
    assert groups == [1, 1]
