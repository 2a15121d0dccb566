"""``rpcsvc tickets``: what users have written to the operator.

stdout is exactly one JSON object. The commands work on the database beside a running server.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rpcsvc.cli.context import Context, Json, UsageError
from rpcsvc.cli.operator.books import print_json, usable_books
from rpcsvc.cli.options import Text
from rpcsvc.clock import iso8601

if TYPE_CHECKING:
    from rpcsvc.store.books import StoredTicket


def add_tickets(commands: Any, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Hang the command into the tree; ``common`` adds the shared options."""
    text = "read and close what users have written to you"
    parser = commands.add_parser("tickets", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    rows = (
        ("list", "all tickets without their messages, oldest first", _list),
        ("show", "one ticket with its message", _show),
        ("close", "delete a ticket that was dealt with", _close),
    )
    for name, what, command in rows:
        action = actions.add_parser(name, help=what, description=what)
        common(action)
        if command is not _list:
            action.add_argument("ticket_id", action=Text, metavar="TICKET_ID")
        action.set_defaults(command=command)


def _list(context: Context) -> int:
    return print_json({"tickets": [_head(each) for each in _tickets(context)]})


def _show(context: Context) -> int:
    wanted = context.options.ticket_id
    for each in _tickets(context):
        if each.ticket_id == wanted:
            return print_json({"ticket": {**_head(each), "message": each.message}})
    raise _unknown(wanted)


def _close(context: Context) -> int:
    from rpcsvc.store.operator_books import close_ticket  # noqa: PLC0415 - help needs none of it

    wanted = context.options.ticket_id
    with usable_books():
        is_closed = close_ticket(context.settings().data_dir, wanted)
    if not is_closed:
        raise _unknown(wanted)
    return print_json({"closed": {"ticketId": wanted}})


def _tickets(context: Context) -> list[StoredTicket]:
    from rpcsvc.store.books import tickets  # noqa: PLC0415 - as above

    with usable_books():
        return tickets(context.settings().data_dir)


def _head(ticket: StoredTicket) -> Json:
    return {
        "ticketId": ticket.ticket_id,
        "createdAt": iso8601(ticket.created_at),
        "category": ticket.category,
        "orderId": ticket.order_id,
        "walletAddress": ticket.wallet_address,
    }


def _unknown(ticket_id: str) -> UsageError:
    return UsageError(f"there is no ticket {ticket_id[:60]}. rpcsvc tickets list names them all.")
