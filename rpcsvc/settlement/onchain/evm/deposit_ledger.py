"""What the deposit half of the USDC adapter remembers: its records and its port to the database.

Units are USDC units (10^-6), times are ms since the epoch, addresses are in EIP-55 form.
What does not live here: the rows (store/onchain_evm_deposits.py), what is done with them
(addresses.py, deposits.py); payments and sweeps, which have records of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rpcsvc.domain.order import DepositKey, DepositState

# What a column of the database holds. All the USDC there is has 17 digits.
LARGEST_DEPOSIT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EvmWallet:
    """The mnemonic of the first start, by its hot wallet's address.

    Addresses up to index ``reserved_to`` may be in use.
    """

    hot_address: str
    reserved_to: int


@dataclass(frozen=True, slots=True)
class EvmAddress:
    """A deposit address and its index in BIP-44, which is above 0."""

    index: int
    address: str


@dataclass(frozen=True, slots=True)
class EvmCursor:
    """A block up to which every deposit is committed."""

    number: int
    hash: str


@dataclass(frozen=True, slots=True)
class EvmDeposit:
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
        """What the order layer knows it by."""
        return DepositKey(self.network, self.txid, self.position)


@dataclass(frozen=True, slots=True)
class PoolSighting:
    """A transaction that a node was about to mine, and that pays one of our addresses then.

    It tells when that was first seen and nothing else: it may never be mined.
    """

    network: str
    txid: str
    address_index: int
    first_seen_at: int


class EvmDepositLedger(Protocol):
    """The database as deposits use it. Everything may raise errors.Unavailable."""

    async def wallet(self) -> EvmWallet | None:
        """The mnemonic of the first start."""
        ...

    async def adopt_wallet(self, hot_address: str) -> None:
        """Record the mnemonic; refused when there is one already."""
        ...

    async def addresses_above(self, index: int) -> list[EvmAddress]:
        """The addresses with a higher index, in order."""
        ...

    async def unknown_addresses(self, to: int) -> list[int]:
        """The indices from 1 up to ``to`` that have no address on record."""
        ...

    async def highest_address(self) -> EvmAddress | None:
        """The newest address."""
        ...

    async def ours(self, addresses: Collection[str]) -> list[EvmAddress]:
        """Those that are recorded, of addresses in any case, by one query."""
        ...

    async def add_addresses(self, made: Sequence[EvmAddress]) -> None:
        """Record addresses, and that all up to the last may be handed out from now on.

        Those that are there already must be the same.
        """
        ...

    async def reserve_addresses(self, index: int) -> None:
        """Addresses up to this index may have been handed out; those above were not."""
        ...

    async def cursors(self, network: str) -> list[EvmCursor]:
        """Blocks up to which deposits are committed, newest first."""
        ...

    async def begin(self, network: str, cursors: Sequence[EvmCursor]) -> None:
        """Record where a network is looked at from; up to there, nothing can be for orders."""
        ...

    async def deposit(self, key: DepositKey) -> EvmDeposit | None:
        """One deposit."""
        ...

    async def deposits_by(self, network: str, txids: Collection[str]) -> list[EvmDeposit]:
        """The deposits made by these transactions, by one query."""
        ...

    async def deposits_to_watch(self, network: str, above: int) -> list[EvmDeposit]:
        """Deposits that are watched, and all in blocks above a number."""
        ...

    async def put_deposits(self, deposits: Sequence[EvmDeposit]) -> None:
        """Add deposits, or change block, acknowledged state and watch of known ones."""
        ...

    async def acknowledge(
        self,
        states: Sequence[tuple[DepositKey, DepositState]],
        move: CursorMove | None,
    ) -> None:
        """Record the states that are committed, and move the cursor."""
        ...

    async def is_awaiting(self, network: str, now_ms: int) -> bool:
        """Whether an order waits for a deposit on this network that would be in time now."""
        ...

    async def awaiting(
        self, network: str, addresses: Collection[str], now_ms: int
    ) -> list[EvmAddress]:
        """Those of addresses, in any case, that such orders have; by one query."""
        ...

    async def pool_sighting(self, network: str, txid: str) -> PoolSighting | None:
        """When a transaction was seen before it was mined."""
        ...

    async def pool_sightings(self, network: str, txids: Collection[str]) -> set[str]:
        """Those of these transactions that are recorded, by one query."""
        ...

    async def pool_counts(self, network: str, indices: Collection[int]) -> dict[int, int]:
        """How many are recorded of each address, none where it is not named; by one query."""
        ...

    async def put_pool_sightings(self, found: Sequence[PoolSighting]) -> None:
        """Record when transactions were first seen; what is recorded stays."""
        ...

    async def forget_pool_sightings(self, network: str, before_ms: int) -> None:
        """Drop those older than that whose order does not wait, and those mined long ago."""
        ...


@dataclass(frozen=True, slots=True)
class CursorMove:
    """Where a network's cursor goes. Recorded blocks above ``fork`` are void.

    Of blocks below ``keep``, the newest alone is kept.
    """

    network: str
    to: EvmCursor
    fork: int
    keep: int
