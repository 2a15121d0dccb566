"""One command for each operation of the table, with an option for each of its inputs."""

from __future__ import annotations

import argparse
import re
from typing import Any, Final

from rpcsvc.cli.agent.call import FIELD, run_operation
from rpcsvc.cli.context import Json, Once, Text, add_common, add_target
from rpcsvc.operations.params import plain_types
from rpcsvc.operations.service import Operation, option_of
from rpcsvc.operations.table import OPERATIONS

_DIGITS: Final = re.compile(r"-?[0-9]{1,18}")


def add_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    for operation in OPERATIONS:
        _add_operation(commands, operation)


def _add_operation(commands: Any, operation: Operation) -> None:
    parser = commands.add_parser(
        operation.command, help=operation.summary, description=operation.summary
    )
    add_common(parser)
    fields = parser.add_argument_group("inputs")
    for name, info in operation.params.model_fields.items():
        _add_field(fields, info.alias or name, info.annotation, info.description)
    fields.add_argument(
        "--params", action=Once, metavar="JSON|-", help="all inputs as one JSON object"
    )
    if operation.sandbox_only:
        parser.add_argument(
            "order", action=Text, nargs="?", metavar="ORDER", help="the same as --order-id"
        )
    _add_call_options(parser, operation)
    parser.set_defaults(command=run_operation, operation=operation)


def _add_field(group: Any, wire_name: str, annotation: Any, description: str | None) -> None:
    flag = option_of(wire_name)
    extra: Json = {"dest": FIELD + wire_name, "help": description, "metavar": "VALUE"}
    types = set(plain_types(annotation))
    if bool in types:
        extra |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    elif int in types and str not in types:
        extra["type"] = _integer
    group.add_argument(flag, action=Text, **extra)


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
    group.add_argument("--request-id", action=Text, metavar="ID", help="echoed in the answer")
    group.add_argument(
        "--stateless", action="store_true", help="neither read nor write local state"
    )
    add_target(group)
    if operation.idempotent:
        group.add_argument(
            "--idempotency-key", action=Text, metavar="KEY", help="makes a retry safe"
        )
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--pretty", action="store_true", default=None, help="indent the answer")
    shape.add_argument("--compact", dest="pretty", action="store_false", help="one line")
