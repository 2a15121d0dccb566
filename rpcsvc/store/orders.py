"""Orders, their history and their effects as rows.

An order is written only if its version is still the one that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import orjson
from msgspec.structs import asdict, replace

from rpcsvc.clock import day_of
from rpcsvc.domain.clients import Approval
from rpcsvc.domain.events import AdvanceTransfer, order_of
from rpcsvc.domain.machine import DECIDED_BY_DEPOSITS
from rpcsvc.domain.order import OnDeadline, Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.settle_times import SwapKind
from rpcsvc.errors import Unavailable
from rpcsvc.store.approvals import approval_of, use_statement
from rpcsvc.store.authorizations import IS_UNRESOLVED, reopen_statements
from rpcsvc.store.changes import Change, HistoryEntry, PendingEffect
from rpcsvc.store.database import (
    Query,
    Row,
    StaleWrite,
    Statement,
    StoreConflict,
    Tables,
    from_row,
    insert,
    update,
    upsert,
)
from rpcsvc.store.finality import FinalityRows, finality_statements
from rpcsvc.store.order_rows import (
    CHANGING,
    DEPOSIT,
    FILL,
    FILLED,
    ORDER,
    SELECT_REPORT,
    TERMS,
    TRANSFER,
    IdempotencyRows,
    RelayRows,
    changing_values,
    deposit_from,
    deposit_values,
    effect_from,
    effect_values,
    fill_from,
    fill_values,
    order_from,
    relay_statements,
    report_from,
    report_statement,
    response_statement,
    return_statements,
    terms_values,
    transfer_from,
    transfer_values,
)
from rpcsvc.store.replicas import address_statement, pooled_statement, rate_statement
from rpcsvc.store.reservations import (
    ReservationRows,
    admission_statements,
    count_statements,
    reservation_statements,
    scanned_until,
    spending_statement,
)
from rpcsvc.store.settle_times import settle_time_statements
from rpcsvc.store.tickets import TicketRows, charge_statements, message_statements, ticket_statement
from rpcsvc.store.webhooks import (
    PRUNE_WEBHOOK,
    OldWebhookRows,
    delivery_statement,
    end_statements,
    webhook_statement,
)

# How much of a session id orders.session_start holds, and of each end of an address
# orders.deposit_address_ends.
_SESSION_START: Final = 8
_ADDRESS_END: Final = 9

_SELECT_VIEW: Final = (
    "SELECT o.to_address, v.view, v.kind FROM orders o JOIN status_views v ON v.order_seq = o.seq"
    " WHERE o.order_id = :order_id AND v.key = :key"
    # It tells to send a deposit: not while a signed payment is under way.
    " AND (v.valid_until IS NULL OR (v.valid_until > :now AND NOT EXISTS ("
    f"SELECT 1 FROM funding_authorizations f WHERE f.order_id = o.order_id AND {IS_UNRESOLVED})))"
)
_SELECT_ORDER: Final = f"SELECT {', '.join(ORDER)} FROM orders WHERE order_id = :order_id"
_SELECT_DEPOSITS: Final = (
    f"SELECT {', '.join(DEPOSIT)} FROM deposits WHERE order_id = :order_id ORDER BY seq"
)
_SELECT_TRANSFERS: Final = (
    f"SELECT {', '.join(TRANSFER)} FROM transfers WHERE order_id = :order_id ORDER BY seq"
)
_SELECT_FILLS: Final = (
    f"SELECT {', '.join(FILLED)} FROM fills WHERE order_id = :order_id ORDER BY chunk"
)
_SELECT_WHOLE: Final = (
    _SELECT_ORDER, _SELECT_DEPOSITS, _SELECT_TRANSFERS, _SELECT_FILLS, SELECT_REPORT,
)  # fmt: skip
# The address is compared in Python: in the query, SQLite would put it into what the column is
# computed from as well, and pass the index by.
_SELECT_GIVEN: Final = (
    "SELECT order_id, deposit_network, deposit_address FROM orders"
    " WHERE deposit_address_ends = :ends"
)
_SELECT_SESSION: Final = (
    "SELECT order_id FROM orders WHERE session_start = :start AND session_id = :session_id"
    " ORDER BY seq DESC LIMIT :limit"
)
_SELECT_SESSION_BEFORE: Final = (
    "SELECT order_id FROM orders WHERE session_start = :start AND session_id = :session_id"
    " AND seq < (SELECT seq FROM orders WHERE order_id = :after AND session_id = :session_id)"
    " ORDER BY seq DESC LIMIT :limit"
)
_SELECT_CLIENT: Final = (
    "SELECT order_id FROM orders WHERE client = :client ORDER BY seq DESC LIMIT :limit"
)
_SELECT_CLIENT_BEFORE: Final = (
    "SELECT order_id FROM orders WHERE client = :client"
    " AND seq < (SELECT seq FROM orders WHERE order_id = :after AND client = :client)"
    " ORDER BY seq DESC LIMIT :limit"
)
_SELECT_HISTORY: Final = (
    "SELECT version, at, event, status, details FROM event_log"
    " WHERE order_seq = (SELECT seq FROM orders WHERE order_id = :order_id)"
    " AND version > :after ORDER BY version LIMIT :limit"
)
_DECIDED_BY_DEPOSITS: Final = ", ".join(f"'{each.value}'" for each in sorted(DECIDED_BY_DEPOSITS))
_SELECT_OVERDUE: Final = f"""
    SELECT order_id FROM orders
    WHERE deadline_at <= :now AND on_deadline IS DISTINCT FROM :but
        AND (on_deadline NOT IN ({_DECIDED_BY_DEPOSITS}) OR deadline_at <= {{scanned}})
    ORDER BY deadline_at LIMIT :limit
