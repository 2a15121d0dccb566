"""``rpcsvc db``: check, back up and restore the database, and own that of a stopped service.

With engine onchain a restore adopts from the payment journal what was signed since the copy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from rpcsvc.cli.client import Unreachable
from rpcsvc.cli.context import FAILED, OK, Context, UsageError, opening
from rpcsvc.cli.operator.service import is_running
from rpcsvc.clock import SystemClock
from rpcsvc.durable_files import sync_directory
from rpcsvc.errors import InputError, Unavailable
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.adapter import ChainUnusable
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.journal.files import (
    FOLDER,
    JournalDamaged,
    mirror,
    read_place,
)
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, Database, DataDirInUse, OwnerLock
from rpcsvc.store.backends.sqlite.maintenance import (
    BackupFailed,
    backup_database,
    check_database,
    check_journal,
    damage_of,
)
from rpcsvc.store.journal_replay import Replayed, forget_mark, open_journal

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


_WITHOUT: Final = (
    "restored without a payment journal: go by docs/restore.md before rpcsvc payouts resume"
)


def restore_copy(context: Context) -> int:
    """The command. Raises UsageError: then the database is as it was."""
    settings, options = context.settings(), context.options
    configure_logging(settings.log.format, "error")
    copy: Path = options.copy
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
        is_onchain = settings.engine == "onchain"
        if is_onchain:
            _take_journal(settings, options.journal or [], without=options.without_journal)
        kept = _put_in_place(settings.data_dir, copy)
        if kept is not None:
            sys.stdout.write(f"The database that was there is {kept}\n")
        with opening(settings):
            done = asyncio.run(_adopt(settings, without=options.without_journal))
    finally:
        lock.release()
    return _tell(done)


def _take_journal(settings: Settings, given: Sequence[Path], *, without: bool) -> None:
    """Have the longest journal in the data directory. Raises UsageError."""
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
                " go by docs/restore.md"
            )
        if found[best].problem is not None:
            raise UsageError(f"The journal in {best} is damaged: {found[best].problem}.")
        if best != folder and found[best].end.line > found[folder].end.line:
            mirror(best, folder)
    except (OSError, JournalDamaged) as error:
        raise UsageError(f"The payment journal can't be used: {error}.") from error


def _move_away(path: Path) -> Path | None:
    """Keep what is in the way under another name."""
    if not path.exists():
        return None
    kept = path.with_name(f"{path.name}.replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    path.rename(kept)
    sync_directory(path.parent)
    return kept


def _put_in_place(data_dir: Path, copy: Path) -> Path | None:
    """The copy as the database; where the one that was there is kept, with its log."""
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
        if beside.exists() and kept is not None:
            beside.rename(kept.with_name(kept.name + suffix))
    fresh.rename(database)
    sync_directory(data_dir)
    return kept


async def _adopt(settings: Settings, *, without: bool) -> Replayed | None:
    """What the journal brought; None where there is none. Raises UsageError."""
    database = await Database.open(settings.data_dir)
    try:
        if settings.engine != "onchain":
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


def _tell(done: Replayed | None) -> int:
    if done is None:
        sys.stdout.write("The copy is in place.\n")
        return OK
    sys.stdout.write(
        f"The copy is in place. The journal brought {len(done.payments)} payments;"
        f" {len(done.orders)} transfers are told of theirs.\n"
    )
    for name in done.lost:
        sys.stdout.write(f"{name}: its order is lost, its payment is on record\n")
    for problem in done.refused:
        sys.stderr.write(f"rpcsvc: not adopted, and payouts are paused: {problem}\n")
    return FAILED if done.refused else OK


Common = Callable[[argparse.ArgumentParser], None]


def add_db(commands: Any, common: Common) -> None:
    """Hang the commands into the tree; ``common`` adds the shared options."""
    parser = commands.add_parser("db", help="look after the database")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check the file and the books")
    backup = actions.add_parser("backup", help="copy the database while the service runs")
    backup.add_argument("destination", type=Path, metavar="DEST")
    text = "put a copy in place, and adopt what the payment journal has besides"
    restore = actions.add_parser("restore", help=text, description=text)
    restore.add_argument("copy", type=Path, metavar="COPY")
    restore.add_argument(
        "--journal", type=Path, action="append", metavar="PATH",
        help="a folder or file with a payment journal; may be given several times",
    )  # fmt: skip
    restore.add_argument(
        "--without-journal", action="store_true",
        help="none is left: begin a new one, with payouts paused",
    )  # fmt: skip
    for action, command in (
        (check, _check),
        (backup, _backup),
        (restore, restore_copy),
    ):
        common(action)
        action.set_defaults(command=command)


def _check(context: Context) -> int:
    settings = context.settings()
    problems = check_database(settings.data_dir)
    if settings.engine == "onchain" and not problems:
        folder, places = settings.data_dir / FOLDER, settings.onchain.journal_places
        problems, state = check_journal(settings.data_dir, folder, places)
        sys.stderr.write(f"{state}\n")
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{len(problems)} problems\n" if problems else "ok\n")
    return FAILED if problems else OK


def _backup(context: Context) -> int:
    destination: Path = context.options.destination
    try:
        problems = backup_database(context.settings().data_dir, destination)
    except BackupFailed as error:
        raise UsageError(str(error)) from error
    sys.stdout.write(f"{destination}\n")
    for problem in problems:
        sys.stderr.write(f"rpcsvc: the copy is made, but {problem}\n")
    return FAILED if problems else OK
