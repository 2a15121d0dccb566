"""The command line: one command per operation (spec 1), and those that run the service.

stdout of an operation is exactly one JSON envelope, and that of ``verify`` and ``receipt`` one JSON
object, whatever the exit status; everything else goes to stderr. Exit status: 0 ok, 1
``ok: false``, 2 usage error, 3 no answer of the service, or none that could be told.
What does not live here: the commands of operations (operations.py), carrying one out
(call.py), where a call goes (client.py), what is remembered (state.py), signing keys
and checking signatures (evm/keys.py, verify.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from rpcsvc import __version__
from rpcsvc.cli.agent.state import BrokenState
from rpcsvc.cli.client import BadUrl, Unreachable, UntrustedSocket, find_endpoint
from rpcsvc.cli.context import (
    FAILED,
    INTERRUPTED,
    OK,
    SERVE_FLAGS,
    UNREACHABLE,
    USAGE,
    AnswerUnwritten,
    BadCommandLine,
    Context,
    Local,
    Serve,
    UsageError,
    in_process,
    opening,
)
from rpcsvc.cli.options import Once, add_common, add_target
from rpcsvc.settings_plain import SettingsError


def run(argv: Sequence[str], environ: Mapping[str, str], *, serve: Serve, local: Local) -> int:
    """Carry out one command line; returns the exit status."""
    try:
        return _carried_out(argv, environ, serve, local)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has gone, and does not know what the answer was.
        _leave_stdout()
        return UNREACHABLE
    except AnswerUnwritten as error:
        _leave_stdout()
        return _complain(error, UNREACHABLE)


def _carried_out(
    argv: Sequence[str], environ: Mapping[str, str], serve: Serve, local: Local
) -> int:
    options: argparse.Namespace | None = None
    failed: BaseException
    try:
        options = build_parser(*argv[:1]).parse_args(argv)
        return int(options.command(Context(options, environ, serve, local)))
    except BadCommandLine as error:
        status, failed = USAGE, error  # the parser has complained
    except (UsageError, BadUrl, UntrustedSocket, BrokenState, SettingsError) as error:
        status = _complain(error, USAGE)
        failed = error
    except Unreachable as error:
        status = _complain(error, UNREACHABLE)
        failed = error
    branch = argv[0] if argv else ""
    if branch in _UNCHECKED:
        sys.stdout.write(json.dumps(_UNCHECKED[branch](argv, failed), indent=2) + "\n")
    elif branch not in _BRANCHES:
        from rpcsvc.cli.agent.call import print_failure  # noqa: PLC0415 - see build_parser

        print_failure(argv, options, failed)
    return status


def _unverified(argv: Sequence[str], error: BaseException) -> dict[str, Any]:
    """As a copy of rpcsvc/verify.py prints it."""
    code = "unreachable" if isinstance(error, Unreachable) else "bad_input"
    described = {"code": code, "message": str(error)}
    return {"verified": False, "kind": "".join(argv[1:2]), "error": described}


def _unproven(_argv: Sequence[str], error: BaseException) -> dict[str, Any]:
    return {"proven": False, "reason": str(error)}


# What the commands that check something print when they could not.
_UNCHECKED: Final = {"verify": _unverified, "receipt": _unproven}


def _leave_stdout() -> None:
    """What can't be written there must not be found out again by the flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception, status: int) -> int:
    sys.stderr.write(f"rpcsvc: {error}\n")
    return status


