"""``rpcsvc drill restore``: restores a backup in a scratch directory, and reports the result.

It signs and publishes nothing, and only reads the data directory: a service may run on it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import asdict

from rpcsvc.audit.auditor import NOT_MADE
from rpcsvc.cli.context import FAILED, OK, Context, Json, Once, UsageError, add_common, say
from rpcsvc.cli.opening import opening
from rpcsvc.cli.operator.audit import audited, report_as_json
from rpcsvc.cli.operator.service import end_progress, print_json, show_progress, show_share
from rpcsvc.cli.recovery.db import check_books
from rpcsvc.cli.recovery.restore import adopt, put_in_place, require_sqlite, take_journal
from rpcsvc.clock import SystemClock, iso8601
from rpcsvc.domain.order import FINAL_TRANSFERS
from rpcsvc.engines import ENGINES
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain.journal.files import FOLDER
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase
from rpcsvc.store.backends.sqlite.maintenance import damage_of, log_beside
from rpcsvc.store.checks import engine_conflict
from rpcsvc.store.operator_books import OperatorBooks


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("drill", help="rehearse a restore beside the running service")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "restore a backup in a scratch directory, check and audit it, and report the result"
    restore = actions.add_parser(
        "restore",
        help=text,
        description=f"{text}. Exit status: 0 a restore of it would succeed, 1 it would not.",
    )
    restore.add_argument("backup", type=Path, metavar="BACKUP")
    restore.add_argument(
        "--journal", type=Path, action="append", metavar="PATH",
        help="a folder or file with a payment journal; may be given several times",
    )  # fmt: skip
    restore.add_argument(
        "--scratch", action=Once, type=Path, metavar="DIR",
        help="where the scratch directory is made and deleted (the system's for temporary files)",
    )  # fmt: skip
    add_common(restore)
    restore.add_argument("--json", action="store_true", help="one JSON object instead of text")
    restore.set_defaults(command=_drill_restore)


def _drill_restore(context: Context) -> int:
    """Run the command. Raises UsageError without the file, or without room for a copy."""
    settings, options = context.settings(), context.options
    configure_logging(settings.log.format, "critical")  # the report has all of it
    require_sqlite(settings, "rehearse with pg_restore into another database, and rpcsvc db check")
    if not options.backup.is_file():
        raise UsageError(f"There is no file {options.backup}. rpcsvc db backup makes one.")
    try:
        report = rehearse(settings, options)
        if _differences(report):
            # A running service may sign more after its journal was read.
            report = _found_twice(report, rehearse(settings, options))
    except OSError as error:
        raise UsageError(
            f"The backup can't be copied to a scratch directory: {error.strerror or error}."
            " Name a place with room for it with --scratch."
        ) from error
    finally:
        end_progress()
    return _print(report, as_json=options.json)


# --- the drill -------------------------------------------------------------------------------


def rehearse(settings: Settings, options: argparse.Namespace) -> Json:
    """Restore the backup once, and report on it. Raises OSError if it can't be copied."""
    with TemporaryDirectory(prefix="rpcsvc-drill-", dir=options.scratch) as made:
        scratch = Path(made)
        show_progress("copying the backup to a scratch directory")
        put_in_place(scratch, options.backup)
        report = _restored(settings, scratch, options)
    return {**report, "ok": _succeeds(report)}


def _restored(settings: Settings, scratch: Path, options: argparse.Namespace) -> Json:
    report: Json = {"ok": False, "backup": str(options.backup), "refused": None}
    if damage := log_beside(options.backup) or damage_of(scratch / DATABASE_NAME):
        return {**report, "refused": damage}
    signs = ENGINES[settings.engine].signs
    journals = [settings.data_dir / FOLDER, *settings.onchain.journal_places]
    cut_off = _within(settings, scratch)
    try:
        with opening(cut_off):
            report |= asyncio.run(_holds(cut_off, SystemClock().now_ms()))
            if signs:
                take_journal(cut_off, [*journals, *(options.journal or [])])
            adopted = asyncio.run(adopt(cut_off))
            report["journal"] = asdict(adopted) if adopted else None
            report["continues"] = asyncio.run(_pending(scratch))
    except UsageError as error:
        return {**report, "refused": str(error)}
    show_progress("checking the books")
    report["problems"], _ = check_books(cut_off)
    return report | (_audited(cut_off) if signs else {"audit": None, "notAudited": None})


def _succeeds(report: Json) -> bool:
    """Return whether the restore needs no manual work."""
    return report["refused"] is None and not (
        report["startRefused"]
        or report["problems"]
        or report["notAudited"]
        or (report["journal"] and report["journal"]["refused"])
        or _differences(report)
    )


def _differences(report: Json) -> list[Json]:
    audit = report.get("audit")
    return audit["differences"] if audit else []