"""
# Of an x2u order a locked rate above the limit, of a u2x order one below it.
_LOCKED_BEYOND: Final = """
    SELECT order_id FROM orders WHERE direction = :direction AND rate {beyond} :rate
        AND price_locked_until > :now AND price_locked_until IS NOT NULL AND lock_broken_at IS NULL
        AND status IN ('awaiting_deposit', 'deposit_detected') LIMIT :limit
"""
_SELECT_LOCKED_BEYOND: Final = {
    Direction.XMR_TO_USDC: _LOCKED_BEYOND.format(beyond=">"),
    Direction.USDC_TO_XMR: _LOCKED_BEYOND.format(beyond="<"),
}
# Signed transfers go before new ones: they hold their wallet's inputs.
_SELECT_EFFECTS: Final = """
    SELECT e.order_id, e.kind, e.subject FROM effects e
    LEFT JOIN transfers t ON t.transfer_id = e.subject
    ORDER BY t.state IS NULL OR t.state = 'planned', e.order_id
"""
_SET_WOKEN: Final = (
    "UPDATE effects SET hurried = :hurried"
    " WHERE order_id = :order_id AND kind = :kind AND subject = :subject"
)
_SELECT_WOKEN: Final = "SELECT order_id, kind, subject FROM effects WHERE hurried = 1"
_SELECT_PLANNED: Final = """
    SELECT t.order_id, t.transfer_id FROM transfers t JOIN effects e
        ON e.order_id = t.order_id AND e.kind = 'advance_transfer'
        AND e.subject = t.transfer_id
    WHERE t.network = :network AND t.state = 'planned' ORDER BY t.seq LIMIT :limit
