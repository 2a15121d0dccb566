"""SQLite uses the intended index for each query on a large table."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from rpcsvc.settlement.onchain.evm.deposit_ledger import (
    _AWAITING,
    _IS_AWAITING,
    _SELECT_ADDRESS,
    _TO_WATCH,
)
from rpcsvc.settlement.onchain.evm.payment_ledger import _SELECT_SWEEP, _UNSWEPT
from rpcsvc.settlement.onchain.unrecorded import _UNATTRIBUTED
from rpcsvc.store.backends.sqlite.database import compiled
from rpcsvc.store.backends.sqlite.migrations import migrate
from rpcsvc.store.checks import _THERE
from rpcsvc.store.operator_books import _FLOWS, _MADE_AT
from rpcsvc.store.order_rows import _DELETE_ENDED_VIEW, _SELECT_OPEN, _SELECT_UNPACKED
from rpcsvc.store.orders import (
    _REDUCE,
    _SELECT_GIVEN,
    _SELECT_OLD,
    _SELECT_OVERDUE,
    _SELECT_SESSION,
    _SELECT_SESSION_BEFORE,
    _SELECT_VIEW,
)
from rpcsvc.store.reservations import _SELECT_CLAIMS

PLANS = [
    (_SELECT_GIVEN, "SEARCH orders USING INDEX orders_by_address_ends"),
    (_SELECT_SESSION, "SEARCH orders USING INDEX orders_by_session_start"),
    (_SELECT_SESSION_BEFORE, "orders_by_session_start (session_start=? AND rowid<?)"),
    (_SELECT_OVERDUE.format(scanned="deadline_at"), "SEARCH orders USING INDEX orders_by_deadline"),
    (_SELECT_OLD, "SEARCH orders USING INDEX orders_with_history (status_at<?)"),
    (_SELECT_OLD, "SEARCH e USING PRIMARY KEY (order_seq=? AND version=?)"),
    (_SELECT_OLD, "SEARCH f USING PRIMARY KEY (order_id=?)"),
    (_SELECT_OLD, "SEARCH w USING INTEGER PRIMARY KEY (rowid=?)"),
    (_REDUCE[0], "SEARCH orders USING INTEGER PRIMARY KEY (rowid=?)"),
    (_REDUCE[1], "SEARCH event_log USING PRIMARY KEY (order_seq=?)"),
    (_REDUCE[2], "SEARCH status_views USING INTEGER PRIMARY KEY (rowid=?)"),
    (_SELECT_UNPACKED, "USING INDEX idempotency_keys_unpacked (created_at<?)"),
    (_DELETE_ENDED_VIEW, "SEARCH status_views USING INTEGER PRIMARY KEY (rowid=?)"),
    (_SELECT_VIEW, "SEARCH f USING INDEX funding_unresolved (order_id=?)"),
    (_THERE, "USING INDEX orders_open_at_upstream"),
    (_SELECT_OPEN, "USING INDEX orders_open_at_upstream"),
    (_IS_AWAITING, "orders_awaiting (deposit_network=? AND expires_at>?)"),
    (_AWAITING, "SEARCH o USING INDEX orders_by_address_ends"),
    (_AWAITING, "SEARCH a USING INDEX evm_addresses_by_address (address_lower=?)"),
    (f"{_SELECT_ADDRESS} WHERE a.address_lower IN :addresses", "(address_lower=?)"),
    (_UNATTRIBUTED, "SEARCH o USING INDEX orders_by_address_ends"),
    (_TO_WATCH, "SEARCH d USING INDEX evm_deposits_watched"),
    (_TO_WATCH, "(network=? AND block_number>?)"),
    (_UNSWEPT, "SEARCH h USING INDEX evm_holdings_unswept"),
    (_MADE_AT, "SEARCH orders USING INTEGER PRIMARY KEY (rowid>?)"),
    (_FLOWS, "SEARCH o USING INTEGER PRIMARY KEY (rowid>?)"),
    (_FLOWS, "SEARCH d USING INDEX deposits_by_order (order_id=?)"),
    (_FLOWS, "SEARCH t USING INDEX transfers_by_order (order_id=?)"),
    (_SELECT_CLAIMS, "SEARCH r USING INDEX reservations_funded (network=?)"),
    (f"{_SELECT_SWEEP} AND state = 'signed'", "USING INDEX evm_sweeps_under_way"),
]


@pytest.mark.parametrize(("sql", "step"), PLANS)
def test_large_tables_are_searched_by_index(sql: str, step: str) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        migrate(database)
        text = compiled(sql).text
        plan = database.execute(f"EXPLAIN QUERY PLAN {text}", ["[]"] * text.count("?")).fetchall()
        assert step in str(plan).replace("COVERING ", "")
