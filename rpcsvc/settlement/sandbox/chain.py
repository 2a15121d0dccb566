"""A simulated chain's blocks as pure functions of time.

A chain makes a block every ``block_ms`` from ``base_at`` on. Its height at a time follows from
that, so an idle chain costs nothing and a restart misses no block. What does not live here:
transactions (ledger.py) and who sends them (engine.py, controls.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

MONERO = "monero"


@dataclass(frozen=True, slots=True)
class Chain:
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

    def pause(self, now: int) -> Chain:
        """The chain without new blocks from ``now`` on."""
        return replace(self, base_height=self.height(now), base_at=now, paused=True)

    def resume(self, now: int) -> Chain:
        """The chain with new blocks again from ``now`` on."""
        return replace(self, base_at=now, paused=False) if self.paused else self


def block_hash(network: str, height: int, fork: int) -> str:
    """A block's hash; ``fork`` differs between rival blocks of one height."""
    return hashlib.sha256(f"{network}/{height}/{fork}".encode()).hexdigest()
