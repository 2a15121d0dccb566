"""Writing orders: the statements that carry out a change.

What does not live here: what the rows look like (order_rows.py, relays.py), when they are
committed (orders.py, sqlite.py).
"""

from __future__ import annotations

from typing import Final

import orjson

from rpcsvc.clock import day_of
from rpcsvc.domain.order import Order
from rpcsvc.orders.ports.store import Change, HistoryEntry
from rpcsvc.store.database import Insert, Statement, Update
from rpcsvc.store.order_rows import (
    CHANGING,
    DEPOSIT,
    FILL,
    RESPONSE,
    TERMS,
    TICKET,
    TRANSFER,
    Row,
    changing_row,
    deposit_row,
    effect_row,
    fill_row,
    in_order,
    insert,
    response_row,
    terms_row,
    transfer_row,
    upsert,
)
from rpcsvc.store.relays import relay_statement, report_statement

_INSERT_ORDER: Final = insert("orders", (*TERMS, *CHANGING))
_UPDATE_ORDER: Final = Update(
    f"UPDATE orders SET {', '.join(f'{c} = ?' for c in CHANGING)}"  # noqa: S608 - constants
    " WHERE order_id = ? AND version = ?"
)
_UPSERT_DEPOSIT: Final = upsert("deposits", DEPOSIT, ("network", "txid", "output_index"))
_UPSERT_TRANSFER: Final = upsert("transfers", TRANSFER, ("transfer_id",))
_DELETE_FILLS: Final = "DELETE FROM fills WHERE order_id = ? AND chunk >= ?"
_INSERT_FILL: Final = insert("fills", FILL)
_INSERT_EVENT: Final = Insert(
    "INSERT INTO event_log (order_seq, version, at, event, status, details) VALUES {rows}",
    "((SELECT seq FROM orders WHERE order_id = ?), ?, ?, ?, ?, ?)",
)
_UPSERT_VIEW: Final = Insert(
    "INSERT INTO status_views (order_seq, view, valid_until, key) VALUES {rows}"
    " ON CONFLICT (order_seq) DO UPDATE SET view = excluded.view,"
    " valid_until = excluded.valid_until, key = excluded.key",
    "((SELECT seq FROM orders WHERE order_id = ?), ?, ?, ?)",
)
_DELETE_VIEW: Final = (
    "DELETE FROM status_views WHERE order_seq = (SELECT seq FROM orders WHERE order_id = ?)"
)
_INSERT_EFFECT: Final = (
    "INSERT INTO effects (order_id, kind, subject) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
)
_DELETE_EFFECT: Final = "DELETE FROM effects WHERE order_id = ? AND kind = ? AND subject = ?"
_INSERT_RESPONSE: Final = insert("idempotency_keys", (*RESPONSE, "order_seq"))._replace(
    row=f"({'?, ' * len(RESPONSE)}(SELECT seq FROM orders WHERE order_id = ?))"  # noqa: S608
)
_INSERT_CLIENT: Final = insert("order_clients", ("order_id", "client"))
_DELETE_CLIENT: Final = "DELETE FROM order_clients WHERE order_id = ?"
_COUNT_ORDER: Final = (
    "INSERT INTO order_counts (day, client, orders) VALUES (?, ?, 1)"
    " ON CONFLICT (day, client) DO UPDATE SET orders = orders + 1"
)
_DELETE_ORDER_COUNTS: Final = "DELETE FROM order_counts WHERE day < ?"
_INSERT_TICKET: Final = insert("tickets", TICKET)
_COUNT_TICKET: Final = (
    "INSERT INTO ticket_counts (day, client, tickets, bytes) VALUES (?, ?, 1, ?)"
    " ON CONFLICT (day, client) DO UPDATE SET tickets = tickets + 1, bytes = bytes + excluded.bytes"
)
_DELETE_TICKET_COUNTS: Final = "DELETE FROM ticket_counts WHERE day < ?"


def statements(change: Change, view_key: str) -> list[Statement]:
    """What has to be written for a change; ``view_key`` is that of its status view."""
    found = [Statement(_DELETE_EFFECT, effect_row(*pending)) for pending in change.done]
    if change.order is not None:
        order_id = change.order.order_id
        found += _order_statements(change.order, changing_row(change.order), is_new=change.is_new)
        found += _view_statements(change, order_id, view_key)
        found += [
            Statement(_INSERT_EFFECT, effect_row(order_id, effect)) for effect in change.effects
        ]
        if change.history is not None:
            found.append(_history_statement(order_id, change.history))
        if change.order.report is not None and change.evidence:
            found.append(report_statement(order_id, change.order.report, change.evidence))
        found += _client_statements(change.order, change)
    if change.relay is not None:
        found.append(relay_statement(change.relay))
    if change.response is not None:
        made = change.order and change.order.order_id
        found.append(Statement(_INSERT_RESPONSE, (*response_row(change.response), made)))
    if change.ticket is not None:
        found.append(Statement(_INSERT_TICKET, in_order(TICKET, change.ticket)))
    if change.charge is not None:
        found.append(Statement(_DELETE_TICKET_COUNTS, (change.charge.day,)))
        found.append(Statement(_COUNT_TICKET, change.charge))
    return found


def _client_statements(order: Order, change: Change) -> list[Statement]:
    if change.client is not None:
        day = day_of(order.terms.created_at)
        return [
            Statement(_INSERT_CLIENT, (order.order_id, change.client)),
            Statement(_DELETE_ORDER_COUNTS, (day,)),
            Statement(_COUNT_ORDER, (day, change.client)),
        ]
    return [Statement(_DELETE_CLIENT, (order.order_id,))] if change.forgets_client else []


def _order_statements(order: Order, changing: Row, *, is_new: bool) -> list[Statement]:
    if is_new:
        return [Statement(_INSERT_ORDER, (*terms_row(order.terms), *changing), first=True)]
    order_id = order.order_id
    return [
        Statement(_UPDATE_ORDER, (*changing, order_id, order.version - 1)),
        *(Statement(_UPSERT_DEPOSIT, deposit_row(order_id, d)) for d in order.deposits),
        *(Statement(_UPSERT_TRANSFER, transfer_row(order_id, t)) for t in order.transfers),
        *_fill_statements(order),
    ]


def _view_statements(change: Change, order_id: str, key: str) -> list[Statement]:
    """Replace the view, or delete the one of before, which is not true any more."""
    view = change.view
    if view is not None:
        return [Statement(_UPSERT_VIEW, (order_id, view.body, view.valid_until, key))]
    return [] if change.is_new else [Statement(_DELETE_VIEW, (order_id,))]


def _fill_statements(order: Order) -> list[Statement]:
    """The chunks as they are now. They only grow, or are all taken back: the last one is new."""
    if order.terms.twap is None:
        return []
    order_id, count = order.order_id, len(order.fills)
    last = [fill_row(order_id, count - 1, fill) for fill in order.fills[-1:]]
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
