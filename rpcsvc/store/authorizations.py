"""Signed authorizations and their rows.

Amounts are USDC units, times are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.authorizations import SignedAuthorization
from rpcsvc.domain.order import Order
from rpcsvc.domain.usdc import Authorization
from rpcsvc.store.database import Row, Statement, Tables, from_row, insert, to_row, update

_KEY: Final = ("network", "asset", "payer", "nonce")
_COLUMNS: Final = (
    *_KEY, "order_id", "recipient", "units", "valid_after", "valid_before", "signature",
    "is_gas_paid", "created_at", "state", "txid", "reason", "payment_id",
)  # fmt: skip
_TABLE: Final = "funding_authorizations"
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM {_TABLE}"
_IS_KEY: Final = " AND ".join(f"{name} = :{name}" for name in _KEY)
IS_UNRESOLVED: Final = "state IN ('recorded', 'sent')"
_ADD: Final = f"{insert(_TABLE, _COLUMNS)} ON CONFLICT DO NOTHING"
_RESOLVE: Final = update(_TABLE, ("state", "txid", "reason"), f"{_IS_KEY} AND {IS_UNRESOLVED}")
# Both indexes on order_id have the form of these conditions.
_REOPEN: Final = (
    f"UPDATE {_TABLE} SET state = 'sent' WHERE order_id = :order_id AND state = 'credited'"
    " AND network = :network AND txid = :txid"
    " AND NOT EXISTS (SELECT 1 FROM deposits d WHERE d.network = :network AND d.txid = :txid"
    "  AND d.order_id = :order_id AND d.state = 'confirmed')"
    f" AND NOT EXISTS (SELECT 1 FROM {_TABLE} o WHERE o.order_id = :order_id"
    f"  AND o.{IS_UNRESOLVED})"
)
_UNCHANGED: Final = "SELECT 1 FROM orders WHERE order_id = :order_id AND version = :version"
_SELECT_COUNT: Final = (
    "SELECT authorizations FROM authorization_counts WHERE day = :day AND client = :client"
)
_COUNT: Final = (
    "INSERT INTO authorization_counts (day, client, authorizations) VALUES (:day, :client, 1)"
    " ON CONFLICT (day, client) DO UPDATE"
    " SET authorizations = authorization_counts.authorizations + 1"
    " WHERE authorization_counts.authorizations < :most"
)
_FORGET_COUNTS: Final = "DELETE FROM authorization_counts WHERE day < :day - 1"


class AuthorizationKey(NamedTuple):
    """The key of an authorization, used once. Addresses are in EIP-55 form, the nonce is hex."""

    network: str
    asset: str
    payer: str
    nonce: str


class AuthorizationState(StrEnum):
    """How far an authorization is.

    RECORDED: it may have been sent. SENT: the network has it. CREDITED: its deposit is confirmed;
    SENT again once that deposit is removed. FAILED: it can never be carried out.
    """

    RECORDED = "recorded"
    SENT = "sent"
    CREDITED = "credited"
    FAILED = "failed"


class AuthorizationRecord(Struct, frozen=True):
    """An authorization that is to pay an order. ``reason`` says why it failed.

    ``is_gas_paid``: the order bears the gas; otherwise the service gives it away. ``payment_id``:
    the payer's name for the payment, which stands for one payment of this payer.
    """

    key: AuthorizationKey
    order_id: str
    signed: SignedAuthorization
    created_at: int
    state: AuthorizationState = AuthorizationState.RECORDED
    txid: str | None = None
    reason: str | None = None
    is_gas_paid: bool = False
    payment_id: str | None = None


class ClientDay(NamedTuple):
    """A client as it is stored, a day of UTC, and how many authorizations it may send on a day."""

    client: str
    day: int
    most: int


class AuthorizationStore:
    """Keeps authorizations. Everything may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def find(self, key: AuthorizationKey) -> AuthorizationRecord | None:
        """The authorization under a key."""
        row = await self._db.fetch_one(f"{_SELECT} WHERE {_IS_KEY}", **key._asdict())
        return _record(row) if row else None

    async def is_named(self, payer: str, payment_id: str) -> bool:
        """Return whether a payer has a payment of this name on record."""
        where = "WHERE payer = :payer AND payment_id = :payment_id"
        sql = f"SELECT 1 FROM {_TABLE} {where}"
        return await self._db.fetch_one(sql, payer=payer, payment_id=payment_id) is not None

    async def unresolved(self) -> list[AuthorizationRecord]:
        """Return the authorizations that are RECORDED or SENT, oldest first."""
        return [
            _record(row)
            for row in await self._db.fetch(f"{_SELECT} WHERE {IS_UNRESOLVED} ORDER BY seq")
        ]

    async def unresolved_of(self, order_id: str) -> AuthorizationRecord | None:
        """The one of an order that is RECORDED or SENT."""
        where = f"WHERE order_id = :order_id AND {IS_UNRESOLVED}"
        row = await self._db.fetch_one(f"{_SELECT} {where}", order_id=order_id)
        return _record(row) if row else None

    async def sent_on(self, client: str, day: int) -> int:
        """Return how many authorizations a client sent on a day of UTC."""
        row = await self._db.fetch_one(_SELECT_COUNT, day=day, client=client)
        return int(row["authorizations"]) if row else 0

    async def add(
        self, record: AuthorizationRecord, order_version: int, counted: ClientDay | None = None
    ) -> None:
        """Put an authorization on record, durably, and count it for its client.

        Raises StaleWrite when the order is at another version, has an unresolved authorization, the
        key or the payer's name for it is taken, or the client may send no more.
        """
        order = {"order_id": record.order_id, "version": order_version}
        statements = [
            Statement(_UNCHANGED, order, first=True, finds=True),
            Statement(_ADD, _values(record), finds=True),
        ]
        if counted is not None:
            values = counted._asdict()
            statements.append(Statement(_FORGET_COUNTS, values))
            statements.append(Statement(_COUNT, values, finds=True))
        await self._db.write(statements)

    async def resolve(self, record: AuthorizationRecord) -> None:
        """Change state, transaction and reason of an unresolved authorization.

        Raises StaleWrite for one that is resolved.
        """
        await self._db.write([Statement(_RESOLVE, _values(record), finds=True)])


def reopen_statements(order: Order) -> Iterator[Statement]:
    """The statements that send an order's credited authorization again if its deposit is removed.

    It may be mined in another transaction, or run out. They run with each change of the order after
    the removal, because the authorization may be credited, by an earlier version, just after it.
    With an upstream, its status tells that an authorization is credited, and no deposit.
    """
    if order.terms.upstream_id is None:
        for key in (each.key for each in order.deposits if not each.is_active):
            values = {"order_id": order.order_id, "network": key.network, "txid": key.txid}
            yield Statement(_REOPEN, values)


def _values(record: AuthorizationRecord) -> dict[str, Any]:
    signed = record.signed
    return {
        **to_row(record),
        **to_row(signed.authorization, recipient=signed.authorization.to),
        **record.key._asdict(),
        "signature": signed.signature,
    }


def _record(row: Row) -> AuthorizationRecord:
    key = AuthorizationKey(*(row[name] for name in _KEY))
    nonce = bytes.fromhex(key.nonce)
    given = from_row(Authorization, row, source=key.payer, to=row["recipient"], nonce=nonce)
    signed = SignedAuthorization(given, bytes(row["signature"]))
    return from_row(AuthorizationRecord, row, key=key, signed=signed)
