"""``rpcsvc audit``: recomputes orders and wallets from the chains, and prints the differences."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from msgspec.structs import asdict

from rpcsvc.audit.auditor import open_auditor
from rpcsvc.audit.books import reader_of
from rpcsvc.audit.memory import AuditMemory
from rpcsvc.audit.records import Annotated, AuditReport, ChainMoved, Difference, Unfit
from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError, add_command, say
from rpcsvc.cli.operator.service import (
    add_progress,
    end_progress,
    onchain_settings,
    print_json,
    print_table,
    reporter,
    server_database,
)
from rpcsvc.client.errors import Unreachable
from rpcsvc.domain.money import ASSETS, format_units
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.store.checks import Progress, quiet
from rpcsvc.store.database import BooksUnreadable


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    text = "recompute every order and wallet from the chains"
    more = ". Exit status: 0 no differences, 1 differences, 3 a node does not answer."
    parser = add_command(commands, "audit", text, _audit, more)
    parser.add_argument(
        "--full", action="store_true", help="ask again for what earlier audits have read"
    )
    add_progress(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _audit(context: Context) -> int:
    """Run the audit. Raises UsageError without readable books, Unreachable without a chain."""
    settings = onchain_settings(context)
    configure_logging(settings.log.format, "error")
    try:
        report = asyncio.run(audited(settings, reporter(context), full=context.options.full))
    except BooksUnreadable as error:
        raise UsageError(str(error)) from error
    except (RpcFailure, Unfit, ChainMoved) as error:
        raise Unreachable(f"No audit could be made: {error}.") from error
    finally:
        end_progress()
    if context.options.json:
        print_json(report_as_json(report))
    else:
        _print(report)
    return FAILED if report.differences else OK


async def audited(
    settings: Settings, progress: Progress = quiet, *, full: bool = False
) -> AuditReport:
    """Audit a data directory; if ``full``, without what earlier audits have remembered of the
    chains. Raises SettingsError and the errors in NOT_MADE.
    """
    chains = read_chains(settings.chains_file)
    async with AsyncExitStack() as held:
        server = None
        if settings.postgresql_url is not None:
            server = await held.enter_async_context(server_database(settings))
        read, memory = reader_of(settings.data_dir, server), AuditMemory(settings.data_dir)
        if full:
            await memory.forget()
        auditor = await held.enter_async_context(
            open_auditor(settings.onchain, chains, read, progress, memory)
        )
        return await auditor.audit()


def report_as_json(report: AuditReport) -> Json:
    """A report as ``rpcsvc audit --json`` prints it."""
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
    """The fields of a difference; the hint only if there is one."""
    return {name: text for name, text in asdict(item).items() if text or name != "hint"}


def _print(report: AuditReport) -> None:
    if report.differences:
        head = ("DIFFERENCE", "WHERE", "EXPECTED", "FOUND", "")
        rows = [(i.kind, i.subject, i.expected, i.found, i.unit) for i in report.differences]
        print_table([head, *rows])
    for item in report.differences:
        if item.hint:
            say(f"{item.subject} {item.hint}\n")
    for reported in report.annotated:
        say(f"explained: {reported.network} {reported.txid}: {_moved(reported)}: {reported.note}\n")
    for text in report.pending:
        say(f"pending: {text}\n")
    for text in report.notes:
        say(f"note: {text}\n")
    say(
        f"{report.orders} orders, {report.payments} payments: {len(report.differences)}"
        f" differences, {len(report.pending)} pending\n"
    )


def _moved(reported: Annotated) -> str:
    parts = (("sent", reported.sent), ("received", reported.received))
    if reported.unit not in ASSETS:  # wei: the coin's name is the network's
        return ", ".join(f"{word} {units} {reported.unit}" for word, units in parts if units)
    asset = ASSETS[reported.unit]
    said = [f"{word} {format_units(units, asset)} {asset.symbol}" for word, units in parts if units]
    return ", ".join(said) or f"moved no {asset.symbol}"
