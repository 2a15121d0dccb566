"""What the hot wallet of one network held in ether when the service first looked.

The auditor adds up from there what the wallet's transactions cost. What was before is nobody's to
know: no node tells the cost of transactions that it has no list of. What does not live here: the
sum (audit/evm_rules.py), SQL (store/onchain_evm_openings.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import structlog

from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Opening:
    """The hot wallet as of a block: transactions that it had sent, and its wei."""

    block_number: int
    block_hash: str
    nonce: int
    wei: int


class OpeningLedger(Protocol):
    """The database as the opening balance uses it. Everything may raise errors.Unavailable."""

    async def opening(self, network: str, sender: str) -> Opening | None:
        """The one on record; None before the first look."""
        ...

    async def record(self, network: str, sender: str, opening: Opening) -> None:
        """Put it on record, in the place of one whose block was replaced."""
        ...


class EvmOpening:
    """Records the opening balance of one hot wallet on one network, once.

    It is of the newest block, whose state every node has. Which transactions came after it is told
    by the nonce, so that it does not matter what was under way. A block that is replaced takes its
    balance with it: until the block is deep, and once after a start, that is looked for.
    """

    def __init__(self, connection: EvmConnection, sender: str, ledger: OpeningLedger) -> None:
        self._connection = connection
        self._network = connection.network
        self._sender = sender
        self._ledger = ledger
        self._is_deep = False

    async def look(self, head: Block) -> None:
        """Record it if it is not, or was replaced; ``head`` is the newest block.

        Raises RpcFailure and errors.Unavailable.
        """
        if self._is_deep:
            return
        known = await self._ledger.opening(self._network.name, self._sender)
        if known is None:
            await self._record(head)
            return
        block = await self._connection.client.block(known.block_number)
        if block is None:
            return  # the node is behind
        if block.hash != known.block_hash:
            log.warning(
                "evm_opening_replaced", network=self._network.name, block=known.block_number
            )
            await self._record(head)
        else:
            self._is_deep = head.number - known.block_number >= self._network.failed_after

    async def _record(self, head: Block) -> None:
        client, number = self._connection.client, head.number
        nonce = await client.nonce(self._sender, number)
        wei = await client.ether(self._sender, number)
        block = await client.block(number)
        if block is None or block.hash != head.hash:
            return  # replaced meanwhile: the next look does it
        opening = Opening(number, head.hash, nonce, wei)
        await self._ledger.record(self._network.name, self._sender, opening)
        log.info("evm_opening_recorded", network=self._network.name, block=number, wei=str(wei))
