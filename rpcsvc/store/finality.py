"""Deposits that count before they are final, as rows, and networks that wait for finality.

Triggers of the schema keep the sums. A transaction that adds a row is committed only if the sums,
the row included, are within their bounds, and its network does not wait for finality.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from rpcsvc.clock import iso8601
from rpcsvc.domain.finality import Exposure, FinalityChange
from rpcsvc.domain.order import DepositKey
from rpcsvc.store.database import Statement, Tables, upsert

_KEY: Final = "network = :network AND txid = :txid AND output_index = :output_index"
_TAKE: Final = upsert(
    "unfinal_deposits",
    ("network", "txid", "output_index", "order_id", "units", "lost_at"),
    ("network", "txid", "output_index"),
)
_FREE: Final = f"DELETE FROM unfinal_deposits WHERE {_KEY}"
_LOSE: Final = f"UPDATE unfinal_deposits SET lost_at = :at WHERE {_KEY}"
_HOLD: Final = (
    "INSERT INTO finality_holds (network, until) VALUES (:network, :until)"
    " ON CONFLICT (network) DO UPDATE SET until = excluded.until"
    " WHERE excluded.until > finality_holds.until"
)
# Runs after the row is added: a SELECT that does not find its row aborts the transaction.
_WITHIN: Final = (
    "SELECT units FROM reservation_sums WHERE scope = 'unfinal' AND network = :sum"
    " AND units <= :most AND NOT EXISTS"
    " (SELECT 1 FROM finality_holds h WHERE h.network = :network AND h.until > :now)"
)
_HELD: Final = "SELECT 1 FROM finality_holds WHERE network = :network AND until > :now"
_SUMS: Final = (
    "SELECT network, units FROM reservation_sums WHERE scope = 'unfinal' AND network IN :networks"
)
_COUNTED: Final = (
    "SELECT network, txid, output_index FROM unfinal_deposits"
    " JOIN deposits USING (network, txid, output_index)"
    " WHERE lost_at IS NULL AND state = 'confirmed' ORDER BY network, txid, output_index"
)
# The index deposits_lost has the form of the first two conditions.
_LOST: Final = (
    "SELECT d.network, d.txid, d.units, d.order_id FROM deposits d"
    " WHERE d.state = 'removed' AND d.transfer_id IS NOT NULL AND NOT EXISTS"
    " (SELECT 1 FROM annotated_transactions a"
    "  WHERE a.network = d.network AND a.txid = d.txid) ORDER BY d.network, d.seq"
)
_AT_RISK: Final = (
    "SELECT u.network, CASE WHEN u.lost_at IS NULL THEN 'counted' WHEN a.txid IS NULL THEN 'lost'"
    " ELSE 'written_off' END AS part, sum(u.units) AS units FROM unfinal_deposits u"
    " LEFT JOIN annotated_transactions a ON a.network = u.network AND a.txid = u.txid GROUP BY 1, 2"
)


class LostDeposit(NamedTuple):
    """A deposit that vanished after its payout, and that the operator has not written off."""

    network: str
    txid: str
    units: int
    order_id: str


class FinalityRows:
    """The part of OrderStore for deposits that are not final."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def may_count(self, exposure: Exposure, now: int) -> bool:
        """Return whether a deposit may count early now. Its transaction checks it again."""
        network = exposure.key.network
        if await self._db.fetch_one(_HELD, network=network, now=now) is not None:
            return False
        networks = [name for name, _ in exposure.bounds]
        rows = await self._db.fetch(_SUMS, networks=networks)
        sums = {row["network"]: row["units"] for row in rows}
        return all(sums.get(name, 0) + exposure.units <= most for name, most in exposure.bounds)

    async def unfinal(self) -> list[DepositKey]:
        """Return the deposits that count and are not final.

        Those that are lost are left out, and those that came back until they are confirmed again.
        """
        rows = await self._db.fetch(_COUNTED)
        return [DepositKey(row["network"], row["txid"], row["output_index"]) for row in rows]

    async def free_final(self, keys: Sequence[DepositKey]) -> None:
        """Take deposits that are final now out of the sum at risk."""
        await self._db.write([Statement(_FREE, _values(key)) for key in keys])

    async def lost_deposits(self) -> list[LostDeposit]:
        """Return the deposits that vanished after their payout and are not written off."""
        rows = await self._db.fetch(_LOST)
        return [LostDeposit(*(row[name] for name in LostDeposit._fields)) for row in rows]

    async def held_until(self, network: str, now: int) -> int | None:
        """Return until when (ms) only final deposits count on a network after a loss; None: no
        hold.
        """
        sql = "SELECT until FROM finality_holds WHERE network = :network AND until > :now"
        row = await self._db.fetch_one(sql, network=network, now=now)
        return None if row is None else int(row["until"])

    async def at_risk(self) -> dict[tuple[str, str], int]:
        """Return the sum at risk in USDC units, by network and part: counted, lost, written_off."""
        rows = await self._db.fetch(_AT_RISK)
        return {(row["network"], row["part"]): int(row["units"]) for row in rows}


async def loss_problem(rows: FinalityRows, now: int) -> str | None:
    """Tell the operator of deposits that were lost after their payout; None: there are none."""
    lost = await rows.lost_deposits()
    if not lost:
        return None
    first = lost[0]
    until = await rows.held_until(first.network, now)
    held = "" if until is None else f"; until {iso8601(until)} only final deposits count there"
    return (
        f"{len(lost)} deposits vanished after they were paid out, such as {first.txid} of"
        f" {first.order_id} on {first.network}{held}. Compare with another node; if it stays away,"
        f" write it off: rpcsvc treasury explain {first.network} {first.txid} --note TEXT"
    )


def finality_statements(change: FinalityChange) -> Iterator[Statement]:
    """Statements for a change; they abort the transaction unless the sums are within bounds."""
    for key in change.freed:
        yield Statement(_FREE, _values(key))
    for key in change.returned:
        yield Statement(_LOSE, _values(key, at=None))
    for key in change.lost:
        yield Statement(_LOSE, _values(key, at=change.at))
    for network in sorted({key.network for key in change.lost}):
        yield Statement(_HOLD, {"network": network, "until": change.held_until})
    if (taken := change.taken) is not None:
        values = _values(taken.key, order_id=change.order_id, units=taken.units, lost_at=None)
        yield Statement(_TAKE, values)
        for name, most in taken.bounds:
            bound = {"sum": name, "most": most, "network": taken.key.network, "now": change.at}
            yield Statement(_WITHIN, bound, finds=True)


def _values(key: DepositKey, **more: Any) -> dict[str, Any]:
    return {**key._asdict(), **more}
