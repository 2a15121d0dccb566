"""``rpcsvc integrators`` and ``rpcsvc relays``: the operator's look into the books.

stdout is exactly one JSON object. They work on the database beside a running server. What does not
live here: reading (store/books.py) and writing it (store/operator_books.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rpcsvc.cli.context import OK, Context, Json, UsageError
from rpcsvc.cli.options import Text
from rpcsvc.clock import SystemClock, iso8601
from rpcsvc.domain.integrators import key_hash
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.ids import system_random

Common = Callable[[argparse.ArgumentParser], None]
KEY_BYTES = 24


def add_books(commands: Any, common: Common) -> None:
    """Hang both into the command tree; ``common`` adds the shared options."""
    parser = commands.add_parser("integrators", help="look after those who bring orders")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    rows = (
        ("new-key", "make an API key and the hash to configure; the key is shown once", _new_key),
        ("report", "what each has earned by settled payouts", _report),
    )
    for name, text, command in rows:
        action = actions.add_parser(name, help=text, description=text)
        common(action)
        action.set_defaults(command=command)
    doubts = "upstream orders that may have been made: look them up there"
    relays = commands.add_parser("relays", help=doubts, description=doubts)
    common(relays)
    relays.set_defaults(command=_relays)
    closing = relays.add_subparsers(metavar="ACTION")
    over = "end one that was looked up: it was not made there, or will never be paid"
    # What was given before the action holds, too.
    close = closing.add_parser(
        "close", help=over, description=over, argument_default=argparse.SUPPRESS
    )
    common(close)
    close.add_argument("order_id", action=Text, metavar="ORDER_ID")
    close.add_argument(
        "--note",
        action=Text,
        required=True,
        metavar="TEXT",
        help="what was found, for the books",
    )
    close.set_defaults(command=_close)


def _new_key(_context: Context) -> int:
    key = system_random(KEY_BYTES).hex()
    return print_json({"key": key, "hash": key_hash(key).hex()})


def _report(context: Context) -> int:
    from rpcsvc.store.books import integrator_fees  # noqa: PLC0415 - help needs none of it

    assets = {asset.symbol: asset for asset in (XMR, USDC)}
    with usable_books():
        found = integrator_fees(context.settings().data_dir)
    return print_json(
        {
            "fees": [
                {
                    "integrator": each.integrator,
                    "asset": each.asset,
                    "amount": format_units(each.units, assets[each.asset]),
                    "payouts": each.payouts,
                }
                for each in found
            ]
        }
    )


def _relays(context: Context) -> int:
    from rpcsvc.store.books import doubts  # noqa: PLC0415 - as above

    with usable_books():
        found = doubts(context.settings().data_dir)
    return print_json(
        {
            "inDoubt": [
                {
                    "orderId": each.order_id,
                    "upstreamId": each.upstream_id,
                    "reason": each.reason,
                    "note": each.note,
                    "createdAt": iso8601(each.created_at),
                }
                for each in found
            ]
        }
    )


def _close(context: Context) -> int:
    from rpcsvc.store.operator_books import close_claim  # noqa: PLC0415 - as above

    order_id, note = context.options.order_id, " ".join(context.options.note.split())
    if not note:
        raise UsageError("--note must say what was found: it is all that the books will tell.")
    reason = f"closed by the operator at {iso8601(SystemClock().now_ms())}: {note}"
    with usable_books():
        is_closed = close_claim(context.settings().data_dir, order_id, reason)
    if not is_closed:
        raise UsageError(
            f"no upstream order {order_id[:60]} is in doubt. rpcsvc relays lists those;"
            " one whose call is still under way can't be closed."
        )
    return print_json({"closed": {"orderId": order_id, "reason": reason}})


@contextmanager
def usable_books() -> Iterator[None]:
    """Books that can't be read or written are told as a wrong use, in a line."""
    from rpcsvc.store.books import BooksUnreadable  # noqa: PLC0415 - as above

    try:
        yield
    except BooksUnreadable as error:
        raise UsageError(str(error)) from error


def print_json(value: Json) -> int:
    """Write the command's answer to stdout; returns the exit status."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    return OK
