"""Claims on upstream orders as rows, and what the upstream last said of an order.

What does not live here: the orders themselves (order_rows.py, orders.py).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

import orjson

from rpcsvc.domain.order import Report
from rpcsvc.orders.ports.store import RelayRecord, RelayState
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.order_rows import Row, in_order, named, upsert

_RELAY: Final = tuple(f.name for f in fields(RelayRecord))
_COLUMNS: Final = tuple("idempotency_key" if name == "key" else name for name in _RELAY)
_PLAIN_UPSERT: Final = upsert("relays", _COLUMNS, ("order_id",))
# A claim that became an order stays so. The operator's note is no column of this: a call that was
# under way when he closed its claim leaves the note as it is (operator_books.py).
_UPSERT: Final = _PLAIN_UPSERT._replace(sql=f"{_PLAIN_UPSERT.sql} WHERE relays.state <> 'created'")
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM relays"  # noqa: S608 - constants
_REPORT: Final = tuple(f.name for f in fields(Report))
# Until the upstream has been asked for the first time there is no report.
_SELECT_REPORT: Final = (
    f"SELECT {', '.join(_REPORT)} FROM relays WHERE order_id = ? AND evidence IS NOT NULL"  # noqa: S608
)
_UPDATE_REPORT: Final = (
    f"UPDATE relays SET {', '.join(f'{c} = ?' for c in _REPORT)}, evidence = ? WHERE order_id = ?"  # noqa: S608
)


class SqliteRelays:
    """The part of the OrderStore port that is about orders at an upstream."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def relay_of_key(self, namespace: str, key: str) -> RelayRecord | None:
        """The latest claim on an upstream order that an idempotency key stands for."""
        where = " WHERE namespace = ? AND idempotency_key = ? ORDER BY seq DESC LIMIT 1"
        row = self._db.read_one(_SELECT + where, (namespace, key))
        return _relay_from(row) if row else None

    async def relays_in(self, state: RelayState) -> list[RelayRecord]:
        """All claims in a state, oldest first."""
        rows = self._db.read(_SELECT + " WHERE state = ? ORDER BY seq", (state.value,))
        return [_relay_from(row) for row in rows]

    async def relays_since(self, at: int) -> list[int]:
        """When each claim was made that is younger than ``at``."""
        sql = "SELECT created_at FROM relays ORDER BY seq DESC LIMIT 1000"
        return [made_at for (made_at,) in self._db.read(sql) if made_at > at]

    async def open_relayed(self) -> list[str]:
        """Ids of the orders that an upstream settles and that are not over, oldest first."""
        rows = self._db.read(
            "SELECT order_id FROM orders WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL"
            " ORDER BY seq"
        )
        return [order_id for (order_id,) in rows]

    def _report(self, order_id: str) -> Report | None:
        row = self._db.read_one(_SELECT_REPORT, (order_id,))
        return None if row is None else Report(**named(_REPORT, row))


def relay_statement(record: RelayRecord) -> Statement:
    """Keep a claim as it stands now."""
    values = dict(zip(_COLUMNS, in_order(_RELAY, record), strict=True))
    values["state"] = record.state.value
    values["params"] = None if record.params is None else orjson.dumps(record.params).decode()
    return Statement(_UPSERT, tuple(values[column] for column in _COLUMNS))


def report_statement(order_id: str, report: Report, evidence: bytes) -> Statement:
    """Keep what the upstream said of an order, with the answer that this was read from."""
    return Statement(_UPDATE_REPORT, (*in_order(_REPORT, report), evidence, order_id))


def _relay_from(row: Row) -> RelayRecord:
    values = named(_RELAY, row)
    values["state"] = RelayState(values["state"])
    if values["params"] is not None:
        values["params"] = orjson.loads(values["params"])
    return RelayRecord(**values)
