"""Records of the books and the chains as plain values, and the differences between them.

Units are atomic (piconero, USDC units), blocks are heights. A collection that grows with the orders
may be a spilled one: rules read it in sequence or by key, and hold none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import chain
from typing import Final, TypeVar

from msgspec import Struct, field

from rpcsvc.audit.spilled import SpilledDict, SpilledList
from rpcsvc.domain.order import DepositState, TransferKind, TransferState
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.redacted import Redacted

T = TypeVar("T")
Many = SpilledList[T] | tuple[T, ...]
_ADDRESSES: Final = 1_000

MONERO: Final = "monero"
# The differences of a hot wallet's ether: less than there should be, and more.
ETHER: Final = "ether"
ETHER_INCOME: Final = "ether_income"


# --- the books -------------------------------------------------------------------------------


class DepositEntry(Struct, frozen=True):
    """A deposit on an order. ``transfer_id``: what it was spent on.

    ``rate``: what it is swapped at, in USDC units per XMR; None: the rate of the decision.
    ``is_early``: it counted before it was final, within the operator's bounds, and is not final.
    """

    network: str
    txid: str
    units: int
    sender: str | None
    state: DepositState
    transfer_id: str | None
    is_dust: bool
    rate: int | None = None
    is_early: bool = False


class TransferEntry(Struct, frozen=True):
    """A payout or refund of an order, or a withdrawal. ``fee``: what the order bears for the
    network, or what is reserved for it.
    """

    transfer_id: str
    kind: TransferKind
    network: str
    address: str
    units: int
    fee: int
    integrator_fee: int
    state: TransferState
    txid: str | None


class FillEntry(Struct, frozen=True):
    """A chunk of a TWAP order: ``units`` brought ``output`` at ``rate``."""

    units: int
    output: int
    integrator_fee: int
    rate: int


class OrderEntry(Struct, frozen=True):
    """An order.

    ``receive_amount``: payout units that a deposit of ``deposit_amount`` pays exactly, if agreed.
    ``rates``: the rates of late deposits, newest last. ``agreed_refund_address`` is in its terms.
    ``refund_address``: the last that its owner has named; ``replaced`` counts earlier ones, which
    are not kept.
    """

    order_id: str
    direction: Direction
    deposit_network: str
    payout_network: str
    deposit_address: str
    to_address: str
    price: Price
    refund_fee: int
    status: str
    deposit_amount: int
    receive_amount: int | None = None
    agreed_refund_address: str | None = None
    refund_address: str | None = None
    replaced: int = 0
    rates: tuple[int, ...] = ()
    leftover: int = 0
    deposits: tuple[DepositEntry, ...] = ()
    transfers: tuple[TransferEntry, ...] = ()
    fills: tuple[FillEntry, ...] = ()

    @property
    def is_over(self) -> bool:
        """Return whether the order was paid out or refunded."""
        return self.status in ("completed", "refunded")

    def transfer(self, transfer_id: str | None) -> TransferEntry | None:
        """Return one of the order's transfers by its id."""
        return next((t for t in self.transfers if t.transfer_id == transfer_id), None)


class PaymentEntry(Redacted, frozen=True):
    """A signed payment of a wallet, of an order or of the wallet's own upkeep.

    ``txids``: its signed transactions, of which one at most is ever mined. ``fee`` (XMR) and
    ``nonce`` (EVM) are None on the other side. ``tx_key`` proves what an XMR payment paid;
    ``block`` is where the service saw it mined last (XMR).
    """

    HIDDEN = frozenset({"tx_key"})

    payment_id: str
    network: str
    purpose: str
    recipient: str
    units: int
    state: str
    txids: tuple[str, ...]
    fee: int | None = None
    nonce: int | None = None
    tx_key: str | None = None
    block: int | None = None

    @property
    def is_transfer(self) -> bool:
        """Whether it belongs to an order or is a withdrawal."""
        return self.purpose == "transfer"


class SweepEntry(Struct, frozen=True):
    """A step of bringing a deposit address's USDC to the hot wallet.

    ``authorization_hash`` is the nonce of the signed authorization (EIP-3009); None without one.
    """

    network: str
    address: str
    units: int
    taken: int
    state: str
    payment_id: str | None
    authorization_hash: str | None = None


class Annotation(Struct, frozen=True):
    """The operator's annotation of a transaction made by hand; ``note`` says what for.

    ``wei``: what contracts sent to the hot wallet in it, which no node shows without tracing.
    """

    network: str
    txid: str
    note: str
    wei: int = 0


