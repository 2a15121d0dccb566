"""Asking an EVM node what transactions of the hot wallet cost, and what else moved its ether.

What is deep is asked once. What does not live here: what it is compared with (ether_rules.py),
events of the token (evm_chain.py).
Source: the Ethereum JSON-RPC specification (execution-apis); the OP stack's receipts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Block, Receipt
from rpcsvc.settlement.onchain.evm.options import EvmNetwork

# Questions under way at once.
_AT_ONCE: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mined:
    """A mined transaction: ``cost`` is its fee in wei, None where the node does not say it all."""

    block: int
    ok: bool
    cost: int | None


@dataclass(frozen=True, slots=True)
class ByHand:
    """An explained transaction that is mined. ``nonce``: of the hot wallet's own, else None.

    ``sent`` and ``came``: wei that went along with it, from the hot wallet and to it.
    """

    mined: Mined
    nonce: int | None
    sent: int
    came: int


@dataclass(slots=True)
class EvmReceipts:
    """Receipts of one network's transactions. Everything raises RpcFailure."""

    network: EvmNetwork
    client: EvmClient
    _mined: dict[str, Mined] = field(default_factory=dict)
    _by_hand: dict[str, ByHand] = field(default_factory=dict)

    def forget(self) -> None:
        """Blocks may have been replaced: ask anew."""
        self._mined.clear()
        self._by_hand.clear()

    def knows(self, txid: str) -> bool:
        """Whether a transaction is mined, and too deep to be asked about again."""
        return txid in self._mined

    async def mined(
        self, txids: Iterable[str], head: Block
    ) -> tuple[dict[str, Mined], frozenset[str]]:
        """Those of the transactions that are mined up to ``head``, and those that are later."""
        found, later = {}, set()
        unknown = []
        for txid in txids:
            if (known := self._mined.get(txid)) is not None:
                found[txid] = known
            else:
                unknown.append(txid)
        for txid, receipt in await each(unknown, self.client.receipt):
            if receipt is None:
                continue
            if receipt.block_number > head.number:
                later.add(txid)
                continue
            found[txid] = self._read(receipt)
            if self._is_deep(receipt, head):
                self._mined[txid] = found[txid]
        return found, frozenset(later)

    async def by_hand(self, txids: Iterable[str], hot: str, head: Block) -> dict[str, ByHand]:
        """Those of the explained transactions that are mined up to ``head``."""
        wanted = list(txids)
        found = {txid: known for txid in wanted if (known := self._by_hand.get(txid)) is not None}
        unknown = [txid for txid in wanted if txid not in found]
        mined, _ = await self.mined(unknown, head)
        for txid, made in await each(mined, self.client.transaction):
            if made is None:
                continue  # replaced meanwhile
            is_own = made.sender.lower() == hot.lower()
            is_to = (made.to or "").lower() == hot.lower()
            value = made.value if mined[txid].ok else 0
            found[txid] = ByHand(
                mined[txid],
                made.nonce if is_own else None,
                value if is_own and not is_to else 0,
                value if is_to and not is_own else 0,
            )
            if self.knows(txid):
                self._by_hand[txid] = found[txid]
        return found

    def _is_deep(self, receipt: Receipt, head: Block) -> bool:
        return head.number - receipt.block_number >= self.network.failed_after

    def _read(self, receipt: Receipt) -> Mined:
        """A chain whose oracle tells a fee for L1 has it in each receipt.

        How the operator fee is reckoned depends on the chain's release, which no receipt says.
        """
        lacks_l1 = self.network.l1_fee_oracle is not None and receipt.l1_fee is None
        cost = receipt.gas_used * receipt.gas_price + (receipt.l1_fee or 0)
        untold = lacks_l1 or receipt.has_operator_fee
        return Mined(receipt.block_number, receipt.ok, None if untold else cost)


async def each(items: Iterable[str], ask: Callable[[str], Awaitable[T]]) -> list[tuple[str, T]]:
    """Ask about each, some at once."""
    wanted: Sequence[str] = list(items)
    answers: list[tuple[str, T]] = []
    for at in range(0, len(wanted), _AT_ONCE):
        some = wanted[at : at + _AT_ONCE]
        # All have ended when the first failure is told: nobody asks on behind the caller's back.
        said = await asyncio.gather(*(ask(item) for item in some), return_exceptions=True)
        for item, answer in zip(some, said, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            answers.append((item, answer))
    return answers
