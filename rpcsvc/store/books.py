"""Reading the books beside a running service: integrators' fees, upstream orders in doubt.

Read-only, so that it can run while a server owns the data directory. What does not live here:
checking and copying the database (maintenance.py).
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, open_reader

# The settled payouts are the books: no fee without one, and none is counted twice.
_INTEGRATOR_FEES: Final = """
    SELECT o.integrator, t.asset, sum(t.integrator_fee), count(*)
    FROM orders o JOIN transfers t USING (order_id)
    WHERE o.integrator IS NOT NULL AND t.kind = 'payout' AND t.state = 'settled'
    GROUP BY o.integrator, t.asset ORDER BY o.integrator, t.asset
"""


class BooksUnreadable(Exception):
    """There is no database, or it can't be read; the message says why."""


class IntegratorFees(NamedTuple):
    """What an integrator has earned in one asset, in atomic units, by so many settled payouts."""

    integrator: str
    asset: str
    units: int
    payouts: int


class Doubt(NamedTuple):
    """A call to the upstream whose outcome is not known. ``created_at`` in ms since the epoch.

    ``note``: what the operator noted when closing it, of one that came into doubt again.
    """

    order_id: str
    upstream_id: str | None
    reason: str | None
    note: str | None
    created_at: int


def integrator_fees(data_dir: Path) -> list[IntegratorFees]:
    """What integrators have earned. Raises BooksUnreadable."""
    return [IntegratorFees(*row) for row in _rows(data_dir, _INTEGRATOR_FEES)]


def doubts(data_dir: Path) -> list[Doubt]:
    """The upstream orders in doubt, oldest first. Raises BooksUnreadable."""
    sql = (
        "SELECT order_id, upstream_id, reason, note, created_at FROM relays"
        " WHERE state IN ('claimed', 'reconciling') ORDER BY seq"
    )
    return [Doubt(*row) for row in _rows(data_dir, sql)]


class StoredTicket(NamedTuple):
    """A support ticket. ``created_at`` in ms since the epoch."""

    ticket_id: str
    created_at: int
    category: str
    order_id: str | None
    wallet_address: str | None
    message: str


def tickets(data_dir: Path) -> list[StoredTicket]:
    """The tickets, oldest first. Raises BooksUnreadable."""
    sql = (
        "SELECT ticket_id, created_at, category, order_id, wallet_address, message FROM tickets"
        " ORDER BY seq"
    )
    return [StoredTicket(*row) for row in _rows(data_dir, sql)]


def _rows(data_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    path = data_dir / DATABASE_NAME
    if not path.is_file():
        raise BooksUnreadable(f"There is no database at {path}.")
    try:
        with closing(open_reader(path)) as reader:
            return reader.execute(sql).fetchall()
    except sqlite3.Error as error:
        raise BooksUnreadable(f"{path} can't be read: {error}.") from error
