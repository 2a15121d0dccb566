"""Orders as rows: the OrderStore port over SQLite.

What does not live here: transactions and connections (sqlite.py), what the values mean (domain/).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, fields, replace
from typing import Any

import orjson

from rpcsvc.domain.effects import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import (
    Deposit,
    DepositKey,
    Fill,
    Order,
    Report,
    Terms,
    Timeouts,
    Transfer,
    TwapPlan,
)
from rpcsvc.domain.pricing import Price
from rpcsvc.domain.states import (
    DepositState,
    Direction,
    OnDeadline,
    OrderStatus,
    TransferKind,
    TransferState,
)
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports import (
    Change,
    HistoryEntry,
    PendingEffect,
    RelayRecord,
    RelayState,
    StatusView,
    StoredResponse,
    Ticket,
)
from rpcsvc.store.sqlite import Database, Insert, Statement

_ASSETS = {asset.symbol: asset for asset in (XMR, USDC)}

_TERMS = (
    "order_id", "session_id", "direction", "chain", "chain_id", "deposit_network",
    "payout_network", "deposit_address", "to_address", "deposit_amount", "expected_output",
    "min_received", "min_deposit", "max_deposit", "rate", "spread_bps", "payout_fee",
    "min_received_bps", "refund_fee", "created_at", "expires_at", "late_window",
    "confirm_timeout", "prepare_timeout", "payout_check", "refund_reminder", "integrator",
    "integrator_bps", "twap_chunk_usd", "twap_interval_ms", "upstream_id",
)  # fmt: skip
# The terms that are columns as they stand: all but direction, price, timeouts and TWAP plan.
_PLAIN_TERMS = (*_TERMS[:2], *_TERMS[3:14], *_TERMS[18:21], _TERMS[26], _TERMS[30])
_STANDING = (
    "status", "status_at", "version", "deadline_at", "on_deadline", "refund_address",
    "action_required", "error_message", "completed_at", "leftover",
)  # fmt: skip
_DEPOSIT = (
    "network", "txid", "output_index", "order_id", "units", "sender", "first_seen_at", "state",
    "transfer_id", "is_dust",
)  # fmt: skip
_TRANSFER = (
    "transfer_id",
    "order_id",
    "kind",
    "network",
    "asset",
    "address",
    "units",
    "fee",
    "state",
    "txid",
    "raw",
    "reason",
    "integrator_fee",
    "receipt",
)
_FILL = ("order_id", "chunk", "units", "output", "integrator_fee", "rate", "at")  # fmt: skip


def _insert(table: str, columns: tuple[str, ...]) -> Insert:
    marks = ", ".join("?" for _ in columns)
    return Insert(f"INSERT INTO {table} ({', '.join(columns)}) VALUES {{rows}}", f"({marks})")  # noqa: S608 - constants


def _upsert(table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> Insert:
    """Insert, or update all but the key; triggers refuse to change what must stay."""
    updates = ", ".join(f"{c} = excluded.{c}" for c in columns if c not in key)
    plain = _insert(table, columns)
    return plain._replace(sql=f"{plain.sql} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}")


# How much of a session id its index holds (migrations/0005_sessions.sql).
_SESSION_START = 8
# How much of an address its index holds (migrations/0003_address_index.sql).
_ADDRESS_START = 18
_SELECT_BY_ADDRESS = f"""
    SELECT order_id, deposit_network, deposit_address FROM orders
    WHERE substr(deposit_address, 1, {_ADDRESS_START}) = ?
