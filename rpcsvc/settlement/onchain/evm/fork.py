"""Up to which block deposits were read, and how much of that is still on the chain.

Blocks up to which every deposit is committed are recorded. One that is on the chain vouches for
all before it; when the newest is not, the newest that still is tells where the fork is.
What does not live here: what is read from there on, and when a block is recorded (deposits.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

import structlog

from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmCursor, EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node_types import Block
from rpcsvc.settlement.onchain.unusable import ChainUnusable

log = structlog.get_logger(__name__)

# An address often stands for several nodes, of which some are late: one that lacks the newest
# blocks gives no events for them and no error.
_NODE_LAG_SECONDS: Final = 30
_WIDEST_OVERLAP: Final = 256


class ForkFinder:
    """Finds the block of one network from which on blocks have to be read."""

    def __init__(self, connection: EvmConnection, ledger: EvmDepositLedger) -> None:
        self._connection = connection
        self._network = connection.network
        self._ledger = ledger

    async def find(self, head: Block) -> EvmCursor | None:
        """The newest block that was looked at and is still on the chain.

        None when this node is late and has not got there yet. Raises ChainUnusable when it is far
        behind, or has none of the blocks.
        """
        known = await self._ledger.cursors(self._network.name) or await self._begin(head)
        newest = known[0]
        if newest.hash in (head.hash, head.parent):
            return newest
        within = [item for item in known if item.number <= head.number]
        fork = await self._newest_on_chain(within)
        if len(within) < len(known) and (not within or fork == within[0]):
            self._require_near(newest.number - head.number)
            return None
        if fork is None:
            raise ChainUnusable(
                f"the node of {self._network.name} is on another chain: it has none of the"
                f" {len(known)} blocks that deposits were read up to, from {known[-1].number} to"
                f" {newest.number}"
            )
        if fork != newest:
            log.warning("evm_blocks_replaced", network=self._network.name, above=fork.number)
        return fork

    async def _newest_on_chain(self, known: Sequence[EvmCursor]) -> EvmCursor | None:
        """By halves: a block is on the chain only if all before it are. Newest first in ``known``.

        The newest is tried first, since nearly always it is the one.
        """
        low, high = 0, len(known)
        middle = 0
        while low < high:
            block = await self._connection.client.block(known[middle].number)
            if block is not None and block.hash == known[middle].hash:
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return known[low] if low < len(known) else None

    def _require_near(self, missing: int) -> None:
        """A node may be a little late. Raises ChainUnusable when it is more."""
        if missing > self.overlap:
            raise ChainUnusable(
                f"the node of {self._network.name} lacks the newest {missing} blocks that deposits"
                " were read from: it is still synchronising, or was reset"
            )
        log.info("evm_node_is_late", network=self._network.name, blocks=missing)

    async def _begin(self, head: Block) -> list[EvmCursor]:
        """The first start: from a block on, and an older one in case that is replaced."""
        start = self._network.start_block
        first = head.number if start is None else max(0, start - 1)
        cursors = await self.cursors_at(first, head)
        await self._ledger.begin(self._network.name, cursors)
        return cursors

    async def cursors_at(self, number: int, head: Block) -> list[EvmCursor]:
        """A block to go on after, and an older one in case that is replaced.

        Raises ChainUnusable when the node has none there.
        """
        numbers = sorted({number, max(0, number - self._network.tracked_blocks)}, reverse=True)
        cursors = []
        for at in numbers:
            block = await self._connection.client.block(at)
            if block is None:
                raise ChainUnusable(
                    f"the node of {self._network.name} has no block {at} to begin at; its"
                    f" newest is {head.number}"
                )
            cursors.append(EvmCursor(at, block.hash))
        return cursors

    @property
    def overlap(self) -> int:
        """How many blocks are read again: those that a late node may lack."""
        return max(2, min(_WIDEST_OVERLAP, ceil(_NODE_LAG_SECONDS / self._network.block_seconds)))
