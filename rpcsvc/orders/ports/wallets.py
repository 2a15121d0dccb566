"""The ports of wallets: deposit addresses, deposits, transfers and fees.

Any exception other than TransferRejected means that the outcome is not known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from msgspec import Struct, field

from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Asset, Money
from rpcsvc.domain.order import DepositKey, DepositState, Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.store.changes import PooledOrder
from rpcsvc.store.database import Commit


class DepositSighting(Struct, frozen=True):
    """A deposit as the chain shows it now. ``state`` REMOVED: no longer there."""

    key: DepositKey
    address: str
    units: int
    sender: str | None
    first_seen_at: int
    state: DepositState


class Observation(Struct, frozen=True):
    """The result of one deposit scan.

    ``complete_until``: when (ms) the scan of each network began that was scanned completely. Every
    deposit until then is in ``sightings``, or was acknowledged as it is.
    """

    sightings: Sequence[DepositSighting] = ()
    complete_until: Mapping[str, int] = field(default_factory=dict)


class PreparedTransfer(Struct, frozen=True):
    """A signed transaction: its id, and the ids of the transfers that it pays.

    ``raw``: its bytes (hex); empty where the wallet's own tables have them.
    """

    txid: str
    transfer_ids: tuple[str, ...]
    raw: str = ""


# Puts signed transactions on record with their orders, and by the commit with their wallet's rows,
# all or none. Raises ImpossibleTransition when an order no longer waits for its transfer, and
# errors.Unavailable: nothing is on record then, and nothing may be published.
Record = Callable[[Sequence[PreparedTransfer], Commit | None], Awaitable[None]]


class Outcome(StrEnum):
    """The network's word on a transfer.

    ABSENT: it does not know it now, which proves nothing about later. FAILED is said only when
    the transfer can never be carried out. An exception is UNKNOWN.
    """

    SETTLED = "settled"
    PENDING = "pending"
    FAILED = "failed"
    UNKNOWN = "unknown"
    ABSENT = "absent"


class Verdict(Struct, frozen=True):
    """An outcome with the reason, in words for the operator.

    ``receipt`` (JSON) comes with SETTLED, where there is something that proves it. ``settles_at``
    comes with PENDING: the first block (its height) after which another look may find it settled.
    """

    outcome: Outcome
    reason: str = ""
    receipt: str | None = None
    settles_at: int | None = None


class Fees(Struct, frozen=True):
    """The network fees of a swap, in atomic units of the asset that is sent."""

    payout: int
    refund: int


class NetworkNames(Struct, frozen=True):
    """The deposit side of an order, as it is named to the payer.

    ``chain_id`` and ``token`` are the ones that a wallet must use: in the sandbox, a test
    network's.
    """

    network: str
    chain_id: int
    token: str | None

    @classmethod
    def of_usdc(cls, chain: Chain, *, is_test: bool) -> NetworkNames:
        """A chain with its USDC contract, or its test network with the contract there."""
        if is_test:
            return cls(chain.test_network, chain.test_chain_id, chain.test_usdc_contract)
        return cls(chain.name, chain.chain_id, chain.usdc_contract)


class NonceGap(NamedTuple):
    """The nonces of a hot wallet, as its node and the database have them.

    ``ahead``: the node's next nonce, its pool included, minus the service's own. ``unrecorded``:
    nonces that the node has used, and that are neither on record nor acknowledged or annotated.
    ``missing``: nonces below the service's own that the node lacks, and that no payment waits with.
    """

    ahead: int
    unrecorded: int
    missing: int


class NetworkState(NamedTuple):
    """The result of the last look at a network; a field is None where it is not known.

    ``block_age``: ms since its node showed a new block. ``outputs``: the wallet's spendable
    outputs, on a network that has outputs. ``sweeps``: since the start, by outcome. ``is_up``:
    whether orders can be settled on it now. ``node_height``: the newest block that the node showed.
    ``scanned_height``: the newest block up to which all deposits are committed. ``nonces``: of an
    EVM network's hot wallet.
    """

    block_age: int | None = None
    outputs: int | None = None
    sweeps: Mapping[str, int] = MappingProxyType({})
    is_up: bool = True
    node_height: int | None = None
    scanned_height: int | None = None
    nonces: NonceGap | None = None


class TransferRejected(Exception):
    """The engine can never prepare this transfer: the network refuses it permanently."""


class LacksFunds(Unavailable):
    """A wallet lacks ``missing`` units to make a transfer, and none of them come back by
    themselves.
    """

    def __init__(self, transfer: Transfer, missing: int) -> None:
        self.missing = Money(missing, transfer.asset)
        super().__init__(
            f"The {transfer.asset.symbol} wallet on {transfer.network} lacks"
            f" {self.missing.display()} for this transfer."
        )


class OrderingWallets(Protocol):
    """The wallets as taking orders needs them."""

    # The networks whose deposits are watched.
    networks: frozenset[str]

    def is_paused(self) -> bool:
        """Whether the operator has stopped all outgoing money."""
        ...

    def require_ready(self) -> None:
        """Raise errors.Unavailable when orders can't be taken now."""
        ...

    def deposit_address(self, asset: Asset) -> str:
        """Return a fresh deposit address that no other order has or will have."""
        ...

    def fee(self, network: str) -> int:
        """Return the network fee of a transfer, in units of the network's asset.

        Raises errors.Unavailable while it is not known, or nothing can be settled on the network.
        """
        ...

    @property
    def holdings(self) -> Callable[[str], Holdings] | None:
        """The function that returns the spendable balance on a network, or raises
        errors.Unavailable.

        None for wallets without a limit, of which nothing is reserved.
        """
        ...

    def pooled(self, address: str, network: str) -> PooledOrder | None:
        """Return the conditions of an order with this deposit address that ``network`` pays; None
        where the addresses are these wallets' own.
        """
        ...

    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        """Raise errors.InvalidDestination for an address that is known not to be payable on a
        network; ``field`` is the input that named it. Takes no more than a second.
        """
        ...

    def estimated_seconds(self, deposit: Money, chain: str) -> int:
        """Return the typical time of a swap from deposit to settled payout, in seconds."""
        ...

    async def confirmations(self, key: DepositKey) -> int:
        """Return the confirmations of a deposit now; 0 while it is in the pool or gone."""
        ...

    def required_confirmations(self, network: str, units: int) -> int:
        """Return the confirmations after which deposits of ``units`` in all count on a network."""
        ...

    def states(self) -> Mapping[str, NetworkState]:
        """Return the state of each network at the last look."""
        ...

    async def health(self) -> Health:
        """Return whether everything can be settled now."""
        ...


