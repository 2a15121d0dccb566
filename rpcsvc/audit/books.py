"""Reads the books: a snapshot of the database beside a running service, as plain records.

All rows are fetched in one read transaction over a read-only connection, whatever the service
writes meanwhile (REPEATABLE READ on PostgreSQL), and made into records after it: while it is open
the service can't begin its log anew. Nothing is written: books are audited on a full disk too.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
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
from rpcsvc.domain.order import DepositState, TransferKind, TransferState
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, open_reader
from rpcsvc.store.backends.sqlite.migrations import other_schema
from rpcsvc.store.database import BooksUnreadable, Query, Tables
from rpcsvc.store.orders import AUDITED_EVENTS

_ORDERS = (
    "SELECT order_id, direction, deposit_network, payout_network, deposit_address, to_address,"
    " rate, spread_bps, payout_fee, min_received_bps, integrator_bps, funding_fee, refund_fee,"
    " status, agreed_refund_address, refund_address, leftover FROM orders"
    " WHERE upstream_id IS NULL ORDER BY seq"
)
_DEPOSITS = (
    "SELECT order_id, network, txid, units, sender, state, transfer_id, is_dust, rate"
    " FROM deposits"
    " ORDER BY order_id, network, txid, output_index"
)
_TRANSFERS = (
    "SELECT order_id, transfer_id, kind, network, address, units, fee, integrator_fee, state, txid"
    " FROM transfers ORDER BY order_id, transfer_id"
)
_WITHDRAWALS = (
    "SELECT withdrawal_id, 'payout', network, address, units, fee, 0, state, txid"
    " FROM withdrawals ORDER BY seq"
)
_FILLS = "SELECT order_id, units, output, integrator_fee, rate FROM fills ORDER BY order_id, chunk"
_EVENTS = (
    "SELECT order_id, event, details FROM order_events"  # noqa: S608 - of constants
    f" WHERE event IN {AUDITED_EVENTS} ORDER BY order_id, version"
)
# A transaction that pays several transfers is one entry for each of them.
_MONERO_PAYMENTS = (
    "SELECT coalesce(e.transfer_id, p.payment_id), p.purpose, coalesce(e.address, p.address),"
    " coalesce(e.units, p.units), p.state, p.txid, p.fee, p.tx_key, p.height"
    " FROM monero_payments p LEFT JOIN monero_payees e ON e.payment_id = p.payment_id"
    " ORDER BY p.seq, e.transfer_id"
)
_ANNOTATIONS = (
    "SELECT network, txid, note, coalesce(wei, '0') FROM annotated_transactions"
    " ORDER BY at, network, txid"
)
_OPENINGS = (
    "SELECT o.network, block_number, block_hash, nonce, wei FROM evm_openings o"
    " JOIN evm_wallet w ON lower(w.hot_address) = lower(o.sender)"
)
_EVM_PAYMENTS = (
    "SELECT payment_id, network, purpose, recipient, units, state, nonce FROM evm_payments"
    " ORDER BY seq"
)
_EVM_ATTEMPTS = "SELECT payment_id, txid FROM evm_attempts ORDER BY payment_id, number"
_SWEEPS = (
    "SELECT network, address, units, taken, state, payment_id FROM evm_sweeps"
    " ORDER BY network, address_index, serial"
)
_MONERO_WATCHED = (
    "SELECT (SELECT min(height) FROM (SELECT height FROM monero_cursor"
    " UNION ALL SELECT height FROM monero_deposits UNION ALL SELECT height FROM monero_payments)),"
    " height, hash FROM monero_cursor ORDER BY height DESC LIMIT 1"
)
_EVM_WATCHED = (
    "SELECT network, (SELECT min(at) FROM (SELECT number AS at FROM evm_cursor"
    " WHERE network = n.network UNION ALL SELECT block_number FROM evm_deposits"
    " WHERE network = n.network UNION ALL SELECT block_number FROM evm_payments"
    " WHERE network = n.network)), number, hash FROM evm_cursor n"
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

Row = tuple[Any, ...]
# The rows of each query, by its text.
Rows = Mapping[str, Iterable[Row]]


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
    """What reads the books: those of a server's ``database``, or else of a data directory."""
    if database is None:
        return partial(asyncio.to_thread, read_books, data_dir)
    return partial(read_books_of, database)


async def read_books_of(database: Tables) -> Books:
    """The books of this moment. Raises BooksUnreadable."""
    try:
        found = await database.fetch_together([Query(sql) for sql in _ALL])
    except Unavailable as error:
        raise BooksUnreadable(error.message) from error
    rows = {sql: [tuple(row) for row in answer] for sql, answer in zip(_ALL, found, strict=True)}
    return await asyncio.to_thread(_books, rows)


def _rows(path: Path) -> Rows:
    """The rows of all queries, of one moment. Raises BooksUnreadable and sqlite3.Error."""
    with closing(open_reader(path)) as reader:
        reader.execute("BEGIN")
        _require_schema(reader)
        return {sql: reader.execute(sql).fetchall() for sql in _ALL}


