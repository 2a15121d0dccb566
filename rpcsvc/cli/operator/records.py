"""``rpcsvc integrators``, ``relays`` and ``tickets``: what the running service has on record.

stdout is exactly one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from rpcsvc.cli.context import Context, Text
from rpcsvc.cli.operator.service import ask, print_json
from rpcsvc.domain.integrators import key_hash
from rpcsvc.ids import system_random

Common = Callable[[argparse.ArgumentParser], None]
KEY_BYTES: Final = 24


def add_records(commands: Any, common: Common) -> None:
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


def add_tickets(commands: Any, common: Common) -> None:
    """Hang the command into the tree; ``common`` adds the shared options."""
    text = "read and close what users have written to you"
    parser = commands.add_parser("tickets", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    rows = (
        ("list", "all tickets without their messages, oldest first", _list_tickets),
        ("show", "one ticket with its message", _show_ticket),
        ("close", "delete a ticket that was dealt with", _close_ticket),
    )
    for name, what, command in rows:
        action = actions.add_parser(name, help=what, description=what)
        common(action)
        if command is not _list_tickets:
            action.add_argument("ticket_id", action=Text, metavar="TICKET_ID")
        action.set_defaults(command=command)


def _new_key(_context: Context) -> int:
    key = system_random(KEY_BYTES).hex()
    return print_json({"key": key, "hash": key_hash(key).hex()})


def _report(context: Context) -> int:
    return print_json(ask(context, "integrators.report"))


def _relays(context: Context) -> int:
    return print_json(ask(context, "relays.list"))


def _close(context: Context) -> int:
    options = context.options
    return print_json(ask(context, "relays.close", orderId=options.order_id, note=options.note))


def _list_tickets(context: Context) -> int:
    return print_json(ask(context, "tickets.list"))


def _show_ticket(context: Context) -> int:
    return print_json(ask(context, "tickets.show", ticketId=context.options.ticket_id))


def _close_ticket(context: Context) -> int:
    return print_json(ask(context, "tickets.close", ticketId=context.options.ticket_id))
