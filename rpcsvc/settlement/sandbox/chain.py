"""The sandbox's simulated chains and its records.

A chain makes a block every ``block_ms`` from ``base_at`` on: heights are pure functions of time, so
an idle chain costs nothing and a restart misses no block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.store.database import StaleWrite

T = TypeVar("T")

MONERO = "monero"
# How often a change is made anew when another replica changed the chains meanwhile.
TRIES: Final = 5


class SimulatedChain(Struct, frozen=True):
    """One simulated chain. ``inventory`` and ``balance`` are the service's wallet, atomic units."""

    network: str
    base_height: int
    base_at: int
    block_ms: int
    paused: bool
    inventory: int
    balance: int

    def height(self, now: int) -> int:
        """The height of the newest block at ``now``."""
        if self.paused:
            return self.base_height
        return self.base_height + max(0, now - self.base_at) // self.block_ms

    def including_height(self, broadcast_at: int, now: int) -> int | None:
        """The height of the first block after ``broadcast_at``; None if it is yet to come."""
        if self.paused:
            return None
        height = max(self.height(broadcast_at), self.base_height) + 1
        return height if height <= self.height(now) else None

    def mined_at(self, height: int) -> int:
        """The time of the block at ``height``."""
        return self.base_at + (height - self.base_height) * self.block_ms

    def pause(self, now: int) -> SimulatedChain:
        """The chain without new blocks from ``now`` on."""
        return replace(self, base_height=self.height(now), base_at=now, paused=True)

    def resume(self, now: int) -> SimulatedChain:
        """The chain with new blocks again from ``now`` on."""
        return replace(self, base_at=now, paused=False) if self.paused else self


def block_hash(network: str, height: int, fork: int) -> str:
    """A block's hash; ``fork`` differs between rival blocks of one height."""
    return hashlib.sha256(f"{network}/{height}/{fork}".encode()).hexdigest()


class TxState(StrEnum):
    """Where a simulated transaction is."""

    MEMPOOL = "mempool"
    MINED = "mined"
    DROPPED = "dropped"
    REVERTED = "reverted"


class TxKind(StrEnum):
    """Whether money comes to the service or leaves it."""

    DEPOSIT = "deposit"
    TRANSFER = "transfer"


class Tx(Struct, frozen=True):
    """A simulated transaction. ``watched``: the service has yet to commit its outcome."""

    network: str
    txid: str
    kind: TxKind
    recipient: str
    sender: str | None
    units: int
    fee: int
    broadcast_at: int
    block_height: int | None = None
    state: TxState = TxState.MEMPOOL
    watched: bool = True

    @property
    def balance_effect(self) -> int:
        """What it does to the service's wallet once it is mined, in atomic units."""
        return self.units if self.kind is TxKind.DEPOSIT else -(self.units + self.fee)


class Fault(StrEnum):
    """A fault that waits for the next transfer of an order, or its next signed payment."""

    PAYOUT_FAILS = "payout_fails"
    PAYOUT_UNKNOWN_SENT = "payout_unknown_sent"
    PAYOUT_UNKNOWN_LOST = "payout_unknown_lost"
    REFUND_FAILS = "refund_fails"
    FUNDING_FAILS = "funding_fails"
    FUNDING_UNKNOWN = "funding_unknown"


class Setting(StrEnum):
    """Integers that hold for the whole sandbox."""

    CLOCK_OFFSET_MS = "clock_offset_ms"
    USDC_PER_XMR = "usdc_per_xmr"
    ENGINE_DOWN = "engine_down"
    RATES_DOWN = "rates_down"


class Mined(Struct, frozen=True):
    """A transaction that a new block takes in."""

    tx: Tx
    height: int
    hash: str
    mined_at: int


async def on_current(change: Callable[[], Awaitable[T]]) -> T:
    """What ``change`` returns; it reads and writes again if a write was stale.

    Raises errors.Unavailable after some tries.
    """
    for _ in range(TRIES):
        try:
            return await change()
        except StaleWrite:
            continue
    raise Unavailable("Other replicas keep changing the simulated chains. Try again.")
