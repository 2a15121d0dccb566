"""The command line: one command per operation (spec 1), and those that run the service.

stdout of an operation is exactly one JSON envelope, and that of ``verify`` and ``receipt`` one JSON
object, whatever the exit status; everything else goes to stderr. Exit status: 0 ok, 1
``ok: false``, 2 usage error, 3 no answer of the service, or one that could not be read.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from rpcsvc import __version__
from rpcsvc.cli.agent import demo
from rpcsvc.cli.agent.call import BrokenState, print_failure
from rpcsvc.cli.agent.operations import add_operations
from rpcsvc.cli.agent.verify import add_receipt, add_verify
from rpcsvc.cli.client import BadUrl, Unreachable, find_endpoint
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
    Once,
    Serve,
    UsageError,
    add_common,
    add_target,
    in_process,
    opening,
)
from rpcsvc.cli.operator.checks import add_audit, add_config, add_health
from rpcsvc.cli.operator.keys import add_keys
from rpcsvc.cli.operator.onchain import add_onchain
from rpcsvc.cli.operator.payouts import add_payouts, add_refund
from rpcsvc.cli.operator.records import add_records, add_tickets
from rpcsvc.cli.operator.treasury import add_treasury
from rpcsvc.cli.recovery.db import add_db
from rpcsvc.errors import Unavailable
from rpcsvc.health_probe import UntrustedSocket
from rpcsvc.logs import configure_logging
from rpcsvc.settings import SettingsError
from rpcsvc.settlement.onchain.evm.keys import OnchainExtraMissing
from rpcsvc.signing.keys import SigningKeyError
from rpcsvc.store.backends.sqlite.database import DatabaseUnusable, DataDirInUse
from rpcsvc.store.backends.sqlite.migrations import UnknownSchema

_OPTION: Final = re.compile(r"--[a-z][a-z-]*")
_KEY: Final = "--idempotency-key"


def unknown_words(words: Sequence[str], usage: str) -> str:
    """A usage error about ``words`` that a command left over; ``usage`` shows what it takes."""
    known = list(dict.fromkeys(_OPTION.findall(usage)))
    hints = [_hint(word.partition("=")[0], known) for word in words if word.startswith("--")]
    return " ".join([f"unrecognized arguments: {' '.join(words)}.", *filter(None, hints)])


def unknown_choice(word: str, known: Sequence[str], program: str) -> str:
    """A usage error about a ``word`` in whose place one of ``known`` is needed."""
    near = difflib.get_close_matches(word, known, n=3)
    hint = f" Did you mean {_one_of(near)}?" if near else ""
    return f"there is no {word!r}.{hint} {program} --help lists all"


def _hint(option: str, known: list[str]) -> str:
    if option == _KEY:
        return f"Only calls that create an order take {_KEY}."
    # A short form says which one is meant; a likeness only guesses.
    begun = [name for name in known if name.startswith(option)]
    near = begun or difflib.get_close_matches(option, known, n=1)
    return f"Did you mean {_one_of(near)}?" if near else ""


def _one_of(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


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
        options = build_parser().parse_args(argv)
        return int(options.command(Context(options, environ, serve, local)))
    except BadCommandLine as error:
        status, failed = USAGE, error  # the parser has complained
    except (UsageError, BadUrl, UntrustedSocket, BrokenState, SettingsError) as error:
        status = _complain(error, USAGE)
        failed = error
    except Unreachable as error:
        status = _complain(error, UNREACHABLE)
        failed = error
    command = argv[0] if argv else ""
    if command in _UNCHECKED:
        sys.stdout.write(json.dumps(_UNCHECKED[command](argv, failed), indent=2) + "\n")
    elif command not in _WITHOUT_ENVELOPE:
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


# The commands whose stdout is no envelope, so that none is printed when they fail.
_WITHOUT_ENVELOPE: Final = frozenset(
    {
        "serve", "config", "db", "keys", "integrators", "relays", "tickets", "audit", "onchain",
        "treasury", "payouts", "refund", "demo", "health",
    }
)  # fmt: skip


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
            raise argparse.ArgumentError(
                action, unknown_choice(str(value), list(action.choices), self.prog)
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what this command does not take, and name what it takes."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(unknown_words(left, self.format_usage()))
        return found, left


def build_parser() -> argparse.ArgumentParser:
    """The whole command tree, operations included."""
    parser = _Parser(prog="rpcsvc", description="A self-hosted service that swaps XMR and USDC.")
    parser.add_argument("--version", action="version", version=f"rpcsvc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    for add in (add_config, add_db, add_keys):
        add(commands, add_common)
    add_verify(commands)
    for add in (
        add_records, add_tickets, add_audit, add_onchain, add_treasury, add_payouts, add_refund,
        add_receipt,
    ):  # fmt: skip
        add(commands, add_common)
    _add_demo(commands)
    add_health(commands, add_common, add_target)
    add_operations(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run the service")
    add_common(parser)
    for name in SERVE_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", action=Once, metavar=name.upper())
    parser.set_defaults(command=_serve)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="run a whole swap each way on the sandbox")
    add_common(parser)
    add_target(parser)
    parser.set_defaults(command=_demo)


# --- commands --------------------------------------------------------------------------------


def _serve(context: Context) -> int:
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


def _demo(context: Context) -> int:
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