class OpeningEntry(Struct, frozen=True):
    """The ether that the service first found in a hot wallet, as of a block, in wei.

    ``nonce``: how many transactions it had sent by then.
    """

    block: int
    hash: str
    nonce: int
    wei: int


class Watched(Struct, frozen=True):
    """The blocks of a network that the service has scanned: from the first on record.

    ``hash``: of block ``upto``. When the chain has another one there, the service has not seen
    yet that blocks were replaced.
    """

    since: int
    upto: int
    hash: str


class Books(Struct, frozen=True, dict=True):
    """The database at one moment.

    ``evm_addresses``: all addresses that deposits may come to. ``from_journal``: transactions that
    a restored copy lacked, and its payment journal had. ``closed``: transfers that were paid by the
    operator's word alone. ``withdrawals``: the operator's own transfers, without an order.
    """

    orders: Many[OrderEntry] = ()
    payments: Many[PaymentEntry] = ()
    sweeps: Many[SweepEntry] = ()
    watched: Mapping[str, Watched] = field(default_factory=dict)
    evm_hot: str | None = None
    evm_addresses: Collection[str] = frozenset()
    monero_primary: str | None = None
    annotations: tuple[Annotation, ...] = ()
    openings: Mapping[str, OpeningEntry] = field(default_factory=dict)
    from_journal: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    withdrawals: tuple[TransferEntry, ...] = ()

    @cached_property
    def own_addresses(self) -> Collection[str]:
        """The hot wallet's address and all that deposits may come to, ascending, in lower case."""
        addresses = chain(self.evm_addresses, (self.evm_hot,) if self.evm_hot else ())
        return SpilledDict(None, ((address.lower(), None) for address in addresses))

    @cached_property
    def is_own(self) -> Callable[[str], bool]:
        """Return whether an address, in lower case, is one of them. Many events are of one
        address.
        """
        return lru_cache(_ADDRESSES)(self.own_addresses.__contains__)

    @cached_property
    def unsettled(self) -> SpilledList[OrderEntry]:
        """The orders that an unrecorded transaction may belong to: those that are not over, and
        those with a transfer that is not final or has no payment on record.
        """
        paid = SpilledDict[str, None](
            None, ((f"{item.network} {item.payment_id}", None) for item in self.payments)
        )
        unsettled = (
            order
            for order in self.orders
            if not order.is_over
            or any(
                not item.state.is_final or f"{item.network} {item.transfer_id}" not in paid
                for item in order.transfers
            )
        )
        return SpilledList(OrderEntry, unsettled)

    @cached_property
    def unsettled_transfers(self) -> tuple[TransferEntry, ...]:
        """The transfers of unsettled orders."""
        return tuple(item for order in self.unsettled for item in order.transfers)

    @cached_property
    def signed(self) -> Mapping[tuple[str, str], Collection[str]]:
        """The transactions on record for each of these transfers, by network and transfer."""
        wanted = {(item.network, item.transfer_id) for item in self.unsettled_transfers}
        found: dict[tuple[str, str], set[str]] = {}
        for payment in self.payments:
            if (key := (payment.network, payment.payment_id)) in wanted:
                found.setdefault(key, set()).update(payment.txids)
        return found

    def payments_on(self, network: str) -> Iterator[PaymentEntry]:
        """Yield the payments of one network."""
        return (item for item in self.payments if item.network == network)

    def annotations_on(self, network: str) -> dict[str, str]:
        """The operator's annotations on one network, by transaction."""
        return {item.txid: item.note for item in self.annotations if item.network == network}


# --- the chains ------------------------------------------------------------------------------


class Arrival(Struct, frozen=True):
    """A payment to one of our addresses. ``block`` None: it waits in the pool.

    ``timelocked``: the sender has locked it for some time.
    """

    txid: str
    address: str
    units: int
    block: int | None
    sender: str | None = None
    timelocked: bool = False


class Departure(Struct, frozen=True):
    """An XMR transaction of our wallet that is mined: ``units`` left it, and ``fee``.

    ``destinations``: to whom, as the wallet remembers it; empty when it does not.
    """

    txid: str
    units: int
    fee: int
    block: int
    destinations: tuple[tuple[str, int], ...] = ()


class TokenTransfer(Struct, frozen=True):
    """A Transfer event of the token to or from one of our addresses (lower case)."""

    txid: str
    source: str
    recipient: str
    units: int
    block: int


