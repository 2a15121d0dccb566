"""Confirmed deposits that are of no order, for the operator: what came, and whose address it is.

An EVM address serves its order on all networks; USDC that is sent to it on another one than the
order's is no deposit of the order. It is swept like any other, and its sender has to get it back
by hand. What does not live here: finding them (triggers of migration 0014).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.settlement.onchain.foreign import Stray
from rpcsvc.store.order_addresses import order_has
from rpcsvc.store.sqlite import Tables

_SELECT: Final = (
    "SELECT s.network, s.txid, s.address, s.units, (SELECT o.order_id FROM orders o"  # noqa: S608 - constants
    f"  WHERE {order_has('s.address')})"
    " FROM stray_deposits s WHERE NOT EXISTS (SELECT 1 FROM explained_transactions e"
    "  WHERE e.network = s.network AND e.txid = s.txid)"
    " ORDER BY s.network, s.txid, s.position LIMIT ?"
)
_MOST: Final = 1000


def stray_deposits(database: Tables) -> list[Stray]:
    """Those that the operator has not explained, the first 1,000. Raises errors.Unavailable."""
    return [Stray(*row) for row in database.read(_SELECT, (_MOST,))]
