"""The payment journal: records each signed payment durably before its database commit.

One line at a time is written and synced, then committed to the database together with its position.
So no payment reaches a network unless its line is on disk. While the journal is not intact nothing
is signed, published or swept, nor once the database has less than it had
(docs/adr/0012-payment-journal.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.ids import RandomBytes
from rpcsvc.settlement.onchain.journal.files import (
    NO_LEASE,
    RESUME,
    JournalContents,
    JournalDamaged,
    JournalEntry,
    JournalPosition,
    Line,
    Mark,
    PlaceWriter,
    encode,
    head_of,
    header,
    mirror,
    read_place,
    segment_name,
    segments,
)
from rpcsvc.settlement.onchain.pause import PauseRow, unpaused
from rpcsvc.store.database import Rows, StaleWrite, Statement, Tables, from_row, to_row
from rpcsvc.store.leases import DatabaseReplaced, HeldLease, LeaseLost

log = structlog.get_logger(__name__)

SEGMENT_BYTES: Final = 16 * 1024 * 1024
_RETRY_MS: Final = 30_000
_PLACE_SECONDS: Final = 10.0
_NAME_BYTES: Final = 8
# How often the database's mark is compared while no line is written.
_COMPARE_SECONDS: Final = 2.5
# The most lines that a failed attempt to write may have left on disk: a header, and a line.
_OWN_LINES: Final = 2
_PUT_MARK: Final = (
    "INSERT INTO payment_journal (journal, line, sum, token, holder)"
    " VALUES (:journal, :line, :sum, :token, :holder)"
    " ON CONFLICT (journal) DO UPDATE SET line = excluded.line, sum = excluded.sum,"
    " token = excluded.token, holder = excluded.holder"
)
_MOVE_MARK: Final = (
    "UPDATE payment_journal SET line = :line, sum = :sum, token = :token, holder = :holder"
    " WHERE journal = :journal AND line >= :known"
)
_HAS: Final = "UPDATE payment_journal SET line = line WHERE journal = :journal AND line >= :known"
_LINE: Final = "SELECT line, sum FROM payment_journal WHERE journal = :journal"
_MARKS: Final = "SELECT journal, line, sum, token, holder FROM payment_journal ORDER BY token"


class JournalOptions(Struct, frozen=True):
    """The locations of the journal. ``places``: further folders. ``command``: takes a line on
    stdin.

    If there is any, one of them must take each line in addition to ``folder``.
    """

    folder: Path
    places: tuple[Path, ...] = ()
    command: tuple[str, ...] = ()
    segment_bytes: int = SEGMENT_BYTES


class PaymentJournal:
    """The journal of one process, opened once. ``random`` names a new journal.

    ``lease``: that of the process; each line names it. ``on_replaced`` is called once, when the
    database was replaced by an older copy.
    """

    def __init__(
        self,
        options: JournalOptions,
        clock: Clock,
        random: RandomBytes,
        *,
        lease: HeldLease = NO_LEASE,
        steady: Callable[[], int] = steady_ms,
        on_replaced: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._options = options
        self._lease = lease
        self._clock = clock
        self._random = random
        self._steady = steady
        self._on_replaced = on_replaced
        self._first = PlaceWriter(options.folder)
        self._further: list[_Further] = [_Folder(options.folder, each) for each in options.places]
        if options.command:
            self._further.append(_Command(options.command))
        self._mark: Mark | None = None
        self._unread: tuple[Line, ...] = ()
        self._is_opened = False
        self._is_read = False
        self._end = JournalPosition()
        self._name = ""
        self._problem: str | None = "it is not open yet"
        self._failed_at: int | None = None
        self._unsettled: tuple[JournalEntry, Callable[[], Awaitable[bool]]] | None = None
        self._one = asyncio.Lock()
        self._is_fenced = self._is_replaced = False

    # --- opening -------------------------------------------------------------------------------

    async def heads(self) -> dict[str, HeldLease]:
        """The journals on disk before it is opened, and the lease of the last line of each."""
        places = (*self._options.places, self._options.folder)
        found = [await asyncio.to_thread(head_of, place) for place in places]
        return dict(head for head in found if head is not None)

    async def write(self, entry: JournalEntry) -> None:
        """Write a line that goes with no commit of its own. Raises errors.Unavailable."""
        async with self._one:
            await self._append(entry)

    async def open(self, mark: Mark | None) -> tuple[Line, ...]:
        """Open for writing; the lines that a database with this mark does not have yet.

        A journal that is missing, damaged or another one is a matter of ``health``; nothing can be
        recorded then.
        """
        self._mark = mark
        await asyncio.to_thread(self._try_to_open)
        self._is_opened = True
        return () if self._problem else self._unread

    def _try_to_open(self) -> None:
        try:
            self._open()
            self._problem = None
        except (OSError, JournalDamaged) as error:
            self._failed(error)

    async def can_be_opened(self, mark: Mark | None) -> bool:
        """Whether its files have all that a database with this mark knows; nothing is opened."""
        self._mark = mark
        try:
            found = await asyncio.to_thread(lambda: read_place(self._best(), self._since))
            self._require_complete(found)
        except (OSError, JournalDamaged):
            return False
        return True

    @property
    def _since(self) -> int:
        """The last line that the database has."""
        return self._mark.at.line if self._mark else 0

    def _best(self) -> Path:
        """The place with most lines; the first one of those that are alike."""
        places = (self._options.folder, *self._options.places)
        return max(places, key=lambda place: _end_of(place, self._since).line)

    def _open(self) -> None:
        folder, since = self._options.folder, self._since
        if (best := self._best()) != folder:
            mirror(best, folder)
        found = read_place(folder, since)
        self._require_complete(found)
        self._name = found.name or self._random(_NAME_BYTES).hex()
        self._end = found.end
        self._unread = tuple(line for line in found.lines if line.at.line > since)
        self._resume(found)
        self._is_read = True

    def _require_complete(self, found: JournalContents) -> None:
        """Raise JournalDamaged unless the journal has every line that the database knows."""
        mark, end = self._mark, found.end
        if found.problem is not None:
            raise JournalDamaged(found.problem)
        # Before one attempt succeeded nobody has its unread lines: a later one must not skip them.
        known, own_lines = (mark.at.line if mark else 0), 0
        if self._is_read:
            known, own_lines = max(self._end.line, known), _OWN_LINES
        if known and not found.lines:
            raise JournalDamaged(f"it is missing; the database knows {known} lines of it")
        if end.line < known:
            raise JournalDamaged(f"it ends at line {end.line}; the database knows {known} lines")
        if self._is_opened and end.line > known + own_lines:
            raise JournalDamaged("it is ahead of the database: restart the service")
        if mark is None:
            return
        same = any(line.at == mark.at for line in found.lines)
        if found.name != mark.journal or not same:
            raise JournalDamaged(
                f"it is journal {found.name}, or another version of it; the database belongs to"
                f" journal {mark.journal}"
            )

    def _resume(self, found: JournalContents) -> None:
        files = segments(self._options.folder)
        self._first.open(files[-1].name if files else segment_name(1))
        if found.torn:
            self._write(RESUME)
        if found.torn or not found.lines:
            self._write_header()

    def _write_header(self) -> None:
        body = header(self._end, self._name, self._clock.now_ms())
        data, at = encode(self._end, body)
        self._write(data)
        self._end = at

    def _write(self, data: bytes) -> None:
        self._first.append(data)

    def _rotate(self) -> None:
        if self._first.size >= self._options.segment_bytes:
            self._first.open(segment_name(self._end.line + 1))
            self._write_header()

    # --- recording -----------------------------------------------------------------------------

    async def record(
        self,
        entry: JournalEntry,
        commit: Callable[[Mark], Awaitable[None]],
        undo: tuple[JournalEntry, Callable[[], Awaitable[bool]]] | None = None,
    ) -> None:
        """Write the entry's line, then ``commit``. Recording continues when the caller is
        cancelled.

        ``undo``: the entry that voids the line if the commit fails, and a check whether the commit
        went through after all. Raises errors.Unavailable when the line is not on disk, and the
        errors of ``commit``.
        """
        recording = asyncio.create_task(self._record(entry, commit, undo), name="journal")
        recording.add_done_callback(_retrieve)
        await asyncio.shield(recording)

    async def _record(
        self,
        entry: JournalEntry,
        commit: Callable[[Mark], Awaitable[None]],
        undo: tuple[JournalEntry, Callable[[], Awaitable[bool]]] | None,
    ) -> None:
        async with self._one:
            await self._settle()
            if self._is_fenced:
                raise LeaseLost
            self._unsettled = undo
            await self._append(entry)
            mark = self.mark
            try:
                await commit(mark)
            except (StaleWrite, LeaseLost) as refused:
                # Of a lease that is lost no line follows a refused one: it is the last to judge.
                self._is_fenced = isinstance(refused, LeaseLost)
                await self._settle()  # rolled back for certain: a restart must not adopt the line
                raise
            self.note_committed(mark)
            self._unsettled = None

    async def _settle(self) -> None:
        """Void the line whose commit failed: without a commit the payment was not published."""
        if self._unsettled is None:
            return
        void, is_committed = self._unsettled
        if not await is_committed():
            await self._append(void)
        self._unsettled = None

    async def _append(self, entry: JournalEntry) -> None:
        body = entry.body()
        if self._lease != NO_LEASE:
            body |= {"token": self._lease.token, "holder": self._lease.holder}
        await self._offer(await asyncio.to_thread(self._append_to_first, body))

    async def _offer(self, data: bytes) -> None:
        """Have a further place take the line. Raises errors.Unavailable."""
        if self._further:
            await asyncio.gather(*(each.offer(data, self._steady()) for each in self._further))
            if not any(each.problem is None for each in self._further):
                raise Unavailable("No further place takes the payment journal. Try again later.")

    def _append_to_first(self, body: dict[str, object]) -> bytes:
        """Write a line to the first place and return its bytes. Raises errors.Unavailable."""
        if self._problem is not None:
            self._try_to_open()
        if self._problem is None:
            try:
                self._rotate()
                data, at = encode(self._end, body)
                self._write(data)
            except (OSError, JournalDamaged) as error:
                self._failed(error)
            else:
                self._end = at
                return data
        raise _unavailable()

    def _failed(self, error: Exception) -> None:
        self._first.close()
        text = _words(error)
        if self._problem != text:
            log.warning("payment_journal_unusable", reason=text, folder=str(self._options.folder))
        self._problem, self._failed_at = text, self._steady()

    async def run(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Retry failed places until cancelled, also while no line is written."""
        while True:
            await pause(_RETRY_MS / 1000)
            await self.retry()

    async def retry(self) -> None:
        """Open it again, or offer a line to the places that fail: another header."""
        async with self._one:
            if self._problem is not None:
                await asyncio.to_thread(self._try_to_open)
            elif any(each.problem is not None for each in self._further):
                body = header(self._end, self._name, self._clock.now_ms())
                with suppress(Unavailable):  # health says so
                    await self._offer(await asyncio.to_thread(self._append_to_first, body))

    # --- the database's mark -------------------------------------------------------------------

    @property
    def known(self) -> Mark | None:
        """The last mark that the database is known to have; None: it is known to have none."""
        return self._mark

    def note_committed(self, mark: Mark) -> None:
        """Note that the database has a mark of this journal."""
        self._mark = mark

    async def require_current(self, database: Tables, *, was_refused: bool = False) -> None:
        """Raise DatabaseReplaced if the database lacks lines that it had, from the first time on.

        What was read before is then of the database that has all lines. ``was_refused``: a commit
        was, so that a read alone shows nothing. Raises errors.Unavailable.
        """
        if self._is_replaced:
            raise DatabaseReplaced
        if (known := self.known) is None:
            return
        row = await database.fetch_one(_LINE, journal=known.journal)
        is_current = row is not None and row["line"] >= known.at.line
        if is_current and not was_refused:
            if row is not None and self._mark is known:  # a commit without an answer went through
                self.note_committed(replace(known, at=from_row(JournalPosition, row)))
            return
        # Reads may come from another server than the one that takes commits.
        try:
            await database.write(
                [Statement(_HAS, {"journal": known.journal, "known": known.at.line}, finds=True)]
            )
        except StaleWrite:
            pass
        else:
            if is_current:
                return
            raise Unavailable("What was read is older than the database. Try again later.")
        if not self._is_replaced:
            self._is_replaced = self._is_fenced = True
            found = None if row is None else row["line"]
            log.critical(
                "database_replaced", journal=known.journal, known=known.at.line, found=found
            )
            if self._on_replaced is not None:
                await self._on_replaced()
        raise DatabaseReplaced

    async def compare(
        self, database: Tables, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Compare the database's mark until cancelled, also while no line is written."""
        while True:
            await pause(_COMPARE_SECONDS)
            with suppress(Unavailable):
                await self.require_current(database)

    # --- how it is -----------------------------------------------------------------------------

    async def require_ready(self) -> None:
        """Raise errors.Unavailable while nothing can be recorded; every 30 s it tries again."""
        if self._is_replaced:
            raise DatabaseReplaced
        if self._problem is None:
            return
        since = self._failed_at
        if since is not None and self._steady() - since >= _RETRY_MS:
            await self.retry()
        if self._problem is not None:
            raise _unavailable()

    @property
    def is_usable(self) -> bool:
        """Whether payments could be recorded at the last attempt."""
        return self._problem is None and not self._is_replaced

    def health(self) -> Health:
        """Return whether every place takes lines; if not, which does not and the consequence."""
        if self._is_replaced:
            return Health(
                False,
                "the database was replaced by an older copy while this process used it: the process"
                " pays nothing more and ends. Its next start adopts what the payment journal has."
                " See docs/operate/restore.md",
            )
        if self._problem is not None:
            return Health(
                False,
                f"the payment journal in {self._options.folder} can't be used ({self._problem}):"
                " payouts wait. Put it back, or see docs/operate/restore.md",
            )
        failing = [each for each in self._further if each.problem is not None]
        if not failing:
            return Health(True)
        waits = "payouts wait" if len(failing) == len(self._further) else "payouts go on"
        what = "; ".join(f"{each.name} ({each.problem})" for each in failing)
        return Health(False, f"the payment journal does not reach {what}: {waits}")

    @property
    def mark(self) -> Mark:
        """The last line."""
        return Mark(self._name, self._end, self._lease)

    async def close(self) -> None:
        """Close the files, after the line that is being recorded."""
        async with self._one:
            self._first.close()
            for each in self._further:
                each.close()


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _unavailable() -> Unavailable:
    return Unavailable("The payment journal can't be written. Payouts wait. Try again later.")


def _end_of(place: Path, since: int) -> JournalPosition:
    """The end of a place; its start when it can't be read."""
    try:
        return read_place(place, since).end
    except OSError:
        return JournalPosition()


def _retrieve(task: asyncio.Task[None]) -> None:
    """Log a failure that the task's starter, perhaps cancelled, may never await."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.info("journal_line_not_committed", reason=str(failure))


# --- the journal and its database ------------------------------------------------------------


async def marks_of(database: Tables) -> list[Mark]:
    """Return the mark of each journal in the database; the newest last."""
    return [
        Mark(row["journal"], from_row(JournalPosition, row), HeldLease(row["holder"], row["token"]))
        for row in await database.fetch(_MARKS)
    ]


def put_mark(mark: Mark, known: Mark | None) -> Statement:
    """The statement that records a mark in place of ``known``, or of a later one.

    A commit whose answer was lost may have left a later one. An older copy of the database has an
    earlier one, or none: then the commit is refused.
    """
    values = to_row(mark.at, journal=mark.journal, **mark.lease._asdict())
    if known is None:
        return Statement(_PUT_MARK, values)
    return Statement(_MOVE_MARK, {**values, "known": known.at.line}, finds=True)


async def forget_mark(database: Tables) -> None:
    """Detach the database from its journals: the next one starts fresh."""
    await database.write([Statement("DELETE FROM payment_journal")])


class JournaledWrites:
    """Writes of one process to its database, each in its payment journal first.

    Without a journal they go to the database alone: for a replay, and for reading. ``pause``: the
    pause that all replicas share.
    """

    def __init__(
        self, database: Tables, journal: PaymentJournal | None, pause: PauseRow | None = None
    ) -> None:
        self._db = database
        self._journal = journal
        self._pause = pause

    async def record_payment(
        self,
        entry: JournalEntry,
        void: JournalEntry,
        rows: Rows,
        is_committed: Callable[[], Awaitable[bool]],
        *,
        is_payout: bool,
    ) -> None:
        """Record signed payments; ``void`` voids their line if it is not committed after all.

        Raises as ``record``, and errors.Unavailable for a payout while payouts are paused.
        """
        async with unpaused(self._pause, is_payout=is_payout) as first:
            await self.record(entry, [*first, *rows], (void, is_committed))

    async def record(
        self,
        entry: JournalEntry,
        rows: Rows,
        undo: tuple[JournalEntry, Callable[[], Awaitable[bool]]] | None = None,
    ) -> None:
        """Write the entry's line, then commit the rows with the journal's mark.

        ``undo`` as in ``PaymentJournal.record``. Raises errors.Unavailable, StaleWrite and
        StoreConflict, and DatabaseReplaced when an older copy of the database was put in place.
        """
        if (journal := self._journal) is None:
            await self._db.write(rows)
            return

        async def commit(mark: Mark) -> None:
            try:
                await self._db.write([*rows, put_mark(mark, journal.known)])
            except StaleWrite:
                await journal.require_current(self._db, was_refused=True)
                raise

        # What is signed from an older copy gets no line, which a restart would find without a void.
        await journal.require_current(self._db)
        await journal.record(entry, commit, undo)

    async def note(self, entry: JournalEntry) -> None:
        """Journal an entry that is already committed; losing its line is harmless."""
        if self._journal is None:
            return
        try:
            await self.record(entry, [])
        except Unavailable as reason:
            log.warning("journal_line_missing", entry=type(entry).__name__, reason=reason.message)


# --- further places --------------------------------------------------------------------------


class _Further:
    """A further place. After a failure it rests for 30 s; while it hangs it gets no line."""

    name = ""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._failed_at = 0
        self._busy: asyncio.Future[None] | None = None

    async def offer(self, data: bytes, now: int) -> None:
        """Write a line to the place; ``problem`` says why it failed."""
        is_busy = self._busy is not None and not self._busy.done()
        if is_busy or (self.problem is not None and now - self._failed_at < _RETRY_MS):
            self.missed(data)
            return
        self._busy = asyncio.ensure_future(asyncio.to_thread(self.take, data))
        try:
            async with asyncio.timeout(_PLACE_SECONDS):
                await asyncio.shield(self._busy)
            self.problem = None
        except (OSError, JournalDamaged, TimeoutError) as error:
            self.problem = _words(error) or f"no answer within {_PLACE_SECONDS:.0f} s"
            self._failed_at = now
            log.warning("payment_journal_place_failed", place=self.name, reason=self.problem)

    def take(self, data: bytes) -> None:
        """Write a line, and the lines that it missed. Raises OSError and JournalDamaged."""
        raise NotImplementedError

    def missed(self, data: bytes) -> None:
        """Note a line that it was not offered."""

    def close(self) -> None:
        """Release the place's resources."""


class _Folder(_Further):
    """A folder on another disk: lines that it missed are copied from the first folder."""

    def __init__(self, source: Path, place: Path) -> None:
        super().__init__()
        self.name = str(place)
        self._source = source
        self._place = place
        self._writer = PlaceWriter(place)
        self._is_behind = True

    @override
    def take(self, data: bytes) -> None:
        newest = segments(self._source)[-1].name
        is_next = self._writer.is_open and self._writer.name == newest
        if is_next and not self._is_behind:
            self._writer.append(data)
            return
        self._is_behind = False
        self._writer.close()
        mirror(self._source, self._place)  # with this line
        self._writer.open(newest)

    @override
    def missed(self, data: bytes) -> None:
        self._is_behind = True  # it is copied with all others

    @override
    def close(self) -> None:
        self._writer.close()


class _Command(_Further):
    """A command that takes lines on stdin and exits with 0 when they are safe."""

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__()
        self.name = argv[0]
        self._argv = list(argv)
        self._waiting: list[bytes] = []

    @override
    def take(self, data: bytes) -> None:
        import subprocess  # noqa: PLC0415 - few services have one

        self._waiting.append(data)
        count = len(self._waiting)
        try:
            done = subprocess.run(  # noqa: S603 - the operator's own setting
                self._argv, input=b"".join(self._waiting[:count]), capture_output=True,
                timeout=_PLACE_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise JournalDamaged(f"no end within {_PLACE_SECONDS:.0f} s") from error
        if done.returncode != 0:
            raise JournalDamaged(f"exit status {done.returncode}")
        del self._waiting[:count]

    @override
    def missed(self, data: bytes) -> None:
        self._waiting.append(data)
