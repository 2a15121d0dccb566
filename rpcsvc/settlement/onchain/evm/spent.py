"""Which transaction of the hot wallet has spent a nonce, and in which block: read off its body.

That a node shows neither receipt nor transaction proves nothing: it may have thrown old ones away,
or not have them in its index yet. A transaction with that sender and nonce in a block does prove
that no other one can be mined in this chain. What does not live here: what follows from it
(presence.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmTransaction
from rpcsvc.settlement.onchain.evm.payment_ledger import BlockPoint, EvmPayment, Purpose

log = structlog.get_logger(__name__)

_RETRY_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Spender:
    """The transaction that has spent a nonce, and its block."""

    made: EvmTransaction
    block: BlockPoint

    def is_attempt_of(self, payment: EvmPayment) -> bool:
        """Whether it is one that is on record."""
        return self.made.txid in {attempt.txid for attempt in payment.attempts}

    def calls_as(self, payment: EvmPayment) -> bool:
        """Whether it does what a payout was to do: its fee was raised, and that is not on record.

        So it is in a database that was put back from an older copy.
        """
        order, to = payment.order, self.made.to or ""
        same = (to.lower(), self.made.data) == (order.contract.lower(), order.data)
        return same and order.purpose is Purpose.TRANSFER


@dataclass(frozen=True, slots=True)
class NotFound:
    """It was looked for with the newest block ``at``; ``why`` is in words for the operator."""

    at: int
    why: str


class SpentNonces:
    """Finds what has spent a payment's nonce, and remembers it, by the payment's id.

    What was not found is looked for again about once a minute: one search may ask the node some
    dozens of times.
    """

    def __init__(self, connection: EvmConnection) -> None:
        self._connection = connection
        self._found: dict[str, Spender | NotFound] = {}

    async def find(self, payment: EvmPayment, by: BlockPoint, top: Block) -> Spender | NotFound:
        """What has spent the nonce in the block ``by``, or before it. Raises RpcFailure.

        A node that can't tell of the past raises nothing: that is NotFound.
        """
        known = self._found.get(payment.payment_id)
        if isinstance(known, NotFound) and abs(top.number - known.at) < self._retry_blocks():
            return known
        if isinstance(known, Spender) and await self._connection.has(known.block):
            return known
        found = await self._search(payment, by, top)
        self._found[payment.payment_id] = found
        return found

    def forget(self, payment_id: str) -> None:
        """Nobody will ask for it again, or it has to be looked for anew."""
        self._found.pop(payment_id, None)

    def _retry_blocks(self) -> int:
        return max(1, round(_RETRY_SECONDS / self._connection.network.block_seconds))

    async def _search(self, payment: EvmPayment, by: BlockPoint, top: Block) -> Spender | NotFound:
        try:
            found = await self._in_body(payment, by.number)
            if found is None:
                number = await self._first_block_with(payment, by.number)
                found = await self._in_body(payment, number)
        except RpcFailure as failure:
            # Not the node's health: it may have all that others need, and lack old states.
            log.info("evm_nonce_not_traced", payment_id=payment.payment_id, reason=str(failure))
            return NotFound(top.number, f"the node can't tell in which block ({failure})")
        if found is None:
            return NotFound(top.number, "the node shows no block with a transaction that did it")
        return found

    async def _in_body(self, payment: EvmPayment, number: int) -> Spender | None:
        sent = await self._connection.client.sent_in(number, payment.sender)
        made = None if sent is None else sent.sent.get(payment.nonce)
        if sent is None or made is None:
            return None
        return Spender(made, BlockPoint(sent.block.number, sent.block.hash))

    async def _first_block_with(self, payment: EvmPayment, high: int) -> int:
        """The first block by which the nonce is spent, no later than ``high``.

        Backwards in steps that double, then by halves: most nodes have the newest states only.
        """
        step = 1
        low = max(high - step, 0)
        while low > 0 and await self._is_spent(payment, low):
            high, step = low, step * 2
            low = max(high - step, 0)
        while high - low > 1:
            middle = (low + high) // 2
            if await self._is_spent(payment, middle):
                high = middle
            else:
                low = middle
        return high

    async def _is_spent(self, payment: EvmPayment, number: int) -> bool:
        return await self._connection.client.nonce(payment.sender, number) > payment.nonce
