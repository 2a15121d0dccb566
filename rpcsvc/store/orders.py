"""Orders in SQLite: the OrderStore port over the tables of a database.

What does not live here: transactions and connections (sqlite.py), rows (order_rows.py), what a
change writes (order_writes.py), claims on upstream orders (relays.py), deleting (retention.py),
what the values mean (domain/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import orjson

from rpcsvc.domain.machine import DECIDED_BY_DEPOSITS
from rpcsvc.domain.order import Fill, OnDeadline, Order
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.store import Change, PendingEffect, StoredResponse
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.order_addresses import order_given
from rpcsvc.store.order_rows import (
    DEPOSIT,
    FILLED,
    ORDER,
    RESPONSE,
    TRANSFER,
    deposit_from,
    effect_from,
    fill_from,
    order_from,
    response_from,
    transfer_from,
)
from rpcsvc.store.order_writes import statements
from rpcsvc.store.relays import SqliteRelays
from rpcsvc.store.retention import SqliteRetention

# How much of a session id its index holds (orders.session_start).
_SESSION_START: Final = 8
_SELECT_VIEW: Final = (
    "SELECT o.to_address, v.view FROM orders o JOIN status_views v ON v.order_seq = o.seq"
    " WHERE o.order_id = ? AND v.key = ? AND (v.valid_until IS NULL OR v.valid_until > ?)"
)
_SELECT_ORDER: Final = f"SELECT {', '.join(ORDER)} FROM orders WHERE order_id = ?"  # noqa: S608
_SELECT_DEPOSITS: Final = (
    f"SELECT {', '.join(DEPOSIT)} FROM deposits WHERE order_id = ? ORDER BY seq"  # noqa: S608
)
_SELECT_TRANSFERS: Final = (
    f"SELECT {', '.join(TRANSFER)} FROM transfers WHERE order_id = ? ORDER BY seq"  # noqa: S608
)
_SELECT_FILLS: Final = f"SELECT {', '.join(FILLED)} FROM fills WHERE order_id = ? ORDER BY chunk"  # noqa: S608
_DECIDED_BY_DEPOSITS: Final = ", ".join(f"'{each.value}'" for each in sorted(DECIDED_BY_DEPOSITS))
# On a network of which nothing is told, nobody looks for deposits: there is nothing to wait for.
_SELECT_OVERDUE: Final = f"""
    SELECT order_id FROM orders WHERE deadline_at <= ? AND on_deadline IS NOT ?
        AND (on_deadline NOT IN ({_DECIDED_BY_DEPOSITS}) OR deadline_at <= coalesce(
            (SELECT value FROM json_each(?) WHERE key = deposit_network), deadline_at))
    ORDER BY deadline_at LIMIT ?
"""  # noqa: S608 - constants
# Of an x2u order a locked rate above the limit, of a u2x order one below it.
_LOCKED_BEYOND: Final = """
    SELECT order_id FROM orders WHERE direction = ? AND rate {beyond} ?
        AND price_locked_until > ? AND price_locked_until IS NOT NULL AND lock_broken_at IS NULL
        AND status IN ('awaiting_deposit', 'deposit_detected') LIMIT ?
"""
_SELECT_LOCKED_BEYOND: Final = {
    Direction.XMR_TO_USDC: _LOCKED_BEYOND.format(beyond=">"),
    Direction.USDC_TO_XMR: _LOCKED_BEYOND.format(beyond="<"),
}
# A transfer whose bytes are committed goes before any new one: it holds its wallet's inputs.
_SELECT_EFFECTS: Final = """
    SELECT e.order_id, e.kind, e.subject FROM effects e
    LEFT JOIN transfers t ON t.transfer_id = e.subject
    ORDER BY t.state IS NULL OR t.state = 'planned', e.order_id
"""
_SELECT_PLANNED: Final = """
    SELECT t.order_id, t.transfer_id FROM transfers t JOIN effects e
        ON e.order_id = t.order_id AND e.kind = 'advance_transfer'
        AND e.subject = t.transfer_id
    WHERE t.network = ? AND t.state = 'planned' ORDER BY t.seq LIMIT ?
