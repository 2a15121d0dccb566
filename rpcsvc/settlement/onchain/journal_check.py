"""The check of a payment journal against an SQLite database: ``rpcsvc db check``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rpcsvc.clock import iso8601
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmEntry
from rpcsvc.settlement.onchain.journal.files import (
    JournalContents,
    JournalPosition,
    Line,
    Mark,
    read_place,
)
from rpcsvc.settlement.onchain.journal_entries import entries_of, latest
from rpcsvc.settlement.onchain.monero.ledger import MoneroEntry
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, open_reader

_MARK = "SELECT journal, line, sum FROM payment_journal ORDER BY token DESC LIMIT 1"
_RECORDED = (
    "SELECT 1 FROM monero_payments WHERE txid = ?1 UNION ALL"
    " SELECT 1 FROM evm_attempts WHERE txid = ?1"
)


def check_journal(data_dir: Path, folder: Path, places: Sequence[Path]) -> tuple[list[str], str]:
    """Return the problems of the journal, and its state in words. The service may be running."""
    # The database first: meanwhile the journal can only grow.
    with closing(open_reader(data_dir / DATABASE_NAME)) as reader:
        row = reader.execute(_MARK).fetchone()
        mark = Mark(row[0], JournalPosition(row[1], row[2])) if row else None
        found = read_place(folder)
        problems = [*_journal_problems(found, mark), *_unrecorded(found.lines, mark, reader)]
    for place in places:
        copy = read_place(place)
        if copy.problem is not None or copy.name != found.name:
            problems.append(f"{place} does not hold the journal: {copy.problem or 'another one'}")
        elif copy.end.line < (mark.at.line if mark else 0):
            problems.append(f"{place} ends at line {copy.end.line} of {found.end.line}")
    return problems, _journal_state(found, mark)


def _journal_problems(found: JournalContents, mark: Mark | None) -> Iterator[str]:
    if found.problem is not None:
        yield f"the payment journal is damaged: {found.problem}"
    if mark is None:
        return
    if found.end.line < mark.at.line:
        yield (
            f"the payment journal ends at line {found.end.line}; the database knows"
            f" {mark.at.line} lines"
        )
    elif found.name != mark.journal or all(line.at != mark.at for line in found.lines):
        yield f"the payment journal is not the database's, which is {mark.journal}"


def _unrecorded(
    lines: Sequence[Line], mark: Mark | None, reader: sqlite3.Connection
) -> Iterator[str]:
    """Yield journaled payments up to the mark that the database lacks: the two files do not belong
    together.

    Payments that a replay skips on purpose do not count.
    """
    upto = mark.at.line if mark is not None else 0
    known = [line for line in lines if line.at.line <= upto]
    entries = [(line.at.line, entry) for line in known for entry in entries_of(line)]
    kept = {id(entry) for entry in latest([entry for _, entry in entries])}
    for number, entry in entries:
        if id(entry) not in kept or not isinstance(entry, MoneroEntry | EvmEntry):
            continue
        txid = _txid(entry)
        if reader.execute(_RECORDED, (txid,)).fetchone() is None:
            yield f"line {number} of the payment journal is not in the database: {txid}"


def _txid(entry: MoneroEntry | EvmEntry) -> str:
    if isinstance(entry, MoneroEntry):
        return entry.payment.txid
    return entry.payment.attempts[0].txid


def _journal_state(found: JournalContents, mark: Mark | None) -> str:
    if not found.lines:
        return "payment journal: none"
    times = [body["at"] for line in found.lines for body in line.bodies if "at" in body]
    behind = found.end.line - (mark.at.line if mark else 0)
    torn = f", {found.torn} bytes of an unfinished line" if found.torn else ""
    return (
        f"payment journal: {found.end.line} lines in {found.files} files, the last payment at"
        f" {iso8601(times[-1])}; the database is {max(behind, 0)} lines behind{torn}"
    )