"""  # noqa: S608 - a constant
_VIEW = ("view", "view_valid_until", "view_key")
_CHANGING = (*_STANDING, *_VIEW)
_INSERT_ORDER = _insert("orders", (*_TERMS, *_CHANGING))
_SELECT_VIEW = (
    "SELECT to_address, view FROM orders WHERE order_id = ? AND view_key = ?"
    " AND (view_valid_until IS NULL OR view_valid_until > ?)"
)
_UPDATE_ORDER = f"UPDATE orders SET {', '.join(f'{c} = ?' for c in _CHANGING)} WHERE order_id = ?"  # noqa: S608
_SELECT_ORDER = f"SELECT {', '.join((*_TERMS, *_STANDING))} FROM orders WHERE order_id = ?"  # noqa: S608
_UPSERT_DEPOSIT = _upsert("deposits", _DEPOSIT, ("network", "txid", "output_index"))
_SELECT_DEPOSITS = f"SELECT {', '.join(_DEPOSIT)} FROM deposits WHERE order_id = ? ORDER BY rowid"  # noqa: S608
_UPSERT_TRANSFER = _upsert("transfers", _TRANSFER, ("transfer_id",))
_SELECT_TRANSFERS = (
    f"SELECT {', '.join(_TRANSFER)} FROM transfers WHERE order_id = ? ORDER BY rowid"  # noqa: S608
)
_SELECT_FILLS = f"SELECT {', '.join(_FILL[2:])} FROM fills WHERE order_id = ? ORDER BY chunk"  # noqa: S608
_RELAY = tuple(f.name for f in fields(RelayRecord))
_RELAY_COLUMNS = tuple("idempotency_key" if name == "key" else name for name in _RELAY)
_UPSERT_RELAY = _upsert("relays", _RELAY_COLUMNS, ("order_id",))
_SELECT_RELAYS = f"SELECT {', '.join(_RELAY_COLUMNS)} FROM relays"  # noqa: S608
_REPORT = tuple(f.name for f in fields(Report))
# Until the upstream has been asked for the first time there is no report.
_SELECT_REPORT = (
    f"SELECT {', '.join(_REPORT)} FROM relays WHERE order_id = ? AND evidence IS NOT NULL"  # noqa: S608
)
_UPDATE_REPORT = (
    f"UPDATE relays SET {', '.join(f'{c} = ?' for c in _REPORT)}, evidence = ? WHERE order_id = ?"  # noqa: S608
)
_DELETE_FILLS = "DELETE FROM fills WHERE order_id = ? AND chunk >= ?"
_INSERT_FILL = _insert("fills", _FILL)
# The settled payouts are the books: no fee without one, and none is counted twice.
SELECT_INTEGRATOR_FEES = """
    SELECT o.integrator, t.asset, sum(t.integrator_fee), count(*)
    FROM orders o JOIN transfers t USING (order_id)
    WHERE o.integrator IS NOT NULL AND t.kind = 'payout' AND t.state = 'settled'
    GROUP BY o.integrator, t.asset ORDER BY o.integrator, t.asset
"""
_INSERT_EVENT = Insert(
    "INSERT INTO event_log (order_seq, version, at, event, status, details) VALUES {rows}",
    "((SELECT seq FROM orders WHERE order_id = ?), ?, ?, ?, ?, ?)",
)
_INSERT_EFFECT = "INSERT OR IGNORE INTO effects (order_id, kind, transfer_id) VALUES (?, ?, ?)"
_DELETE_EFFECT = "DELETE FROM effects WHERE order_id = ? AND kind = ? AND transfer_id = ?"
_RESPONSE = ("namespace", "idempotency_key", "operation", "params", "body", "created_at")
_INSERT_RESPONSE = _insert("idempotency_keys", _RESPONSE)
_SELECT_RESPONSE = (
    f"SELECT {', '.join(_RESPONSE)} FROM idempotency_keys"  # noqa: S608
    " WHERE namespace = ? AND idempotency_key = ?"
)
_INSERT_TICKET = _insert("tickets", tuple(f.name for f in fields(Ticket)))
# A transfer whose bytes are committed goes before any new one: it holds its wallet's inputs.
_SELECT_EFFECTS = """
    SELECT e.order_id, e.kind, e.transfer_id FROM effects e
    LEFT JOIN transfers t ON t.transfer_id = e.transfer_id
    ORDER BY t.state IS NULL OR t.state = 'planned', e.order_id
"""
_SELECT_PLANNED = """
    SELECT t.order_id, t.transfer_id FROM transfers t JOIN effects e
        ON e.order_id = t.order_id AND e.kind = 'advance_transfer'
        AND e.transfer_id = t.transfer_id
    WHERE t.network = ? AND t.state = 'planned' ORDER BY t.rowid LIMIT ?