"""
_NEWEST_TOO_MANY: Final = (
    "SELECT unpaid_since FROM orders WHERE unpaid_since IS NOT NULL"
    " ORDER BY unpaid_since DESC LIMIT 1 OFFSET :most"
)
_SELECT_UNPAID: Final = (
    "SELECT seq FROM orders WHERE unpaid_since IS NOT NULL AND unpaid_since < :before"
    " ORDER BY unpaid_since LIMIT :limit"
)
# Events that an order keeps when its history is reduced, because the auditor checks payments by
# their details, which are nowhere else: the rates of late deposits, and how many refund addresses
# were named.
AUDITED_EVENTS: Final = "('Repriced', 'RefundAddressGiven')"
# The order is over, owes nothing, and has no webhook, whose messages are made of events. A late
# deposit leaves status_at as it is, so the time of the last event counts as well.
_IS_OLD: Final = (
    "deadline_at IS NULL AND action_required IS NULL AND history_from < version"
    " AND status_at < :before AND (SELECT e.at FROM event_log e"
    " WHERE e.order_seq = orders.seq AND e.version = orders.version) < :before"
    " AND NOT EXISTS (SELECT 1 FROM effects f WHERE f.order_id = orders.order_id)"
    " AND NOT EXISTS (SELECT 1 FROM webhooks w WHERE w.order_seq = orders.seq)"
)
_SELECT_OLD: Final = f"SELECT seq FROM orders WHERE {_IS_OLD} ORDER BY status_at LIMIT :limit"

_INSERT_ORDER: Final = insert("orders", (*TERMS, *CHANGING))
_UPDATE_ORDER: Final = update("orders", CHANGING, "order_id = :order_id AND version = :based_on")
_UPSERT_DEPOSIT: Final = upsert("deposits", DEPOSIT, ("network", "txid", "output_index"))
_UPSERT_TRANSFER: Final = upsert("transfers", TRANSFER, ("transfer_id",))
_DELETE_FILLS: Final = "DELETE FROM fills WHERE order_id = :order_id AND chunk >= :chunk"
_INSERT_FILL: Final = insert("fills", FILL)
_SEQ: Final = "(SELECT seq FROM orders WHERE order_id = :order_id)"
_INSERT_EVENT: Final = (
    "INSERT INTO event_log (order_seq, version, at, event, status, details)"
    f" VALUES ({_SEQ}, :version, :at, :event, :status, :details)"
)
_UPSERT_VIEW: Final = (
    "INSERT INTO status_views (order_seq, view, valid_until, key, kind)"
    f" VALUES ({_SEQ}, :view, :valid_until, :key, :kind)"
    " ON CONFLICT (order_seq) DO UPDATE SET view = excluded.view,"
    " valid_until = excluded.valid_until, key = excluded.key, kind = excluded.kind"
)
_DELETE_VIEW: Final = f"DELETE FROM status_views WHERE order_seq = {_SEQ}"
_INSERT_EFFECT: Final = (
    f"{insert('effects', ('order_id', 'kind', 'subject'))} ON CONFLICT DO NOTHING"
)
_DELETE_EFFECT: Final = (
    "DELETE FROM effects WHERE order_id = :order_id AND kind = :kind AND subject = :subject"
)
# If a deposit comes between the query and these statements, they find nothing to change. The order
# goes last, because the others test it. The next poll renders its status answer.
_IS_UNPAID: Final = "seq = :seq AND unpaid_since IS NOT NULL"
_PRUNE: Final = (
    *(sql.format(seq=f"(SELECT seq FROM orders WHERE {_IS_UNPAID})") for sql in PRUNE_WEBHOOK),
    f"DELETE FROM idempotency_keys WHERE order_seq = (SELECT seq FROM orders WHERE {_IS_UNPAID})",
    f"DELETE FROM status_views WHERE order_seq = (SELECT seq FROM orders WHERE {_IS_UNPAID})",
    "UPDATE relays SET raw = :nothing"
    f" WHERE order_id = (SELECT order_id FROM orders WHERE {_IS_UNPAID})",
    f"UPDATE orders SET unpaid_since = NULL WHERE {_IS_UNPAID}",
)
# An order that has changed since the query keeps its history. Its row goes first: it is locked from
# then on, and the deletions depend on its new values.
_REDUCE: Final = (
    f"UPDATE orders SET history_from = version WHERE seq IN :seqs AND {_IS_OLD}",
    "DELETE FROM event_log WHERE order_seq IN :seqs"
    f" AND event NOT IN {AUDITED_EVENTS}"
    " AND version < (SELECT o.history_from FROM orders o WHERE o.seq = event_log.order_seq)",
    "DELETE FROM status_views WHERE order_seq IN :seqs AND EXISTS (SELECT 1 FROM orders o"
    " WHERE o.seq = status_views.order_seq AND o.history_from = o.version)",
)


class StoredView(NamedTuple):
    """A stored status answer, with the destination, and the kind of swap unless it is over."""

    to_address: str
    body: bytes
    kind: SwapKind | None


class OrderStore(
    RelayRows,
    IdempotencyRows,
    TicketRows,
    ReservationRows,
    FinalityRows,
    OldWebhookRows,
):
    """Keeps orders, their history, pending effects, idempotency keys and tickets.

    Reads are of committed state; ``commit`` returns once the change is durable. Every method raises
    errors.Unavailable when the database can't serve it.
    """

    def __init__(self, database: Tables, view_key: Callable[[], str]) -> None:
        super().__init__(database)
        self._view_key = view_key

    # --- reading -------------------------------------------------------------------------------

    async def order(self, order_id: str) -> Order | None:
        """The order as last committed."""
        row = await self._db.fetch_one(_SELECT_ORDER, order_id=order_id)
        if row is None or row["version"] == 1:
            # A new order has no deposits or transfers to look up.
            return order_from(row) if row else None
        values = {"order_id": order_id}
        # Read the order again in the same snapshot: it may have changed since.
        (found,), deposits, transfers, fills, reports = await self._db.fetch_together(
            [Query(sql, values) for sql in _SELECT_WHOLE]
        )
        order = order_from(found)
        is_relayed = order.terms.upstream_id is not None
        return replace(
            order,
            deposits=tuple(map(deposit_from, deposits)),
            transfers=tuple(map(transfer_from, transfers)),
            fills=tuple(map(fill_from, fills)),
            report=report_from(reports) if is_relayed else None,
        )

    async def status_view(self, order_id: str, now: int) -> StoredView | None:
        """The status answer of an order as stored.

        None when there is no such order, or its answer is from another version of the service
        or has run out: then it has to be made from the order.
        """
        row = await self._db.fetch_one(
            _SELECT_VIEW, order_id=order_id, key=self._view_key(), now=now
        )
        return StoredView(row["to_address"], row["view"], row["kind"]) if row else None

    async def order_id_of_deposit_address(self, network: str, address: str) -> str | None:
        """The id of the order that has this deposit address."""
        row = await self._given(address)
        return row["order_id"] if row is not None and row["deposit_network"] == network else None

    async def is_deposit_address(self, address: str) -> bool:
        """Return whether the address is an order's deposit address, on any network."""
        return await self._given(address) is not None

    async def _given(self, address: str) -> Row | None:
        ends = address[:_ADDRESS_END] + address[-_ADDRESS_END:]
        row = await self._db.fetch_one(_SELECT_GIVEN, ends=ends)
        return row if row is not None and row["deposit_address"] == address else None

    async def orders_of_session(
        self, session_id: str, limit: int, after: str | None = None
    ) -> list[Order]:
        """The session's orders, newest first; those made before the one with the id ``after``.

        None at all where ``after`` is no order of the session.
        """
        values = {"start": session_id[:_SESSION_START], "session_id": session_id, "limit": limit}
        if after is None:
            rows = await self._db.fetch(_SELECT_SESSION, **values)
        else:
            rows = await self._db.fetch(_SELECT_SESSION_BEFORE, **values, after=after)
        return await self._all_of(rows)

    async def orders_of_client(
        self, client: str, limit: int, after: str | None = None
    ) -> list[Order]:
        """The orders that a client made with its token, as ``orders_of_session``."""
        if after is None:
            rows = await self._db.fetch(_SELECT_CLIENT, client=client, limit=limit)
        else:
            rows = await self._db.fetch(
                _SELECT_CLIENT_BEFORE, client=client, limit=limit, after=after
            )
        return await self._all_of(rows)

    async def approval_of(self, order_id: str) -> Approval | None:
        """The approval that an order, or the claim of one, has used up."""
        return await approval_of(self._db, order_id)

    async def _all_of(self, rows: Sequence[Row]) -> list[Order]:
        found = [await self.order(row["order_id"]) for row in rows]
        return [order for order in found if order is not None]

    async def history(self, order_id: str, after: int, limit: int) -> list[HistoryEntry]:
        """The order's history after a version, oldest first."""
        rows = await self._db.fetch(_SELECT_HISTORY, order_id=order_id, after=after, limit=limit)
        return [from_row(HistoryEntry, row, details=orjson.loads(row["details"])) for row in rows]

    async def versions(self, order_ids: Sequence[str]) -> dict[str, int]:
        """The version of each of these orders."""
        rows = await self._db.fetch(
            "SELECT order_id, version FROM orders WHERE order_id IN :order_ids", order_ids=order_ids
        )
        return {row["order_id"]: row["version"] for row in rows}

    async def open_orders(self) -> list[str]:
        """Return the ids of all orders that are not over, or that wait for a refund address."""
        # Reads every order; it is asked once, at the start.
        rows = await self._db.fetch(
            "SELECT order_id FROM orders"
            " WHERE deadline_at IS NOT NULL OR action_required IS NOT NULL"
        )
        return [row["order_id"] for row in rows]

    async def overdue(
        self, now: int, limit: int, known: Mapping[str, int], *, but: OnDeadline | None = None
    ) -> list[str]:
        """Ids of orders whose deadline is at or before ``now``, oldest deadline first.

        It leaves out orders whose deadline action is ``but``, and orders whose deadline depends on
        deposits of a network that is ``known`` only until before the deadline.
        """
        scanned, values = scanned_until(known, "deadline_at")
        rows = await self._db.fetch(
            _SELECT_OVERDUE.format(scanned=scanned),
            now=now,
            but=but and but.value,
            limit=limit,
            **values,
        )
        return [row["order_id"] for row in rows]

    async def locked_beyond(
        self, direction: Direction, rate: int, now: int, limit: int
    ) -> list[str]:
        """Return the ids of orders that await money and whose price lock, not over at ``now``,
        breaks.

        ``rate`` is that of ``price_lock.breaking_rate`` for the direction.
        """
        rows = await self._db.fetch(
            _SELECT_LOCKED_BEYOND[direction],
            direction=direction.value,
            rate=rate,
            now=now,
            limit=limit,
        )
        return [row["order_id"] for row in rows]

    async def pending_effects(self) -> list[PendingEffect]:
        """Return all committed effects that are not done; prepared transfers first."""
        return [
            PendingEffect(row["order_id"], effect_from(row["kind"], row["subject"]))
            for row in await self._db.fetch(_SELECT_EFFECTS)
        ]

    async def wake_transfer(self, transfer_id: str) -> bool:
        """Have the settling replica run a transfer now; return whether it was pending."""
        values = effect_values(order_of(transfer_id), AdvanceTransfer(transfer_id))
        try:
            await self._db.write([Statement(_SET_WOKEN, {**values, "hurried": 1}, finds=True)])
        except StaleWrite:
            return False
        return True

    async def take_woken(self) -> list[str]:
        """The ids of the transfers that ``wake_transfer`` named since the last call."""
        found = [{**row, "hurried": 0} for row in await self._db.fetch(_SELECT_WOKEN)]
        if found:
            await self._db.write([Statement(_SET_WOKEN, values) for values in found])
        return [values["subject"] for values in found]

    async def planned_transfers(self, network: str, limit: int) -> list[tuple[str, str]]:
        """Order and transfer ids of unsigned transfers due on a network, oldest first."""
        rows = await self._db.fetch(_SELECT_PLANNED, network=network, limit=limit)
        return [(row["order_id"], row["transfer_id"]) for row in rows]

    # --- writing -------------------------------------------------------------------------------

    async def commit(self, *changes: Change) -> None:
        """Commit all of the changes, or none.

        Raises errors.Unavailable; StaleWrite if an order has moved past the version that its change
        is based on, exceeds its admission, or has a key that is taken or that another open claim
        stands for; StoreConflict if another constraint is violated.
        """
        try:
            await self._db.write(self.rows(*changes))
        except StoreConflict:
            for change in changes:
                if await self._is_key_taken(change):
                    raise StaleWrite from None
            raise

    async def _is_key_taken(self, change: Change) -> bool:
        """Return whether another call was first with the idempotency key of a change."""
        response, relay = change.response, change.relay
        if response and await self.response(response.namespace, response.key) is not None:
            return True
        if relay is None or relay.namespace is None or relay.key is None:
            return False
        other = await self.relay_of_key(relay.namespace, relay.key)
        return other is not None and other.order_id != relay.order_id

    def rows(self, *changes: Change) -> list[Statement]:
        """The statements that ``commit`` writes, for a transaction that holds more."""
        key = self._view_key()
        return [row for change in changes for row in _statements(change, key)]

    async def settle(self) -> None:
        """Wait until every commit that has begun is on disk or refused."""
        with suppress(Unavailable):  # closing: waiting writes are finished anyway
            await self._db.write(())

    async def prune_unpaid(self, before: int, most: int, limit: int) -> int:
        """Delete the stored answers of orders that ended unpaid before a time, and of the oldest
        beyond ``most``.

        It handles ``limit`` at once and returns how many. Orders themselves are never deleted:
        terms, deposit address and history stay, so a later deposit finds all that a refund needs.
        """
        excess = await self._db.fetch_one(_NEWEST_TOO_MANY, most=most)
        if excess is not None:
            before = max(before, excess["unpaid_since"] + 1)
        found = await self._db.fetch(_SELECT_UNPAID, before=before, limit=limit)
        if found:
            values = [{"seq": row["seq"], "nothing": b""} for row in found]
            await self._db.write([Statement(sql, each) for sql in _PRUNE for each in values])
        return len(found)

    async def reduce_history(self, before: int, limit: int) -> int:
        """Reduce the history of orders that are over, and whose last event is from before a time,
        to that event and AUDITED_EVENTS; delete their stored status answers.

        It handles ``limit`` at once and returns how many. Orders, deposits, transfers and chunks
        stay. A later deposit adds to what is left of the history.
        """
        found = await self._db.fetch(_SELECT_OLD, before=before, limit=limit)
        if found:
            values = {"seqs": [row["seq"] for row in found], "before": before}
            await self._db.write([Statement(sql, values) for sql in _REDUCE])
        return len(found)


