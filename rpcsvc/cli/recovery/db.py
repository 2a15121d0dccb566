"""``rpcsvc db``: check, back up and restore the database."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpcsvc.cli.context import FAILED, OK, Context, UsageError
from rpcsvc.cli.recovery.restore import restore as restore_copy
from rpcsvc.settlement.onchain.journal.files import FOLDER
from rpcsvc.store.backends.sqlite.maintenance import (
    BackupFailed,
    backup_database,
    check_database,
    check_journal,
)

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
