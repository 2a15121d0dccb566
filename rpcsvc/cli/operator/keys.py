"""``rpcsvc keys``: lists, rotates and exports the service's signing keys.

stdout is exactly one JSON object. A running service notices a rotation within a second.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rpcsvc.cli.context import OK, Context, Json, UsageError, add_command
from rpcsvc.clock import SystemClock
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.signing.keys import (
    KEYS_DIR,
    KeyRing,
    SigningKeyError,
)


def add_commands(commands: Any) -> None:
    """Add ``keys`` and its actions to the parser."""
    parser = commands.add_parser("keys", help="list, rotate and export the signing keys")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    rows = (
        ("list", "list the current key and the retired ones", _list),
        ("rotate", "make a new key; signatures of the old one still verify", _rotate),
        ("export-public", "print the public keys as a JWKS", _export_public),
    )
    for name, text, command in rows:
        action = add_command(actions, name, text, command)
        if name == "rotate":
            action.add_argument(
                "--revoke",
                action="store_true",
                help="drop the old public key too, if the private key may be stolen",
            )


def _list(context: Context) -> int:
    ring = _ring(context)
    current: Json = {
        "kid": ring.current.kid,
        "status": "current",
        "createdAt": ring.current.created_at,
    }
    retired = [
        {
            "kid": key.kid,
            "status": "retired",
            "createdAt": key.created_at,
            "retiredAt": key.retired_at,
        }
        for key in ring.retired
    ]
    return _print({"keys": [current, *retired]})


def _rotate(context: Context) -> int:
    configure_logging(context.settings().log.format, "warning")
    ring = _ring(context)
    try:
        fresh = ring.rotate(revoke=context.options.revoke)
    except SigningKeyError as error:
        raise UsageError(str(error)) from error
    retired = None if context.options.revoke else ring.retired[0]
    return _print(
        {
            "kid": fresh.kid,
            "createdAt": fresh.created_at,
            "retired": retired and {"kid": retired.kid, "retiredAt": retired.retired_at},
        }
    )


def _export_public(context: Context) -> int:
    return _print(_ring(context).jwks())


def _ring(context: Context) -> KeyRing:
    directory = context.settings().data_dir / KEYS_DIR
    try:
        return KeyRing.load(directory, SystemClock(), system_random)
    except SigningKeyError as error:
        raise UsageError(str(error)) from error


def _print(value: Json) -> int:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    return OK