class Sighting(Struct, frozen=True):
    """A payment on its chain. ``block`` None: it waits in the pool. ``paid``: to its recipient.

    ``fee`` is what the transaction itself says it costs; None where the chain has it elsewhere.
    """

    txid: str
    block: int | None
    paid: int
    fee: int | None = None


class MoneroFacts(Struct, frozen=True):
    """State of node and wallet as of block ``top``. ``deposit_depth``: confirmations at most.

    ``payments``: what became of recorded payments, by their id; absent ones are nowhere.
    ``stale``: blocks were replaced, and the books do not know of it yet. ``is_complete``:
    ``balance`` includes the frozen outputs of the wallet; False where they can't be listed.
    """

    top: int
    deposit_depth: int
    arrivals: Many[Arrival]
    departures: Many[Departure]
    payments: Mapping[str, Sighting]
    balance: int
    is_complete: bool = True
    stale: bool = False


class Ether(Struct, frozen=True):
    """The hot wallet's own coin since its opening balance, in wei, by transaction.

    ``spent``: what its recorded and annotated transactions cost, and what they sent along.
    ``came``: what the annotated ones of others brought. ``done``: the annotated ones that are
    mined, and did not fail. ``cost_unknown``: those of its own whose whole cost the node does not
    say. ``replaced``: the block of the opening balance is on the chain no more, or not yet.
    """

    balance: int
    spent: Mapping[str, int] = field(default_factory=dict)
    came: Mapping[str, int] = field(default_factory=dict)
    done: frozenset[str] = frozenset()
    cost_unknown: Collection[str] = frozenset()
    replaced: bool = False


class EvmFacts(Struct, frozen=True):
    """State of a node as of block ``top``. Addresses are in lower case.

    ``mined`` has those of the recorded transactions that are mined, where no event of the token
    says so; ``waiting`` those in the pool. ``balances``: ascending. ``nonce``: how many
    transactions the hot wallet has made. ``opening``: the token that the hot wallet had before the
    first recorded block; None: the node can't say. ``stale``: blocks were replaced, and the books
    do not know of it yet. ``annotated``: those of the annotated transactions that are mined, with
    the nonce of the hot wallet's own. ``ether``: None where there is no opening balance to add up
    from.
    """

    network: str
    top: int
    deposit_depth: int
    moves: Many[TokenTransfer]
    balances: Mapping[str, int]
    opening: int | None
    nonce: int
    mined: Collection[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    stale: bool = False
    annotated: Mapping[str, int | None] = field(default_factory=dict)
    ether: Ether | None = None


# --- what comes of it ------------------------------------------------------------------------


class Difference(Struct, frozen=True):
    """Books and chain do not agree, or the books not with themselves.

    ``subject``: the order, transfer, transaction or wallet. ``unit``: of the two values when they
    are amounts; empty when they are not. ``hint``: what it may be, and what to do then.
    """

    kind: str
    subject: str
    expected: str
    found: str
    unit: str = ""
    hint: str = ""

    @property
    def is_income(self) -> bool:
        """Whether it is a surplus of unknown origin, which does not pause payouts.

        Anyone can send ether to the hot wallet, and would stop the exchange with it.
        """
        return self.kind == ETHER_INCOME

    @property
    def is_bounded(self) -> bool:
        """Whether it is a loss within the operator's bounds, which does not pause payouts.

        Whoever takes a small deposit back after its payout would stop the exchange with it.
        """
        return self.kind == "deposit_lost_early"

    @property
    def gap(self) -> int:
        """Found minus expected, of amounts."""
        return int(self.found) - int(self.expected)


class Annotated(Struct, frozen=True):
    """An annotated transaction as the chain shows it: units that left our wallets, and that came.

    The fee of an XMR transaction is part of ``sent``, and so is the fee of ether (unit ``wei``).
    """

    network: str
    txid: str
    sent: int
    received: int
    unit: str
    note: str


class AuditReport(Struct, frozen=True):
    """The result of an audit.

    ``pending``: differences that the chains may still resolve. ``notes``: what could not be
    checked. ``orders`` and ``payments`` count what was compared. ``annotated``: unrecorded
    transactions that the operator has annotated.
    """

    differences: tuple[Difference, ...] = ()
    pending: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    orders: int = 0
    payments: int = 0
    annotated: tuple[Annotated, ...] = ()


class Unfit(Exception):
    """A node or wallet is not the one that the books are about. The text is for the operator."""


class ChainMoved(Exception):
    """The chain changed while it was read: read it again."""