"""
_SELECT_RESPONSE: Final = (
    f"SELECT {', '.join(RESPONSE)} FROM idempotency_keys"  # noqa: S608
    " WHERE namespace = ? AND idempotency_key = ?"
)


class SqliteOrderStore(SqliteRelays, SqliteRetention):
    """The OrderStore port (orders/ports/) over a Database."""

    def __init__(self, database: Tables, view_key: Callable[[], str]) -> None:
        super().__init__(database)
        self._view_key = view_key

    async def order(self, order_id: str) -> Order | None:
        """The order as last committed."""
        row = self._db.read_one(_SELECT_ORDER, (order_id,))
        if row is None:
            return None
        order = order_from(row)
        if order.version == 1:
            return order  # only created so far: it has no deposits or transfers to look up
        return replace(
            order,
            deposits=tuple(map(deposit_from, self._db.read(_SELECT_DEPOSITS, (order_id,)))),
            transfers=tuple(map(transfer_from, self._db.read(_SELECT_TRANSFERS, (order_id,)))),
            fills=self._fills(order),
            report=None if order.terms.upstream_id is None else self._report(order_id),
        )

    def _fills(self, order: Order) -> tuple[Fill, ...]:
        if order.terms.twap is None:
            return ()
        return tuple(map(fill_from, self._db.read(_SELECT_FILLS, (order.order_id,))))

    async def order_id_of_deposit_address(self, network: str, address: str) -> str | None:
        """Which order an address was given to."""
        found = order_given(self._db, address)
        return found[0] if found is not None and found[1] == network else None

    async def status_view(self, order_id: str, now: int) -> tuple[str, bytes] | None:
        """The destination and the status answer of an order, if it holds now."""
        row = self._db.read_one(_SELECT_VIEW, (order_id, self._view_key(), now))
        return (row[0], row[1]) if row else None

    async def is_deposit_address(self, address: str) -> bool:
        """Whether the address was given to an order to pay to, on whatever network."""
        return order_given(self._db, address) is not None

    async def orders_of_session(self, session_id: str, limit: int) -> list[Order]:
        """The session's orders, newest first."""
        rows = self._db.read(
            "SELECT order_id FROM orders WHERE session_start = ?"
            " AND session_id = ? ORDER BY seq DESC LIMIT ?",
            (session_id[:_SESSION_START], session_id, limit),
        )
        found = [await self.order(order_id) for (order_id,) in rows]
        return [order for order in found if order is not None]

    async def open_orders(self) -> list[str]:
        """Ids of all orders that are not over, and of those that wait for a refund address."""
        # Reads every order; it is asked once, at the start.
        rows = self._db.read(
            "SELECT order_id FROM orders"
            " WHERE deadline_at IS NOT NULL OR action_required IS NOT NULL"
        )
        return [order_id for (order_id,) in rows]

    async def overdue(
        self, now: int, limit: int, known: Mapping[str, int], *, but: OnDeadline | None = None
    ) -> list[str]:
        """Ids of orders whose deadline is at or before ``now``, oldest deadline first.

        Left out are those with ``but`` to be done at their deadline, and those that are decided by
        deposits on a network where all are ``known`` only until before their deadline.
        """
        found = self._db.read(
            _SELECT_OVERDUE, (now, but and but.value, orjson.dumps(dict(known)).decode(), limit)
        )
        return [order_id for (order_id,) in found]

    async def locked_beyond(
        self, direction: Direction, rate: int, now: int, limit: int
    ) -> list[str]:
        """Ids of unpaid orders whose price lock the rate breaks (domain/deposit_rules.py)."""
        found = self._db.read(_SELECT_LOCKED_BEYOND[direction], (direction.value, rate, now, limit))
        return [order_id for (order_id,) in found]

    async def unfunded_clients(self) -> dict[str, str]:
        """Who asked for each order that awaits its deposit, by order id."""
        return dict(self._db.read("SELECT order_id, client FROM order_clients"))

    async def orders_made(self, day: int) -> dict[str, int]:
        """How many orders each client made on a day of UTC."""
        return dict(self._db.read("SELECT client, orders FROM order_counts WHERE day = ?", (day,)))

    async def tickets_taken(self, day: int) -> dict[str, tuple[int, int]]:
        """Tickets and bytes that each client was charged on a day of UTC."""
        sql = "SELECT client, tickets, bytes FROM ticket_counts WHERE day = ?"
        return {client: (tickets, size) for client, tickets, size in self._db.read(sql, (day,))}

    async def pending_effects(self) -> list[PendingEffect]:
        """Every effect that is committed and not done; prepared transfers first."""
        return [
            PendingEffect(order_id, effect_from(kind, transfer_id))
            for order_id, kind, transfer_id in self._db.read(_SELECT_EFFECTS)
        ]

    async def planned_transfers(self, network: str, limit: int) -> list[tuple[str, str]]:
        """Order and transfer ids of what is due on a network and not signed, oldest first."""
        return [tuple(row) for row in self._db.read(_SELECT_PLANNED, (network, limit))]

    async def response(self, namespace: str, key: str) -> StoredResponse | None:
        """The stored answer under an idempotency key."""
        row = self._db.read_one(_SELECT_RESPONSE, (namespace, key))
        return response_from(row) if row else None

    async def commit(self, *changes: Change) -> None:
        """Make the changes durable, all of them whole or nothing at all.

        Raises errors.Unavailable, and sqlite.StoreConflict when a constraint is broken.
        """
        await self._db.write(self.rows(*changes))

    def rows(self, *changes: Change) -> list[Statement]:
        """What ``commit`` writes for these changes."""
        key = self._view_key()
        return [row for change in changes for row in statements(change, key)]

    async def settle(self) -> None:
        """Wait until every commit begun so far is on disk or refused."""
        with suppress(Unavailable):  # closing: the writes that wait are finished all the same
            await self._db.write(())
