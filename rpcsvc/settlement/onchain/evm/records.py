"""Records and options of the EVM adapter: addresses, deposits, payments, sweeps.

A payment is one nonce of the hot wallet on one network. Its signed attempts differ in fees and so
in ids; at most one can be mined. Units are USDC units, fees wei per gas. Each fits 63 bits; a
product (gas times fee) need not, and is never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.orders.ports.wallets import PreparedTransfer
from rpcsvc.redacted import Redacted
from rpcsvc.settlement.onchain.thresholds import DepthTag, Thresholds, rise


class EvmWallet(Struct, frozen=True):
    """The mnemonic of the first start, by its hot wallet's address.

    Addresses up to index ``reserved_to`` may be in use.
    """

    hot_address: str
    reserved_to: int


class EvmAddress(Struct, frozen=True):
    """A deposit address and its index in BIP-44, which is above 0."""

    index: int
    address: str


class EvmCursor(Struct, frozen=True):
    """A block up to which every deposit is committed."""

    number: int
    hash: str


class EvmDeposit(Struct, frozen=True):
    """One Transfer event to one of our addresses; ``position`` is its place in its transaction.

    ``sender`` is the event's: the zero address when the tokens were minted. ``block_number`` and
    ``block_hash`` are None while it is on the chain no more. ``acknowledged``: the state that the
    order layer has committed; None: not known, since another was shown to it. ``watched``: the
    state is not acknowledged, or its block is young.
    """

    network: str
    txid: str
    position: int
    address_index: int
    address: str
    units: int
    sender: str
    first_seen_at: int
    block_number: int | None
    block_hash: str | None
    acknowledged: DepositState | None = None
    watched: bool = True

    @property
    def key(self) -> DepositKey:
        """The key by which the order layer knows it."""
        return DepositKey(self.network, self.txid, self.position)


class PoolSighting(Struct, frozen=True):
    """A transaction that a node was about to mine, and that pays one of our addresses then.

    It tells when that was first seen and nothing else: it may never be mined.
    """

    network: str
    txid: str
    address_index: int
    first_seen_at: int


class CursorMove(Struct, frozen=True):
    """A move of a network's cursor. Recorded blocks above ``fork`` are void.

    Of blocks below ``keep``, the newest alone is kept.
    """

    network: str
    to: EvmCursor
    fork: int
    keep: int


class EvmPaymentState(StrEnum):
    """The progress of a payment.

    PREPARED: signed and committed, never handed to a node. PUBLISHED: a node may have it. SETTLED
    and FAILED: mined deep enough, or never to be; the nonce of a failed one is spent, unless a deep
    reorganisation took its block. That may also make a SETTLED payment that is no order's FAILED.
    """

    PREPARED = "prepared"
    PUBLISHED = "published"
    SETTLED = "settled"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether its bytes must not be published, except a sweep's to spend its nonce again."""
        return self is EvmPaymentState.FAILED


class EvmPurpose(StrEnum):
    """The purpose of a payment.

    TRANSFER: of an order. SWEEP: brings deposits home. AUTHORIZATION: moves a payer's USDC to the
    address of an order, as its owner has signed.
    """

    TRANSFER = "transfer"
    SWEEP = "sweep"
    AUTHORIZATION = "authorization"


class BlockPoint(Struct, frozen=True):
    """A block by number and hash: only both together name one."""

    number: int
    hash: str


class Attempt(Redacted, frozen=True):
    """A signed transaction. ``raw`` is hex without 0x; fees are wei per gas."""

    HIDDEN = frozenset({"raw"})

    txid: str
    raw: str
    max_fee: int
    tip: int
    made_at: int


class Inclusion(Struct, frozen=True):
    """The block in which an attempt was mined, and its cost.

    ``l1_fee``: wei for data on L1 (OP stack); None where the receipt has none. ``log_position`` and
    ``log_index`` place the token's Transfer event within the transaction and within the block; None
    when the transaction was not to make one.
    """

    txid: str
    block: BlockPoint
    gas_used: int
    gas_price: int
    log_position: int | None = None
    log_index: int | None = None
    l1_fee: int | None = None

    @property
    def fee(self) -> int:
        """The wei that it cost."""
        return self.gas_used * self.gas_price + (self.l1_fee or 0)


class EvmPaymentOrder(Struct, frozen=True):
    """A call to be sent. ``recipient`` gets ``units``; ``contract`` is called with ``data``.

    ``gas`` is the most gas that it may use. No ether is sent along.
    """

    payment_id: str
    purpose: EvmPurpose
    recipient: str
    units: int
    contract: str
    data: bytes
    gas: int


