"""The commands of admin methods, made from the rows of the admin table that have a ``cli``.

``rpcsvc approvals``, ``clients``, ``integrators``, ``relays``, ``tickets`` and ``webhooks`` are
nothing else: records of the running service. stdout is exactly one JSON object, but where a row
prints a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin

from rpcsvc.cli.context import (
    FAILED,
    OK,
    Context,
    Json,
    TextOption,
    UsageError,
    add_command,
    complain,
    say,
)
from rpcsvc.cli.operator.service import (
    ask_service,
    onchain_settings,
    print_json,
    print_table,
    refuse,
)
from rpcsvc.domain.integrators import key_hash
from rpcsvc.ids import system_random
from rpcsvc.operations.admin import PREFIX, RECORDS
from rpcsvc.operations.approvals import APPROVALS
from rpcsvc.operations.clients import CLIENTS
from rpcsvc.operations.params import plain_types
from rpcsvc.operations.service import Cli, Confirmation, Operation
from rpcsvc.operations.support import TICKETS
from rpcsvc.operations.webhooks import WEBHOOKS
from rpcsvc.settings import Settings

KEY_BYTES: Final = 24

Printer: TypeAlias = Callable[[Cli, Json], object]


def print_rows(cli: Cli, answer: Json) -> bool:
    """Print the answer's list as a table; False if it is empty."""
    rows = [{name: value or "-" for name, value in row.items()} for row in answer[cli.rows]]
    if not rows:
        say("none\n")
        return False
    cells = [[text.format(**row) for text in cli.columns.values()] for row in rows]
    print_table([list(cli.columns), *cells])
    return True


def add_methods(
    parsers: Any,
    rows: Iterable[Operation],
    word: str = "",
    *,
    printers: dict[str, Printer] | None = None,
    **options: Any,
) -> Any:
    """Add the commands of ``rows`` that follow ``word``; returns the parser of the last one."""
    parser = None
    for row in rows:
        before, _, name = row.cli.command.rpartition(" ") if row.cli else ("", "", "")
        if row.cli is not None and before == word:
            printer = (printers or {}).get(name, print_rows)
            parser = _add_method(parsers, name, row, row.cli, printer, options)
    return parser


def _add_method(
    parsers: Any, name: str, row: Operation, cli: Cli, printer: Printer, options: Json
) -> Any:
    parser = add_command(
        parsers, name, cli.help, partial(_run, row, cli, printer), cli.more, **options
    )
    for field, written in cli.arguments.items():
        _add_argument(parser, field, written, row.params.model_fields[field])
    if cli.prints:
        parser.add_argument(
            "--json", action="store_true", help=f"one JSON object instead of {cli.prints}"
        )
    if cli.confirmation is not None:
        parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _add_argument(parser: Any, field: str, written: str, info: Any) -> None:
    option, _, metavar = written.partition(" ")
    kinds = set(plain_types(info.annotation))
    if bool in kinds:
        parser.add_argument(option, dest=field, action="store_true", help=info.description)
        return
    extra: Json = {"metavar": metavar or None, "help": info.description, "action": TextOption}
    if get_origin(info.annotation) is Literal:
        extra["choices"] = get_args(info.annotation)
    elif int in kinds:
        extra["type"] = partial(_whole, info.metadata)
    if option.startswith("--"):
        parser.add_argument(option, dest=field, required=info.is_required(), **extra)
    else:
        parser.add_argument(field, **{**extra, "metavar": option})


def _whole(bounds: Iterable[Any], text: str) -> int:
    """The number within the ``ge`` and ``le`` of a field. Raises ArgumentTypeError."""
    least = next((each.ge for each in bounds if hasattr(each, "ge")), 0)
    most = next((each.le for each in bounds if hasattr(each, "le")), None)
    if text.isascii() and text.isdigit() and least <= int(text) <= (most or int(text)):
        return int(text)
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}")


def _run(row: Operation, cli: Cli, printer: Printer, context: Context) -> int:
    settings = onchain_settings(context) if cli.engine == "onchain" else context.settings()
    given = {name: getattr(context.options, name, None) for name in cli.arguments}
    params = {_wire(row, name): each for name, each in given.items() if each is not None}
    try:
        if cli.confirmation is not None and not context.options.yes:
            _confirm(settings, cli.confirmation, params)
        answer = ask_service(settings, row.name.removeprefix(PREFIX), params)
    except UsageError as error:
        raise UsageError(_as_written(row, cli, str(error))) from error
    known = {**params, **answer}
    if answer.get("refused") is not None:
        return refuse(cli.refused.format(**known))
    if cli.done:
        say(cli.done.format(**known) + "\n")
    elif cli.prints and not context.options.json:
        printer(cli, answer)
    else:
        print_json(answer)
    return FAILED if answer.get("problems") else OK


def _wire(row: Operation, name: str) -> str:
    return row.params.model_fields[name].alias or name


def _as_written(row: Operation, cli: Cli, message: str) -> str:
    """The message with the option or argument in place of the input's name that it begins with."""
    for name, written in cli.arguments.items():
        wire = _wire(row, name)
        if message.startswith((f"{wire} ", f"{wire}: ")):
            return written.partition(" ")[0] + message.removeprefix(wire)
    return message


def _confirm(settings: Settings, confirmation: Confirmation, params: Json) -> None:
    """Ask on the terminal. Raises UsageError unless the answer is yes."""
    preview = ask_service(settings, confirmation.preview, params)
    if not sys.stdin.isatty():
        raise UsageError(f"{confirmation.short.format(**preview)} Not on a terminal: add --yes.")
    complain(f"{confirmation.text.format(**preview)} Type yes: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip() != "yes":
        raise UsageError("Nothing was changed.")


# --- records of the running service ---


def add_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser("integrators", help="list integrators and the fees they earned")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "make an API key and the hash to configure; the key is shown once"
    add_command(actions, "new-key", text, _new_key)
    add_methods(actions, RECORDS, "integrators")
    relays = add_methods(commands, RECORDS).add_subparsers(metavar="ACTION")
    # Options given before the action apply, too.
    add_methods(relays, RECORDS, "relays", argument_default=argparse.SUPPRESS)
    parser = commands.add_parser("clients", help="list clients, and make tokens for them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "make a token and the SHA-256 to configure; the token is shown once"
    add_command(actions, "new-token", text, _new_token)
    add_methods(actions, CLIENTS, "clients")
    for word, text, rows in (
        ("approvals", "decide on orders of clients that wait for a person", APPROVALS),
        ("tickets", "read, answer and close what users have written to you", TICKETS),
        ("webhooks", "messages to the webhooks of orders", WEBHOOKS),
    ):
        parser = commands.add_parser(word, help=text, description=text)
        add_methods(parser.add_subparsers(required=True, metavar="ACTION"), rows, word)


def _new_key(_context: Context) -> int:
    key = system_random(KEY_BYTES).hex()
    return print_json({"key": key, "hash": key_hash(key).hex()})


def _new_token(_context: Context) -> int:
    token = system_random(KEY_BYTES).hex()
    return print_json({"token": token, "sha256": key_hash(token).hex()})
