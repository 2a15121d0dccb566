"""Webhooks and their messages as rows, and the rows that commits of orders write for them.

Times are ms since the epoch, by the machine's clock: a sandbox's time machine moves no pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.webhooks import DeliveryAttempt, DeliveryVerdict, Standing, Webhook
from rpcsvc.store.database import Row, Statement, Tables

_SEQ: Final = "(SELECT seq FROM orders WHERE order_id = :order_id)"
_INSERT_WEBHOOK: Final = (
    "INSERT INTO webhooks (order_seq, url, receiver, secret, client, failures, due_at)"
    f" VALUES ({_SEQ}, :url, :receiver, :secret, :client, 0, 0)"
)
# Nothing where the order has no webhook. Behind a message that waits, this one waits as well.
_INSERT_DELIVERY: Final = (
    "INSERT INTO webhook_deliveries (order_seq, version, state, due_at, attempts)"
    " SELECT order_seq, CAST(:version AS BIGINT), 'pending', due_at, 0 FROM webhooks"
    f" WHERE order_seq = {_SEQ} AND ended_at IS NULL"
)
_SELECT_DUE: Final = """
    SELECT o.order_id, t.version, w.url, w.secret, w.client, w.failures, w.failing_since
    FROM (
        SELECT d.order_seq, d.version, d.due_at,
            row_number() OVER (PARTITION BY h.client ORDER BY d.due_at, d.order_seq) AS turn
        FROM (
            SELECT order_seq, min(version) AS version, min(due_at) AS due_at
            FROM webhook_deliveries
            WHERE state = 'pending' AND due_at <= :now GROUP BY order_seq
        ) AS d
        JOIN webhooks h ON h.order_seq = d.order_seq
        WHERE h.ended_at IS NULL AND h.receiver NOT IN :busy AND :is_known = coalesce((
            SELECT last.has_answered FROM webhooks AS last
            WHERE last.receiver = h.receiver AND last.tried_at IS NOT NULL
            ORDER BY last.tried_at DESC LIMIT 1
        ), 0)
    ) AS t
    JOIN webhooks w ON w.order_seq = t.order_seq JOIN orders o ON o.seq = t.order_seq
    WHERE t.turn <= :most_of_client ORDER BY t.turn, t.due_at, t.order_seq DESC LIMIT :limit
"""
_HAS_DUE: Final = (
    "SELECT 1 FROM webhook_deliveries WHERE state = 'pending' AND due_at <= :now LIMIT 1"
)
_ATTEMPTED: Final = (
    "UPDATE webhook_deliveries SET state = :state, attempts = attempts + 1, tried_at = :now,"
    " status = :status, error = :error"
    f" WHERE order_seq = {_SEQ} AND version = :version AND state = 'pending'"
)
_STANDS: Final = (
    "UPDATE webhooks SET failures = :failures, failing_since = :failing_since, due_at = :due_at,"
    " tried_at = :now, has_answered = :has_answered, ended_at = coalesce(ended_at, :ended_at)"
    f" WHERE order_seq = {_SEQ}"
)
_DUE: Final = (
    f"UPDATE webhook_deliveries SET due_at = :due_at WHERE order_seq = {_SEQ}"
    " AND state = 'pending' AND due_at <> :due_at"
)
# The webhook of an order that was cancelled before a deposit came, unless its receiver took the
# last message. One whose time passed ended later than it expired.
_END_CANCELLED: Final = (
    f"UPDATE webhooks SET ended_at = :now WHERE order_seq = {_SEQ} AND ended_at IS NULL"
    " AND (failures > 0 OR tried_at IS NULL) AND EXISTS (SELECT 1 FROM orders o"
    " WHERE o.seq = webhooks.order_seq AND o.unpaid_since < o.expires_at)"
)
# Nothing unless the webhook has ended.
_NO_MORE: Final = (
    f"UPDATE webhook_deliveries SET state = 'dead', error = :error WHERE order_seq = {_SEQ}"
    " AND state = 'pending' AND EXISTS (SELECT 1 FROM webhooks w"
    " WHERE w.order_seq = webhook_deliveries.order_seq AND w.ended_at IS NOT NULL)"
)
_REOPEN: Final = (
    "UPDATE webhooks SET failures = 0, failing_since = NULL, due_at = 0, ended_at = NULL"
    f" WHERE order_seq = {_SEQ}"
)
_BRING_FORWARD: Final = (
    "UPDATE webhook_deliveries SET due_at = 0 WHERE state = 'pending' AND due_at > :beyond",
    "UPDATE webhooks SET due_at = 0 WHERE due_at > :beyond",
)
_AGAIN: Final = (
    "UPDATE webhook_deliveries SET state = 'pending', due_at = 0"
    f" WHERE order_seq = {_SEQ} AND {{which}}"
)
_BOOKED: Final = """
    SELECT o.order_id, d.version, e.event, e.at, w.url, d.state, d.attempts, d.tried_at, d.status,
        d.error, d.due_at
    FROM webhook_deliveries d JOIN webhooks w ON w.order_seq = d.order_seq
    JOIN orders o ON o.seq = d.order_seq
    JOIN event_log e ON e.order_seq = d.order_seq AND e.version = d.version
