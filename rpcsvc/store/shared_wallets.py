"""Wallet states and the pool of deposit addresses as rows: the SharedWallets port over a database,
and the conditions of an order that is made by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rpcsvc.domain.money import Asset
from rpcsvc.orders.ports.shared_wallets import PublishedState, WalletState
from rpcsvc.orders.ports.store import PooledOrder
from rpcsvc.orders.ports.wallets import Holdings
from rpcsvc.store.database import Row, Statement, Tables

_STATE: Final = (
    "is_up", "height", "fee", "free", "locked", "seconds_to_unlock", "shortage", "refusal",
)  # fmt: skip
_PUBLISH: Final = (
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
    """The SharedWallets port (orders/ports/shared_wallets.py)."""

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
            [*emptied, *(Statement(_PUBLISH, _values(each)) for each in states), *added]
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
