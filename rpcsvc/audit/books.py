"""Reads the books: a snapshot of the database of a running service, as plain records.

All rows are fetched in one read transaction over a read-only connection, unaffected by concurrent
writes (REPEATABLE READ on PostgreSQL), and made into records after it: while it is open the service
can't restart its log. Of many rows only the newest are in memory, on SQLite: the others are spilled
to temporary files. Nothing is written to the data directory.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import orjson

from rpcsvc.audit.records import (
    MONERO,
    Annotation,
    Books,
    DepositEntry,
    FillEntry,
    OpeningEntry,
    OrderEntry,
    PaymentEntry,
    SweepEntry,
    TransferEntry,
    Watched,
)
from rpcsvc.audit.spilled import SpilledDict, SpilledList
from rpcsvc.domain.pricing import Price
from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, open_reader
from rpcsvc.store.backends.sqlite.migrations import other_schema
from rpcsvc.store.database import BooksUnreadable, Query, Row, Tables, from_row
from rpcsvc.store.orders import AUDITED_EVENTS

# An order's rows come in the sequence of the orders. CROSS JOIN has SQLite read them so: it has
# none to sort in memory.
_ORDERS = (
    "SELECT seq, order_id, direction, deposit_network, payout_network, deposit_address, to_address,"
    " rate, spread_bps, payout_fee, min_received_bps, integrator_bps, funding_fee, refund_fee,"
    " status, deposit_amount, receive_amount, agreed_refund_address, refund_address, leftover"
    " FROM orders"
    " WHERE upstream_id IS NULL ORDER BY seq"
)
_DEPOSITS = (
    "SELECT o.seq, d.network, d.txid, d.units, d.sender, d.state, d.transfer_id, d.is_dust,"
    " d.rate, CASE WHEN u.units IS NULL THEN 0 ELSE 1 END AS is_early"
    " FROM orders o CROSS JOIN deposits d LEFT JOIN unfinal_deposits u"
    " ON u.network = d.network AND u.txid = d.txid AND u.output_index = d.output_index"
    " WHERE d.order_id = o.order_id AND o.upstream_id IS NULL"
    " ORDER BY o.seq, d.network, d.txid, d.output_index"
)
_TRANSFERS = (
    "SELECT o.seq, t.transfer_id, t.kind, t.network, t.address, t.units, t.fee, t.integrator_fee,"
    " t.state, t.txid FROM orders o CROSS JOIN transfers t"
    " WHERE t.order_id = o.order_id AND o.upstream_id IS NULL ORDER BY o.seq, t.transfer_id"
)
_WITHDRAWALS = (
    "SELECT withdrawal_id AS transfer_id, 'payout' AS kind, network, address, units, fee,"
    " 0 AS integrator_fee, state, txid FROM withdrawals ORDER BY seq"
)
_FILLS = (
    "SELECT o.seq, f.units, f.output, f.integrator_fee, f.rate"
    " FROM orders o CROSS JOIN fills f WHERE f.order_id = o.order_id AND o.upstream_id IS NULL"
    " ORDER BY o.seq, f.chunk"
)
_EVENTS = (
    "SELECT o.seq, e.event, e.details"  # noqa: S608 - of constants
    " FROM orders o CROSS JOIN order_events e"
    f" WHERE e.order_id = o.order_id AND o.upstream_id IS NULL AND e.event IN {AUDITED_EVENTS}"
    " ORDER BY o.seq, e.version"
)
# A transaction that pays several transfers is one entry for each of them.
_MONERO_PAYMENTS = (
    "SELECT coalesce(e.transfer_id, p.payment_id) AS payment_id, p.purpose,"
    " coalesce(e.address, p.address) AS recipient, coalesce(e.units, p.units) AS units, p.state,"
    " p.txid, p.fee, p.tx_key, p.height AS block"
    " FROM monero_payments p LEFT JOIN monero_payees e ON e.payment_id = p.payment_id"
    " ORDER BY p.seq, e.transfer_id"
)
_ANNOTATIONS = (
    "SELECT network, txid, note, coalesce(wei, '0') AS wei FROM annotated_transactions"
    " ORDER BY at, network, txid"
)
_OPENINGS = (
    "SELECT o.network, block_number AS block, block_hash AS hash, nonce, wei FROM evm_openings o"
    " JOIN evm_wallet w ON lower(w.hot_address) = lower(o.sender)"
)
_EVM_PAYMENTS = (
    "SELECT seq, payment_id, network, purpose, recipient, units, state, nonce FROM evm_payments"
    " ORDER BY seq"
)
_EVM_ATTEMPTS = (
    "SELECT p.seq, a.txid FROM evm_payments p CROSS JOIN evm_attempts a"
    " WHERE a.payment_id = p.payment_id ORDER BY p.seq, a.number"
)
_SWEEPS = (
    "SELECT network, address, units, taken, state, payment_id, authorization_hash FROM evm_sweeps"
    " ORDER BY network, address_index, serial"
)
_MONERO_WATCHED = (
    "SELECT (SELECT min(height) FROM (SELECT height FROM monero_cursor"
    " UNION ALL SELECT height FROM monero_deposits UNION ALL SELECT height FROM monero_payments))"
    " AS since, height AS upto, hash FROM monero_cursor ORDER BY height DESC LIMIT 1"
)
_EVM_WATCHED = (
    "SELECT network, (SELECT min(at) FROM (SELECT number AS at FROM evm_cursor"
    " WHERE network = n.network UNION ALL SELECT block_number FROM evm_deposits"
    " WHERE network = n.network UNION ALL SELECT block_number FROM evm_payments"
    " WHERE network = n.network)) AS since, number AS upto, hash FROM evm_cursor n"
    " WHERE number = (SELECT max(number) FROM evm_cursor WHERE network = n.network)"
)
_CLOSED = "SELECT transfer_id FROM closed_by_hand"
_FROM_JOURNAL = "SELECT txid FROM journal_adopted"
_HOT = "SELECT hot_address FROM evm_wallet"
_EVM_ADDRESSES = "SELECT address FROM evm_addresses"
_PRIMARY = "SELECT primary_address FROM monero_wallet"
_ALL: Final = (
    _ORDERS, _DEPOSITS, _TRANSFERS, _WITHDRAWALS, _FILLS, _EVENTS, _MONERO_PAYMENTS, _ANNOTATIONS,
    _OPENINGS, _EVM_PAYMENTS, _EVM_ATTEMPTS, _SWEEPS, _MONERO_WATCHED, _EVM_WATCHED, _HOT,
    _EVM_ADDRESSES, _PRIMARY, _FROM_JOURNAL, _CLOSED,
)  # fmt: skip

# The rows of each query, by its text.
Rows = Mapping[str, Iterable[Row]]


class _Table:
    """Rows as dictionaries, kept without their columns' names."""

    def __init__(self, names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
        self._names = names
        self._rows = SpilledList(tuple, rows)

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            yield dict(zip(self._names, row, strict=True))


def read_books(data_dir: Path) -> Books:
    """The books of this moment. Raises BooksUnreadable."""
    path = data_dir / DATABASE_NAME
    if not path.is_file():
        raise BooksUnreadable(f"There is no database at {path}.")
    try:
        rows = _rows(path)
    except sqlite3.Error as error:
        raise BooksUnreadable(f"{path} can't be read: {error}.") from error
    return _books(rows)


def reader_of(data_dir: Path, database: Tables | None) -> Callable[[], Awaitable[Books]]:
    """Return the reader of a server's ``database``, or else of a data directory."""
    if database is None:
        return partial(asyncio.to_thread, read_books, data_dir)
    return partial(read_books_of, database)


async def read_books_of(database: Tables) -> Books:
    """The books of this moment. Raises BooksUnreadable."""
    try:
        found = await database.fetch_together([Query(sql) for sql in _ALL])
    except Unavailable as error:
        raise BooksUnreadable(error.message) from error
    return await asyncio.to_thread(_books, dict(zip(_ALL, found, strict=True)))


def _rows(path: Path) -> Rows:
    """The rows of all queries, of one moment. Raises BooksUnreadable and sqlite3.Error."""
    with closing(open_reader(path)) as reader:
        reader.execute("BEGIN")
        _require_schema(reader)
        return {sql: _read(reader.execute(sql)) for sql in _ALL}


def _read(cursor: sqlite3.Cursor) -> _Table:
    return _Table([name for name, *_ in cursor.description], cursor)


def _require_schema(reader: sqlite3.Connection) -> None:
    other = other_schema(reader)
    if other is not None:
        raise BooksUnreadable(
            f"The database can't be audited: {other}. Audit it with the version of the service that"
            " runs on it."
        )


def _books(rows: Rows) -> Books:
    return Books(
        orders=SpilledList(OrderEntry, _orders(rows)),
        payments=SpilledList(PaymentEntry, chain(_monero_payments(rows), _evm_payments(rows))),
        sweeps=SpilledList(SweepEntry, (from_row(SweepEntry, row) for row in rows[_SWEEPS])),
        watched=dict(_watched(rows)),
        evm_hot=next((row["hot_address"] for row in rows[_HOT]), None),
        evm_addresses=SpilledDict(None, ((row["address"], None) for row in rows[_EVM_ADDRESSES])),
        monero_primary=next((row["primary_address"] for row in rows[_PRIMARY]), None),
        withdrawals=tuple(from_row(TransferEntry, row) for row in rows[_WITHDRAWALS]),
        closed=frozenset(row["transfer_id"] for row in rows[_CLOSED]),
        from_journal=frozenset(row["txid"] for row in rows[_FROM_JOURNAL]),
        annotations=tuple(
            from_row(Annotation, row, wei=int(row["wei"])) for row in rows[_ANNOTATIONS]
        ),
        openings={
            row["network"]: from_row(OpeningEntry, row, wei=int(row["wei"]))
            for row in rows[_OPENINGS]
        },
    )


def _watched(rows: Rows) -> Iterator[tuple[str, Watched]]:
    for row in rows[_MONERO_WATCHED]:
        yield MONERO, from_row(Watched, row)
    for row in rows[_EVM_WATCHED]:
        yield row["network"], from_row(Watched, row)


def _orders(rows: Rows) -> Iterator[OrderEntry]:
    deposits = _Groups(rows[_DEPOSITS])
    transfers = _Groups(rows[_TRANSFERS])
    fills = _Groups(rows[_FILLS])
    events = _Groups(rows[_EVENTS])
    for row in rows[_ORDERS]:
        seq = row["seq"]
        happened = events.of(seq)
        repriced = (each["details"] for each in happened if each["event"] == "Repriced")
        named = sum(each["event"] == "RefundAddressGiven" for each in happened)
        yield from_row(
            OrderEntry,
            row,
            price=from_row(Price, row),
            replaced=max(0, named - 1),
            rates=tuple(orjson.loads(details)["rate"] for details in repriced),
            deposits=tuple(from_row(DepositEntry, each) for each in deposits.of(seq)),
            transfers=tuple(from_row(TransferEntry, each) for each in transfers.of(seq)),
            fills=tuple(from_row(FillEntry, each) for each in fills.of(seq)),
        )
    for groups in (deposits, transfers, fills, events):
        groups.require_end()


class _Groups:
    """Rows of orders or payments, read once beside these, in the same sequence."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._groups = groupby(rows, itemgetter("seq"))
        self._next = next(self._groups, None)

    def of(self, seq: int) -> list[Row]:
        """Return the rows of the order or payment, which is the next in sequence."""
        if self._next is None or self._next[0] != seq:
            return []
        found = list(self._next[1])
        self._next = next(self._groups, None)
        return found

    def require_end(self) -> None:
        """Raise BooksUnreadable if rows were not asked for."""
        if self._next is not None:
            raise BooksUnreadable(f"Rows are out of sequence at number {self._next[0]}.")


def _monero_payments(rows: Rows) -> Iterator[PaymentEntry]:
    for row in rows[_MONERO_PAYMENTS]:
        yield from_row(PaymentEntry, row, network=MONERO, txids=(row["txid"],))


def _evm_payments(rows: Rows) -> Iterator[PaymentEntry]:
    attempts = _Groups(rows[_EVM_ATTEMPTS])
    for row in rows[_EVM_PAYMENTS]:
        txids = tuple(each["txid"] for each in attempts.of(row["seq"]))
        yield from_row(PaymentEntry, row, txids=txids)
    attempts.require_end()
