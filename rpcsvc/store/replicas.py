"""What replicas share, as rows: leases, published rates, and wallet states with their addresses.

With ``Fenced``, a database whose writes need the lease: a write checks the lease's token in its own
transaction. Taking the lease waits for a running commit; a later write finds another token and is
rolled back.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from rpcsvc.domain.money import Asset
from rpcsvc.orders.lease import HeldLease, Lease, LeaseLost
from rpcsvc.orders.ports.store import PooledOrder, RateBounds, RateRow, StaleWrite
from rpcsvc.orders.ports.wallets import Holdings, PublishedState, WalletState
from rpcsvc.store.database import Query, Row, Statement, Tables

_SELECT: Final = "SELECT holder, token FROM leases WHERE name = :name"
_HELD: Final = f"{_SELECT} AND expires_at > now_ms()"
_ADD: Final = (
    "INSERT INTO leases (name, holder, token, expires_at) VALUES (:name, :holder, 0, 0)"
    " ON CONFLICT DO NOTHING"
)
# A lease without an end comes from a copied SQLite database; nobody holds it.
_TAKE: Final = (
    "UPDATE leases SET holder = :holder, token = token + 1, expires_at = now_ms() + :lasts_ms"
    " WHERE name = :name AND (expires_at IS NULL OR expires_at <= now_ms())"
)
_TAKE_FOR_GOOD: Final = (
    "UPDATE leases SET holder = :holder, token = token + 1, expires_at = NULL WHERE name = :name"
)
_RENEW: Final = (
    "UPDATE leases SET expires_at = now_ms() + :lasts_ms WHERE name = :name AND token = :token"
)
_RELEASE: Final = "UPDATE leases SET expires_at = 0 WHERE name = :name AND token = :token"
_FENCE: Final = "SELECT token FROM leases WHERE name = :name AND token = :token"


class SqlLeases:
    """The Leases port (orders/lease.py)."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def take(self, name: str, holder: str, lasts_ms: int | None) -> int | None:
        """Take the lease and return its token; None while another process holds it."""
        taking = _TAKE_FOR_GOOD if lasts_ms is None else _TAKE
        values = {"name": name, "holder": holder, "lasts_ms": lasts_ms}
        try:
            await self._db.write(
                [Statement(_ADD, values, first=True), Statement(taking, values, finds=True)]
            )
        except StaleWrite:
            return None
        row = await self._db.fetch_one(_SELECT, name=name)
        # If this process was paused for longer than the lease lasts, another one may have taken it.
        return int(row["token"]) if row is not None and row["holder"] == holder else None

    async def renew(self, name: str, token: int, lasts_ms: int) -> bool:
        """Extend the lease from now; False when another process has taken it."""
        values = {"name": name, "token": token, "lasts_ms": lasts_ms}
        try:
            await self._db.write([Statement(_RENEW, values, finds=True)])
        except StaleWrite:
            return False
        return True

    async def release(self, name: str, token: int) -> None:
        """Release the lease, so that another process can take it at once."""
        await self._db.write([Statement(_RELEASE, {"name": name, "token": token})])

    async def held(self, name: str) -> HeldLease | None:
        """The current holder; None if the lease is free."""
        row = await self._db.fetch_one(_HELD, name=name)
        return None if row is None else HeldLease(row["holder"], row["token"])


class Fenced:
    """A database under a lease: once another process takes the lease, every write is refused."""

    def __init__(self, database: Tables, lease: Lease) -> None:
        self._db = database
        self._lease = lease
        values = {"name": lease.name, "token": lease.token}
        self._fence = Statement(_FENCE, values, first=True, finds=True)

    def fetch(self, sql: str, **values: Any) -> Coroutine[Any, Any, list[Row]]:
        """As Tables says."""
        return self._db.fetch(sql, **values)

    def fetch_one(self, sql: str, **values: Any) -> Coroutine[Any, Any, Row | None]:
        """As Tables says."""
        return self._db.fetch_one(sql, **values)

    def fetch_together(self, queries: Sequence[Query]) -> Coroutine[Any, Any, list[list[Row]]]:
        """As Tables says."""
        return self._db.fetch_together(queries)

    async def write(self, statements: Sequence[Statement]) -> None:
        """As Tables says. Raises LeaseLost if the lease was lost: nothing was written, and no later
        write will be.
        """
        if self._lease.lost.is_set():
            raise LeaseLost
        try:
            await self._db.write([self._fence, *statements])
        except StaleWrite:
            if await self._is_lost():
                self._lease.lose()
                raise LeaseLost from None
            raise

    async def _is_lost(self) -> bool:
        row = await self._db.fetch_one(_SELECT, name=self._lease.name)
        return row is None or bool(row["token"] != self._lease.token)


KEPT_MS: Final = 7 * 86_400_000

_LAST: Final = "seq = (SELECT max(seq) FROM rates)"
_IS_FRESH: Final = "published_at > now_ms() - :max_age_ms"
_PUBLISH_RATE: Final = (
    "INSERT INTO rates (published_at, usdc_per_xmr, token) SELECT now_ms(), :rate, :token"
    f" WHERE NOT EXISTS (SELECT 1 FROM rates WHERE {_LAST} AND token <> :token AND {_IS_FRESH}"
    " AND usdc_per_xmr NOT BETWEEN :least AND :most)"
)
_PRUNE: Final = "DELETE FROM rates WHERE published_at < now_ms() - :kept_ms"
_AGREES: Final = (
    f"SELECT seq FROM rates WHERE {_LAST} AND {_IS_FRESH} AND usdc_per_xmr BETWEEN :least AND :most"
)
_ROW: Final = (
    "SELECT usdc_per_xmr, published_at, now_ms() - published_at AS age_ms, token FROM rates"
)
_SELECT_LAST: Final = f"{_ROW} WHERE {_LAST}"
_SELECT_RECENT: Final = (
    f"{_ROW} WHERE seq IN (SELECT max(seq) FROM rates WHERE published_at > now_ms() - :span_ms"
    " GROUP BY published_at / :step_ms) ORDER BY seq"
)


