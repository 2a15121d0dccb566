"""``rpcsvc payouts`` and ``rpcsvc refund``: outgoing transfers, and pausing them.

``pause`` and ``resume`` also work without a running service: the switch is a file that the service
reads before each signature; on PostgreSQL it is a row, which stops all replicas. ``adopt`` and
``close`` need a stopped service: none of its own payments may be under way while a person records
what was paid.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from rpcsvc.cli.context import OK, Context, Json, TextOption, UsageError, add_command, say
from rpcsvc.cli.operator.methods import add_methods, print_rows
from rpcsvc.cli.operator.service import is_running, onchain_settings, refuse, server_database
from rpcsvc.clock import SystemClock
from rpcsvc.errors import Unavailable
from rpcsvc.logs import configure_logging
from rpcsvc.operations.service import Cli
from rpcsvc.operations.transfers import TRANSFERS
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain.pause import PauseRow, PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME


def add_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser("payouts", help="list, pause and resume outgoing payments")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    action = partial(add_command, actions)
    add_methods(actions, TRANSFERS, "payouts", printers={"list": _print_list})
    adopting = action(
        "adopt",
        "record which transaction paid one, after restoring an older database",
        _recovery("adopt"),
    )
    text = (
        "record one as paid without proof, after restoring an older database; or end one that a"
        " reorganisation removed permanently"
    )
    closing = action("close", text, _recovery("close"))
    for one in (adopting, closing):
        one.add_argument(
            "transfer",
            action=TextOption,
            metavar="TRANSFER",
            help="its id, from payouts list",
        )
    named = "the transaction, as rpcsvc audit names it"
    adopting.add_argument("txid", action=TextOption, metavar="TXID", help=named)
    closing.add_argument(
        "txid",
        action=TextOption,
        nargs="?",
        metavar="TXID",
        help=f"{named}; omit it for a signed one that a reorganisation removed permanently",
    )
    closing.add_argument(
        "--note",
        action=TextOption,
        required=True,
        help="your evidence; stored, signed by the service's key",
    )
    closing.add_argument(
        "--unproven",
        action="store_true",
        help="nothing proves it, and you have asked other nodes: no node has the XMR payout",
    )
    adopting.add_argument(
        "--tx-key",
        action=TextOption,
        metavar="KEY",
        help="transaction key, if the XMR wallet has lost it",
    )
    pause = action("pause", "pause all outgoing payments, now and across restarts", _pause)
    pause.add_argument(
        "--reason", action=TextOption, required=True, type=_reason, help="shown in health and logs"
    )
    action("resume", "resume outgoing payments", _resume)
    add_methods(commands, TRANSFERS)


def _recovery(command: str) -> Callable[[Context], int]:
    """A command of the module that reads the chains. Other commands ask the service and import no
    engine.
    """

    def run(context: Context) -> int:
        done: int = getattr(import_module("rpcsvc.cli.recovery.transfers"), command)(context)
        return done

    return run


def _reason(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must say why payouts are paused")
    return " ".join(text.split())


def _print_list(cli: Cli, found: Json) -> None:
    if found["paused"] is not None:
        say(f"PAUSED: {found['paused']}\n")
    if print_rows(cli, found):
        say("\nNext step of each: rpcsvc payouts show TRANSFER\n")


# --- the switch ------------------------------------------------------------------------------


def _pause(context: Context) -> int:
    settings = onchain_settings(context)
    switch = PauseSwitch(settings.data_dir)
    try:
        switch.pause(context.options.reason)
    except OSError as error:
        raise UsageError(
            f"The pause file in {settings.data_dir} can't be written: {error.strerror}. PAYOUTS"
            " CONTINUE."
            " To stop them now, stop the service."
        ) from error
    if settings.postgresql_url is not None:
        return _pause_all(settings, switch, context.options.reason)
    where = settings.data_dir.absolute()
    if not _has_service(settings):
        return refuse(
            f"No service has ever run on {where}. A service started there is paused from the start;"
            " PAYOUTS OF ANY OTHER SERVICE CONTINUE. Give its --data-dir and --config."
        )
    say(
        f"Payouts of the service on {where} are paused: nothing more is signed or published."
        " Published transactions can't be recalled.\nOrders whose payout is not signed in time are"
        " refunded after the pause.\nResume with: rpcsvc payouts resume\n"
    )
    return OK


def _pause_all(settings: Settings, switch: PauseSwitch, reason: str) -> int:
    """Pause all replicas by the database row; until then the file pauses this one."""
    now = SystemClock().now_ms()
    try:
        _with_row(settings, lambda row: row.pause(reason, now))
    except (Unavailable, UsageError) as error:
        return refuse(
            f"The database can't be reached ({error}): only the replica on"
            f" {settings.data_dir.absolute()} is paused. PAYOUTS OF ANOTHER REPLICA CONTINUE. To"
            " stop them now, stop that replica."
        )
    switch.resume()
    say(
        "Payouts of all replicas are paused: nothing more is signed or published. Published"
        " transactions can't be recalled.\nOrders whose payout is not signed in time are refunded"
        " after the pause.\nResume with: rpcsvc payouts resume\n"
    )
    return OK


T = TypeVar("T")


def _with_row(settings: Settings, work: Callable[[PauseRow], Awaitable[T]]) -> T:
    """Run ``work`` on the pause that replicas share. Raises Unavailable and UsageError."""

    async def run() -> T:
        async with server_database(settings) as database:
            return await work(PauseRow(database))

    configure_logging(settings.log.format, "error")
    return asyncio.run(run())


def _resume(context: Context) -> int:
    settings = onchain_settings(context)
    switch = PauseSwitch(settings.data_dir)
    before = switch.reason()
    if settings.postgresql_url is not None:
        return _resume_all(settings, switch, before)
    _turn_off(settings, switch)
    where = settings.data_dir.absolute()
    if before is None:
        say(
            f"Payouts of the service on {where} were not paused. If health says that the pause is"
            " in memory only, the service writes it as soon as it can: resume then.\n"
        )
    else:
        say(f"Payouts of the service on {where} are resumed. They were paused: {before}\n")
    return OK


def _turn_off(settings: Settings, switch: PauseSwitch) -> None:
    """Raise UsageError."""
    try:
        switch.resume()
    except OSError as error:
        raise UsageError(
            f"The pause file in {settings.data_dir} can't be removed: {error.strerror}."
        ) from error


def _resume_all(settings: Settings, switch: PauseSwitch, before: str | None) -> int:
    async def resume(row: PauseRow) -> str | None:
        reason = await row.reason()
        await row.resume()
        return reason

    try:
        found = _with_row(settings, resume) or before
    except (Unavailable, UsageError) as error:
        return refuse(f"The database can't be reached ({error}): no replica was changed.")
    _turn_off(settings, switch)
    if found is None:
        say(
            "Payouts were not paused. If a replica's health says otherwise, run this on its"
            " machine.\n"
        )
    else:
        say(f"Payouts of all replicas are resumed. They were paused: {found}\n")
    return OK


def _has_service(settings: Settings) -> bool:
    """Return whether a service runs, or ever ran, on the data directory: one may have lost its
    database.

    A wrong directory, such as /var instead of ./var, has neither.
    """
    return is_running(settings) or (settings.data_dir / DATABASE_NAME).exists()
