"""Rows that replicas share: published rates, and wallet states with their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Struct

from rpcsvc.clock import DAY_MS
from rpcsvc.domain.money import Asset
from rpcsvc.domain.reservations import Holdings
from rpcsvc.store.changes import PooledOrder, RateBounds
from rpcsvc.store.database import Row, StaleWrite, Statement, Tables, from_row, to_row

KEPT_MS: Final = 7 * DAY_MS
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


class RateRow(NamedTuple):
    """A published rate: when, how long ago, and the token of the lease it was published under."""

    usdc_per_xmr: int
    at: int
    age_ms: int
    token: int


class RateRows:
    """Keeps published rates for a week. Everything may raise errors.Unavailable."""

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


def rate_statement(bounds: RateBounds) -> Statement:
    """Abort the transaction unless the last published rate is fresh and within bounds."""
    return Statement(_AGREES, bounds._asdict(), finds=True)


def _rate_row(row: Row) -> RateRow:
    return RateRow(row["usdc_per_xmr"], row["published_at"], row["age_ms"], row["token"])


class WalletState(Struct, frozen=True):
    """The wallet of a network, as the replica that settles from it sees it.

    ``fee``: of a transfer; None while it is not known. ``holdings``: None while they are not known,
    or too low; ``shortage`` says so to a caller then. ``refusal``: why no order is taken now; None:
    orders are taken. ``height``: of the newest block that the node showed.
    """

    network: str
    is_up: bool
    height: int | None
    fee: int | None
    holdings: Holdings | None
    shortage: str | None
    refusal: str | None


class PublishedState(Struct, frozen=True):
    """A state with the time when it was published, and how long ago that was (ms)."""

    state: WalletState
    published_at: int
    age_ms: int


class SharedWallets:
    """Keeps wallet states and the pool of deposit addresses. All may raise errors.Unavailable."""

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


def address_statement(pooled: PooledOrder) -> Statement:
    """Abort the transaction unless the order's address is in the pool.

    It runs before the order's row, which an order with the same address refuses as a conflict.
    """
    return Statement(_TAKE_ADDRESS, {"address": pooled.address}, first=True, finds=True)


def pooled_statement(pooled: PooledOrder) -> Statement:
    """Abort the transaction unless the order's wallet can pay."""
    return Statement(_CAN_PAY, pooled._asdict(), finds=True)


def _values(state: WalletState) -> dict[str, Any]:
    held = state.holdings
    none = dict.fromkeys(Holdings.__struct_fields__)
    return {**to_row(state), **(none if held is None else to_row(held))}


def _published(row: Row) -> PublishedState:
    held = None if row["free"] is None else from_row(Holdings, row)
    return from_row(PublishedState, row, state=from_row(WalletState, row, holdings=held))
