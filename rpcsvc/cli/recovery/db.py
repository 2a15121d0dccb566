"""``rpcsvc db``: check, back up and copy the database; exclusive access for other commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from rpcsvc.cli.context import (
    FAILED,
    OK,
    Context,
    TextOption,
    UsageError,
    add_common,
    complain,
    say,
)
from rpcsvc.cli.opening import opening
from rpcsvc.cli.operator.service import (
    add_progress,
    end_progress,
    is_running,
    reporter,
    show_progress,
)
from rpcsvc.cli.recovery.restore import require_sqlite, restore_copy
from rpcsvc.client.errors import Unreachable
from rpcsvc.clock import SystemClock
from rpcsvc.engines import ENGINES
from rpcsvc.errors import InputError, Unavailable
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, RpcFailure
from rpcsvc.settlement.onchain.journal.files import FOLDER
from rpcsvc.settlement.onchain.journal_check import check_journal
from rpcsvc.store.backends import EXTRA_MISSING, open_database
from rpcsvc.store.backends.sqlite.database import (
    DATABASE_NAME,
    OwnerLock,
    SqliteDatabase,
    snapshot,
)
from rpcsvc.store.backends.sqlite.maintenance import (
    BackupFailed,
    backup_database,
    check_database,
)
from rpcsvc.store.checks import Progress, quiet, reservation_problems
from rpcsvc.store.database import Tables
from rpcsvc.store.leases import Fenced, LeaseKeeper, Leases, LeaseTaken, holder_name

T = TypeVar("T")


def with_database(settings: Settings, work: Callable[[Tables], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` on the database of a stopped service. Raises UsageError and Unreachable.

    Meanwhile nothing else signs, publishes or hands out an address: the command has the data
    directory's lock, and on a server the lease of the replica that settles.
    """
    configure_logging(settings.log.format, "error")
    if is_running(settings):
        raise UsageError(
            f"A service runs on {settings.data_dir}. Stop it first: while it runs, it is the only"
            " one that writes its database. Nothing was changed."
        )

    async def alone() -> T:
        owned = _owned(settings) if settings.postgresql_url is None else _leased(settings)
        async with owned as database:
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
async def _owned(settings: Settings) -> AsyncIterator[Tables]:
    if not (settings.data_dir / DATABASE_NAME).is_file():
        raise UsageError(f"There is no database in {settings.data_dir}.")
    lock = OwnerLock(settings.data_dir)
    lock.acquire()
    try:
        database = await SqliteDatabase.open(settings.data_dir)
        try:
            yield database
        finally:
            await database.close()
    finally:
        lock.release()


@asynccontextmanager
async def _leased(settings: Settings) -> AsyncIterator[Tables]:
    lock = OwnerLock(settings.data_dir)
    lock.acquire()
    try:
        database = await open_database(settings.data_dir, settings.postgresql_url)
        try:
            holder = holder_name(system_random)
            keeper = LeaseKeeper(Leases(database), holder, database.lease_ms)
            async with keeper.held() as lease:
                yield Fenced(database, lease)
        except LeaseTaken as taken:
            raise Unreachable(
                f"A replica settles on this database: {taken}. Stop all replicas first. Nothing was"
                " changed."
            ) from taken
        finally:
            await database.close()
    finally:
        lock.release()


def add_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser("db", help="check, back up and restore the database")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check the file and the books")
    backup = actions.add_parser("backup", help="copy the database while the service runs")
    backup.add_argument("destination", type=Path, metavar="DEST")
    for action in (check, backup):
        add_progress(action)
    text = "restore a copy, and adopt the payments that only the journal has"
    restore = actions.add_parser("restore", help=text, description=text)
    restore.add_argument("copy", type=Path, metavar="COPY")
    restore.add_argument(
        "--journal", type=Path, action="append", metavar="PATH",
        help="a folder or file with a payment journal; may be given several times",
    )  # fmt: skip
    restore.add_argument(
        "--without-journal", action="store_true",
        help="no journal is left: start a new one, with payouts paused",
    )  # fmt: skip
    text = "copy the database of a stopped service to another one, compared row by row"
    move = actions.add_parser("copy", help=text, description=text)
    for name in ("from", "to"):
        move.add_argument(
            f"--{name}", action=TextOption, required=True, dest=f"copy_{name}", metavar="DATABASE",
            help="sqlite:DIR, a postgresql:// URL, or postgresql: for that of database_url",
        )  # fmt: skip
    for action, command in (
        (check, _check),
        (move, _copy),
        (backup, _backup),
        (restore, restore_copy),
    ):
        add_common(action)
        action.set_defaults(command=command)


