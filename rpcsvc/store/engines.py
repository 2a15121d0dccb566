"""Open orders that the configured engine can't settle: of another engine, or of a network without a
node.

An engine never sees the money of another engine's orders: it would let them expire, refund them,
or call them paid.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rpcsvc.store.database import Tables

WALLETS: Final = "SELECT id FROM evm_wallet UNION ALL SELECT id FROM monero_wallet"
_COUNT: Final = "SELECT count(*) AS orders, min(order_id) AS one FROM"
_THERE: Final = f"{_COUNT} orders WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL"
# Withdrawals of simulated wallets are the sandbox's as well.
_SIMULATED: Final = (
    f"{_COUNT} (SELECT order_id, deadline_at FROM orders WHERE upstream_id IS NULL"
    " UNION ALL SELECT withdrawal_id, CASE WHEN state IN ('settled', 'failed', 'cancelled')"
    " THEN NULL ELSE created_at END FROM withdrawals) AS simulated"
)
_IS_OPEN: Final = "(deadline_at IS NOT NULL OR action_required IS NOT NULL)"
# An order may be over and still owe a refund.
_WAITING: Final = (
    f"SELECT order_id, deposit_network AS network FROM orders WHERE {_IS_OPEN}"
    f" UNION SELECT order_id, payout_network FROM orders WHERE {_IS_OPEN}"
    " UNION SELECT order_id, network FROM transfers"
    "  WHERE state IN ('planned', 'prepared', 'published', 'unknown')"
    " UNION SELECT withdrawal_id, network FROM withdrawals"
    "  WHERE state IN ('planned', 'prepared', 'published', 'unknown')"
)
_UNSERVED: Final = (
    f"SELECT order_id, network FROM ({_WAITING}) AS waiting"
    " WHERE network NOT IN :served ORDER BY network, order_id"
)
_STILL: Final = (
    f"SELECT 1 FROM ({_WAITING}) AS waiting WHERE order_id = :order_id AND network = :network"
)


async def claim_of_another(database: Tables, engine: str) -> tuple[str, str] | None:
    """Which engine other than ``engine`` the database is for, and why; None when it is for none.

    That of real wallets is so for ever: money may come to their addresses at any time. Another is
    so until its orders are over; but real wallets never paid what the sandbox did, as their auditor
    would find. Raises errors.Unavailable.
    """
    has_wallets = await database.fetch_one(WALLETS) is not None
    if has_wallets and engine != "onchain":
        return "onchain", "it has the orders of real wallets"
    if engine != "upstream" and (found := await _orders(database, _THERE)):
        return "upstream", f"{found} not over at an upstream"
    if has_wallets or engine == "sandbox":
        return None
    if engine == "onchain":
        found = await _orders(database, _SIMULATED)
        return ("sandbox", f"{found} the sandbox's") if found else None
    found = await _orders(database, f"{_SIMULATED} WHERE deadline_at IS NOT NULL")
    return ("sandbox", f"{found} not over in the sandbox") if found else None


async def _orders(database: Tables, sql: str) -> str | None:
    row = await database.fetch_one(sql)
    if row is None or not row["orders"]:
        return None
    return f"{row['orders']} orders, such as {row['one']}, are"


class UnservedOrders:
    """The open orders of networks that no node serves. Everything raises errors.Unavailable.

    They are looked for once, since nobody gets a new order there; then only those found are looked
    at.
    """

    def __init__(self, database: Tables, waiting: list[tuple[str, str]]) -> None:
        self._db = database
        self._waiting = waiting

    @classmethod
    async def find(cls, database: Tables, served: Collection[str]) -> UnservedOrders:
        """Those that there are now."""
        rows = await database.fetch(_UNSERVED, served=served)
        return cls(database, [(row["order_id"], row["network"]) for row in rows])

    async def problem(self) -> str | None:
        """What the operator has to do about them; None when there are none."""
        self._waiting = [
            (order_id, network)
            for order_id, network in self._waiting
            if await self._db.fetch_one(_STILL, order_id=order_id, network=network) is not None
        ]
        if not self._waiting:
            return None
        order_id, network = self._waiting[0]
        return (
            f"{len(self._waiting)} orders wait for a network without a node, such as {order_id} for"
            f" {network}: name a node for it in onchain.nodes until they are over"
        )
