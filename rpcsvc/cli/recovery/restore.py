"""``rpcsvc db restore``: puts a copy in place, and adopts the journaled payments that it lacks.

Each step takes the data directory, so that a drill can run in another one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rpcsvc.cli.context import FAILED, OK, Context, UsageError, complain, say
from rpcsvc.cli.opening import opening
from rpcsvc.cli.operator.service import is_running
from rpcsvc.clock import SystemClock
from rpcsvc.domain.withdrawals import is_withdrawal
from rpcsvc.durable_files import sync_directory
from rpcsvc.engines import ENGINES
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.journal.files import (
    FOLDER,
    JournalDamaged,
    mirror,
    read_place,
)
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal, forget_mark
from rpcsvc.settlement.onchain.journal_replay import ReplayResult, open_journal
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import (
    DATABASE_NAME,
    DataDirInUse,
    OwnerLock,
    SqliteDatabase,
)
from rpcsvc.store.backends.sqlite.maintenance import damage_of

_WITHOUT: Final = (
    "restored without a payment journal: go by docs/operate/restore.md before rpcsvc payouts resume"
)


def restore_copy(context: Context) -> int:
    """Run the command. Raises UsageError: then the database is unchanged."""
    settings, options = context.settings(), context.options
    configure_logging(settings.log.format, "error")
    copy: Path = options.copy
    require_sqlite(settings, "restore it with pg_restore, or put a base backup in place")
    if is_running(settings):
        raise UsageError(f"A service runs on {settings.data_dir}. Stop it first.")
    if damage := damage_of(copy):
        raise UsageError(f"{copy} can't be used: {damage}")
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = OwnerLock(settings.data_dir)
    try:
        lock.acquire()
    except DataDirInUse as error:
        raise UsageError(str(error)) from error
    try:
        if ENGINES[settings.engine].signs:
            take_journal(settings, options.journal or [], without=options.without_journal)
        kept = put_in_place(settings.data_dir, copy)
        if kept is not None:
            say(f"The previous database is {kept}\n")
        with opening(settings):
            done = asyncio.run(adopt(settings, without=options.without_journal))
    finally:
        lock.release()
    return _print(done)


def take_journal(settings: Settings, given: Sequence[Path], *, without: bool = False) -> None:
    """Copy the longest journal into the data directory. Raises UsageError."""
    folder = settings.data_dir / FOLDER
    try:
        if without:
            _move_away(folder)
            return
        known = [folder, *settings.onchain.journal_places, *given]
        found = {place: read_place(place) for place in known}
        best = max(known, key=lambda place: found[place].end.line)
        if found[best].end.line == 0:
            raise UsageError(
                f"There is no payment journal in {', '.join(str(place) for place in known)}. Name"
                " where there is one with --journal. If none is left: --without-journal, and then"
                " go by docs/operate/restore.md"
            )
        if found[best].problem is not None:
            raise UsageError(f"The journal in {best} is damaged: {found[best].problem}.")
        if best != folder and found[best].end.line > found[folder].end.line:
            mirror(best, folder)
    except (OSError, JournalDamaged) as error:
        raise UsageError(f"The payment journal can't be used: {error}.") from error


def _move_away(path: Path) -> Path | None:
    """Rename a file that is in the way."""
    if not path.exists():
        return None
    kept = path.with_name(f"{path.name}.replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    path.rename(kept)
    sync_directory(path.parent)
    return kept


def put_in_place(data_dir: Path, copy: Path) -> Path | None:
    """Install the copy as the database; returns where the old one is kept, with its log."""
    fresh = data_dir / f"{DATABASE_NAME}.fresh"
    shutil.copyfile(copy, fresh)
    fresh.chmod(0o600)
    fd = os.open(fresh, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    database = data_dir / DATABASE_NAME
    kept = _move_away(database)
    for suffix in ("-wal", "-shm"):
        beside = database.with_name(DATABASE_NAME + suffix)
        if kept is None:
            # Its database is gone. Left there, SQLite would take its commits for the copy's.
            _move_away(beside)
        elif beside.exists():
            beside.rename(kept.with_name(kept.name + suffix))
    fresh.rename(database)
    sync_directory(data_dir)
    return kept


async def adopt(settings: Settings, *, without: bool = False) -> ReplayResult | None:
    """Adopt the payments of the journal; None if the engine has none, or ``without`` it.

    Raises UsageError.
    """
    database = await SqliteDatabase.open(settings.data_dir)
    try:
        if not ENGINES[settings.engine].signs:
            return None
        switch = PauseSwitch(settings.data_dir)
        if without:
            switch.pause(_WITHOUT)
            await forget_mark(database)
        options = wiring.journal_options(settings.onchain, settings.data_dir)
        journal = PaymentJournal(options, SystemClock(), system_random)
        try:
            done = await open_journal(journal, database, SystemClock(), switch)
            health = journal.health()
        finally:
            await journal.close()
        if not health.ok:
            raise UsageError(f"{health.detail}. The copy is in place, and nothing was adopted.")
        return None if without else done
    finally:
        await database.close()


def _print(done: ReplayResult | None) -> int:
    if done is None:
        say("The copy is in place.\n")
        return OK
    say(
        f"The copy is in place. The journal brought {len(done.payments)} payments;"
        f" {len(done.orders)} transfers have theirs on record now.\n"
    )
    for name in done.lost:
        if is_withdrawal(name):
            say(
                f"{name}: the copy is older than this withdrawal, its payment is on record; once"
                f" the service is up: the same rpcsvc treasury withdraw with --id {name}\n"
            )
        else:
            say(f"{name}: its order is lost, its payment is on record\n")
    for problem in done.refused:
        complain(f"rpcsvc: not adopted, and payouts are paused: {problem}\n")
    return FAILED if done.refused else OK


def require_sqlite(settings: Settings, instead: str) -> None:
    """Raise UsageError, with the alternative, if the database is on a server."""
    if settings.database_url is not None:
        raise UsageError(f"This command is about SQLite, and database_url is set: {instead}.")
