"""Taking up a payment that the chain has and the database does not, as after a restored backup.

What both networks share: why a transaction is not taken for the payment of a transfer. What does
not live here: the proof that it is (monero/adoption.py, evm/adoption.py), the command
(cli/recovery/adopt.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rpcsvc.domain.order import Transfer, TransferKind, TransferState

_HEX64: Final = re.compile(r"[0-9a-f]{64}")


class NotAdopted(Exception):
    """The transaction can't be taken for the payment of the transfer. The text is for the operator.

    Nothing was changed.
    """


@dataclass(frozen=True, slots=True)
class Open:
    """A transfer of an order that is not over."""

    order_id: str
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Adopted:
    """A payment that is on record now. ``unexplained``: units that it paid to others besides."""

    txid: str
    transfers: tuple[Open, ...]
    block: int | None
    unexplained: int = 0


def bare_txid(text: str, prefix: str) -> str:
    """A transaction id in lower case, with ``prefix``. Raises NotAdopted."""
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


def require_untold(transfer: Transfer, txid: str) -> None:
    """Raise NotAdopted when the order knows already that a transfer was signed."""
    if transfer.state is not TransferState.PLANNED:
        raise NotAdopted(
            f"{txid} is on record for {transfer.transfer_id} already: the service finds it by"
            " itself."
        )