def _require_schema(reader: sqlite3.Connection) -> None:
    other = other_schema(reader)
    if other is not None:
        raise BooksUnreadable(
            f"The database can't be audited: {other}. Audit it with the version of the service that"
            " runs on it."
        )


def _books(rows: Rows) -> Books:
    return Books(
        orders=_orders(rows),
        payments=(*_monero_payments(rows), *_evm_payments(rows)),
        sweeps=tuple(SweepEntry(*row) for row in rows[_SWEEPS]),
        watched=dict(_watched(rows)),
        evm_hot=_one(rows[_HOT]),
        evm_addresses=frozenset(str(address) for (address,) in rows[_EVM_ADDRESSES]),
        monero_primary=_one(rows[_PRIMARY]),
        withdrawals=tuple(_transfer(*row) for row in rows[_WITHDRAWALS]),
        closed=frozenset(str(name) for (name,) in rows[_CLOSED]),
        from_journal=frozenset(str(txid) for (txid,) in rows[_FROM_JOURNAL]),
        annotations=tuple(
            Annotation(network, txid, note, int(wei))
            for network, txid, note, wei in rows[_ANNOTATIONS]
        ),
        openings={
            network: OpeningEntry(block, block_hash, nonce, int(wei))
            for network, block, block_hash, nonce, wei in rows[_OPENINGS]
        },
    )


def _one(rows: Iterable[Row]) -> str | None:
    return next((str(row[0]) for row in rows), None)


def _watched(rows: Rows) -> Iterator[tuple[str, Watched]]:
    for row in rows[_MONERO_WATCHED]:
        yield MONERO, Watched(*row)
    for network, *seen in rows[_EVM_WATCHED]:
        yield network, Watched(*seen)


def _orders(rows: Rows) -> tuple[OrderEntry, ...]:
    deposits = _grouped(rows[_DEPOSITS], _deposit)
    transfers = _grouped(rows[_TRANSFERS], _transfer)
    fills = _grouped(rows[_FILLS], FillEntry)
    events = _grouped(rows[_EVENTS], lambda event, details: (event, orjson.loads(details)))
    return tuple(_order(row, deposits, transfers, fills, events) for row in rows[_ORDERS])


def _order(
    row: Row,
    deposits: Mapping[str, list[DepositEntry]],
    transfers: Mapping[str, list[TransferEntry]],
    fills: Mapping[str, list[FillEntry]],
    events: Mapping[str, list[tuple[str, dict[str, Any]]]],
) -> OrderEntry:
    order_id, direction, *terms = row
    deposit_network, payout_network, deposit_address, to_address, *terms = terms
    *price, refund_fee, status, agreed_refund_address, refund_address, left = terms
    happened = events.get(order_id, [])
    rates = [details["rate"] for event, details in happened if event == "Repriced"]
    named = sum(event == "RefundAddressGiven" for event, _ in happened)
    return OrderEntry(
        order_id=order_id,
        direction=Direction(direction),
        deposit_network=deposit_network,
        payout_network=payout_network,
        deposit_address=deposit_address,
        to_address=to_address,
        price=Price(*price),
        refund_fee=refund_fee,
        status=status,
        agreed_refund_address=agreed_refund_address,
        refund_address=refund_address,
        replaced=max(0, named - 1),
        rates=tuple(rates),
        leftover=left,
        deposits=tuple(deposits.get(order_id, ())),
        transfers=tuple(transfers.get(order_id, ())),
        fills=tuple(fills.get(order_id, ())),
    )


def _deposit(*row: Any) -> DepositEntry:
    network, txid, units, sender, state, transfer_id, is_dust, rate = row
    return DepositEntry(
        network, txid, units, sender, DepositState(state), transfer_id, bool(is_dust), rate
    )


def _transfer(*row: Any) -> TransferEntry:
    transfer_id, kind, network, address, units, fee, integrator_fee, state, txid = row
    return TransferEntry(
        transfer_id, TransferKind(kind), network, address, units, fee, integrator_fee,
        TransferState(state), txid,
    )  # fmt: skip


def _grouped(rows: Iterable[Row], make: Any) -> dict[str, list[Any]]:
    """Rows by their first column, made of the others."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for key, *row in rows:
        groups[key].append(make(*row))
    return groups


def _monero_payments(rows: Rows) -> Iterator[PaymentEntry]:
    for payment_id, purpose, address, units, state, txid, fee, key, block in rows[_MONERO_PAYMENTS]:
        yield PaymentEntry(
            payment_id, MONERO, purpose, address, units, state, (txid,),
            fee=fee, tx_key=key, block=block,
        )  # fmt: skip


def _evm_payments(rows: Rows) -> Iterator[PaymentEntry]:
    attempts = _grouped(rows[_EVM_ATTEMPTS], str)
    for payment_id, network, purpose, recipient, units, state, nonce in rows[_EVM_PAYMENTS]:
        txids = tuple(attempts.get(payment_id, ()))
        yield PaymentEntry(
            payment_id, network, purpose, recipient, units, state, txids, nonce=nonce
        )
