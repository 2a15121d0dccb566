"""``rpcsvc config check``, ``health`` and ``audit``: they ask and compare, and change nothing.

``config check`` refuses what a start would refuse of the settings; it asks no node or wallet.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from rpcsvc.audit.auditor import open_auditor
from rpcsvc.audit.records import Annotated, ChainMoved, Difference, Report, Unfit
from rpcsvc.cli.client import Unreachable, endpoint_of, read_response
from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError
from rpcsvc.cli.operator.service import onchain_settings, print_json, print_table
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.engines import engine_of
from rpcsvc.health_probe import PATHS, ask, printable
from rpcsvc.logs import configure_logging
from rpcsvc.settings import (
    Settings,
    check_bind,
    render_config,
)
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.store.database import BooksUnreadable

Common = Callable[[argparse.ArgumentParser], None]


def add_config(commands: Any, common: Common) -> None:
    """Hang the command into the tree; ``common`` adds the shared options."""
    parser = commands.add_parser("config", help="look at the configuration")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "print every setting and where it came from, and check them as a start does"
    check = actions.add_parser("check", help=text, description=text)
    common(check)
    check.set_defaults(command=check_config)


def check_config(context: Context) -> int:
    """The command. Raises SettingsError once everything is printed."""
    loaded = context.loaded()
    sys.stdout.write(render_config(loaded).rstrip("\n") + "\n")
    settings = loaded.settings
    check_bind(settings)
    engine_of(settings.engine).check(settings, read_chains(settings.chains_file))
    return OK


def add_health(commands: Any, add_common: Any, add_target: Any) -> None:
    """Hang the command into the parser."""
    parser = commands.add_parser(
        "health",
        help="ask a running service how it is",
        description="Exit status: 0 well, 1 not, 3 no service answers.",
    )
    add_common(parser)
    add_target(parser)
    parser.add_argument(
        "--check", choices=tuple(PATHS), default="health", help="which question (health)"
    )
    parser.set_defaults(command=_health)


def _health(context: Context) -> int:
    """Print the answer. Raises Unreachable and BadUrl."""
    url = context.url()
    if url is None:
        return ask(context.settings().data_dir, PATHS[context.options.check])
    endpoint = endpoint_of(url)
    connection = endpoint.connection()
    try:
        path = endpoint.path.removesuffix("/rpc") + PATHS[context.options.check]
        token = context.given_token()
        connection.request("GET", path, headers={"x-agent-rpc-token": token} if token else {})
        status, body = read_response(connection)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"No service answers at {endpoint.name}: {error}.") from error
    finally:
        connection.close()
    sys.stdout.write(printable(body.decode("utf-8", "replace")) + "\n")
    return OK if status == 200 else FAILED


_ASSETS: Final = {asset.symbol: asset for asset in (XMR, USDC)}


def add_audit(commands: Any, common: Common) -> None:
    """Hang the command into the tree; ``common`` adds the shared options."""
    text = "recompute every order and wallet from the chains"
    parser = commands.add_parser(
        "audit",
        help=text,
        description=f"{text}. Exit status: 0 all agrees, 1 it does not, 3 a node can't be asked.",
    )
    common(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(command=_audit)


def _audit(context: Context) -> int:
    """Raises UsageError when there are no books to read, Unreachable when there is no chain."""
    settings = onchain_settings(context)
    configure_logging(settings.log.format, "error")
    try:
        report = asyncio.run(_made(settings))
    except BooksUnreadable as error:
        raise UsageError(str(error)) from error
    except (RpcFailure, Unfit, ChainMoved) as error:
        raise Unreachable(f"No audit could be made: {error}.") from error
    if context.options.json:
        print_json(_as_json(report))
    else:
        _print(report)
    return FAILED if report.differences else OK


async def _made(settings: Settings) -> Report:
    chains = read_chains(settings.chains_file)
    async with open_auditor(settings.onchain, chains, settings.data_dir) as auditor:
        return await auditor.audit()


def _as_json(report: Report) -> Json:
    return {
        "ok": not report.differences,
        "orders": report.orders,
        "payments": report.payments,
        "differences": [_difference(item) for item in report.differences],
        "explained": [asdict(item) for item in report.annotated],
        "pending": list(report.pending),
        "notes": list(report.notes),
    }


def _difference(item: Difference) -> Json:
    """Its fields; the hint only where there is one."""
    return {name: text for name, text in asdict(item).items() if text or name != "hint"}


def _print(report: Report) -> None:
    if report.differences:
        head = ("DIFFERENCE", "WHERE", "EXPECTED", "FOUND", "")
        rows = [(i.kind, i.subject, i.expected, i.found, i.unit) for i in report.differences]
        print_table([head, *rows])
    for item in report.differences:
        if item.hint:
            sys.stdout.write(f"{item.subject} {item.hint}\n")
    for told in report.annotated:
        sys.stdout.write(f"explained: {told.network} {told.txid}: {_moved(told)}: {told.note}\n")
    for text in report.pending:
        sys.stdout.write(f"pending: {text}\n")
    for text in report.notes:
        sys.stdout.write(f"note: {text}\n")
    sys.stdout.write(
        f"{report.orders} orders, {report.payments} payments: {len(report.differences)}"
        f" differences, {len(report.pending)} pending\n"
    )


def _moved(told: Annotated) -> str:
    parts = (("sent", told.sent), ("received", told.received))
    if told.unit not in _ASSETS:  # wei: the coin's name is the network's
        return ", ".join(f"{word} {units} {told.unit}" for word, units in parts if units)
    asset = _ASSETS[told.unit]
    said = [f"{word} {format_units(units, asset)} {asset.symbol}" for word, units in parts if units]
    return ", ".join(said) or f"moved no {asset.symbol}"