"""
_OF_ORDER: Final = f"{_BOOKED} WHERE d.order_seq = {_SEQ} ORDER BY d.version DESC LIMIT :limit"
_IN_STATES: Final = (
    f"{_BOOKED} WHERE d.state IN :states ORDER BY e.at DESC, d.version DESC LIMIT :limit"
)
_BACKLOG: Final = """
    SELECT count(*) AS pending, min(e.at) AS oldest FROM webhook_deliveries d
    JOIN event_log e ON e.order_seq = d.order_seq AND e.version = d.version
    WHERE d.state = 'pending'
"""
_SELECT_OLD: Final = """
    SELECT w.order_seq FROM webhooks w JOIN orders o ON o.seq = w.order_seq
    WHERE o.deadline_at IS NULL AND o.status_at < :before AND NOT EXISTS (
        SELECT 1 FROM webhook_deliveries d WHERE d.order_seq = w.order_seq AND d.state = 'pending'
    )
    LIMIT :limit
"""
_FORGOTTEN_AT_ONCE: Final = 2_000
# Of an order whose answers are pruned; within the transaction that does it (store/orders.py).
PRUNE_WEBHOOK: Final = (
    "DELETE FROM webhook_deliveries WHERE order_seq = {seq}",
    "DELETE FROM webhooks WHERE order_seq = {seq}",
)

ENDED: Final = "The receiver has ended the webhook with status 410."
CANCELLED: Final = "The order was cancelled before a deposit came."


def webhook_statement(order_id: str, webhook: Webhook) -> Statement:
    """The webhook of a new order; its first message refers to it."""
    values = {
        "order_id": order_id, "url": webhook.url, "receiver": webhook.receiver,
        "secret": webhook.secret, "client": webhook.client,
    }  # fmt: skip
    return Statement(_INSERT_WEBHOOK, values, first=True)


def delivery_statement(order_id: str, version: int) -> Statement:
    """The message of an event, if the order has a webhook."""
    return Statement(_INSERT_DELIVERY, {"order_id": order_id, "version": version})


class DueDelivery(Struct, frozen=True):
    """The oldest message of an order that is not delivered, to be sent now.

    ``is_known``: its receiver answered the last message that it was sent, of any order.
    """

    order_id: str
    sequence: int
    webhook: Webhook
    standing: Standing
    is_known: bool


class BookedDelivery(NamedTuple):
    """A message on record. ``event`` and ``at`` are those of the order's history.

    ``due_at``: when a pending one is tried next; 0: at once.
    """

    order_id: str
    sequence: int
    event: str
    at: int
    url: str
    state: str
    attempts: int
    tried_at: int | None
    status: int | None
    error: str | None
    due_at: int


class BookedWebhook(NamedTuple):
    """A webhook on record, without its secret."""

    url: str
    has_secret: bool
    failing_since: int | None
    ended_at: int | None


class Backlog(NamedTuple):
    """How many messages are pending, and when the oldest event of them was; None: there is none."""

    pending: int
    oldest_at: int | None


def end_statements(order_id: str, now: int) -> list[Statement]:
    """End the webhook of an order that was cancelled unfunded, unless its receiver took the last
    message; then the first failure ends it.
    """
    values = {"order_id": order_id, "now": now, "error": CANCELLED}
    return [Statement(_END_CANCELLED, values), Statement(_NO_MORE, values)]


class OldWebhookRows:
    """The part of OrderStore for webhooks that are deleted after their time."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def forget_webhooks(self, before: int) -> int:
        """Delete webhooks, secrets included, of orders that ended before a time; some at once.

        A webhook with a pending message stays. Returns how many.
        """
        rows = await self._db.fetch(_SELECT_OLD, before=before, limit=_FORGOTTEN_AT_ONCE)
        values = [{"seq": row["order_seq"]} for row in rows]
        texts = [sql.format(seq=":seq") for sql in PRUNE_WEBHOOK]
        if values:
            await self._db.write([Statement(sql, each) for sql in texts for each in values])
        return len(values)