# --- the parser ------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Options are written out: a short form of one could mean another one in the next version."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Complain as argparse does, and raise BadCommandLine."""
        sys.stderr.write(f"{self.format_usage()}{self.prog}: error: {message}\n")
        raise BadCommandLine(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the command that is nearest to an unknown one, in place of all there are."""
        if action.choices is not None and value not in action.choices:
            from rpcsvc.cli.unknown import unknown_choice  # noqa: PLC0415 - seldom needed

            raise argparse.ArgumentError(
                action, unknown_choice(str(value), list(action.choices), self.prog)
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what this command does not take, and name what it takes."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            from rpcsvc.cli.unknown import unknown_words  # noqa: PLC0415 - seldom needed

            self.error(unknown_words(left, self.format_usage()))
        return found, left


def build_parser(first: str = "") -> argparse.ArgumentParser:
    """The whole command tree, operations included; or its one branch that ``first`` begins.

    The branch says and takes what it does in the whole tree, and costs a fraction of its imports.
    """
    parser = _Parser(prog="rpcsvc", description="A self-hosted service that swaps XMR and USDC.")
    parser.add_argument("--version", action="version", version=f"rpcsvc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _branches(first):
        add(commands)
    return parser


def _branches(first: str) -> Iterable[Callable[[Any], None]]:
    if first in _BRANCHES:
        return [_BRANCHES[first]]
    if first == "--version":
        return []  # it is printed before a command is looked for
    return dict.fromkeys([*_BRANCHES.values(), _add_operations])


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run the service")
    add_common(parser)
    for name in SERVE_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", action=Once, metavar=name.upper())
    parser.set_defaults(command=_serve)


def _add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="look at the configuration")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "print every setting and where it came from, and check them as a start does"
    check = actions.add_parser("check", help=text, description=text)
    add_common(check)
    check.set_defaults(command=_config_check)


def _add_db(commands: Any) -> None:
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
        (check, _db_check),
        (backup, _db_backup),
        (restore, _db_restore),
    ):
        add_common(action)
        action.set_defaults(command=command)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="run a whole swap each way on the sandbox")
    add_common(parser)
    add_target(parser)
    parser.set_defaults(command=_demo)


# --- branches in modules of their own, imported when they are asked for ------------------------


def _add_keys(commands: Any) -> None:
    from rpcsvc.cli.operator.keys import add_keys  # noqa: PLC0415 - see build_parser

    add_keys(commands, add_common)


def _add_verify(commands: Any) -> None:
    from rpcsvc.cli.agent.verify import add_verify  # noqa: PLC0415

    add_verify(commands)


def _add_tickets(commands: Any) -> None:
    from rpcsvc.cli.operator.records import add_tickets  # noqa: PLC0415

    add_tickets(commands, add_common)


def _add_books(commands: Any) -> None:
    from rpcsvc.cli.operator.records import add_books  # noqa: PLC0415

    add_books(commands, add_common)


def _add_audit(commands: Any) -> None:
    from rpcsvc.cli.operator.audit import add_audit  # noqa: PLC0415

    add_audit(commands, add_common)


def _add_onchain(commands: Any) -> None:
    from rpcsvc.cli.operator.onchain import add_onchain  # noqa: PLC0415

    add_onchain(commands, add_common)


def _add_treasury(commands: Any) -> None:
    from rpcsvc.cli.operator.treasury import add_treasury  # noqa: PLC0415

    add_treasury(commands, add_common)


def _add_payouts(commands: Any) -> None:
    from rpcsvc.cli.operator.payouts import add_payouts  # noqa: PLC0415

    add_payouts(commands, add_common)


def _add_refund(commands: Any) -> None:
    from rpcsvc.cli.operator.payouts import add_refund  # noqa: PLC0415

    add_refund(commands, add_common)


def _add_receipt(commands: Any) -> None:
    from rpcsvc.cli.agent.receipt import add_receipt  # noqa: PLC0415

    add_receipt(commands, add_common)


def _add_health(commands: Any) -> None:
    from rpcsvc.cli.operator.health import add_health  # noqa: PLC0415

    add_health(commands, add_common, add_target)


def _add_operations(commands: Any) -> None:
    from rpcsvc.cli.agent.operations import add_operations  # noqa: PLC0415

    add_operations(commands)


# What the first word of a command line adds, in the order of the help.
_BRANCHES: Final[Mapping[str, Callable[[Any], None]]] = {
    "serve": _add_serve,
    "config": _add_config,
    "db": _add_db,
    "keys": _add_keys,
    "verify": _add_verify,
    "integrators": _add_books,
    "relays": _add_books,
    "tickets": _add_tickets,
    "audit": _add_audit,
    "onchain": _add_onchain,
    "treasury": _add_treasury,
    "payouts": _add_payouts,
    "refund": _add_refund,
    "receipt": _add_receipt,
    "demo": _add_demo,
    "health": _add_health,
}


# --- commands --------------------------------------------------------------------------------


def _serve(context: Context) -> int:
    import asyncio  # noqa: PLC0415 - only this command needs them

    from rpcsvc.errors import Unavailable  # noqa: PLC0415
    from rpcsvc.logs import configure_logging  # noqa: PLC0415
    from rpcsvc.settlement.onchain.evm.keys import OnchainExtraMissing  # noqa: PLC0415
    from rpcsvc.signing.keys import SigningKeyError  # noqa: PLC0415
    from rpcsvc.store.backends.sqlite.database import DatabaseUnusable, DataDirInUse  # noqa: PLC0415
    from rpcsvc.store.backends.sqlite.migrations import UnknownSchema  # noqa: PLC0415

    settings = context.settings()
    configure_logging(settings.log.format, settings.log.level)
    try:
        asyncio.run(context.serve(settings))
    except (DataDirInUse, DatabaseUnusable, UnknownSchema, SigningKeyError) as error:
        raise UsageError(str(error)) from error
    except OnchainExtraMissing as error:
        raise UsageError(str(error)) from error
    except Unavailable as error:
        raise UsageError(f"can't start: {error.message}") from error
    except OSError as error:
        where = error.filename or f"{settings.host}:{settings.port}"
        raise UsageError(f"can't serve on {where}: {error.strerror or error}") from error
    return OK


def _config_check(context: Context) -> int:
    from rpcsvc.cli.operator.config import check_config  # noqa: PLC0415

    return check_config(context)


def _db_check(context: Context) -> int:
    from rpcsvc.store.backends.sqlite.maintenance import check_database  # noqa: PLC0415

    settings = context.settings()
    problems = check_database(settings.data_dir)
    if settings.engine == "onchain" and not problems:
        from rpcsvc.settlement.onchain.journal.files import FOLDER  # noqa: PLC0415
        from rpcsvc.store.backends.sqlite.journal_check import check_journal  # noqa: PLC0415

        folder, places = settings.data_dir / FOLDER, settings.onchain.journal_places
        problems, state = check_journal(settings.data_dir, folder, places)
        sys.stderr.write(f"{state}\n")
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{len(problems)} problems\n" if problems else "ok\n")
    return FAILED if problems else OK


def _db_backup(context: Context) -> int:
    from rpcsvc.store.backends.sqlite.maintenance import BackupFailed, backup_database  # noqa: PLC0415

    destination: Path = context.options.destination
    try:
        problems = backup_database(context.settings().data_dir, destination)
    except BackupFailed as error:
        raise UsageError(str(error)) from error
    sys.stdout.write(f"{destination}\n")
    for problem in problems:
        sys.stderr.write(f"rpcsvc: the copy is made, but {problem}\n")
    return FAILED if problems else OK


def _db_restore(context: Context) -> int:
    from rpcsvc.cli.recovery.restore import restore  # noqa: PLC0415

    return restore(context)


def _demo(context: Context) -> int:
    from rpcsvc.cli.agent import demo  # noqa: PLC0415
    from rpcsvc.logs import configure_logging  # noqa: PLC0415

    settings = context.settings()
    url, data_dir = context.url(), context.options.data_dir
    endpoint = find_endpoint(url, settings.data_dir) if url or data_dir else None
    if endpoint is not None:
        caller = demo.Remote(endpoint, settings.brand.slug, context.token(settings))
        return OK if demo.run_remote(caller) else FAILED
    configure_logging(settings.log.format, "warning")
    passing = data_dir is None  # on a sandbox of its own, whatever engine is configured
    with opening(settings) if passing else in_process(settings):
        return OK if demo.run_local(settings, context.local, passing=passing) else FAILED