def _found_twice(first: Json, again: Json) -> Json:
    """The differences that both reports have, as in the second one."""
    if not _differences(again):
        return again
    known = {(item["kind"], item["subject"]) for item in _differences(first)}
    twice = [item for item in _differences(again) if (item["kind"], item["subject"]) in known]
    report = {**again, "audit": {**again["audit"], "ok": not twice, "differences": twice}}
    return {**report, "ok": _succeeds(report)}


def _within(settings: Settings, scratch: Path) -> Settings:
    """The settings of a restore into ``scratch``; they write the journal there alone."""
    alone = {"journal_places": (), "journal_command": ""}
    onchain = settings.onchain.model_copy(update=alone)
    return settings.model_copy(update={"data_dir": scratch, "onchain": onchain})


async def _holds(settings: Settings, now: int) -> Json:
    """The contents of the backup before adoption. The database is migrated first."""
    database = await SqliteDatabase.open(settings.data_dir)
    try:
        books = OperatorBooks(database)
        orders, newest = await books.extent()
        is_open = await books.open_orders_by_status()
        claim = await engine_conflict(database, settings.engine)
        return {
            "newestEvent": None if newest is None else iso8601(newest),
            "ageSeconds": None if newest is None else (now - newest) // 1000,
            "orders": orders,
            "openOrders": {status: count for status, (count, _) in sorted(is_open.items())},
            "transfers": await books.transfers_by_state(),
            "inDoubt": len(await books.doubts()),
            "startRefused": claim and f"it is for engine {claim[0]}: {claim[1]}",
        }
    finally:
        await database.close()


async def _pending(scratch: Path) -> dict[str, int]:
    """Transfers that the first start will resume, by state."""
    database = await SqliteDatabase.open(scratch)
    try:
        found = await OperatorBooks(database).transfers_by_state()
    finally:
        await database.close()
    return {state: count for state, count in found.items() if state not in FINAL_TRANSFERS}


def _audited(settings: Settings) -> Json:
    try:
        report = asyncio.run(audited(settings, show_share))
    except NOT_MADE as error:
        return {"audit": None, "notAudited": str(error)}
    return {"audit": report_as_json(report), "notAudited": None}


# --- the report ------------------------------------------------------------------------------


def _print(report: Json, *, as_json: bool) -> int:
    if as_json:
        print_json(report)
    else:
        for line in _lines(report):
            say(f"{line}\n")
    return OK if report["ok"] else FAILED


def _lines(report: Json) -> Iterator[str]:
    if "orders" in report:
        yield f"newest event: {_age(report)}"
        yield f"orders: {report['orders']}; open: {_counts(report['openOrders'])}"
        yield f"payouts and refunds: {_counts(report['transfers'])}"
        if report["inDoubt"]:
            yield f"calls of an upstream in doubt: {report['inDoubt']}"
    if report["refused"] is not None:
        yield f"A restore would be refused: {report['refused']}"
        return
    if report["journal"] is not None:
        yield from _journal_lines(report["journal"])
    yield f"the first start continues: {_counts(report['continues'])}"
    if report["startRefused"]:
        yield f"the first start would be refused: {report['startRefused']}"
    yield f"db check: {len(report['problems']) or 'no'} problems"
    yield from (f"  {problem}" for problem in report["problems"])
    yield from _audit_lines(report)
    manual = "needs manual steps: see above, and docs/operate/restore.md"
    yield f"A restore of {report['backup']} {'would succeed' if report['ok'] else manual}."


def _age(report: Json) -> str:
    if report["newestEvent"] is None:
        return "none"
    minutes = report["ageSeconds"] // 60
    return f"{report['newestEvent']}, {minutes // 60} h {minutes % 60} min ago"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "none"


def _journal_lines(journal: Json) -> Iterator[str]:
    payments, orders = len(journal["payments"]), len(journal["orders"])
    yield f"the journal brings {payments} payments, {orders} of them to transfers of the backup"
    for name in journal["lost"]:
        yield f"  {name}: its order is lost, its payment is on record"
    for problem in journal["refused"]:
        yield f"  not adopted, and payouts would be paused: {problem}"


def _audit_lines(report: Json) -> Iterator[str]:
    if report["notAudited"] is not None:
        yield f"not audited: {report['notAudited']}"
    audit = report["audit"]
    if audit is None:
        return
    yield (
        f"audit: {audit['orders']} orders, {audit['payments']} payments:"
        f" {len(audit['differences'])} differences, {len(audit['pending'])} pending"
    )
    for item in audit["differences"]:
        yield f"  {item['kind']} {item['subject']}: {item['found']}, not {item['expected']}"
        if "hint" in item:
            yield f"    {item['hint']}"
    yield from (f"  note: {text}" for text in audit["notes"])
