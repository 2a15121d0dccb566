"""The command line: one command per operation (spec 1), and those that run the service.

stdout of an operation is exactly one JSON envelope; everything else goes to stderr. Exit status:
0 ok, 1 ``ok: false``, 2 usage error, 3 service not reachable.
What does not live here: carrying out an operation (cli_call.py), where a call goes
(cli_client.py), what is remembered (cli_state.py), signing keys and checking signatures
(cli_keys.py, cli_verify.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from rpcsvc import __version__
from rpcsvc.errors import Unavailable
from rpcsvc.operations.table import OPERATIONS, Operation
from rpcsvc.settings import SettingsError
from rpcsvc.transport.cli_audit import add_audit
from rpcsvc.transport.cli_books import add_books
from rpcsvc.transport.cli_call import FIELD, run_operation
from rpcsvc.transport.cli_client import BadUrl, Unreachable, find_endpoint
from rpcsvc.transport.cli_context import (
    FAILED,
    INTERRUPTED,
    OK,
    SERVE_FLAGS,
    UNREACHABLE,
    USAGE,
    Context,
    Json,
    Local,
    Serve,
    UsageError,
    opening,
)
from rpcsvc.transport.cli_health import add_health
from rpcsvc.transport.cli_keys import add_keys
from rpcsvc.transport.cli_onchain import add_onchain
from rpcsvc.transport.cli_payouts import add_payouts
from rpcsvc.transport.cli_receipt import add_receipt
from rpcsvc.transport.cli_refund import add_refund
from rpcsvc.transport.cli_state import BrokenState
from rpcsvc.transport.cli_treasury import add_treasury
from rpcsvc.transport.cli_verify import add_verify

_DIGITS: Final = re.compile(r"-?[0-9]{1,18}")


def run(argv: Sequence[str], environ: Mapping[str, str], *, serve: Serve, local: Local) -> int:
    """Carry out one command line; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        return int(options.command(Context(options, environ, serve, local)))
    except (UsageError, BadUrl, BrokenState, SettingsError) as error:
        return _complain(error, USAGE)
    except Unreachable as error:
        return _complain(error, UNREACHABLE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has gone; the flush at exit must not find that out again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _complain(error: Exception, status: int) -> int:
    sys.stderr.write(f"rpcsvc: {error}\n")
    return status


# --- the parser ------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Options are written out: a short form of one could mean another one in the next version."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})


class _Once(argparse.Action):
    """An input is given once: which of two amounts counts would be a guess."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"argument {option_string}: is given twice")
        setattr(namespace, self.dest, values)


def build_parser() -> argparse.ArgumentParser:
    """The whole command tree, operations included."""
    parser = _Parser(prog="rpcsvc", description="A self-hosted service that swaps XMR and USDC.")
    parser.add_argument("--version", action="version", version=f"rpcsvc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_config(commands)
    _add_db(commands)
    add_keys(commands, _common)
    add_verify(commands, _Once)
    add_books(commands, _common)
    add_audit(commands, _common)
    add_onchain(commands, _common)
    add_treasury(commands, _common)
    add_payouts(commands, _common)
    add_refund(commands, _common)
    add_receipt(commands, _common)
    _add_demo(commands)
    add_health(commands, _common, _add_target)
    for operation in OPERATIONS:
        _add_operation(commands, operation)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--data-dir", metavar="DIR", help="where the service keeps its data")


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run the service")
    _common(parser)
    for name in SERVE_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=name.upper())
    parser.set_defaults(command=_serve)


def _add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="look at the configuration")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="print every setting and where it came from")
    _common(check)
    check.set_defaults(command=_config_check)


def _add_db(commands: Any) -> None:
    parser = commands.add_parser("db", help="look after the database")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check the file and the books")
    backup = actions.add_parser("backup", help="copy the database while the service runs")
    backup.add_argument("destination", type=Path, metavar="DEST")
    for action, command in ((check, _db_check), (backup, _db_backup)):
        _common(action)
        action.set_defaults(command=command)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="run a whole swap each way on the sandbox")
    _common(parser)
    _add_target(parser)
    parser.set_defaults(command=_demo)


def _add_operation(commands: Any, operation: Operation) -> None:
    parser = commands.add_parser(
        operation.command, help=operation.summary, description=operation.summary
    )
    _common(parser)
    fields = parser.add_argument_group("inputs")
    for name, info in operation.params.model_fields.items():
        _add_field(fields, info.alias or name, info.annotation, info.description)
    fields.add_argument(
        "--params", action=_Once, metavar="JSON|-", help="all inputs as one JSON object"
    )
    if operation.sandbox_only:
        parser.add_argument("order", nargs="?", metavar="ORDER", help="the same as --order-id")
    _add_call_options(parser, operation)
    parser.set_defaults(command=run_operation, operation=operation)


def _add_field(group: Any, wire_name: str, annotation: Any, description: str | None) -> None:
    flag = "--" + re.sub(r"([A-Z])", r"-\1", wire_name).lower()
    extra: Json = {"dest": FIELD + wire_name, "help": description, "metavar": "VALUE"}
    types = set(_types_in(annotation))
    if bool in types:
        extra |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    elif int in types and str not in types:
        extra["type"] = _integer
    group.add_argument(flag, action=_Once, **extra)


def _types_in(annotation: Any) -> Iterator[Any]:
    """The plain types that a field can have, out of unions, literals and annotations."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from map(type, arguments)
    elif origin is Annotated:
        yield from _types_in(arguments[0])
    elif arguments:
        for argument in arguments:
            yield from _types_in(argument)
    else:
        yield annotation


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError("must be true or false")
    return text == "true"


def _integer(text: str) -> int:
    if not _DIGITS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a whole number such as 60, not {text!r}")
    return int(text)


def _add_call_options(parser: argparse.ArgumentParser, operation: Operation) -> None:
    group = parser.add_argument_group("the call")
    group.add_argument("--request-id", metavar="ID", help="echoed in the answer")
    group.add_argument(
        "--stateless", action="store_true", help="neither read nor write local state"
    )
    _add_target(group)
    if operation.idempotent:
        group.add_argument(
            "--idempotency-key", action=_Once, metavar="KEY", help="makes a retry safe"
        )
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--pretty", action="store_true", default=None, help="indent the answer")
    shape.add_argument("--compact", dest="pretty", action="store_false", help="one line")


def _add_target(group: Any) -> None:
    group.add_argument("--url", help="the service's root URL (RPCSVC_URL)")
    group.add_argument("--token", help="for /rpc (AGENT_RPC_TOKEN)")


# --- commands --------------------------------------------------------------------------------


def _serve(context: Context) -> int:
    from rpcsvc.logs import configure_logging  # noqa: PLC0415 - only this command logs
    from rpcsvc.signing import SigningKeyError  # noqa: PLC0415
    from rpcsvc.store.migrations import NewerDatabase  # noqa: PLC0415
    from rpcsvc.store.sqlite import DatabaseUnusable, DataDirInUse  # noqa: PLC0415

    settings = context.settings()
    configure_logging(settings.log.format, settings.log.level)
    try:
        asyncio.run(context.serve(settings))
    except (DataDirInUse, DatabaseUnusable, NewerDatabase, SigningKeyError) as error:
        raise UsageError(str(error)) from error
    except Unavailable as error:
        raise UsageError(f"can't start: {error.message}") from error
    except OSError as error:
        where = error.filename or f"{settings.host}:{settings.port}"
        raise UsageError(f"can't serve on {where}: {error.strerror or error}") from error
    return OK


def _config_check(context: Context) -> int:
    from rpcsvc.settings import check_bind, render_config  # noqa: PLC0415

    loaded = context.loaded()
    sys.stdout.write(render_config(loaded).rstrip("\n") + "\n")
    check_bind(loaded.settings)
    return OK


def _db_check(context: Context) -> int:
    from rpcsvc.store.maintenance import check_database  # noqa: PLC0415

    problems = check_database(context.settings().data_dir)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{len(problems)} problems\n" if problems else "ok\n")
    return FAILED if problems else OK


def _db_backup(context: Context) -> int:
    from rpcsvc.store.maintenance import BackupFailed, backup_database  # noqa: PLC0415

    destination: Path = context.options.destination
    try:
        problems = backup_database(context.settings().data_dir, destination)
    except BackupFailed as error:
        raise UsageError(str(error)) from error
    sys.stdout.write(f"{destination}\n")
    for problem in problems:
        sys.stderr.write(f"rpcsvc: the copy is made, but {problem}\n")
    return FAILED if problems else OK


def _demo(context: Context) -> int:
    from rpcsvc.logs import configure_logging  # noqa: PLC0415
    from rpcsvc.transport import demo  # noqa: PLC0415

    settings = context.settings()
    url, data_dir = context.url(), context.options.data_dir
    endpoint = find_endpoint(url, settings.data_dir) if url or data_dir else None
    if endpoint is not None:
        caller = demo.Remote(endpoint, settings.brand.slug, context.token(settings))
        return OK if demo.run_remote(caller) else FAILED
    configure_logging(settings.log.format, "warning")
    with opening(settings):
        return OK if demo.run_local(settings, context.local, passing=data_dir is None) else FAILED
