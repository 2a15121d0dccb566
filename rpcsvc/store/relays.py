"""Claims on upstream orders as rows, and what the upstream last said of an order."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Final

import orjson

from rpcsvc.domain.order import Report
from rpcsvc.orders.ports.store import RelayRecord, RelayState
from rpcsvc.store.database import Row, Statement, Tables, fields_of, update, upsert

_COLUMNS: Final = tuple(
    "idempotency_key" if field.name == "key" else field.name for field in fields(RelayRecord)
)
# A claim that became an order stays so. The operator's note is no column of this: a call that was
# under way when he closed its claim leaves the note as it is (operator_books.py).
_UPSERT: Final = f"{upsert('relays', _COLUMNS, ('order_id',))} WHERE relays.state <> 'created'"
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM relays"
_SELECT_OPEN: Final = (
    "SELECT order_id FROM orders WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL"
    " ORDER BY seq"
)
_REPORT: Final = tuple(field.name for field in fields(Report))
# Until the upstream has been asked for the first time there is no report.
_SELECT_REPORT: Final = (
    f"SELECT {', '.join(_REPORT)} FROM relays WHERE order_id = :order_id AND evidence IS NOT NULL"
)
_UPDATE_REPORT: Final = update("relays", (*_REPORT, "evidence"), "order_id = :order_id")


class SqlRelays:
    """The part of the OrderStore port that is about orders at an upstream."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def relay_of_key(self, namespace: str, key: str) -> RelayRecord | None:
        """The latest claim on an upstream order that an idempotency key stands for."""
        sql = (
            f"{_SELECT} WHERE namespace = :namespace AND idempotency_key = :key"
            " ORDER BY seq DESC LIMIT 1"
        )
        row = await self._db.fetch_one(sql, namespace=namespace, key=key)
        return _relay_from(row) if row else None

    async def relays_in(self, state: RelayState) -> list[RelayRecord]:
        """All claims in a state, oldest first."""
        rows = await self._db.fetch(
            f"{_SELECT} WHERE state = :state ORDER BY seq", state=state.value
        )
        return [_relay_from(row) for row in rows]

    async def relays_since(self, at: int) -> list[int]:
        """When each claim was made that is younger than ``at``."""
        rows = await self._db.fetch("SELECT created_at FROM relays ORDER BY seq DESC LIMIT 1000")
        return [row["created_at"] for row in rows if row["created_at"] > at]

    async def open_relayed(self) -> list[str]:
        """Ids of the orders that an upstream settles and that are not over, oldest first."""
        return [row["order_id"] for row in await self._db.fetch(_SELECT_OPEN)]

    async def _report(self, order_id: str) -> Report | None:
        row = await self._db.fetch_one(_SELECT_REPORT, order_id=order_id)
        return None if row is None else Report(**row)


def relay_statement(record: RelayRecord) -> Statement:
    """Keep a claim as it stands now."""
    values: dict[str, Any] = asdict(record)
    values["idempotency_key"] = values.pop("key")
    values["state"] = record.state.value
    values["params"] = None if record.params is None else orjson.dumps(record.params).decode()
    return Statement(_UPSERT, values)


def report_statement(order_id: str, report: Report, evidence: bytes) -> Statement:
    """Keep what the upstream said of an order, with the answer that this was read from."""
    return Statement(_UPDATE_REPORT, {**asdict(report), "evidence": evidence, "order_id": order_id})


def _relay_from(row: Row) -> RelayRecord:
    values = fields_of(row)
    values["key"] = values.pop("idempotency_key")
    values["state"] = RelayState(values["state"])
    if values["params"] is not None:
        values["params"] = orjson.loads(values["params"])
    return RelayRecord(**values)
