"""``rpcsvc integrators``, ``relays``, ``tickets``, ``webhooks``: records of the running service.

stdout is exactly one JSON object.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from rpcsvc.cli.context import Context, add_command
from rpcsvc.cli.operator.methods import add_methods
from rpcsvc.cli.operator.service import print_json
from rpcsvc.domain.integrators import key_hash
from rpcsvc.ids import system_random
from rpcsvc.operations.admin import RECORDS
from rpcsvc.operations.webhooks import WEBHOOKS

KEY_BYTES: Final = 24


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
    for word, text, rows in (
        ("tickets", "read and close what users have written to you", RECORDS),
        ("webhooks", "messages to the webhooks of orders", WEBHOOKS),
    ):
        parser = commands.add_parser(word, help=text, description=text)
        add_methods(parser.add_subparsers(required=True, metavar="ACTION"), rows, word)


def _new_key(_context: Context) -> int:
    key = system_random(KEY_BYTES).hex()
    return print_json({"key": key, "hash": key_hash(key).hex()})
