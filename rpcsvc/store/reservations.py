"""Reservations as rows: the amounts that orders may still take from wallets.

Triggers of the schema keep the sums. A new order is committed only if the sums, itself included,
are within its admission.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rpcsvc.domain.clients import Spending
from rpcsvc.domain.reservations import (
    TOTAL,
    Admission,
    Claims,
    Reservation,
    ReservationChange,
    Reserved,
)
from rpcsvc.store.database import Statement, Tables, upsert

_FUNDED: Final = upsert(
    "reservations", ("order_id", "kind", "network", "units"), ("order_id", "kind", "network")
)
_NOT_FUNDED: Final = (
    "DELETE FROM reservations WHERE order_id = :order_id AND kind = 'funded' AND network = :network"
)
_BEGIN: Final = (
    "INSERT INTO reservations"
    " (order_id, kind, network, units, client, deposit_network, expires_at)"
    " VALUES (:order_id, :kind, :network, :units, :client, :deposit_network, :expires_at)"
    " ON CONFLICT (order_id, kind, network) DO UPDATE SET"
    " units = excluded.units, expires_at = excluded.expires_at"
)
_CHANGE: Final = (
    "UPDATE reservations SET units = :units WHERE order_id = :order_id AND kind = 'unfunded'"
)
_END: Final = "DELETE FROM reservations WHERE order_id = :order_id AND kind = 'unfunded'"
_END_EXPIRED: Final = f"{_END} AND expires_at <= :now"
# These run after the rows above: a SELECT that does not find its row aborts the transaction.
_UNITS_WITHIN: Final = (
    "SELECT units FROM reservation_sums"
    " WHERE scope = :scope AND network = :network AND units <= :most"
)
_ORDERS_WITHIN: Final = (
    "SELECT number FROM reservation_sums WHERE scope = :client AND network = '' AND number <= :most"
)
_COUNT_ORDER: Final = (
    "INSERT INTO order_counts (day, client, orders) VALUES (:day, :client, 1)"
    " ON CONFLICT (day, client) DO UPDATE SET orders = order_counts.orders + 1"
    " WHERE order_counts.orders < :most"
)
_FORGET_ORDER_COUNTS: Final = "DELETE FROM order_counts WHERE day < :day - 1"
_COUNT_WORTH: Final = (
    "INSERT INTO client_days (day, client, units, orders) VALUES (:day, :client, :units, 1)"
    " ON CONFLICT (day, client) DO UPDATE SET units = client_days.units + excluded.units,"
    " orders = client_days.orders + 1 WHERE client_days.units + excluded.units <= :most"
)
_UNBOUNDED: Final = 2**62

_SELECT_SUMS: Final = (
    "SELECT scope, network, units, number FROM reservation_sums"
    " WHERE scope IN ('total', 'all', 'by_address', :client) AND network IN (:network, '')"
)
# An order has its deposits on one network, and its payout on another. CROSS JOIN has SQLite begin
# with the few rows of open orders.
_SELECT_CLAIMS: Final = """
    SELECT 'total' AS part, coalesce(sum(units), 0) AS units
        FROM reservation_sums WHERE scope = 'total' AND network = :network
    UNION ALL SELECT 'deposits', coalesce(sum(r.units), 0)
        FROM reservations r CROSS JOIN orders o
        WHERE r.network = :network AND r.kind = 'funded' AND o.order_id = r.order_id
            AND o.deposit_network = :network
    UNION ALL SELECT 'above_quotes', coalesce(sum(r.units - o.expected_output - o.payout_fee), 0)
        FROM reservations r CROSS JOIN orders o
        WHERE r.network = :network AND r.kind = 'funded' AND o.order_id = r.order_id
            AND o.payout_network = :network AND r.units > o.expected_output + o.payout_fee
            AND NOT EXISTS (SELECT 1 FROM transfers t WHERE t.order_id = o.order_id
                AND t.kind = 'payout' AND t.state IN ('prepared', 'published', 'unknown'))
    UNION ALL SELECT t.kind, coalesce(sum(t.units + t.fee), 0)
        FROM effects e CROSS JOIN transfers t
        WHERE e.kind = 'advance_transfer' AND t.transfer_id = e.subject AND t.network = :network
            AND t.state IN ('prepared', 'published', 'unknown')
        GROUP BY t.kind
    UNION ALL SELECT 'withdrawal', units + fee FROM withdrawals
        WHERE network = :network AND state NOT IN ('settled', 'failed', 'cancelled')
            AND txid IS NOT NULL
"""
_SELECT_UNFUNDED: Final = (
    "SELECT network, units, client, deposit_network, expires_at FROM reservations"
    " WHERE kind = 'unfunded'"
)
_SELECT_EXPIRED: Final = """
    SELECT order_id FROM reservations
    WHERE kind = 'unfunded' AND expires_at <= :now AND expires_at <= {scanned}
    ORDER BY expires_at LIMIT :limit
