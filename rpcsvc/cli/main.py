"""The command line: one command per operation (spec 1), and those that run the service.

The stdout of an operation is exactly one JSON envelope, and that of ``verify`` and ``receipt`` one
JSON object, whatever the exit status; everything else goes to stderr. Exit status: 0 ok, 1 ``ok:
false``, 2 usage error, 3 no readable answer from the service.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from rpcsvc import __version__
from rpcsvc.cli.context import (
    INTERRUPTED,
    UNREACHABLE,
    USAGE,
    AnswerUnwritten,
    BadCommandLine,
    Context,
    Local,
    Private,
    Serve,
    UsageError,
    complain,
    say,
)
from rpcsvc.client.errors import Unreachable
from rpcsvc.client.transport import BadUrl
from rpcsvc.errors import SettingsError
from rpcsvc.health_probe import UntrustedSocket
from rpcsvc.importing import Importing

_OPTION: Final = re.compile(r"--[a-z][a-z-]*")
_KEY: Final = "--idempotency-key"


def unknown_words(words: Sequence[str], usage: str) -> str:
    """The usage error for ``words`` that a command does not know; ``usage`` shows its options."""
    known = list(dict.fromkeys(_OPTION.findall(usage)))
    hints = [_hint(word.partition("=")[0], known) for word in words if word.startswith("--")]
    return " ".join([f"unrecognized arguments: {' '.join(words)}.", *filter(None, hints)])


def unknown_choice(word: str, known: Sequence[str], program: str) -> str:
    """The usage error for a ``word`` that is none of ``known``."""
    near = difflib.get_close_matches(word, known, n=3)
    hint = f" Did you mean {_one_of(near)}?" if near else ""
    return f"there is no {word!r}.{hint} {program} --help lists all"


def _hint(option: str, known: list[str]) -> str:
    if option == _KEY:
        return f"Only calls that create an order take {_KEY}."
    # An abbreviation names the option that is meant; similarity is a guess.
    begun = [name for name in known if name.startswith(option)]
    near = begun or difflib.get_close_matches(option, known, n=1)
    return f"Did you mean {_one_of(near)}?" if near else ""


def _one_of(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    serve: Serve,
    local: Local,
    private: Private,
) -> int:
    """Carry out one command line; returns the exit status."""
    try:
        return _carried_out(argv, lambda options: Context(options, environ, serve, local, private))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout closed it before it got the answer.
        _leave_stdout()
        return UNREACHABLE
    except AnswerUnwritten as error:
        _leave_stdout()
        return _complain(error, UNREACHABLE)


def _carried_out(argv: Sequence[str], context_of: Callable[[argparse.Namespace], Context]) -> int:
    command = argv[0] if argv else ""
    options: argparse.Namespace | None = None
    failed: BaseException
    try:
        options = build_parser(command).parse_args(argv)
        return int(options.command(context_of(options)))
    except BadCommandLine as error:
        status, failed = USAGE, error  # the parser has printed the error
    except (UsageError, BadUrl, UntrustedSocket, SettingsError) as error:
        status = _complain(error, USAGE)
        failed = error
    except Unreachable as error:
        status = _complain(error, UNREACHABLE)
        failed = error
    if command in _UNCHECKED:
        say(json.dumps(_UNCHECKED[command](argv, failed), indent=2) + "\n")
    elif _module_of(command) in _WITH_ENVELOPE:
        operations = import_module("rpcsvc.cli.agent.operations")
        envelope = import_module("rpcsvc.cli.agent.local").failed_call(
            argv, operations.operation_of(command), failed
        )
        operations.print_envelope(envelope, pretty=getattr(options, "pretty", None))
    return status


def _unverified(argv: Sequence[str], error: BaseException) -> dict[str, Any]:
    """The output that a copy of rpcsvc/verify.py would print."""
    code = "unreachable" if isinstance(error, Unreachable) else "bad_input"
    described = {"code": code, "message": str(error)}
    return {"verified": False, "kind": "".join(argv[1:2]), "error": described}


def _unproven(_argv: Sequence[str], error: BaseException) -> dict[str, Any]:
    return {"proven": False, "reason": str(error)}


# The output of the checking commands when the check itself fails.
_UNCHECKED: Final = {"verify": _unverified, "receipt": _unproven}


# Commands by their first word, or its part up to the colon, and the module whose ``add_commands``
# adds them. It is imported on demand: importing all takes ten times as long as most commands.
_MODULES: Final = {
    "serve": "rpcsvc.cli.operator.serve",
    "config": "rpcsvc.cli.operator.serve",
    "db": "rpcsvc.cli.recovery.db",
    "drill": "rpcsvc.cli.recovery.drill",
    "keys": "rpcsvc.cli.operator.keys",
    "verify": "rpcsvc.cli.agent.verify",
    "receipt": "rpcsvc.cli.agent.receipt",
    "approvals": "rpcsvc.cli.operator.methods",
    "clients": "rpcsvc.cli.operator.methods",
    "integrators": "rpcsvc.cli.operator.methods",
    "relays": "rpcsvc.cli.operator.methods",
    "tickets": "rpcsvc.cli.operator.methods",
    "webhooks": "rpcsvc.cli.operator.methods",
    "top": "rpcsvc.cli.operator.top",
    "audit": "rpcsvc.cli.operator.audit",
    "onchain": "rpcsvc.cli.operator.onchain",
    "treasury": "rpcsvc.cli.operator.treasury",
    "payouts": "rpcsvc.cli.operator.payouts",
    "refund": "rpcsvc.cli.operator.payouts",
    "demo": "rpcsvc.cli.agent.demo",
    "mcp": "rpcsvc.cli.agent.mcp",
    "health": "rpcsvc.cli.operator.serve",
    "agent:": "rpcsvc.cli.agent.operations",
    "sandbox:": "rpcsvc.cli.agent.operations",
}
# Modules whose stdout is an envelope even on failure; an unknown command counts as one.
_WITH_ENVELOPE: Final = frozenset({None, _MODULES["agent:"]})


def _module_of(word: str) -> str | None:
    """The module of a command, by the first word of a command line; None if there is none."""
    name, colon, _ = word.partition(":")
    return _MODULES.get(name + colon)


def _leave_stdout() -> None:
    """Redirect stdout to /dev/null, so that the flush at exit can't fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception, status: int) -> int:
    complain(f"rpcsvc: {error}\n")
    return status


# --- the parser ------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Accepts full options only: in the next version an abbreviation could mean another option."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print the error as argparse does, and raise BadCommandLine."""
        complain(f"{self.format_usage()}{self.prog}: error: {message}\n")
        raise BadCommandLine(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the command nearest to an unknown one instead of listing all."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, unknown_choice(str(value), list(action.choices), self.prog)
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown options, and name the known ones."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(unknown_words(left, self.format_usage()))
        return found, left


def build_parser(word: str | None = None) -> argparse.ArgumentParser:
    """The parser; given the first word of a command line, it holds only that command."""
    parser = _Parser(prog="rpcsvc", description="A self-hosted service that swaps XMR and USDC.")
    parser.add_argument("--version", action="version", version=f"rpcsvc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    branch = _module_of(word or "")
    for name in dict.fromkeys(_MODULES.values()) if branch is None else (branch,):
        with Importing():
            module = import_module(name)
        module.add_commands(commands)
    return parser