class WebhookStore:
    """Messages that are due and on record. Everything may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def has_due(self, now: int) -> bool:
        """Whether any message is due: cheap to ask after every event."""
        return bool(await self._db.fetch(_HAS_DUE, now=now))

    async def due(
        self, now: int, busy: Sequence[str], *, is_known: bool, most_of_client: int, limit: int
    ) -> list[DueDelivery]:
        """The oldest due message of each order: the first of each client, then the second."""
        rows = await self._db.fetch(
            _SELECT_DUE,
            now=now,
            busy=list(busy),
            is_known=int(is_known),
            most_of_client=most_of_client,
            limit=limit,
        )
        return [
            DueDelivery(
                row["order_id"],
                row["version"],
                Webhook(row["url"], row["secret"], row["client"]),
                Standing(row["failures"], row["failing_since"]),
                is_known,
            )
            for row in rows
        ]

    async def record(
        self, delivery: DueDelivery, attempt: DeliveryAttempt, verdict: DeliveryVerdict, now: int
    ) -> None:
        """Record the outcome of an attempt."""
        standing, order = verdict.standing, {"order_id": delivery.order_id}
        tried = {
            **order, "version": delivery.sequence, "state": verdict.state, "now": now,
            "status": attempt.status, "error": attempt.error,
        }  # fmt: skip
        stands = {
            **order, "failures": standing.failures, "failing_since": standing.failing_since,
            "due_at": standing.due_at, "ended_at": now if standing.is_ended else None, "now": now,
            "has_answered": int(attempt.status is not None),
        }  # fmt: skip
        statements = [
            Statement(_ATTEMPTED, tried),
            Statement(_STANDS, stands),
            Statement(_DUE, {**order, "due_at": standing.due_at}),
        ]
        if standing.is_ended:
            statements.append(Statement(_NO_MORE, {**order, "error": ENDED}))
        elif standing.failures:
            statements += end_statements(delivery.order_id, now)
        await self._db.write(statements)

    async def bring_forward(self, beyond: int) -> None:
        """Make messages due now that are due later than ``beyond``: the clock was set back."""
        await self._db.write([Statement(sql, {"beyond": beyond}) for sql in _BRING_FORWARD])

    async def webhook(self, order_id: str) -> BookedWebhook | None:
        """The webhook of an order."""
        row = await self._db.fetch_one(
            "SELECT url, secret IS NOT NULL AS has_secret, failing_since, ended_at FROM webhooks"
            f" WHERE order_seq = {_SEQ}",
            order_id=order_id,
        )
        if row is None:
            return None
        has_secret = bool(row["has_secret"])
        return BookedWebhook(row["url"], has_secret, row["failing_since"], row["ended_at"])

    async def deliveries(self, order_id: str, limit: int) -> list[BookedDelivery]:
        """The newest messages of an order, oldest first."""
        rows = await self._db.fetch(_OF_ORDER, order_id=order_id, limit=limit)
        return [_booked(row) for row in reversed(rows)]

    async def listed(self, states: Sequence[str], limit: int) -> list[BookedDelivery]:
        """The newest messages in these states, newest first."""
        rows = await self._db.fetch(_IN_STATES, states=list(states), limit=limit)
        return [_booked(row) for row in rows]

    async def replay(self, order_id: str, sequence: int | None) -> int:
        """Have a message, or all dead ones of the order, sent again; returns how many.

        A webhook that the receiver had ended goes on.
        """
        which = "state = 'dead'" if sequence is None else "version = :version"
        values = {"order_id": order_id, **({} if sequence is None else {"version": sequence})}
        row = await self._db.fetch_one(
            "SELECT count(*) AS found FROM webhook_deliveries"
            f" WHERE order_seq = {_SEQ} AND {which}",
            **values,
        )
        if row is None or not row["found"]:
            return 0
        await self._db.write(
            [
                Statement(_AGAIN.format(which=which), values),
                Statement(_REOPEN, {"order_id": order_id}),
                Statement(_DUE, {"order_id": order_id, "due_at": 0}),
            ]
        )
        return int(row["found"])

    async def backlog(self) -> Backlog:
        """Number and age of pending messages."""
        row = await self._db.fetch_one(_BACKLOG)
        return Backlog(row["pending"], row["oldest"]) if row else Backlog(0, None)


def _booked(row: Row) -> BookedDelivery:
    return BookedDelivery(
        row["order_id"], row["version"], row["event"], row["at"], row["url"], row["state"],
        row["attempts"], row["tried_at"], row["status"], row["error"], row["due_at"],
    )  # fmt: skip