class Wallets(OrderingWallets, Protocol):
    """The wallets as settling needs them: they see deposits and send transfers.

    Any exception other than TransferRejected means that the outcome is not known.
    """

    poll_ms: int

    async def start(self) -> None:
        """Connect, load, catch up."""
        ...

    async def observe(self) -> Observation:
        """Return deposits that may have changed since they were last acknowledged, recomputed."""
        ...

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """The order layer has committed these: final ones need not be shown again."""
        ...

    async def is_final(self, key: DepositKey) -> bool:
        """Return whether a confirmed deposit has all confirmations that its network ever asks for.

        Until then its payout is at risk (domain/finality.py). Raises errors.Unavailable.
        """
        ...

    def signed_together(self, network: str) -> int:
        """Return the most transfers of a network that are signed and recorded together."""
        ...

    def carried_at_once(self, network: str) -> int:
        """Return how many transfers of a network are carried on side by side.

        One at a time is signed and published; the others are looked up.
        """
        ...

    async def prepare(
        self,
        transfer: Transfer,
        companions: Sequence[Transfer],
        record: Record,
        leaves: Mapping[str, int],
    ) -> Sequence[Transfer]:
        """Sign without publishing, and ``record`` it. ``companions`` are due on the transfer's
        network and may be signed with it, in one transaction or each in its own. ``leaves``: by
        transfer id, the units that the wallet must have left or coming back after it.

        Return the companions that could not be signed now, and would take the places of others if
        they were tried again at once. Raises TransferRejected, and LacksFunds; after any failure
        but TransferRejected nothing is on record, and it may be retried.
        """
        ...

    async def publish(self, transfer: Transfer) -> Verdict:
        """Publish the transfer's signed bytes; repeating it is safe.

        Others of its network that are signed and were never published may go out with it.
        """
        ...

    async def look_up(self, transfer: Transfer) -> Verdict:
        """Return the outcome for the transfer's transaction id."""
        ...
