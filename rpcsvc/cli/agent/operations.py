"""One command for each operation of the table, with an option for each of its inputs."""

from __future__ import annotations

import argparse
import re
from typing import Any, Final

from rpcsvc.cli.agent.call import FIELD, Command, Input, commands, run_operation
from rpcsvc.cli.context import Json, Once, TextOption, add_common, add_target

_DIGITS: Final = re.compile(r"-?[0-9]{1,18}")


def add_commands(parsers: Any) -> None:
    """Add the commands to the parser."""
    for command in commands():
        _add_command(parsers, command)


def _add_command(parsers: Any, command: Command) -> None:
    parser = parsers.add_parser(command.name, help=command.summary, description=command.summary)
    add_common(parser)
    fields = parser.add_argument_group("inputs")
    for each in command.inputs:
        _add_input(fields, each)
    fields.add_argument(
        "--params", action=Once, metavar="JSON|-", help="all inputs as one JSON object"
    )
    if command.sandbox_only:
        parser.add_argument(
            "order", action=TextOption, nargs="?", metavar="ORDER", help="the same as --order-id"
        )
    _add_call_options(parser, command)
    parser.set_defaults(command=run_operation, called=command)


def _add_input(group: Any, each: Input) -> None:
    extra: Json = {"dest": FIELD + each.name, "help": each.help, "metavar": "VALUE"}
    if each.kind == "boolean":
        extra |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    elif each.kind == "integer":
        extra["type"] = _integer
    group.add_argument(each.option, action=TextOption, **extra)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError("must be true or false")
    return text == "true"


def _integer(text: str) -> int:
    if not _DIGITS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a whole number such as 60, not {text!r}")
    return int(text)


def _add_call_options(parser: argparse.ArgumentParser, command: Command) -> None:
    group = parser.add_argument_group("the call")
    group.add_argument("--request-id", action=TextOption, metavar="ID", help="echoed in the answer")
    group.add_argument(
        "--stateless", action="store_true", help="neither read nor write local state"
    )
    add_target(group)
    if command.idempotent:
        group.add_argument(
            "--idempotency-key", action=TextOption, metavar="KEY", help="makes a retry safe"
        )
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--pretty", action="store_true", default=None, help="indent the answer")
    shape.add_argument("--compact", dest="pretty", action="store_false", help="one line")
