"""The store port of withdrawals. Everything may raise errors.Unavailable."""

from __future__ import annotations

from typing import Protocol

from rpcsvc.domain.withdrawals import Withdrawal
from rpcsvc.orders.ports.store import Commit


class WithdrawalStore(Protocol):
    """Holds withdrawals, each with the reservation of what it takes while it is open."""

    async def find(self, withdrawal_id: str) -> Withdrawal | None:
        """One withdrawal as last committed."""
        ...

    async def open(self) -> list[Withdrawal]:
        """Those that are not over, oldest first; at most one for each network."""
        ...

    async def latest(self, limit: int) -> list[Withdrawal]:
        """The newest first."""
        ...

    async def signed_terms(self, withdrawal_id: str) -> tuple[str, str, int] | None:
        """Network, address and units of the payment on record under an id; None: there is none.

        After a restore the payment journal may have one that the rows of withdrawals lack.
        """
        ...

    async def add(self, item: Withdrawal, most: int | None) -> None:
        """Commit a planned withdrawal and its reservation, if all that is reserved on the network
        is within ``most`` units then; None: any.

        Raises StaleWrite when it is not, when the id is taken, or when the network has an open
        one: nothing was changed.
        """
        ...

    async def change(
        self, before: Withdrawal, after: Withdrawal, commit: Commit | None = None
    ) -> None:
        """Commit the next state; one that is over reserves nothing. ``commit`` writes that
        together with rows of its own.

        Raises StaleWrite when it is not in the state of ``before`` any more.
        """
        ...

    async def cancel(self, before: Withdrawal, after: Withdrawal) -> bool:
        """Commit the cancellation of a planned one; False, unchanged, when it is not planned any
        more or a payment of it is on record.
        """
        ...
