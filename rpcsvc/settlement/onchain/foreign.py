"""What moved in the service's wallets and is of no order: records of it, and throwing the switch.

What left and is not on record tells of a database that was put back from an older copy, or of a
key in other hands: whoever signs on pays twice, or helps a thief. So nothing more is signed before
the operator has looked, and he has when he lets money out again: what he was told of does not stop
it a second time.
What does not live here: finding it (evm/nonces.py, monero/startup_reconciliation.py), SQL
(store/onchain_foreign.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

import structlog

from rpcsvc.settlement.onchain.guard import PauseSwitch, throw

log = structlog.get_logger(__name__)


class Stray(NamedTuple):
    """A confirmed deposit that is of no order. ``order_id``: whose address it came to, if any's."""

    network: str
    txid: str
    address: str
    units: int
    order_id: str | None


class ForeignLedger(Protocol):
    """The database as those use it who look for what is not on record.

    Everything may raise errors.Unavailable.
    """

    def nonce_told(self, network: str, sender: str) -> int | None:
        """Up to which nonce of the sender, itself left out, the operator was told; None: never."""
        ...

    async def tell_nonce(self, network: str, sender: str, nonce: int) -> None:
        """Note that the operator was told of all nonces below this one."""
        ...

    def explained(self, network: str) -> list[str]:
        """The ids of the transactions that the operator made by hand, and said so."""
        ...

    def monero_cursor(self) -> int | None:
        """The newest block of Monero whose deposits are on record; None before the first look."""
        ...

    def not_on_record(self, txids: Collection[str]) -> list[str]:
        """Those of the wallet's Monero transactions that nobody knows of, in order.

        That is: no payment of the service, not explained, and the operator was not told of them.
        """
        ...

    def strays(self) -> list[Stray]:
        """Confirmed deposits that are of no order and not explained; the first 1,000."""
        ...

    async def tell_transactions(self, network: str, txids: Collection[str], at: int) -> None:
        """Note that the operator was told of these."""
        ...


def reason_of(wallet: str) -> str:
    """Why payouts are paused, and what to do, for the operator."""
    return (
        f"transactions of {wallet} that the database does not know: run rpcsvc audit, then rpcsvc"
        " payouts resume"
    )


def pause_for(switch: PauseSwitch, wallet: str) -> bool:
    """Pause payouts; False when they are paused for another reason, or that can't be written.

    It is on disk before the operator counts as told: told first and not paused, nobody would be.
    """
    if not throw(switch, reason_of(wallet)):
        return False
    log.error("payouts_paused_by_foreign_transactions", wallet=wallet)
    return True