def _statements(change: Change, view_key: str) -> list[Statement]:
    """The statements for a change; ``view_key`` is the key of its status view."""
    order = change.order
    found = [] if change.pooled is None else [address_statement(change.pooled)]
    found += [Statement(_DELETE_EFFECT, effect_values(*pending)) for pending in change.done]
    if order is not None:
        found += _statements_of_order(change, order, view_key)
    if change.relay is not None:
        found += return_statements(change.relay, change.returns)
        found += relay_statements(change.relay)
    found += _limit_statements(change)
    if change.response is not None:
        found.append(response_statement(change.response, order.order_id if order else None))
    if change.ticket is not None:
        found.append(ticket_statement(change.ticket))
    if change.message is not None:
        found += message_statements(change.message)
    if change.charge is not None:
        found += charge_statements(change.charge)
    return found


def _statements_of_order(change: Change, order: Order, view_key: str) -> list[Statement]:
    order_id = order.order_id
    found = _order_statements(order, is_new=change.is_new)
    if not change.is_new:
        found += reopen_statements(order)
    if change.rates is not None:
        found.append(rate_statement(change.rates))
    found += _view_statements(change, order_id, view_key)
    found += [
        Statement(_INSERT_EFFECT, effect_values(order_id, effect)) for effect in change.effects
    ]
    if change.history is not None:
        found.append(_history_statement(order_id, change.history))
        found += _webhook_statements(change, order, change.history.version)
        if change.settled is not None:
            found += settle_time_statements(change.settled, day_of(change.history.at))
    if order.report is not None and change.evidence:
        found.append(report_statement(order_id, order.report, change.evidence))
    if change.admission is not None:
        found += count_statements(change.admission, day_of(order.terms.created_at))
    return found


