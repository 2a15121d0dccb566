"""Tickets that two replicas change at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import asyncpg

from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.changes import Change, Ticket
from rpcsvc.store.orders import OrderStore
from tests.postgres import new_database

_MESSAGE = """
    UPDATE tickets SET messages = messages + 1 WHERE ticket_id = 'tkt_1';
    INSERT INTO ticket_messages (ticket_id, at, message) VALUES ('tkt_1', 2, 'more')
"""


async def _until_it_waits(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """Wait until a statement of another connection waits for a row."""
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    async with asyncio.timeout(10):
        while not await connection.fetchval(waiting):  # noqa: ASYNC110 - only a look can tell
            await asyncio.sleep(0.01)


async def test_ticket_is_closed_while_a_message_is_added(postgres: Callable[[], str]) -> None:
    async with new_database(postgres()) as url:
        database, other = await PostgresqlDatabase.open(url), await asyncpg.connect(url)
        try:
            store = OrderStore(database, lambda: "")
            await store.commit(Change(ticket=Ticket("tkt_1", 1, "other", "m", None, None, None)))
            adding = other.transaction()
            await adding.start()
            await other.execute(_MESSAGE)
            closing = asyncio.create_task(store.close_ticket("tkt_1"))
            await _until_it_waits(other)
            await adding.commit()
            assert await asyncio.wait_for(closing, 10)
            assert (await store.tickets(), await store.ticket_messages("tkt_1")) == ([], [])
        finally:
            await other.close()
            await database.close()
