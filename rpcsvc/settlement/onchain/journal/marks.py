"""The marks of payment journals as rows, and writes that the payment journal has first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.journal.files import JournalEntry, JournalPosition, Mark, VoidEntry
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.store.database import Rows, Statement, Tables, from_row, to_row
from rpcsvc.store.leases import HeldLease

log = structlog.get_logger(__name__)

_PUT_MARK: Final = (
    "INSERT INTO payment_journal (journal, line, sum, token, holder)"
    " VALUES (:journal, :line, :sum, :token, :holder)"
    " ON CONFLICT (journal) DO UPDATE SET line = excluded.line, sum = excluded.sum,"
    " token = excluded.token, holder = excluded.holder"
)
_MARKS: Final = "SELECT journal, line, sum, token, holder FROM payment_journal ORDER BY token"


async def marks_of(database: Tables) -> list[Mark]:
    """Each journal, and its last line, that the database has everything of; the newest last."""
    return [
        Mark(row["journal"], from_row(JournalPosition, row), HeldLease(row["holder"], row["token"]))
        for row in await database.fetch(_MARKS)
    ]


def put_mark(mark: Mark) -> Statement:
    """The statement that records a mark."""
    values = to_row(mark.at, journal=mark.journal, **mark.lease._asdict())
    return Statement(_PUT_MARK, values)


async def forget_mark(database: Tables) -> None:
    """Detach the database from its journals: the next one starts fresh."""
    await database.write([Statement("DELETE FROM payment_journal")])


class JournaledWrites:
    """Writes of one process to its database, each in its payment journal first.

    Without a journal they go to the database alone: for a replay, and for reading.
    """

    def __init__(self, database: Tables, journal: PaymentJournal | None) -> None:
        self._db = database
        self._journal = journal

    async def record(
        self,
        entry: JournalEntry,
        rows: Rows,
        undo: tuple[VoidEntry, Callable[[], Awaitable[bool]]] | None = None,
    ) -> None:
        """Write the entry's line, then commit the rows with the journal's mark.

        ``undo`` as in ``PaymentJournal.record``. Raises errors.Unavailable, StaleWrite and
        StoreConflict.
        """
        if self._journal is None:
            await self._db.write(rows)
            return
        await self._journal.record(
            entry, lambda mark: self._db.write([*rows, put_mark(mark)]), undo
        )

    async def note(self, entry: JournalEntry) -> None:
        """Journal what is already committed; losing such a line is harmless."""
        if self._journal is None:
            return
        try:
            await self._journal.record(entry, lambda mark: self._db.write([put_mark(mark)]))
        except Unavailable as reason:
            log.warning("journal_line_missing", entry=type(entry).__name__, reason=reason.message)