class GasUse(Struct, frozen=True):
    """The gas of one payment, in the wei that it cost, or may cost while it is not mined.

    ``is_paid``: its order bears it. ``l1_fee``: wei in addition for data on L1; None where not
    known.
    """

    wei: int
    is_paid: bool
    state: EvmPaymentState
    l1_fee: int | None = None


class EvmPayment(Struct, frozen=True):
    """A payment. ``conflict``: a block by which its nonce was spent, while no receipt says how."""

    network: str
    sender: str
    nonce: int
    order: EvmPaymentOrder
    attempts: tuple[Attempt, ...]
    prepared_at: int
    state: EvmPaymentState = EvmPaymentState.PREPARED
    published_at: int | None = None
    inclusion: Inclusion | None = None
    conflict: BlockPoint | None = None

    @property
    def payment_id(self) -> str:
        """The payment's id: for an order's transfer, the transfer's id."""
        return self.order.payment_id

    @property
    def prepared(self) -> PreparedTransfer:
        """The payment as its order knows it: by its first attempt."""
        first = self.attempts[0]
        return PreparedTransfer(first.txid, (self.payment_id,))

    @property
    def latest(self) -> Attempt:
        """The attempt with the highest fees."""
        return self.attempts[-1]

    @property
    def most_fee(self) -> int:
        """The most that it may cost, wei."""
        return self.order.gas * self.latest.max_fee


class SweepMethod(StrEnum):
    """The way of a sweep.

    RECEIVE: EIP-3009, one call. PERMIT (EIP-2612), then TAKE (transferFrom): two calls.
    """

    RECEIVE = "receive"
    PERMIT = "permit"
    TAKE = "take"


class SweepState(StrEnum):
    """The progress of a sweep.

    SIGNED: its payment is under way. DONE: ``taken`` left the address. VOID: nothing did. DONE
    becomes VOID when its settled payment fails after a reorganisation, by the database itself; VOID
    becomes DONE when its authorization turns out to be used.
    """

    SIGNED = "signed"
    DONE = "done"
    VOID = "void"


class Sweep(Struct, frozen=True):
    """A step of bringing an address's deposits home.

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


class UnsweptAddress(Struct, frozen=True):
    """The confirmed deposits of an address less the units swept. ``serial``: its next sweep's."""

    address_index: int
    address: str
    units: int
    serial: int


# --- options ---------------------------------------------------------------------------------


class EvmNetwork(Struct, frozen=True):
    """One chain. Units are USDC units, fees wei. Raises ValueError for what can't be meant.

    ``name`` is the network's name in orders; ``token`` the USDC contract (EIP-55).
    ``thresholds``: when a deposit counts, the last when it is final; all that an address received
    lately counts as one deposit. ``tag_seconds``: how long a block typically takes to get a tag.
    ``settled_after`` and ``failed_after`` are confirmations: of a payout, and of what took its
    nonce. ``tracked_blocks``: how long a confirmed deposit or settled payout is still compared
    with the chain. ``start_block`` is where the first scan begins; None: the newest
    block then. A payment not mined for ``bump_after_ms`` is replaced by one with a fee higher by
    ``bump_percent``, as long as it costs no more than ``highest_fee`` in all. ``gas_reserve`` is
    what the hot wallet should always hold. Deposits of ``sweep_units`` and more are swept, at
    most ``sweep_batch`` at a time. ``l1_fee_oracle`` tells what the chain takes for data on L1
    (EIP-55, OP stack); None on a chain that takes nothing for that.
    """

    name: str
    chain_id: int
    token: str
    thresholds: Thresholds
    settled_after: int
    failed_after: int
    block_seconds: float
    highest_fee: int
    gas_reserve: int
    sweep_units: int
    l1_fee_oracle: str | None
    tag_seconds: Mapping[DepthTag, int] = MappingProxyType({})
    tracked_blocks: int = 2000
    start_block: int | None = None
    bump_after_ms: int = 60_000
    bump_percent: int = 25
    sweep_batch: int = 20

    def __post_init__(self) -> None:
        least = {"chain_id": 1, "settled_after": 1, "failed_after": 1, "tracked_blocks": 1,
                 "bump_after_ms": 1, "bump_percent": 10, "highest_fee": 1, "sweep_units": 1,
                 "sweep_batch": 1}  # fmt: skip
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ValueError(f"{self.name}: {field} must be at least {bound}")
        if not rise(self.thresholds):
            raise ValueError(f"{self.name}: thresholds must rise, from 0 units")
        if self.block_seconds <= 0:
            raise ValueError(f"{self.name}: block_seconds must be above 0")
