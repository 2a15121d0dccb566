"""Unrecorded transactions and unattributed deposits: pauses payouts for them, and adopts them.

An unrecorded outgoing transaction means a database restored from an older copy, or a key in other
hands: signing on would pay twice, or help a thief. Nothing is signed until the operator resumes
payouts; transactions that are acknowledged that way do not pause them again.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import structlog
from msgspec import Struct

from rpcsvc.domain.order import Transfer, TransferKind, TransferState
from rpcsvc.settlement.onchain.pause import PauseSwitch, throw
from rpcsvc.store.database import Statement, Tables, from_row, insert

log = structlog.get_logger(__name__)

_ACKNOWLEDGE_TRANSACTION: Final = (
    f"{insert('acknowledged_transactions', ('network', 'txid', 'at'))} ON CONFLICT DO NOTHING"
)
_ON_RECORD: Final = (
    "SELECT txid FROM monero_payments WHERE txid IN :txids"
    " UNION SELECT txid FROM annotated_transactions WHERE network = 'monero' AND txid IN :txids"
    " UNION SELECT txid FROM acknowledged_transactions"
    "  WHERE network = 'monero' AND txid IN :txids"
)
_UNATTRIBUTED: Final = (
    "SELECT s.network, s.txid, s.address, s.units, (SELECT o.order_id FROM orders o"
    "  WHERE o.deposit_address_ends = s.address_ends AND o.deposit_address = s.address) AS order_id"
    " FROM unattributed_deposits s WHERE NOT EXISTS (SELECT 1 FROM annotated_transactions e"
    "  WHERE e.network = s.network AND e.txid = s.txid)"
    " ORDER BY s.network, s.txid, s.position LIMIT 1000"
)
_HEX64: Final = re.compile(r"[0-9a-f]{64}")


class UnattributedDeposit(Struct, frozen=True):
    """A confirmed deposit that is of no order. ``order_id``: whose address it came to, if any's."""

    network: str
    txid: str
    address: str
    units: int
    order_id: str | None


class UnrecordedLedger:
    """The rows about transactions that are not on record. All may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def annotated(self, network: str) -> list[str]:
        """Return the ids of transactions that the operator made by hand and annotated."""
        sql = "SELECT txid FROM annotated_transactions WHERE network = :network ORDER BY txid"
        return [row["txid"] for row in await self._db.fetch(sql, network=network)]

    async def not_on_record(self, txids: Collection[str]) -> list[str]:
        """Return the wallet's Monero transactions that are not on record, in order.

        They are no payment of the service, and neither annotated nor acknowledged.
        """
        known = {row["txid"] for row in await self._db.fetch(_ON_RECORD, txids=txids)}
        return sorted(set(txids) - known)

    async def unattributed_deposits(self) -> list[UnattributedDeposit]:
        """Return confirmed deposits without an order or annotation; the first 1,000."""
        return await unattributed_deposits(self._db)

    async def acknowledge_transactions(self, network: str, txids: Collection[str], at: int) -> None:
        """Record that the operator has acknowledged these transactions."""
        await self._db.write(
            [
                Statement(_ACKNOWLEDGE_TRANSACTION, {"network": network, "txid": txid, "at": at})
                for txid in txids
            ]
        )


async def unattributed_deposits(database: Tables) -> list[UnattributedDeposit]:
    """Return confirmed deposits without an order or annotation; the first 1,000.

    Raises errors.Unavailable.
    """
    return [from_row(UnattributedDeposit, row) for row in await database.fetch(_UNATTRIBUTED)]


def reason_of(wallet: str) -> str:
    """Return why payouts are paused, and the operator's next steps."""
    return (
        f"transactions of {wallet} that the database does not know: run rpcsvc audit, then rpcsvc"
        " payouts resume"
    )


def pause_for(switch: PauseSwitch, wallet: str) -> bool:
    """Pause payouts; False when they are paused for another reason, or the pause can't be written.

    The pause is on disk before anything counts as acknowledged: a failed write loses no warning.
    """
    if not throw(switch, reason_of(wallet)):
        return False
    log.error("payouts_paused_by_unrecorded_transactions", wallet=wallet)
    return True


class NotAdopted(Exception):
    """The transaction can't be adopted as the payment of the transfer. The text is for the
    operator. Nothing was changed.
    """


class OpenTransfer(Struct, frozen=True):
    """A transfer of an order that is not over."""

    order_id: str
    transfer: Transfer


class Adopted(Struct, frozen=True):
    """A payment that is on record now. ``other_units``: paid to others in addition."""

    txid: str
    transfers: tuple[OpenTransfer, ...]
    block: int | None
    other_units: int = 0


def bare_txid(text: str, prefix: str) -> str:
    """Return a transaction id in lower case, with ``prefix``. Raises NotAdopted."""
    digits = text.lower().removeprefix("0x")
    if not _HEX64.fullmatch(digits):
        raise NotAdopted(
            f"A transaction id has 64 hex digits{', after 0x' if prefix else ''}; received"
            f" {text[:80]!r}."
        )
    return prefix + digits


def require_open(transfer: Transfer) -> None:
    """Raise NotAdopted for a transfer that has come to its end."""
    name, state = transfer.transfer_id, transfer.state
    if not state.is_final:
        return
    if state is TransferState.SETTLED:
        raise NotAdopted(f"{name} is settled, by {transfer.txid}: there is nothing to adopt.")
    becomes = "its order is refunded" if transfer.kind is TransferKind.PAYOUT else "it is over"
    raise NotAdopted(
        f"{name} is {state.value}, which is final: {becomes}. If the transaction did pay it, do not"
        " resume payouts: the refund would be paid as well. The order has to be settled by hand."
    )


def require_unsigned(transfer: Transfer, txid: str) -> None:
    """Raise NotAdopted when the order knows already that a transfer was signed."""
    if transfer.state is not TransferState.PLANNED:
        raise NotAdopted(
            f"{txid} is on record for {transfer.transfer_id} already: the service finds it by"
            " itself."
        )
