"""Idempotency keys and the answers that they stand for, as rows."""

from __future__ import annotations

from typing import Final

import orjson

from rpcsvc.orders.ports.store import StoredResponse
from rpcsvc.store.database import Statement, Tables

_RESPONSE: Final = "namespace, idempotency_key, operation, params, body, created_at"
_SELECT: Final = (
    f"SELECT {_RESPONSE} FROM idempotency_keys"
    " WHERE namespace = :namespace AND idempotency_key = :key"
)
_INSERT: Final = (
    f"INSERT INTO idempotency_keys ({_RESPONSE}, order_seq)"
    " VALUES (:namespace, :key, :operation, :params, :body, :created_at,"
    " (SELECT seq FROM orders WHERE order_id = :order_id))"
)
_OLDEST: Final = "SELECT created_at FROM idempotency_keys ORDER BY seq LIMIT 1"
# Keys are numbered as they come, so the old ones are those up to the first young one.
_OLD: Final = (
    "SELECT count(*) AS keys, max(seq) AS last FROM idempotency_keys WHERE seq < coalesce("
    "(SELECT seq FROM idempotency_keys WHERE created_at >= :before ORDER BY seq LIMIT 1),"
    " (SELECT max(seq) + 1 FROM idempotency_keys))"
)
# Twice what falls due between two times of forgetting, so that what is left over gets less.
_FORGOTTEN_AT_ONCE_MS: Final = 2 * 3_600_000


class SqlIdempotencyKeys:
    """The part of the OrderStore port that is about idempotency keys."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def response(self, namespace: str, key: str) -> StoredResponse | None:
        """The stored answer under an idempotency key."""
        row = await self._db.fetch_one(_SELECT, namespace=namespace, key=key)
        if row is None:
            return None
        return StoredResponse(
            namespace=row["namespace"],
            key=row["idempotency_key"],
            operation=row["operation"],
            params=orjson.loads(row["params"]),
            body=row["body"],
            created_at=row["created_at"],
        )

    async def forget_responses(self, before: int) -> int:
        """Drop idempotency keys made before that time, and within two hours of the oldest.

        Returns how many. This is called once an hour: what falls due is gone in time, but a clock
        that was set weeks ahead costs no key that a retry may still come with.
        """
        oldest = await self._db.fetch_one(_OLDEST)
        if oldest is None:
            return 0
        before = min(before, oldest["created_at"] + _FORGOTTEN_AT_ONCE_MS)
        old = await self._db.fetch_one(_OLD, before=before)
        if old is None or not old["keys"]:
            return 0
        sql = "DELETE FROM idempotency_keys WHERE seq <= :last"
        await self._db.write([Statement(sql, {"last": old["last"]})])
        return int(old["keys"])


def response_statement(response: StoredResponse, order_id: str | None) -> Statement:
    """Keep an answer, with the order that it is about, if it made one."""
    return Statement(
        _INSERT,
        {
            "namespace": response.namespace,
            "key": response.key,
            "operation": response.operation,
            "params": orjson.dumps(response.params).decode(),
            "body": response.body,
            "created_at": response.created_at,
            "order_id": order_id,
        },
    )
