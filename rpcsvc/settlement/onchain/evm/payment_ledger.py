"""What the EVM adapter's payments and sweeps keep: records, and the port to the database.

One payment is one nonce of the hot wallet on one network. It has one or more signed attempts,
which differ in their fees and so in their ids; at most one of them can ever be mined. Units are
USDC units, fees wei per gas. Both fit 63 bits; what they come to in all (gas times fee) need not,
and is nowhere stored but multiplied when it is needed.
What does not live here: SQL (store/onchain_evm_payments.py), when a record changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from rpcsvc.orders.ports.store import Rows

LARGEST_STORED: Final = 2**63 - 1


class PaymentState(StrEnum):
    """How far a payment is.

    PREPARED: signed and committed, never handed to a node. PUBLISHED: a node may have it. SETTLED
    and FAILED: mined deep enough, or never to be; a failed one's nonce is spent. A SETTLED one that
    is no order's may become FAILED by a deep reorganisation.
    """

    PREPARED = "prepared"
    PUBLISHED = "published"
    SETTLED = "settled"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether its bytes must not be published."""
        return self is PaymentState.FAILED


class Purpose(StrEnum):
    """TRANSFER: of an order. SWEEP: brings deposits home."""

    TRANSFER = "transfer"
    SWEEP = "sweep"


@dataclass(frozen=True, slots=True)
class BlockPoint:
    """A block by number and hash: only both together name one."""

    number: int
    hash: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """A signed transaction. ``raw`` is hex without 0x; fees are wei per gas."""

    txid: str
    raw: str = field(repr=False)
    max_fee: int
    tip: int
    made_at: int


@dataclass(frozen=True, slots=True)
class Inclusion:
    """Where an attempt was mined, and what that cost: ``gas_used`` times ``gas_price`` wei.

    ``log_position`` and ``log_index`` place the token's Transfer event within the transaction and
    within the block; None when the transaction was not to make one.
    """

    txid: str
    block: BlockPoint
    gas_used: int
    gas_price: int
    log_position: int | None = None
    log_index: int | None = None


@dataclass(frozen=True, slots=True)
class PaymentOrder:
    """A call to be sent. ``recipient`` gets ``units``; ``contract`` is called with ``data``.

    ``gas`` is the most gas that it may use. No ether is sent along.
    """

    payment_id: str
    purpose: Purpose
    recipient: str
    units: int
    contract: str
    data: bytes
    gas: int


@dataclass(frozen=True, slots=True)
class EvmPayment:
    """A payment. ``conflict``: a block by which its nonce was spent, while no receipt says how."""

    network: str
    sender: str
    nonce: int
    order: PaymentOrder
    attempts: tuple[Attempt, ...]
    prepared_at: int
    state: PaymentState = PaymentState.PREPARED
    published_at: int | None = None
    inclusion: Inclusion | None = None
    conflict: BlockPoint | None = None

    @property
    def payment_id(self) -> str:
        """What it is known by: for an order's transfer, the transfer's id."""
        return self.order.payment_id

    @property
    def latest(self) -> Attempt:
        """The attempt with the highest fees."""
        return self.attempts[-1]

    @property
    def most_fee(self) -> int:
        """The most that it may cost, wei."""
        return self.order.gas * self.latest.max_fee


class SweepMethod(StrEnum):
    """RECEIVE: EIP-3009, one call. PERMIT (EIP-2612), then TAKE (transferFrom): two calls."""

    RECEIVE = "receive"
    PERMIT = "permit"
    TAKE = "take"


class SweepState(StrEnum):
    """SIGNED: its payment is under way. DONE: ``taken`` left the address. VOID: nothing did.

    DONE becomes VOID when its settled payment fails after a reorganisation, by the database itself;
    VOID becomes DONE when its authorization turns out to be used.
    """

    SIGNED = "signed"
    DONE = "done"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Sweep:
    """One step of bringing an address's deposits home.

    ``authorization``: the nonce that an EIP-3009 signature uses up, hex; None for other methods.
    ``payment_id`` None: the authorization was found used, not by a payment on record.
    """

    network: str
    address_index: int
    serial: int
    address: str
    method: SweepMethod
    units: int
    authorization: str | None
    payment_id: str | None
    state: SweepState = SweepState.SIGNED
    taken: int = 0


@dataclass(frozen=True, slots=True)
class Unswept:
    """Confirmed deposits of an address, less what sweeps took. ``serial``: its next sweep's."""

    address_index: int
    address: str
    units: int
    serial: int


@dataclass(frozen=True, slots=True)
class EvmReceipt:
    """Proof of a settled payout: any node of the network shows this event of the token.

    ``log_position`` counts within the transaction, ``log_index`` within the block. ``fee``: wei of
    gas that the service paid.
    """

    transfer_id: str
    network: str
    chain_id: int
    token: str
    txid: str
    log_position: int
    log_index: int
    recipient: str
    units: int
    block_number: int
    fee: int


class EvmPaymentLedger(Protocol):
    """The database as payments and sweeps use it. Everything may raise errors.Unavailable."""

    async def payment(self, payment_id: str) -> EvmPayment | None:
        """One payment."""
        ...

    async def payments_in(self, network: str, *states: PaymentState) -> list[EvmPayment]:
        """A network's payments in these states, lowest nonce first."""
        ...

    async def settled_above(self, network: str, number: int) -> list[EvmPayment]:
        """Settled payments that were mined in blocks above a number, or are not at the moment."""
        ...

    async def next_nonce(self, network: str, sender: str) -> int:
        """One more than the highest nonce that a payment of the sender has or had; 0 at first."""
        ...

    async def add_payment(
        self, payment: EvmPayment, sweep: Sweep | None = None, *, rows: Rows = ()
    ) -> None:
        """Commit a signed payment with the sweep that it is for, or with its order's ``rows``.

        Refused when its nonce is taken.
        """
        ...

    async def add_attempt(self, payment: EvmPayment, attempt: Attempt) -> None:
        """Commit one more signed transaction of a payment; refused when it is over."""
        ...

    async def put_payment(self, payment: EvmPayment) -> None:
        """Change how far a payment is."""
        ...

    async def unswept(self, network: str, least: int) -> list[Unswept]:
        """Addresses with at least so much to sweep and no sweep under way, lowest index first."""
        ...

    async def unswept_of(self, network: str, address_index: int) -> int:
        """What of an address's confirmed deposits no sweep took; a sweep under way took nothing."""
        ...

    async def sweeps_under_way(self, network: str) -> list[Sweep]:
        """Sweeps in state SIGNED."""
        ...

    async def void_sweeps(self, network: str, address_index: int) -> list[Sweep]:
        """An address's sweeps in state VOID that have an authorization."""
        ...

    async def add_sweep(self, sweep: Sweep) -> None:
        """Record a sweep that has no payment."""
        ...

    async def put_sweep(self, sweep: Sweep) -> None:
        """Record how a sweep ended."""
        ...
