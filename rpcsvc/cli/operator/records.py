"""``rpcsvc integrators``, ``relays``, ``tickets``, ``webhooks``: records of the running service.

stdout is exactly one JSON object.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from rpcsvc.cli.context import Context, Once, TextOption, add_command
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
        add_command(actions, name, text, command)
    doubts = "upstream orders in doubt: look them up at the upstream"
    relays = add_command(commands, "relays", doubts, _relays)
    closing = relays.add_subparsers(metavar="ACTION")
    over = "end one that you looked up: it was not made, or will never be paid"
    # Options given before the action apply, too.
    close = add_command(closing, "close", over, _close, argument_default=argparse.SUPPRESS)
    close.add_argument("order_id", action=TextOption, metavar="ORDER_ID")
    close.add_argument(
        "--note",
        action=TextOption,
        required=True,
        metavar="TEXT",
        help="what you found; stored",
    )
    _add_tickets(commands)
    _add_webhooks(commands)


def _add_webhooks(commands: Any) -> None:
    text = "messages to the webhooks of orders"
    parser = commands.add_parser("webhooks", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    what = "pending or dead messages, the newest first"
    listing = add_command(actions, "list", what, _list_webhooks)
    states = ("pending", "dead", "delivered", "all")
    listing.add_argument("--state", choices=states, default="pending")
    listing.add_argument("--limit", type=int, default=100, metavar="N")
    what = "send an order's dead messages again, or one message"
    again = add_command(actions, "replay", what, _replay)
    again.add_argument("order_id", action=TextOption, metavar="ORDER_ID")
    again.add_argument(
        "--sequence",
        action=Once,
        type=int,
        metavar="N",
        help="only the message of this event, by its cursor",
    )


def _add_tickets(commands: Any) -> None:
    text = "read and close what users have written to you"
    parser = commands.add_parser("tickets", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    rows = (
        ("list", "all tickets without their messages, oldest first", _list_tickets),
        ("show", "one ticket with its message", _show_ticket),
        ("close", "delete a handled ticket", _close_ticket),
    )
    for name, what, command in rows:
        action = add_command(actions, name, what, command)
        if command is not _list_tickets:
            action.add_argument("ticket_id", action=TextOption, metavar="TICKET_ID")


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