def _limit_statements(change: Change) -> list[Statement]:
    """Statements that count what a change takes, and abort the transaction above a limit."""
    found: list[Statement] = []
    if change.spending is not None:
        found.append(spending_statement(change.spending))
    if change.approval is not None:
        found.append(use_statement(change.approval))
    if change.reservation is not None:
        found += reservation_statements(change.reservation)
        if change.admission is not None:
            found += admission_statements(change.admission, change.reservation.unfunded)
    if change.finality is not None:
        found += finality_statements(change.finality)
    if change.pooled is not None:
        found.append(pooled_statement(change.pooled))
    return found


def _order_statements(order: Order, *, is_new: bool) -> list[Statement]:
    changing = changing_values(order)
    if is_new:
        return [Statement(_INSERT_ORDER, terms_values(order.terms) | changing, first=True)]
    order_id = order.order_id
    based_on = {**changing, "order_id": order_id, "based_on": order.version - 1}
    return [
        Statement(_UPDATE_ORDER, based_on, finds=True),
        *(Statement(_UPSERT_DEPOSIT, deposit_values(order_id, item)) for item in order.deposits),
        *(Statement(_UPSERT_TRANSFER, transfer_values(order_id, item)) for item in order.transfers),
        *_fill_statements(order),
    ]


def _view_statements(change: Change, order_id: str, key: str) -> list[Statement]:
    """Replace the status view, or delete the outdated one."""
    view = change.view
    if view is not None:
        values = {
            "order_id": order_id, "view": view.body, "valid_until": view.valid_until, "key": key,
            "kind": view.kind,
        }  # fmt: skip
        return [Statement(_UPSERT_VIEW, values)]
    return [] if change.is_new else [Statement(_DELETE_VIEW, {"order_id": order_id})]


def _fill_statements(order: Order) -> list[Statement]:
    """Write the chunks. They only grow or are all removed, so only the last one can be new."""
    if order.terms.twap is None:
        return []
    order_id, count = order.order_id, len(order.fills)
    last = [fill_values(order_id, count - 1, fill) for fill in order.fills[-1:]]
    return [
        Statement(_DELETE_FILLS, {"order_id": order_id, "chunk": max(0, count - 1)}),
        *(Statement(_INSERT_FILL, values) for values in last),
    ]


def _history_statement(order_id: str, entry: HistoryEntry) -> Statement:
    details = orjson.dumps(entry.details).decode()
    values = {**asdict(entry), "order_id": order_id, "details": details}
    return Statement(_INSERT_EVENT, values)


def _webhook_statements(change: Change, order: Order, version: int) -> list[Statement]:
    """Statements for the webhook of a new order, for the message of the event, and for the end of
    the webhook of an order that is cancelled unfunded.
    """
    if change.is_new and change.webhook is None:
        return []
    order_id = order.order_id
    new = [] if change.webhook is None else [webhook_statement(order_id, change.webhook)]
    end = end_statements(order_id, order.status_at) if order.was_cancelled else []
    return [*new, delivery_statement(order_id, version), *end]