"""


class SqliteOrderStore:
    """The OrderStore port (orders/ports.py) over a Database."""

    def __init__(self, database: Database, view_key: Callable[[], str]) -> None:
        self._db = database
        self._view_key = view_key

    def order(self, order_id: str) -> Order | None:
        """The order as last committed."""
        row = self._db.read_one(_SELECT_ORDER, (order_id,))
        if row is None:
            return None
        order = Order(_terms_from(row), **_standing_from(row))
        if order.version == 1:
            return order  # only created so far: it has no deposits or transfers to look up
        return replace(
            order,
            deposits=tuple(_deposit_from(r) for r in self._db.read(_SELECT_DEPOSITS, (order_id,))),
            transfers=tuple(
                _transfer_from(r) for r in self._db.read(_SELECT_TRANSFERS, (order_id,))
            ),
            fills=self._fills(order),
            report=self._report(order),
        )

    def _report(self, order: Order) -> Report | None:
        if order.terms.upstream_id is None:
            return None
        row = self._db.read_one(_SELECT_REPORT, (order.order_id,))
        return None if row is None else Report(*row)

    def _fills(self, order: Order) -> tuple[Fill, ...]:
        if order.terms.twap is None:
            return ()
        return tuple(Fill(*row) for row in self._db.read(_SELECT_FILLS, (order.order_id,)))

    def order_id_of_deposit_address(self, network: str, address: str) -> str | None:
        """Which order an address was given to."""
        found = self._given(address)
        return found[0] if found is not None and found[1] == network else None

    def status_view(self, order_id: str, now: int) -> tuple[str, bytes] | None:
        """The destination and the status answer of an order, if it holds now."""
        row = self._db.read_one(_SELECT_VIEW, (order_id, self._view_key(), now))
        return (row[0], row[1]) if row else None

    def is_deposit_address(self, address: str) -> bool:
        """Whether the address was given to an order to pay to, on whatever network."""
        return self._given(address) is not None

    def _given(self, address: str) -> tuple[str, str] | None:
        """The order and the network of a deposit address."""
        row = self._db.read_one(_SELECT_BY_ADDRESS, (address[:_ADDRESS_START],))
        return (row[0], row[1]) if row is not None and row[2] == address else None

    def orders_of_session(self, session_id: str, limit: int) -> list[Order]:
        """The session's orders, newest first."""
        rows = self._db.read(
            f"SELECT order_id FROM orders WHERE substr(session_id, 1, {_SESSION_START}) = ?"  # noqa: S608 - a constant
            " AND session_id = ? ORDER BY seq DESC LIMIT ?",
            (session_id[:_SESSION_START], session_id, limit),
        )
        found = (self.order(order_id) for (order_id,) in rows)
        return [order for order in found if order is not None]

    def integrator_fees(self) -> list[tuple[str, str, int, int]]:
        """What integrators have earned: id, asset, atomic units, and by how many payouts."""
        return [tuple(row) for row in self._db.read(SELECT_INTEGRATOR_FEES)]

    def history(self, order_id: str) -> list[HistoryEntry]:
        """All events of an order, oldest first."""
        rows = self._db.read(
            "SELECT version, at, event, status, details FROM order_events"
            " WHERE order_id = ? ORDER BY version",
            (order_id,),
        )
        return [HistoryEntry(row[0], row[1], row[2], row[3], orjson.loads(row[4])) for row in rows]

    def overdue(self, now: int, limit: int, *, but: OnDeadline | None = None) -> list[str]:
        """Ids of orders whose deadline is at or before ``now``, oldest deadline first.

        Those with ``but`` to be done at their deadline are left out.
        """
        rows = self._db.read(
            "SELECT order_id FROM orders WHERE deadline_at <= ? AND on_deadline IS NOT ?"
            " ORDER BY deadline_at LIMIT ?",
            (now, but and but.value, limit),
        )
        return [row[0] for row in rows]

    def pending_effects(self) -> list[PendingEffect]:
        """Every effect that is committed and not done; prepared transfers first."""
        return [
            PendingEffect(order_id, _effect_from(kind, transfer_id))
            for order_id, kind, transfer_id in self._db.read(_SELECT_EFFECTS)
        ]

    def planned_transfers(self, network: str, limit: int) -> list[tuple[str, str]]:
        """Order and transfer ids of what is due on a network and not signed, oldest first."""
        return [tuple(row) for row in self._db.read(_SELECT_PLANNED, (network, limit))]

    def response(self, namespace: str, key: str) -> StoredResponse | None:
        """The stored answer under an idempotency key."""
        row = self._db.read_one(_SELECT_RESPONSE, (namespace, key))
        if row is None:
            return None
        namespace, key, operation, params, body, created_at = row
        return StoredResponse(namespace, key, operation, orjson.loads(params), body, created_at)

    def relay_of_key(self, namespace: str, key: str) -> RelayRecord | None:
        """The latest claim on an upstream order that an idempotency key stands for."""
        where = " WHERE namespace = ? AND idempotency_key = ? ORDER BY seq DESC LIMIT 1"
        row = self._db.read_one(_SELECT_RELAYS + where, (namespace, key))
        return _relay_from(row) if row else None

    def relays_in(self, state: RelayState) -> list[RelayRecord]:
        """All claims in a state, oldest first."""
        rows = self._db.read(_SELECT_RELAYS + " WHERE state = ? ORDER BY seq", (state.value,))
        return [_relay_from(row) for row in rows]

    def relays_since(self, at: int) -> list[int]:
        """When each claim was made that is younger than ``at``."""
        sql = "SELECT created_at FROM relays ORDER BY seq DESC LIMIT 1000"
        return [made_at for (made_at,) in self._db.read(sql) if made_at > at]

    def open_relayed(self) -> list[str]:
        """Ids of the orders that an upstream settles and that are not over, oldest first."""
        rows = self._db.read(
            "SELECT order_id FROM orders WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL"
            " ORDER BY seq"
        )
        return [order_id for (order_id,) in rows]

    async def commit(self, *changes: Change) -> None:
        """Make the changes durable, all of them whole or nothing at all.

        Raises errors.Unavailable, and sqlite.StoreConflict when a constraint is broken.
        """
        key = self._view_key()
        await self._db.write([row for change in changes for row in _statements(change, key)])

    async def settle(self) -> None:
        """Wait until every commit begun so far is on disk or refused."""
        with suppress(Unavailable):  # closing: the writes that wait are finished all the same
            await self._db.write(())

    async def forget_responses(self, before: int) -> int:
        """Drop idempotency keys made before that time; returns how many."""
        # Keys are numbered as they come, so the old ones are those up to the first young one.
        row = self._db.read_one(
            "SELECT count(*), max(seq) FROM idempotency_keys WHERE seq < coalesce("
            "(SELECT seq FROM idempotency_keys WHERE created_at >= ? ORDER BY seq LIMIT 1),"
            " (SELECT max(seq) + 1 FROM idempotency_keys))",
            (before,),
        )
        count, last = row
        if count:
            sql = "DELETE FROM idempotency_keys WHERE seq <= ?"
            await self._db.write([Statement(sql, (last,))])
        return int(count)


