"""Compares the orders of a data directory with the simulated chains, without the service's code."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from rpcsvc.store.backends.sqlite.maintenance import check_database

# What the chain shows of each order, next to what the order says.
_PAYOUTS_ON_CHAIN = """
    SELECT o.order_id, count(*) FROM orders o
    JOIN transfers t ON t.order_id = o.order_id AND t.kind = 'payout'
    JOIN sandbox_transactions s ON s.network = t.network AND s.txid = t.txid
        AND s.state IN ('mempool', 'mined')
    GROUP BY o.order_id HAVING count(*) > 1
"""
_STRANGE_TRANSFERS = """
    SELECT s.txid FROM sandbox_transactions s
    LEFT JOIN transfers t ON t.network = s.network AND t.txid = s.txid
        AND t.address = s.recipient AND t.units = s.units AND t.fee = s.fee
    LEFT JOIN withdrawals w ON w.network = s.network AND w.txid = s.txid
        AND w.address = s.recipient AND w.units = s.units AND w.fee = s.fee
    WHERE s.kind = 'transfer' AND t.transfer_id IS NULL AND w.withdrawal_id IS NULL
"""
_UNCREDITED = """
    SELECT s.txid FROM sandbox_transactions s JOIN orders o ON o.deposit_address = s.recipient
    LEFT JOIN deposits d ON d.network = s.network AND d.txid = s.txid AND d.units = s.units
        AND d.order_id = o.order_id
    WHERE s.kind = 'deposit' AND s.state = 'mined' AND s.watched = 0 AND d.txid IS NULL
"""
_BALANCE = """
    SELECT c.network, c.balance, c.inventory + coalesce(sum(
        CASE s.kind WHEN 'deposit' THEN s.units ELSE -(s.units + s.fee) END), 0) AS expected
    FROM sandbox_chains c
    LEFT JOIN sandbox_transactions s ON s.network = c.network AND s.state = 'mined'
    GROUP BY c.network HAVING c.balance <> expected
"""
_SETTLED_BUT_NOT_ON_CHAIN = """
    SELECT t.transfer_id FROM transfers t
    LEFT JOIN sandbox_transactions s ON s.network = t.network AND s.txid = t.txid
        AND s.state = 'mined'
    WHERE t.state = 'settled' AND s.txid IS NULL
"""
_FAILED_BUT_ON_CHAIN = """
    SELECT t.transfer_id FROM transfers t
    JOIN sandbox_transactions s ON s.network = t.network AND s.txid = t.txid
        AND s.state IN ('mempool', 'mined')
    WHERE t.state IN ('failed', 'cancelled')
"""
_WRONG_AMOUNT = """
    SELECT t.transfer_id FROM transfers t JOIN orders o USING (order_id)
    WHERE t.kind = 'payout' AND t.state NOT IN ('failed', 'cancelled')
        AND t.units <> o.expected_output
        AND o.order_id NOT IN (SELECT order_id FROM fills)
        AND (SELECT sum(units) FROM deposits d WHERE d.transfer_id = t.transfer_id)
            = o.deposit_amount
        AND NOT EXISTS (SELECT 1 FROM deposits d WHERE d.transfer_id = t.transfer_id
             AND d.first_seen_at > coalesce(o.lock_broken_at, o.price_locked_until))
"""
_NOWHERE = """
    SELECT d.txid FROM deposits d JOIN orders o USING (order_id)
    LEFT JOIN transfers t ON t.transfer_id = d.transfer_id
    WHERE d.state = 'confirmed' AND d.is_dust = 0 AND (
        t.state IN ('failed', 'cancelled')
        OR (d.transfer_id IS NULL AND o.action_required IS NULL
            AND o.status IN ('completed', 'refunding', 'refunded', 'failed', 'expired')))
"""
_HALF_WRITTEN = """
    SELECT 'order ' || o.order_id FROM orders o
    LEFT JOIN event_log e ON e.order_seq = o.seq AND e.version = o.history_from
    WHERE e.version IS NULL
    UNION ALL
    SELECT 'key ' || idempotency_key FROM idempotency_keys k
    WHERE NOT EXISTS (SELECT 1 FROM orders o WHERE o.seq = k.order_seq)
"""
_CHECKS = {
    "a payout is not what was quoted": _WRONG_AMOUNT,
    "a deposit is neither swapped, sent back, dust, nor waiting": _NOWHERE,
    "an order is half written": _HALF_WRITTEN,
    "an order is paid out twice": _PAYOUTS_ON_CHAIN,
    "a transfer on the chain is not in the books": _STRANGE_TRANSFERS,
    "a deposit on the chain is not credited": _UNCREDITED,
    "a wallet does not add up": _BALANCE,
    "a settled transfer is not on its chain": _SETTLED_BUT_NOT_ON_CHAIN,
    "a failed transfer is on its chain": _FAILED_BUT_ON_CHAIN,
}


def _open(data_dir: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{(data_dir / 'rpcsvc.db').as_uri()}?mode=ro", uri=True)


def audit(data_dir: Path) -> list[str]:
    """All differences between orders and chains; empty if there are none."""
    with closing(_open(data_dir)) as database:
        return check_database(data_dir) + differences(database)


def differences(database: sqlite3.Connection) -> list[str]:
    """All differences between the orders and the chains of an open database."""
    return [
        f"{problem}: {tuple(row)}"
        for problem, query in _CHECKS.items()
        for row in database.execute(query)
    ]


def orders_of(data_dir: Path) -> dict[str, str]:
    """Every order's status by id."""
    with closing(_open(data_dir)) as database:
        return dict(database.execute("SELECT order_id, status FROM orders"))


def deposits_on_chain(data_dir: Path, order_id: str) -> int:
    """The deposits that the simulated chain has for an order, recorded by the service or not."""
    query = (
        "SELECT count(*) FROM sandbox_transactions s JOIN orders o"
        " ON o.deposit_address = s.recipient WHERE o.order_id = ?"
    )
    with closing(_open(data_dir)) as database:
        return int(database.execute(query, (order_id,)).fetchone()[0])


def debits(data_dir: Path, to: str) -> list[int]:
    """Units of each transaction from the simulated wallets to an address."""
    sql = (
        "SELECT units FROM sandbox_transactions WHERE recipient = ? AND kind = 'transfer'"
        " AND state IN ('mempool', 'mined')"
    )
    with closing(_open(data_dir)) as database:
        return [units for (units,) in database.execute(sql, (to,))]


def count(data_dir: Path, table: str) -> int:
    """How many rows a table has."""
    with closing(_open(data_dir)) as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
