"""``rpcsvc treasury``: balances, rebalancing to targets, withdrawals, and notes on manual
transactions."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

from rpcsvc.cli.context import (
    FAILED,
    OK,
    Context,
    Json,
    TextOption,
    UsageError,
    add_common,
    complain,
    say,
)
from rpcsvc.cli.operator.methods import Printer, add_methods, print_rows
from rpcsvc.cli.operator.service import (
    ask_service,
    is_running,
    onchain_settings,
    print_table,
    refuse,
)
from rpcsvc.client.errors import Unreachable
from rpcsvc.ids import system_random, withdrawal_id
from rpcsvc.operations.service import Cli
from rpcsvc.operations.withdrawals import WITHDRAWALS
from rpcsvc.settings import Settings
from rpcsvc.treasury.operations import TREASURY

_ENDS: Final = ("settled", "failed", "cancelled")
_LOOK_SECONDS: Final = 1.0
# How many last characters of the address the operator types to confirm it.
_LAST: Final = 6


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_methods(commands, TREASURY, printers={"treasury": _print_tables})
    actions = parser.add_subparsers(metavar="ACTION")
    # Options given before the action apply, too.
    options = {"argument_default": argparse.SUPPRESS}
    printers: dict[str, Printer] = {"plan": _print_plan, "withdrawals": _print_withdrawals}
    add_methods(actions, TREASURY, "treasury", printers=printers, **options)
    _add_annotate(actions)
    _add_withdraw(actions)
    add_methods(actions, WITHDRAWALS, "treasury", printers=printers, **options)


def _add_annotate(actions: Any) -> None:
    text = "annotate a transaction that you made by hand, so that the audit accepts it"
    # Options given before the action apply, too.
    parser = actions.add_parser(
        "explain",
        help=text,
        description=f"{text}. Its amount is read from the chain.",
        argument_default=argparse.SUPPRESS,
    )
    add_common(parser)
    parser.add_argument(
        "network", action=TextOption, metavar="NETWORK", help="monero, or a chain such as arbitrum"
    )
    parser.add_argument(
        "txid", action=TextOption, metavar="TXID", help="the transaction, as rpcsvc audit names it"
    )
    said = parser.add_mutually_exclusive_group(required=True)
    said.add_argument(
        "--note", action=TextOption, default=None, metavar="TEXT", help="what it was for"
    )
    said.add_argument("--take-back", action="store_true", default=False, help="remove the note")
    parser.add_argument(
        "--internal-wei",
        type=int,
        default=0,
        metavar="WEI",
        help="ether that a contract sent to the hot wallet in it: no node shows that amount",
    )
    parser.set_defaults(command=_annotate)


def _add_withdraw(actions: Any) -> None:
    text = "send from the exchange's wallet to an address of inventory.withdraw_to"
    # Options given before the action apply, too.
    parser = actions.add_parser(
        "withdraw",
        help=text,
        description=f"{text}. Amounts reserved by open orders are not touched; caps and the pause"
        " hold as for payouts. Asks for amount and address as confirmation, then follows it until"
        " it is final. Exit status: 0 once it is settled, 1 when it is refused, cancelled or"
        " failed.",
        argument_default=argparse.SUPPRESS,
    )
    add_common(parser)
    parser.add_argument(
        "network", action=TextOption, metavar="NETWORK", help="monero, or a chain such as arbitrum"
    )
    parser.add_argument(
        "amount", action=TextOption, metavar="AMOUNT", help="XMR or USDC that arrive, such as 1.5"
    )
    parser.add_argument("--to", action=TextOption, required=True, metavar="ADDR")
    parser.add_argument(
        "--id",
        action=TextOption,
        default=None,
        metavar="ID",
        help="wd_ and 4 to 60 letters, digits, - or _: the same one never pays twice (random)",
    )
    parser.add_argument(
        "--detach", action="store_true", default=False, help="do not wait until it is final"
    )
    parser.set_defaults(command=_withdraw)


def _print_plan(_cli: Cli, plan: Json) -> None:
    names = ("network", "asset", "held", "reserved", "free", "target", "received", "sent",
             "runsDryAt", "uncovered")  # fmt: skip
    head = ("NETWORK", "ASSET", "HELD", "RESERVED", "FREE", "TARGET", f"IN {plan['days']} D",
            f"OUT {plan['days']} D", "RUNS DRY", "UNCOVERED")  # fmt: skip
    rows = [[str(item[name] or "-") for name in names] for item in plan["networks"]]
    print_table([head, *rows])
    for move in plan["moves"]:
        say(
            f"\nmove {move['amount']} {move['asset']} from {move['from']} to {move['to']}, where"
            f" {move['arrives']} {move['arrivesAsset']} arrive before fees: {move['why']}\n"
        )
    if not plan["moves"]:
        say("\nnothing to move\n")
    for problem in plan["problems"]:
        say(f"\nnot asked: {problem}\n")


# --- annotations -----------------------------------------------------------------------------


def _annotate(context: Context) -> int:
    """Annotate through the running service; without one, write the database directly."""
    settings, given = onchain_settings(context), context.options
    transaction = {"network": given.network, "txid": given.txid}
    if given.take_back:
        done = _carried_out(settings, "unannotate", transaction)
        if done["refused"] is not None:
            return refuse(done["refused"])
        say(f"{done['txid']} is a difference again, if the service has no record of it.\n")
        return OK
    note = {"note": given.note, "internalWei": given.internal_wei}
    done = _carried_out(settings, "annotate", {**transaction, **note})
    if done["refused"] is not None:
        return refuse(f"not explained: {done['refused']}")
    say(f"{done['txid']} on {given.network}, {done['moved']}: {done['note']}\n")
    if done["recorded"] is not None:
        say(
            f"It is on record as payment {done['recorded']}: that is compared as before, and what"
            " the transaction moved besides is explained.\n"
        )
    return OK


def _carried_out(settings: Settings, action: str, params: Json) -> Json:
    if is_running(settings):
        return ask_service(settings, f"treasury.{action}", params)
    recovery = import_module("rpcsvc.cli.recovery.transfers")  # it imports the whole engine
    return dict(recovery.annotate(settings, action, params))


# --- withdrawals -------------------------------------------------------------------------------


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
        _confirm_withdrawal(preview["withdrawal"])
    try:
        done = ask_service(settings, "withdrawals.make", params)
    except Unreachable as failure:
        raise Unreachable(
            f"{failure} Whether {name} was made is unknown. Repeat the command with --id {name}"
            " tells, and pays it once."
        ) from failure
    if done["refused"] is not None:
        return refuse(f"not withdrawn: {done['refused']}")
    if given.detach:
        say(f"{name} is {done['withdrawal']['state']}: rpcsvc treasury withdrawals\n")
        return OK
    return _follow_withdrawal(settings, params)


def _confirm_withdrawal(view: Json) -> None:
    """Have the operator type amount and address. Raises UsageError if they differ."""
    asset, address = view["asset"], view["address"]
    complain(
        f"{view['withdrawalId']}: {view['amount']} {asset} on {view['network']}, with up to"
        f" {view['fee']} {asset} for the network's fee, go to\n  {address}\n"
        f"This can't be taken back. Type the amount and the last {_LAST} characters of the address,"
        " with a space between: "
    )
    sys.stderr.flush()
    if sys.stdin.readline().split() != [view["amount"], address[-_LAST:]]:
        raise UsageError("That is another amount or address. Nothing was sent.")


def _follow_withdrawal(settings: Settings, params: Json) -> int:
    """Print the withdrawal's states until it is over; returns the exit status.

    The withdrawal continues without this command.
    """
    said = ""
    while True:
        view = ask_service(settings, "withdrawals.preview", params)["withdrawal"]
        if (text := _progress_line(view)) != said:
            say(f"{text}\n")
            sys.stdout.flush()
            said = text
        if view["state"] in _ENDS:
            return OK if view["state"] == "settled" else FAILED
        time.sleep(_LOOK_SECONDS)


def _progress_line(view: Json) -> str:
    because = view["waitsFor"] or view["reason"]
    paid_by = "" if view["txid"] is None else f", transaction {view['txid']}"
    why = "" if because is None else f": {because}"
    return f"{view['withdrawalId']} is {view['state']}{paid_by}{why}"


def _print_withdrawals(cli: Cli, found: Json) -> None:
    print_rows(cli, found)
    for item in found["withdrawals"]:
        because = item["waitsFor"] or item["reason"]
        if because is not None:
            say(f"\n{item['withdrawalId']}: {because}\n")
    say("\naddresses that may be paid (inventory.withdraw_to)\n")
    pairs = [(f"  {name}", each) for name, known in found["allowed"].items() for each in known]
    print_table(pairs or [("  none", "")])


# --- tables ----------------------------------------------------------------------------------


def _print_tables(_cli: Cli, view: Json) -> None:
    paused = view["paused"]
    say(f"payouts: {'open' if paused is None else f'PAUSED: {paused}'}\n")
    _print_side("XMR", view["xmr"])
    for network in view["usdc"]:
        _print_side(f"USDC on {network['network']}", network)
    say("\nsent in the last 24 hours\n")
    print_table(
        [
            (f"  {name}", f"{caps['sentIn24Hours']} of {caps['perDay']}",
             f"at most {caps['perTransfer']} in one transfer")
            for name, caps in view["caps"].items()
        ]
    )  # fmt: skip
    _print_unattributed(view["ofNoOrder"])
    for problem in view["problems"]:
        say(f"\nnot asked: {problem}\n")


def _print_unattributed(unattributed: list[Json]) -> None:
    if not unattributed:
        return
    say("\nunattributed deposits, to be paid back by hand\n")
    head = ("  AMOUNT", "NETWORK", "TRANSACTION", "THE ADDRESS IS OF")
    cells = ("amount", "network", "txid", "addressOf")
    rows = [tuple(str(item[name] or "no order") for name in cells) for item in unattributed]
    print_table([head, *((f"  {amount}", *rest) for amount, *rest in rows)])
    say("after a move: rpcsvc treasury explain NETWORK TRANSACTION --note TEXT\n")


def _print_side(title: str, side: Json) -> None:
    say(f"\n{title}\n")
    print_table([(f"  {_LABELS[key]}", text) for key, text in _cells(side)])


def _cells(side: Json) -> Iterable[tuple[str, str]]:
    for key in _LABELS:
        if key in side:
            value = side[key]
            yield key, _coins(value) if key == "gas" else _cell(value)


def _coins(gas: Json) -> str:
    return f"{_cell(gas['left'])} {gas['coin']}" if gas["left"] else _cell(None)


def _cell(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, dict):
        return ", ".join(f"{_cell(each)} {name}" for name, each in value.items()) or "none"
    return str(value)


_LABELS: Final = {
    "address": "wallet",
    "unlocked": "to spend",
    "locked": "locked",
    "outputs": "outputs",
    "hotWallet": "hot wallet",
    "unswept": "on deposit addresses",
    "unsweptAddresses": "deposit addresses with money",
    "arriving": "arriving, not confirmed",
    "swept": "swept so far",
    "reserved": "reserved by open orders",
    "withdrawing": "reserved by a withdrawal",
    "refundsUnderWay": "refunds under way",
    "refundsOwed": "refunds owed",
    "waitingForAddress": "waits for a refund address",
    "ordersWaitingForAddress": "orders that wait for one",
    "feesPaid": "network fees paid",
    "gas": "for gas",
    "gasPaid": "gas paid",
}