class SqlRates:
    """The RateRows port (orders/ports/store.py)."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def publish(self, rate: int, token: int, bounds: RateBounds) -> bool:
        """Add a rate; False if it deviates too far from a fresh rate of another token."""
        row = {"rate": rate, "token": token, **bounds._asdict()}
        try:
            await self._db.write(
                [Statement(_PUBLISH_RATE, row, finds=True), Statement(_PRUNE, {"kept_ms": KEPT_MS})]
            )
        except StaleWrite:
            return False
        return True

    async def last(self) -> RateRow | None:
        """The newest row."""
        row = await self._db.fetch_one(_SELECT_LAST)
        return None if row is None else _rate_row(row)

    async def recent(self, span_ms: int, step_ms: int) -> Sequence[RateRow]:
        """The last row of each step of the span that ends now, oldest first."""
        rows = await self._db.fetch(_SELECT_RECENT, span_ms=span_ms, step_ms=step_ms)
        return [_rate_row(row) for row in rows]


def rate_statements(bounds: RateBounds | None) -> Iterator[Statement]:
    """Statements that abort the transaction unless the last published rate is fresh and within
    bounds.
    """
    if bounds is not None:
        yield Statement(_AGREES, bounds._asdict(), finds=True)


def _rate_row(row: Row) -> RateRow:
    return RateRow(row["usdc_per_xmr"], row["published_at"], row["age_ms"], row["token"])


_STATE: Final = (
    "is_up", "height", "fee", "free", "locked", "seconds_to_unlock", "shortage", "refusal",
)  # fmt: skip
_PUBLISH_STATE: Final = (
    f"INSERT INTO wallet_states (network, published_at, {', '.join(_STATE)})"
    f" VALUES (:network, now_ms(), {', '.join(f':{name}' for name in _STATE)})"
    " ON CONFLICT (network) DO UPDATE SET published_at = excluded.published_at, "
    + ", ".join(f"{name} = excluded.{name}" for name in _STATE)
)
_SELECT_STATES: Final = (
    f"SELECT network, {', '.join(_STATE)}, published_at, now_ms() - published_at AS age_ms"
    " FROM wallet_states"
)
_EMPTY_POOL: Final = "DELETE FROM address_pool"
_ADD_ADDRESS: Final = "INSERT INTO address_pool (address, asset) VALUES (:address, :asset)"
_SELECT_ADDRESSES: Final = "SELECT address FROM address_pool WHERE asset = :asset"
_TAKE_ADDRESS: Final = "DELETE FROM address_pool WHERE address = :address"
# It runs after the rows of reservations: the sum has the new order in it.
_CAN_PAY: Final = (
    "SELECT network FROM wallet_states WHERE network = :network AND published_at >= :since"
    " AND published_at > now_ms() - :max_age_ms AND refusal IS NULL AND free >= coalesce("
    "(SELECT units FROM reservation_sums WHERE scope = 'total' AND network = :network), 0)"
)


class SqlSharedWallets:
    """The SharedWallets port (orders/ports/wallets.py)."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def now_ms(self) -> int:
        """The time by the database's clock."""
        row = await self._db.fetch_one("SELECT now_ms() AS now")
        return 0 if row is None else int(row["now"])

    async def publish(
        self,
        states: Sequence[WalletState],
        addresses: Mapping[Asset, Sequence[str]],
        *,
        is_first: bool,
    ) -> None:
        """Put the states in place of the earlier ones, and add addresses to the pool.

        ``is_first`` empties the pool before that. Raises StoreConflict for an address in the pool.
        """
        emptied = [Statement(_EMPTY_POOL)] if is_first else []
        added = [
            Statement(_ADD_ADDRESS, {"address": address, "asset": asset.symbol})
            for asset, made in addresses.items()
            for address in made
        ]
        await self._db.write(
            [*emptied, *(Statement(_PUBLISH_STATE, _values(each)) for each in states), *added]
        )

    async def states(self) -> list[PublishedState]:
        """The state of each network."""
        return [_published(row) for row in await self._db.fetch(_SELECT_STATES)]

    async def addresses(self, asset: Asset) -> list[str]:
        """The addresses in the pool."""
        rows = await self._db.fetch(_SELECT_ADDRESSES, asset=asset.symbol)
        return [row["address"] for row in rows]


def pooled_statements(pooled: PooledOrder | None) -> Iterator[Statement]:
    """Statements that abort the transaction unless the order's address is in the pool, and its
    wallet can pay.
    """
    if pooled is not None:
        yield Statement(_TAKE_ADDRESS, {"address": pooled.address}, finds=True)
        yield Statement(_CAN_PAY, pooled._asdict(), finds=True)


def _values(state: WalletState) -> dict[str, object]:
    held = state.holdings
    return {
        "network": state.network,
        "is_up": int(state.is_up),
        "height": state.height,
        "fee": state.fee,
        "free": held and held.free,
        "locked": held and held.locked,
        "seconds_to_unlock": held and held.seconds_to_unlock,
        "shortage": state.shortage,
        "refusal": state.refusal,
    }


def _published(row: Row) -> PublishedState:
    known = row["free"] is not None
    held = Holdings(row["free"], row["locked"], row["seconds_to_unlock"]) if known else None
    state = WalletState(
        row["network"],
        bool(row["is_up"]),
        row["height"],
        row["fee"],
        held,
        row["shortage"],
        row["refusal"],
    )
    return PublishedState(state, row["published_at"], row["age_ms"])
