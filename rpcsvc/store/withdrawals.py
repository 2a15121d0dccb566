"""Withdrawals as rows, each with its reservation while it is open.

A withdrawal and its reservation are written by one commit, as are its signed bytes and the wallet's
own record of them.
"""

from __future__ import annotations

from typing import Any, Final

from rpcsvc.domain.money import ASSETS
from rpcsvc.domain.order import FINAL_TRANSFERS
from rpcsvc.domain.reservations import TOTAL, ReservationChange
from rpcsvc.domain.withdrawals import Withdrawal
from rpcsvc.store.database import (
    Commit,
    Row,
    Rows,
    StaleWrite,
    Statement,
    Tables,
    from_row,
    insert,
    to_row,
    update,
)
from rpcsvc.store.reservations import reservation_statements, within_statement

_TABLE: Final = "withdrawals"
_PROGRESS: Final = ("state", "txid", "raw", "reason", "receipt", "changed_at")
_COLUMNS: Final = (
    "withdrawal_id", "network", "asset", "address", "units", "fee", "created_at", *_PROGRESS,
)  # fmt: skip
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM {_TABLE}"
_IS_OPEN: Final = "state NOT IN ('settled', 'failed', 'cancelled')"
_ADD: Final = f"{insert(_TABLE, _COLUMNS)} ON CONFLICT DO NOTHING"
_CHANGE: Final = update(_TABLE, _PROGRESS, "withdrawal_id = :withdrawal_id AND state = :was")
# The payment journal may have restored a payment that an older copy has as planned.
_CANCEL: Final = (
    f"{_CHANGE} AND NOT EXISTS (SELECT 1 FROM monero_payments WHERE payment_id = :withdrawal_id)"
    " AND NOT EXISTS (SELECT 1 FROM evm_payments WHERE payment_id = :withdrawal_id)"
)
_SIGNED: Final = (
    "SELECT 'monero' AS network, address, units FROM monero_payments WHERE payment_id = :name"
    " UNION ALL SELECT network, recipient, units FROM evm_payments WHERE payment_id = :name"
)


class WithdrawalStore:
    """Keeps withdrawals. Everything may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def find(self, withdrawal_id: str) -> Withdrawal | None:
        """Return a withdrawal as last committed."""
        row = await self._db.fetch_one(f"{_SELECT} WHERE withdrawal_id = :name", name=withdrawal_id)
        return _withdrawal(row) if row else None

    async def open(self) -> list[Withdrawal]:
        """Open withdrawals, oldest first; at most one for each network."""
        rows = await self._db.fetch(f"{_SELECT} WHERE {_IS_OPEN} ORDER BY seq")
        return [_withdrawal(row) for row in rows]

    async def latest(self, limit: int) -> list[Withdrawal]:
        """Withdrawals, newest first."""
        rows = await self._db.fetch(f"{_SELECT} ORDER BY seq DESC LIMIT :limit", limit=limit)
        return [_withdrawal(row) for row in rows]

    async def signed_terms(self, withdrawal_id: str) -> tuple[str, str, int] | None:
        """Network, address and units of the payment on record under an id; None: there is none.

        After a restore the payment journal may have one that the rows of withdrawals lack.
        """
        row = await self._db.fetch_one(_SIGNED, name=withdrawal_id)
        return (row["network"], row["address"], int(row["units"])) if row else None

    async def add(self, item: Withdrawal, most: int | None) -> None:
        """Commit a planned withdrawal and its reservation, if all reservations on the network stay
        within ``most`` units; None: any.

        Raises StaleWrite when they do not, when the id is taken, or when the network has an open
        one: nothing was changed.
        """
        statements = [Statement(_ADD, _values(item), finds=True), *_reserving(item)]
        if most is not None:
            statements.append(within_statement(TOTAL, item.network, most))
        await self._db.write(statements)

    async def change(
        self, before: Withdrawal, after: Withdrawal, commit: Commit | None = None
    ) -> None:
        """Commit the next state; one that is over reserves nothing. ``commit`` writes that
        together with rows of its own.

        Raises StaleWrite when it is not in the state of ``before`` any more.
        """
        rows = _changing(_CHANGE, before, after)
        if commit is None:
            await self._db.write(rows)
        else:
            await commit(rows)

    async def cancel(self, before: Withdrawal, after: Withdrawal) -> bool:
        """Commit the cancellation of a planned one; False, unchanged, when it is not planned any
        more or a payment of it is on record.
        """
        try:
            await self._db.write(_changing(_CANCEL, before, after))
        except StaleWrite:
            return False
        return True


def _changing(sql: str, before: Withdrawal, after: Withdrawal) -> Rows:
    changed = Statement(sql, {**_values(after), "was": before.state.value}, finds=True)
    return [changed, *_reserving(after)] if after.state in FINAL_TRANSFERS else [changed]


def _reserving(item: Withdrawal) -> list[Statement]:
    """Reserve units and fee of an open withdrawal; nothing for one that is over."""
    units = 0 if item.state in FINAL_TRANSFERS else item.units + item.fee
    change = ReservationChange(item.withdrawal_id, {item.network: units}, None, begins=True)
    return list(reservation_statements(change))


def _values(item: Withdrawal) -> dict[str, Any]:
    return to_row(item, asset=item.asset.symbol)


def _withdrawal(row: Row) -> Withdrawal:
    return from_row(Withdrawal, row, asset=ASSETS[row["asset"]])
