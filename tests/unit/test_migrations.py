"""What migrations make of rows that older versions wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rpcsvc.store.backends.sqlite.migrations import migrate, scripts

CREATED, EXPIRES, ENDED = 1_000, 5_000, 6_000
RATE = 165_000_000
_ORDER = """
    INSERT INTO orders (order_id, session_id, direction, chain, chain_id, deposit_network,
        payout_network, deposit_address, to_address, deposit_amount, expected_output, min_received,
        min_deposit, max_deposit, rate, spread_bps, payout_fee, min_received_bps, refund_fee,
        created_at, expires_at, late_window, confirm_timeout, prepare_timeout, payout_check,
        refund_reminder, status, status_at, version, deadline_at, completed_at, view, view_key)
    VALUES (?1, 's', 'x2u', 'arbitrum', 42161, 'monero', 'arbitrum', 'address of ' || ?1, '0xTo',
        10, 9, 8, 1, 100, ?2, 50, 0, 9900, 0, ?3, ?4, 1, 1, 1, 1, 1, ?5, ?3, 2,
        iif(?5 = 'expired', NULL, 1), ?6, x'7b7d', 'old')
"""
_DEPOSIT = """
    INSERT INTO deposits (network, txid, output_index, order_id, units, first_seen_at, state,
        is_dust) VALUES ('monero', ?, 0, ?, 5, ?, 'confirmed', 0)
"""


@pytest.fixture
def old(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "old.db", isolation_level=None)) as database:
        yield database


def older_than(database: sqlite3.Connection, number: int) -> None:
    for each, _, sql in scripts():
        if each < number:
            database.executescript(f"{sql}; PRAGMA user_version = {each};")


def order(database: sqlite3.Connection, order_id: str, status: str = "deposit_detected") -> None:
    ended = ENDED if status == "expired" else None
    database.execute(_ORDER, (order_id, RATE, CREATED, EXPIRES, status, ended))


def test_deposits_from_before_the_price_lock_have_the_orders_rate(old: sqlite3.Connection) -> None:
    """Unless one of them was late: such an order is priced as a whole when it is decided."""
    older_than(old, 23)
    for order_id in ("in time", "late"):
        order(old, order_id)
        old.execute(_DEPOSIT, (f"{order_id} 1", order_id, EXPIRES))
        old.execute(_DEPOSIT, (f"{order_id} 2", order_id, EXPIRES + (order_id == "late")))
    migrate(old)
    found = dict(old.execute("SELECT txid, rate FROM deposits"))
    assert found == {"in time 1": RATE, "in time 2": RATE, "late 1": None, "late 2": None}
    assert old.execute("SELECT DISTINCT price_locked_until FROM orders").fetchall() == [(None,)]


def test_orders_that_ended_unpaid_are_found_among_older_ones(old: sqlite3.Connection) -> None:
    older_than(old, 29)
    for order_id, status in (("unpaid", "expired"), ("paid", "expired"), ("open", "refunding")):
        order(old, order_id, status)
    old.execute(_DEPOSIT, ("tx", "paid", ENDED + 1))
    order(old, "paid upstream", "expired")
    old.execute(
        "INSERT INTO relays (order_id, state, created_at, session_id, upstream_id, raw,"
        " deposit_txid) VALUES ('paid upstream', 'created', 1, 's', 'up', x'', 'tx')"
    )
    migrate(old)
    found = old.execute("SELECT order_id, unpaid_since FROM orders WHERE unpaid_since IS NOT NULL")
    assert found.fetchall() == [("unpaid", ENDED)]