def _statements(change: Change, view_key: str) -> list[Statement]:
    statements = [Statement(_DELETE_EFFECT, _effect_row(*pending)) for pending in change.done]
    if change.order is not None:
        order_id = change.order.order_id
        changing = (*_standing_row(change.order), *_view_row(change.view, view_key))
        statements += _order_statements(change.order, changing, is_new=change.is_new)
        statements += [
            Statement(_INSERT_EFFECT, _effect_row(order_id, effect)) for effect in change.effects
        ]
        if change.history is not None:
            statements.append(_history_statement(change.order.order_id, change.history))
        if change.order.report is not None and change.evidence:
            report = astuple(change.order.report)
            statements.append(Statement(_UPDATE_REPORT, (*report, change.evidence, order_id)))
    if change.relay is not None:
        statements.append(Statement(_UPSERT_RELAY, _relay_row(change.relay)))
    if change.response is not None:
        statements.append(_response_statement(change.response))
    if change.ticket is not None:
        values = tuple(getattr(change.ticket, f.name) for f in fields(Ticket))
        statements.append(Statement(_INSERT_TICKET, values))
    return statements


def _order_statements(order: Order, changing: tuple[Any, ...], *, is_new: bool) -> list[Statement]:
    if is_new:
        return [Statement(_INSERT_ORDER, (*_terms_row(order.terms), *changing), first=True)]
    order_id = order.order_id
    return [
        Statement(_UPDATE_ORDER, (*changing, order_id)),
        *(Statement(_UPSERT_DEPOSIT, _deposit_row(order_id, d)) for d in order.deposits),
        *(Statement(_UPSERT_TRANSFER, _transfer_row(order_id, t)) for t in order.transfers),
        *_fill_statements(order),
    ]


def _fill_statements(order: Order) -> list[Statement]:
    """The chunks as they are now. They only grow, or are all taken back: the last one is new."""
    if order.terms.twap is None:
        return []
    order_id, count = order.order_id, len(order.fills)
    last = [(order_id, count - 1, *astuple(fill)) for fill in order.fills[-1:]]
    return [
        Statement(_DELETE_FILLS, (order_id, max(0, count - 1))),
        *(Statement(_INSERT_FILL, row) for row in last),
    ]


def _history_statement(order_id: str, entry: HistoryEntry) -> Statement:
    details = orjson.dumps(entry.details).decode()
    return Statement(
        _INSERT_EVENT,
        (order_id, entry.version, entry.at, entry.event, entry.status, details),
    )


def _response_statement(response: StoredResponse) -> Statement:
    params = orjson.dumps(response.params).decode()
    return Statement(
        _INSERT_RESPONSE,
        (
            response.namespace, response.key, response.operation, params, response.body,
            response.created_at,
        ),
    )  # fmt: skip


