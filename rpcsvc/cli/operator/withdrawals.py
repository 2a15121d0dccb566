"""``rpcsvc treasury withdraw`` and ``treasury withdrawals``: the operator's own transfers."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Final

from rpcsvc.cli.context import FAILED, OK, Context, Json, Text, UsageError, add_common
from rpcsvc.cli.operator.service import ask_service, print_json, print_table, refuse
from rpcsvc.client.errors import Unreachable
from rpcsvc.ids import system_random, withdrawal_id
from rpcsvc.settings import Settings

_ENDS: Final = ("settled", "failed", "cancelled")
_LOOK_SECONDS: Final = 1.0
# So much of the end of an address is typed to confirm it.
_LAST: Final = 6


def add_actions(actions: Any) -> None:
    """Add the actions of ``treasury``. What was given before the action holds, too."""
    text = "send from the exchange's wallet to an address of inventory.withdraw_to"
    parser = actions.add_parser(
        "withdraw",
        help=text,
        description=f"{text}. What open orders reserve is left; caps and the pause hold as for"
        " payouts. Asks to type amount and address, then follows it to its end. Exit status: 0"
        " once it is settled, 1 when it is refused, cancelled or failed.",
        argument_default=argparse.SUPPRESS,
    )
    add_common(parser)
    parser.add_argument(
        "network", action=Text, metavar="NETWORK", help="monero, or a chain such as arbitrum"
    )
    parser.add_argument(
        "amount", action=Text, metavar="AMOUNT", help="XMR or USDC that arrive, such as 1.5"
    )
    parser.add_argument("--to", action=Text, required=True, metavar="ADDR")
    parser.add_argument(
        "--id",
        action=Text,
        default=None,
        metavar="ID",
        help="wd_ and 4 to 60 letters, digits, - or _: the same one never pays twice (random)",
    )
    parser.add_argument(
        "--detach", action="store_true", default=False, help="do not follow it to its end"
    )
    parser.set_defaults(command=_withdraw)
    text = "withdrawals, the newest first, and the addresses that may be paid"
    listing = actions.add_parser(
        "withdrawals", help=text, description=f"{text}.", argument_default=argparse.SUPPRESS
    )
    add_common(listing)
    listing.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    listing.set_defaults(command=_list)


def _withdraw(context: Context) -> int:
    settings, given = context.settings(), context.options
    name = given.id or withdrawal_id(system_random)
    params = {
        "withdrawalId": name,
        "network": given.network,
        "amount": given.amount,
        "to": given.to,
    }
    preview = ask_service(settings, "withdrawals.preview", params)
    if preview["refused"] is not None:
        return refuse(f"not withdrawn: {preview['refused']}")
    if not preview["isMade"]:
        _confirm(preview["withdrawal"])
    try:
        done = ask_service(settings, "withdrawals.make", params)
    except Unreachable as failure:
        raise Unreachable(
            f"{failure} Whether {name} was made is not known: the same command with --id {name}"
            " tells, and pays it once."
        ) from failure
    if done["refused"] is not None:
        return refuse(f"not withdrawn: {done['refused']}")
    if given.detach:
        sys.stdout.write(f"{name} is {done['withdrawal']['state']}: rpcsvc treasury withdrawals\n")
        return OK
    return _follow(settings, params)


def _confirm(view: Json) -> None:
    """Have amount and address typed. Raises UsageError for anything else."""
    asset, address = view["asset"], view["address"]
    sys.stderr.write(
        f"{view['withdrawalId']}: {view['amount']} {asset} on {view['network']}, with up to"
        f" {view['fee']} {asset} for the network's fee, go to\n  {address}\n"
        f"This can't be taken back. Type the amount and the last {_LAST} characters of the address,"
        " with a space between: "
    )
    sys.stderr.flush()
    if sys.stdin.readline().split() != [view["amount"], address[-_LAST:]]:
        raise UsageError("That is another amount or address. Nothing was sent.")


def _follow(settings: Settings, params: Json) -> int:
    """Print its states until it is over; the exit status. It goes on without this command."""
    said = ""
    while True:
        view = ask_service(settings, "withdrawals.preview", params)["withdrawal"]
        if (text := _line(view)) != said:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
            said = text
        if view["state"] in _ENDS:
            return OK if view["state"] == "settled" else FAILED
        time.sleep(_LOOK_SECONDS)


def _line(view: Json) -> str:
    because = view["waitsFor"] or view["reason"]
    paid_by = "" if view["txid"] is None else f", transaction {view['txid']}"
    why = "" if because is None else f": {because}"
    return f"{view['withdrawalId']} is {view['state']}{paid_by}{why}"


def _list(context: Context) -> int:
    found = ask_service(context.settings(), "withdrawals.list", {})
    if getattr(context.options, "json", False):
        return print_json(found)
    head = ("WITHDRAWAL", "STATE", "AMOUNT", "NETWORK", "TO", "TRANSACTION", "SINCE")
    rows = [
        (
            item["withdrawalId"], item["state"], f"{item['amount']} {item['asset']}",
            item["network"], item["address"], item["txid"] or "-", item["since"],
        )
        for item in found["withdrawals"]
    ]  # fmt: skip
    if rows:
        print_table([head, *rows])
    else:
        sys.stdout.write("none\n")
    for item in found["withdrawals"]:
        because = item["waitsFor"] or item["reason"]
        if because is not None:
            sys.stdout.write(f"\n{item['withdrawalId']}: {because}\n")
    sys.stdout.write("\naddresses that may be paid (inventory.withdraw_to)\n")
    pairs = [(f"  {name}", each) for name, known in found["allowed"].items() for each in known]
    print_table(pairs or [("  none", "")])
    return OK