def _check(context: Context) -> int:
    settings = context.settings()
    url, progress, journal = settings.postgresql_url, reporter(context), None
    try:
        if url is not None:
            problems = asyncio.run(_check_server(url, progress))
        else:
            problems, journal = check_books(settings, progress)
    finally:
        end_progress()
    if journal is not None:
        complain(f"{journal}\n")
    return _print_problems(problems)


def check_books(settings: Settings, progress: Progress = quiet) -> tuple[list[str], str | None]:
    """Problems of the database, its books and the journal, and the journal's state.

    The journal is skipped if the engine has none, or the database has problems already.
    """
    problems = check_database(settings.data_dir, progress)
    problems = problems or asyncio.run(_recount(settings.data_dir))
    if not ENGINES[settings.engine].signs or problems:
        return problems, None
    folder, places = settings.data_dir / FOLDER, settings.onchain.journal_places
    return check_journal(settings.data_dir, folder, places)


async def _recount(data_dir: Path) -> list[str]:
    with snapshot(data_dir) as taken:
        return await reservation_problems(taken, SystemClock().now_ms())


async def _check_server(url: str, progress: Progress) -> list[str]:
    try:
        from rpcsvc.store.backends.postgresql.schema import (  # noqa: PLC0415 - of an extra
            check_server,
        )
    except ImportError as error:
        raise UsageError(EXTRA_MISSING) from error
    return await check_server(url, progress)


def _copy(context: Context) -> int:
    settings, options = context.settings(), context.options
    configure_logging(settings.log.format, "error")
    try:
        from rpcsvc.store.backends.copying import (  # noqa: PLC0415 - of an extra
            NotCopied,
            from_server,
            to_server,
        )
    except ImportError as error:
        raise UsageError(EXTRA_MISSING) from error
    source, target = options.copy_from, options.copy_to
    is_out = source.startswith("sqlite:") and target.startswith("postgres")
    if not is_out and not (source.startswith("postgres") and target.startswith("sqlite:")):
        raise UsageError("Name one sqlite:DIR and one postgresql:// URL, with --from and --to.")
    file, url = (source, target) if is_out else (target, source)
    data_dir = Path(file.removeprefix("sqlite:"))
    if url in ("postgresql:", "postgres:"):
        if settings.postgresql_url is None:
            raise UsageError("postgresql: stands for database_url, which is not set.")
        url = settings.postgresql_url
    try:
        done = (
            to_server(data_dir, url, _progress) if is_out else from_server(url, data_dir, _progress)
        )
        counts = asyncio.run(done)
    except NotCopied as error:
        raise UsageError(f"Nothing was copied: {error}.") from error
    finally:
        end_progress()
    say(f"{sum(counts.values())} rows of {len(counts)} tables are copied and equal.\n")
    return OK


def _progress(what: str, rows: int, total: int) -> None:
    show_progress(f"{what}: {rows} of {total} rows")


def _print_problems(problems: Sequence[str]) -> int:
    for problem in problems:
        say(f"{problem}\n")
    say(f"{len(problems)} problems\n" if problems else "ok\n")
    return FAILED if problems else OK


def _backup(context: Context) -> int:
    destination: Path = context.options.destination
    require_sqlite(context.settings(), "back up the server with pg_dump or pg_basebackup")
    try:
        data_dir = context.settings().data_dir
        problems = backup_database(data_dir, destination, reporter(context))
    except BackupFailed as error:
        raise UsageError(str(error)) from error
    finally:
        end_progress()
    say(f"{destination}\n")
    for problem in problems:
        complain(f"rpcsvc: the copy is made, but {problem}\n")
    return FAILED if problems else OK
