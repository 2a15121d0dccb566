"""``rpcsvc keys``: lists, rotates and exports the service's signing keys.

stdout is exactly one JSON object. A running service notices a change within a second.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from rpcsvc.cli.context import OK, Context, Json, Once, UsageError, add_command, say
from rpcsvc.clock import SystemClock, iso8601_second
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.signing import (
    KEYS_DIR,
    LEAST_PUBLISHED_MINUTES,
    PUBLISHED_MINUTES,
    KeyRing,
    SigningKeyError,
    retire,
)

_MOST_PUBLISHED_MINUTES: Final = 7 * 24 * 60


def add_commands(commands: Any) -> None:
    """Add ``keys`` and its actions to the parser."""
    parser = commands.add_parser("keys", help="list, rotate and export the signing keys")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    add_command(actions, "list", "list the current key, the next and the retired ones", _list)
    rotate = add_command(
        actions, "rotate", "make the next key; it signs once verifiers know it", _rotate
    )
    when = rotate.add_mutually_exclusive_group()
    when.add_argument(
        "--after",
        action=Once,
        type=_minutes,
        metavar="MINUTES",
        help=f"how long it is published before it signs ({PUBLISHED_MINUTES})",
    )
    when.add_argument(
        "--now", action="store_true", help="sign with it at once, if a private key may be stolen"
    )
    rotate.add_argument(
        "--revoke", action="store_true", help="drop the old public key too; implies --now"
    )
    add_command(actions, "export-public", "print the public keys as a JWKS", _export_public)


def _minutes(text: str) -> int:
    least, most = LEAST_PUBLISHED_MINUTES, _MOST_PUBLISHED_MINUTES
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(
            f"must be {least} to {most}, not {text!r}: verifiers keep a key set for ten minutes"
        )
    return int(text)


def _list(context: Context) -> int:
    ring = _ring(context)
    keys: list[Json] = [_row(ring.current.kid, "current", ring.current.created_at)]
    if ring.next is not None:
        key, signs_from = ring.next.key, iso8601_second(ring.next.signs_from)
        keys.append({**_row(key.kid, "next", key.created_at), "signsFrom": signs_from})
    for old in ring.retired:
        keys.append({**_row(old.kid, "retired", old.created_at), "retiredAt": old.retired_at})
    return _print({"keys": keys})


def _row(kid: str, status: str, created_at: str) -> Json:
    return {"kid": kid, "status": status, "createdAt": created_at}


def _rotate(context: Context) -> int:
    configure_logging(context.settings().log.format, "warning")
    options, ring = context.options, _ring(context)
    if options.revoke and options.after is not None:
        raise UsageError("--revoke drops the old key now: leave out --after.")
    try:
        if options.now or options.revoke:
            fresh = ring.rotate(revoke=options.revoke)
            signs_from, retired = fresh.created_at, None if options.revoke else ring.retired[0]
        else:
            prepared = ring.prepare(options.after or PUBLISHED_MINUTES)
            fresh, signs_from = prepared.key, iso8601_second(prepared.signs_from)
            retired = retire(ring.current, prepared.signs_from)
    except SigningKeyError as error:
        raise UsageError(str(error)) from error
    return _print(
        {
            "kid": fresh.kid,
            "createdAt": fresh.created_at,
            "signsFrom": signs_from,
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
    say(json.dumps(value, indent=2) + "\n")
    return OK
