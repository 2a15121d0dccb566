"""``rpcsvc integrators``, ``relays``, ``tickets``, ``webhooks``: records of the running service.

stdout is exactly one JSON object.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from rpcsvc.cli.context import Context, Once, Text, add_common
from rpcsvc.cli.operator.service import ask, print_json
from rpcsvc.domain.integrators import key_hash
from rpcsvc.ids import system_random

KEY_BYTES: Final = 24


def add_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser("integrators", help="list integrators and the fees they earned")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    rows = (
        ("new-key", "make an API key and the hash to configure; the key is shown once", _new_key),
        ("report", "what each has earned by settled payouts", _report),
    )
    for name, text, command in rows:
        action = actions.add_parser(name, help=text, description=text)
        add_common(action)
        action.set_defaults(command=command)
    doubts = "upstream orders that may have been made: look them up there"
    relays = commands.add_parser("relays", help=doubts, description=doubts)
    add_common(relays)
    relays.set_defaults(command=_relays)
    closing = relays.add_subparsers(metavar="ACTION")
    over = "end one that was looked up: it was not made there, or will never be paid"
    # What was given before the action holds, too.
    close = closing.add_parser(
        "close", help=over, description=over, argument_default=argparse.SUPPRESS
    )
    add_common(close)
    close.add_argument("order_id", action=Text, metavar="ORDER_ID")
    close.add_argument(
        "--note",
        action=Text,
        required=True,
        metavar="TEXT",
        help="what was found, for the books",
    )
    close.set_defaults(command=_close)
    _add_tickets(commands)
    _add_webhooks(commands)


def _add_webhooks(commands: Any) -> None:
    text = "messages to the webhooks of orders"
    parser = commands.add_parser("webhooks", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    what = "what waits or was given up, the newest first"
    listing = actions.add_parser("list", help=what, description=what)
    add_common(listing)
    states = ("pending", "dead", "delivered", "all")
    listing.add_argument("--state", choices=states, default="pending")
    listing.add_argument("--limit", type=int, default=100, metavar="N")
    listing.set_defaults(command=_list_webhooks)
    what = "send an order's dead messages again, or one message"
    again = actions.add_parser("replay", help=what, description=what)
    add_common(again)
    again.add_argument("order_id", action=Text, metavar="ORDER_ID")
    again.add_argument(
        "--sequence", action=Once, type=int, metavar="N", help="the event's cursor: this one alone"
    )
    again.set_defaults(command=_replay)


def _add_tickets(commands: Any) -> None:
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
        add_common(action)
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


def _list_webhooks(context: Context) -> int:
    options = context.options
    return print_json(ask(context, "webhooks.list", state=options.state, limit=options.limit))


def _replay(context: Context) -> int:
    options = context.options
    params = {"orderId": options.order_id, "sequence": options.sequence}
    return print_json(ask(context, "webhooks.replay", **params))


def _list_tickets(context: Context) -> int:
    return print_json(ask(context, "tickets.list"))


def _show_ticket(context: Context) -> int:
    return print_json(ask(context, "tickets.show", ticketId=context.options.ticket_id))


def _close_ticket(context: Context) -> int:
    return print_json(ask(context, "tickets.close", ticketId=context.options.ticket_id))