"""


class ReservationRows:
    """The part of OrderStore for reservations."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def reserved(self, network: str, client: str = "") -> Reserved:
        """Units reserved on a network: in all, and by a client's unfunded orders."""
        rows = await self._db.fetch(_SELECT_SUMS, network=network, client=client)
        units = {row["scope"]: row["units"] for row in rows if row["network"] == network}
        orders = sum(row["number"] for row in rows if not row["network"])
        return Reserved(units.pop(TOTAL, 0), units, orders)

    async def claims(self, network: str) -> Claims:
        """Units on a network that are reserved and for which no transfer is signed yet."""
        rows = await self._db.fetch(_SELECT_CLAIMS, network=network)
        units = {row["part"]: int(row["units"]) for row in rows}
        refunds = units.get("refund", 0)
        signed = refunds + units.get("payout", 0) + units.get("withdrawal", 0)
        return Claims(units["total"] - signed, units["deposits"] - refunds, units["above_quotes"])

    async def reserved_by(self, order_id: str, network: str) -> int:
        """Units that one order reserves on a network."""
        rows = await self._db.fetch(
            "SELECT units FROM reservations WHERE order_id = :order_id AND network = :network",
            order_id=order_id,
            network=network,
        )
        return sum(row["units"] for row in rows)

    async def unfunded(self, limit: int, client: str | None = None) -> list[Reservation]:
        """Reservations of unfunded orders, of one client or of all, soonest to expire first."""
        who = "" if client is None else " AND client = :client"
        values = {} if client is None else {"client": client}
        rows = await self._db.fetch(
            f"{_SELECT_UNFUNDED}{who} ORDER BY expires_at LIMIT :limit", limit=limit, **values
        )
        return [Reservation(*(row[name] for name in Reservation._fields)) for row in rows]

    async def spent(self, day: int, clients: Sequence[str]) -> dict[str, int]:
        """The worth of the orders that clients made on a day, in USDC units; none of the others."""
        rows = await self._db.fetch(
            "SELECT client, units FROM client_days WHERE day = :day AND client IN :clients",
            day=day,
            clients=clients,
        )
        return {row["client"]: row["units"] for row in rows}

    async def expired_reservations(
        self, now: int, limit: int, known: Mapping[str, int]
    ) -> list[str]:
        """Return the orders whose reservation without a deposit is over, oldest first.

        All deposits sent to them in time are on record (``known``: by network, complete until
        then).
        """
        scanned, values = scanned_until(known, "expires_at")
        rows = await self._db.fetch(
            _SELECT_EXPIRED.format(scanned=scanned), now=now, limit=limit, **values
        )
        return [row["order_id"] for row in rows]

    async def end_reservations(self, order_ids: Sequence[str], now: int) -> None:
        """End the unfunded reservations of these orders, if they have expired."""
        values = ({"order_id": order_id, "now": now} for order_id in order_ids)
        await self._db.write([Statement(_END_EXPIRED, each) for each in values])

    async def orders_made(self, client: str, day: int) -> int:
        """Return how many orders a client made on a day of UTC."""
        sql = "SELECT orders FROM order_counts WHERE day = :day AND client = :client"
        row = await self._db.fetch_one(sql, day=day, client=client)
        return row["orders"] if row else 0


def scanned_until(known: Mapping[str, int], otherwise: str) -> tuple[str, dict[str, Any]]:
    """SQL, and its values, for the time until which a row's network is scanned for deposits.

    A network that is not in ``known`` is not scanned, so there is nothing to wait for.
    """
    scans = list(enumerate(known.items()))
    if not scans:
        return otherwise, {}
    whens = "".join(f" WHEN :network{n} THEN :until{n}" for n, _ in scans)
    values: dict[str, Any] = {f"network{n}": network for n, (network, _) in scans}
    values |= {f"until{n}": until for n, (_, until) in scans}
    return f"CASE deposit_network{whens} ELSE {otherwise} END", values


def reservation_statements(change: ReservationChange) -> Iterator[Statement]:
    """Statements that update an order's rows for a change of it."""
    order_id, unfunded = change.order_id, change.unfunded
    for network, units in change.funded.items():
        values = {"order_id": order_id, "kind": "funded", "network": network, "units": units}
        yield Statement(_FUNDED if units else _NOT_FUNDED, values)
    if unfunded is None:
        if not change.begins:
            yield Statement(_END, {"order_id": order_id})
    elif change.begins:
        yield Statement(_BEGIN, {**unfunded._asdict(), "order_id": order_id, "kind": "unfunded"})
    else:
        yield Statement(_CHANGE, {"order_id": order_id, "units": unfunded.units})


def within_statement(scope: str, network: str, most: int) -> Statement:
    """Statement that aborts the transaction unless a sum, with its additions, is at most ``most``
    units.
    """
    values = {"scope": scope, "network": network, "most": most}
    return Statement(_UNITS_WITHIN, values, finds=True)


def admission_statements(admission: Admission, unfunded: Reservation | None) -> Iterator[Statement]:
    """Statements that abort the transaction unless its order, already counted, is within its
    admission.
    """
    if unfunded is None:
        return
    for scope, most in admission.units:
        yield within_statement(scope, unfunded.network, most)
    if admission.orders is not None:
        values = {"client": admission.client, "most": admission.orders}
        yield Statement(_ORDERS_WITHIN, values, finds=True)


def spending_statement(spending: Spending) -> Statement:
    """Count an order's worth to its client's day, unless that exceeds the limit."""
    return Statement(_COUNT_WORTH, spending._asdict(), finds=True)


def count_statements(admission: Admission, day: int) -> Iterator[Statement]:
    """Statements that count an order for its client and day. The transaction is refused above the
    limit.
    """
    most = _UNBOUNDED if admission.orders_today is None else admission.orders_today
    values = {"day": day, "client": admission.client, "most": most}
    yield Statement(_FORGET_ORDER_COUNTS, values)
    yield Statement(_COUNT_ORDER, values, finds=True)