def _terms_row(terms: Terms) -> tuple[Any, ...]:
    price, timeouts = terms.price, terms.timeouts
    return (
        terms.order_id, terms.session_id, terms.direction.value, terms.chain, terms.chain_id,
        terms.deposit_network, terms.payout_network, terms.deposit_address, terms.to_address,
        terms.deposit_amount, terms.expected_output, terms.min_received, terms.min_deposit,
        terms.max_deposit, price.rate, price.spread_bps, price.payout_fee,
        price.min_received_bps, terms.refund_fee, terms.created_at, terms.expires_at,
        timeouts.late_window, timeouts.confirm, timeouts.prepare, timeouts.payout_check,
        timeouts.refund_reminder, terms.integrator, price.integrator_bps,
        terms.twap and terms.twap.chunk_usd, terms.twap and terms.twap.interval_ms,
        terms.upstream_id,
    )  # fmt: skip


def _terms_from(row: tuple[Any, ...]) -> Terms:
    agreed = dict(
        zip(_PLAIN_TERMS, (*row[:2], *row[3:14], *row[18:21], row[26], row[30]), strict=True)
    )
    return Terms(
        direction=Direction(row[2]),
        price=Price(row[14], row[15], row[16], row[17], row[27]),
        twap=None if row[28] is None else TwapPlan(*row[28:30]),
        timeouts=Timeouts(*row[21:26]),
        **agreed,
    )


def _standing_row(order: Order) -> tuple[Any, ...]:
    on_deadline = order.on_deadline
    return (
        order.status.value, order.status_at, order.version, order.deadline_at,
        on_deadline and on_deadline.value, order.refund_address, order.action_required,
        order.error_message, order.completed_at, order.leftover,
    )  # fmt: skip


def _view_row(view: StatusView | None, key: str) -> tuple[Any, ...]:
    return (view.body, view.valid_until, key) if view else (b"", None, "")


def _standing_from(row: tuple[Any, ...]) -> dict[str, Any]:
    standing = dict(zip(_STANDING, row[len(_TERMS) :], strict=True))
    standing["status"] = OrderStatus(standing["status"])
    if standing["on_deadline"] is not None:
        standing["on_deadline"] = OnDeadline(standing["on_deadline"])
    return standing


def _deposit_row(order_id: str, deposit: Deposit) -> tuple[Any, ...]:
    return (
        *deposit.key, order_id, deposit.units, deposit.sender, deposit.first_seen_at,
        deposit.state.value, deposit.transfer_id, int(deposit.is_dust),
    )  # fmt: skip


def _deposit_from(row: tuple[Any, ...]) -> Deposit:
    network, txid, index, _, units, sender, seen_at, state, transfer_id, is_dust = row
    return Deposit(
        DepositKey(network, txid, index), units, sender, seen_at, DepositState(state),
        transfer_id, bool(is_dust),
    )  # fmt: skip


def _transfer_row(order_id: str, transfer: Transfer) -> tuple[Any, ...]:
    return (
        transfer.transfer_id, order_id, transfer.kind.value, transfer.network,
        transfer.asset.symbol, transfer.address, transfer.units, transfer.fee,
        transfer.state.value, transfer.txid, transfer.raw, transfer.reason,
        transfer.integrator_fee, transfer.receipt,
    )  # fmt: skip


def _transfer_from(row: tuple[Any, ...]) -> Transfer:
    transfer_id, _, kind, network, asset, address, units, fee, state, *rest = row
    return Transfer(
        transfer_id, TransferKind(kind), network, _ASSETS[asset], address, units, fee,
        TransferState(state), *rest,
    )  # fmt: skip


def _relay_row(record: RelayRecord) -> tuple[Any, ...]:
    order_id, state, *rest = astuple(record)
    return order_id, state.value, *rest


def _relay_from(row: tuple[Any, ...]) -> RelayRecord:
    order_id, state, *rest = row
    return RelayRecord(order_id, RelayState(state), *rest)


def _effect_row(order_id: str, effect: Effect) -> tuple[str, str, str]:
    if isinstance(effect, AdvanceTransfer):
        return order_id, "advance_transfer", effect.transfer_id
    if isinstance(effect, FillChunk):
        return order_id, "fill_chunk", str(effect.index)
    return order_id, "price_late_deposit", ""


def _effect_from(kind: str, subject: str) -> Effect:
    if kind == "advance_transfer":
        return AdvanceTransfer(subject)
    if kind == "fill_chunk":
        return FillChunk(int(subject))
    if kind == "price_late_deposit":
        return PriceLateDeposit()
    raise ValueError(f"unknown effect {kind!r} in the store")
