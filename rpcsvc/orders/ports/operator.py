"""The ports of the operator's records: transfers, fees, claims in doubt, tickets, withdrawals.

Amounts are atomic units, times are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from rpcsvc.domain.order import OnDeadline, OrderStatus, TransferState
from rpcsvc.domain.withdrawals import Withdrawal
from rpcsvc.store.database import Commit


class BookedTransfer(NamedTuple):
    """A payout or refund with what its order says about it.

    ``since``: when its state was reached. ``reason``: what was recorded with it. ``receipt`` is
    JSON that proves the payment.
    """

    transfer_id: str
    order_id: str
    kind: str
    state: TransferState
    asset: str
    network: str
    address: str
    units: int
    txid: str | None
    reason: str | None
    since: int
    order_status: OrderStatus
    deadline_at: int | None
    on_deadline: OnDeadline | None
    action_required: str | None
    receipt: str | None


class Signed(NamedTuple):
    """A transaction that was signed for a transfer. ``block`` is where it was mined."""

    txid: str
    made_at: int
    wallet_state: str
    block: int | None


class IntegratorFees(NamedTuple):
    """What an integrator has earned in one asset, by so many settled payouts."""

    integrator: str
    asset: str
    units: int
    payouts: int


class Doubt(NamedTuple):
    """A call to the upstream whose outcome is not known.

    ``note``: what the operator noted when closing it, of one that came into doubt again.
    """

    order_id: str
    upstream_id: str | None
    reason: str | None
    note: str | None
    created_at: int


class StoredTicket(NamedTuple):
    """A support ticket."""

    ticket_id: str
    created_at: int
    category: str
    order_id: str | None
    wallet_address: str | None
    message: str


class OperatorBooks(Protocol):
    """The records as the operator sees them. Everything may raise errors.Unavailable."""

    async def transfers(
        self, states: tuple[TransferState, ...], limit: int
    ) -> list[BookedTransfer]:
        """The newest transfers in these states, newest first."""
        ...

    async def transfer(self, transfer_id: str) -> BookedTransfer | None:
        """One transfer."""
        ...

    async def signed(self, transfer_id: str) -> list[Signed]:
        """Every transaction that was signed for a transfer, oldest first."""
        ...

    async def is_own_address(self, address: str) -> bool:
        """Whether an address is a deposit address, or one of the service's wallets."""
        ...

    async def integrator_fees(self) -> list[IntegratorFees]:
        """What integrators have earned."""
        ...

    async def doubts(self) -> list[Doubt]:
        """The upstream orders in doubt, oldest first."""
        ...

    async def close_claim(self, order_id: str, reason: str) -> bool:
        """End a claim in doubt, so that its idempotency key is free; False when it is not in doubt.

        Nobody was given a deposit address, so no money can be on its way. ``reason`` is appended to
        the notes of earlier closings and kept.
        """
        ...

    async def open_orders_by_status(self) -> dict[str, tuple[int, int]]:
        """How many open orders have each status, and since when (ms) the oldest has it."""
        ...

    async def due(self) -> dict[tuple[str, str], int]:
        """Units of the transfers that are not over, by network and kind."""
        ...

    async def unmined_payments(self, networks: Iterable[str]) -> dict[str, int]:
        """How many signed payments are in no block, by network."""
        ...

    async def network_fees(self, since: int, before: int | None = None) -> dict[str, int]:
        """Piconero or wei, by network, that payments prepared in that time (ms) took.

        A network that took nothing is left out. Fees for data on L1 are included.
        """
        ...

    async def withdrawals_over(self) -> dict[tuple[str, str], int]:
        """How many withdrawals have ended, by network and how."""
        ...

    async def unresolved_authorizations(self) -> int:
        """How many signed authorizations have neither paid their order nor failed."""
        ...

    async def tickets(self) -> list[StoredTicket]:
        """The tickets, oldest first."""
        ...

    async def close_ticket(self, ticket_id: str) -> bool:
        """Delete a ticket that was dealt with; False when there is none."""
        ...


class Noted(NamedTuple):
    """The outcome of a note on a transaction.

    ``moved``: what the transaction moved, in words. ``recorded``: the payment that it is on record
    as. ``refused``: why nothing was changed.
    """

    txid: str
    note: str | None = None
    moved: str | None = None
    recorded: str | None = None
    refused: str | None = None


class Treasury(Protocol):
    """The operator's view of an engine's wallets."""

    async def view(self) -> dict[str, Any]:
        """The wallets' holdings, and the amounts reserved, owed, swept and spent on fees."""
        ...

    async def plan(self) -> dict[str, Any]:
        """The inventory of each network beside its target, and the moves that would reach it."""
        ...

    async def annotate(self, network: str, txid: str, note: str, wei: int) -> Noted:
        """Annotate a transaction that was made by hand. Raises InvalidInput, Unavailable."""
        ...

    async def remove_annotation(self, network: str, txid: str) -> Noted:
        """Remove an annotation. Raises InvalidInput."""
        ...


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
