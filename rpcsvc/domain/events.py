"""What can happen to an order. Facts in the past tense, found by the engine, the clock or a caller.

What does not live here: what follows from them (transition.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from rpcsvc.domain.order import DepositKey, Report
from rpcsvc.domain.states import OrderStatus


@dataclass(frozen=True, slots=True)
class DepositSeen:
    """The chain or its pool shows a deposit that was not there at the last look.

    ``rate`` is the current one in USDC units per XMR, None when there is no fresh one.
    """

    key: DepositKey
    units: int
    sender: str | None
    first_seen_at: int
    rate: int | None = None


@dataclass(frozen=True, slots=True)
class DepositConfirmed:
    """A deposit has as many confirmations as its network asks for."""

    key: DepositKey


@dataclass(frozen=True, slots=True)
class DepositRemoved:
    """A deposit is gone from the chain and its pool: reorganised away, dropped or double-spent."""

    key: DepositKey


@dataclass(frozen=True, slots=True)
class Repriced:
    """A fresh rate for deposits that have none, in USDC units per XMR.

    ``payable``: payout units that the wallet can pay for them, None where that is not known.
    """

    rate: int
    payable: int | None = None


@dataclass(frozen=True, slots=True)
class LockBroken:
    """The rate, in USDC units per XMR, has moved too far against the service for a price lock."""

    rate: int


@dataclass(frozen=True, slots=True)
class ChunkFilled:
    """The next chunk of a TWAP order was swapped at a rate in USDC units per XMR."""

    index: int
    rate: int


@dataclass(frozen=True, slots=True)
class FillingStopped:
    """No fair rate came for the next chunk for as long as the order waits."""

    index: int


@dataclass(frozen=True, slots=True)
class UpstreamReported:
    """The upstream that settles the order told how it stands."""

    status: OrderStatus
    report: Report


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The order's ``deadline_at`` is over."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The order's owner gave it up."""


@dataclass(frozen=True, slots=True)
class RefundAddressGiven:
    """The order's owner named where refunds go. The address is validated before."""

    address: str


@dataclass(frozen=True, slots=True)
class RefundRetried:
    """The operator had a refund tried again that failed to reach the agreed refund address."""


@dataclass(frozen=True, slots=True)
class TransferPrepared:
    """A transfer was signed; its bytes and id exist, and nothing was published."""

    transfer_id: str
    txid: str
    raw: str


@dataclass(frozen=True, slots=True)
class TransferPublished:
    """The network has taken the transfer; it is not final yet."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class TransferUnknown:
    """Publishing gave no answer that can be relied on; the network may have the transfer."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TransferSettled:
    """The transfer is final on the network. ``receipt`` (JSON) proves it, where there is one."""

    transfer_id: str
    receipt: str | None = None


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The network says that the transfer failed and can never be carried out."""

    transfer_id: str
    reason: str


Event = (
    DepositSeen
    | DepositConfirmed
    | DepositRemoved
    | Repriced
    | LockBroken
    | ChunkFilled
    | FillingStopped
    | UpstreamReported
    | DeadlinePassed
    | Cancelled
    | RefundAddressGiven
    | RefundRetried
    | TransferPrepared
    | TransferPublished
    | TransferUnknown
    | TransferSettled
    | TransferFailed
)
