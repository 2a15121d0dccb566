"""Orders that wait for a network which no node serves: its node was taken out of the settings.

They are looked for once, since nobody gets a new order there; then only those found are looked
at. What does not live here: which networks are served (settlement/onchain/wiring.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import orjson

from rpcsvc.store.database import Tables

_IS_OPEN: Final = "(deadline_at IS NOT NULL OR action_required IS NOT NULL)"
# An order may be over and still owe a refund.
_WAITING: Final = (
    f"SELECT order_id, deposit_network AS network FROM orders WHERE {_IS_OPEN}"  # noqa: S608 - constants
    f" UNION SELECT order_id, payout_network FROM orders WHERE {_IS_OPEN}"
    " UNION SELECT order_id, network FROM transfers"
    "  WHERE state IN ('planned', 'prepared', 'published', 'unknown')"
)
_UNSERVED: Final = (
    f"SELECT order_id, network FROM ({_WAITING})"  # noqa: S608 - constants
    " WHERE network NOT IN (SELECT value FROM json_each(?)) ORDER BY network, order_id"
)
_STILL: Final = f"SELECT 1 FROM ({_WAITING}) WHERE order_id = ? AND network = ?"  # noqa: S608 - constants


class UnservedOrders:
    """The open orders of networks that are not ``served``. Everything raises Unavailable."""

    def __init__(self, database: Tables, waiting: list[tuple[str, str]]) -> None:
        self._db = database
        self._waiting = waiting

    @classmethod
    async def find(cls, database: Tables, served: Collection[str]) -> UnservedOrders:
        """Those that there are now."""
        listed = orjson.dumps(sorted(served)).decode()
        return cls(database, list(database.read(_UNSERVED, (listed,))))

    async def problem(self) -> str | None:
        """What the operator has to do about them; None when there are none."""
        self._waiting = [item for item in self._waiting if self._db.read_one(_STILL, item)]
        if not self._waiting:
            return None
        order_id, network = self._waiting[0]
        return (
            f"{len(self._waiting)} orders wait for a network without a node, such as {order_id} for"
            f" {network}: name a node for it in onchain.nodes until they are over"
        )
