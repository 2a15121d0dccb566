"""Withdrawals: the operator's own transfers out of the wallets, and the states they pass through.

A withdrawal belongs to no order. Its id is its idempotency key, and what it pays never changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.domain.money import Asset
from rpcsvc.domain.order import Transfer, TransferKind, TransferState

PREFIX: Final = "wd_"
ID_FORM: Final = "wd_ and 4 to 60 letters, digits, - or _"
# One that is not signed within this time is cancelled.
SIGN_WITHIN_MS: Final = 10 * 60 * 1000

_ID: Final = re.compile(rf"{PREFIX}[0-9A-Za-z_-]{{4,60}}", re.ASCII)
_ENDS: Final = frozenset({TransferState.SETTLED, TransferState.FAILED})
_NEXT: Final[Mapping[TransferState, frozenset[TransferState]]] = {
    TransferState.PLANNED: frozenset(
        {TransferState.PREPARED, TransferState.FAILED, TransferState.CANCELLED}
    ),
    TransferState.PREPARED: _ENDS | {TransferState.PUBLISHED, TransferState.UNKNOWN},
    TransferState.PUBLISHED: _ENDS | {TransferState.UNKNOWN},
    TransferState.UNKNOWN: _ENDS | {TransferState.PUBLISHED},
}


class ImpossibleStep(Exception):
    """A withdrawal can't go from its state to the one asked for; it was not changed."""


class Withdrawal(Struct, frozen=True):
    """A withdrawal. ``units`` arrive; ``fee``: units reserved besides, for the network's fee.

    ``raw`` holds the signed bytes, hex, from PREPARED on. ``reason`` is in words for the operator.
    Times are ms since the epoch.
    """

    withdrawal_id: str
    network: str
    asset: Asset
    address: str
    units: int
    fee: int
    created_at: int
    changed_at: int
    state: TransferState = TransferState.PLANNED
    txid: str | None = None
    raw: str | None = None
    reason: str | None = None
    receipt: str | None = None

    @property
    def transfer(self) -> Transfer:
        """The withdrawal as the wallets pay it: a payout whose id belongs to no order."""
        return Transfer(
            self.withdrawal_id, TransferKind.PAYOUT, self.network, self.asset, self.address,
            self.units, self.fee, self.state, self.txid, self.raw, self.reason,
            receipt=self.receipt,
        )  # fmt: skip

    @property
    def terms(self) -> tuple[str, str, int]:
        """The terms that a repeated call must match: network, address, units."""
        return self.network, self.address, self.units

    def is_expired(self, now: int) -> bool:
        """Return whether it was not signed in time."""
        is_unsigned = self.state is TransferState.PLANNED
        return is_unsigned and now >= self.created_at + SIGN_WITHIN_MS


def is_withdrawal(transfer_id: str) -> bool:
    """Return whether a transfer's id belongs to a withdrawal: ids of orders begin otherwise."""
    return transfer_id.startswith(PREFIX)


def is_withdrawal_id(text: str) -> bool:
    """Return whether a text has the form of ``ID_FORM``."""
    return _ID.fullmatch(text) is not None


def signed(item: Withdrawal, txid: str, raw: str, now: int) -> Withdrawal:
    """With its signed bytes. Raises ImpossibleStep."""
    return replace(stepped(item, TransferState.PREPARED, now), txid=txid, raw=raw)


def stepped(
    item: Withdrawal,
    state: TransferState,
    now: int,
    *,
    reason: str | None = None,
    receipt: str | None = None,
) -> Withdrawal:
    """Return the withdrawal in its next state. Raises ImpossibleStep."""
    if state not in _NEXT.get(item.state, frozenset()):
        raise ImpossibleStep(f"{item.withdrawal_id} is {item.state.value}, not {state.value} next")
    return replace(item, state=state, changed_at=now, reason=reason, receipt=receipt)
