"""Where a payment of XMR is, by the node's word: in a block, in the pool, nowhere, or impossible.

What does not live here: what is done about it (payments.py).
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.orders.ports import Outcome, Verdict
from rpcsvc.settlement.onchain.monero.ledger import (
    Cursor,
    MoneroLedger,
    MoneroOptions,
    Payment,
    PaymentState,
)
from rpcsvc.settlement.onchain.monero.link import MoneroLink
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo, NodeTransaction, Spent


class MoneroPresence:
    """Looks payments up and records how far they are. May raise RpcFailure and SideUnusable."""

    def __init__(self, link: MoneroLink, ledger: MoneroLedger, options: MoneroOptions) -> None:
        self._link = link
        self._ledger = ledger
        self._options = options

    async def verdict(self, payment: Payment) -> Verdict:
        """Ask the node, record how far the payment is, and say it."""
        before = await self._link.check_node()
        spent = await self._link.node.key_images(payment.key_images)
        found = (await self._link.node.transactions([payment.txid])).get(payment.txid)
        after = await self._link.check_node()
        if found is not None:
            return await self._present(payment, found, after)
        if before.top_hash != after.top_hash or Spent.IN_CHAIN not in spent.values():
            return await self._absent(payment)
        return await self._in_conflict(payment, after)

    async def _present(self, payment: Payment, found: NodeTransaction, info: NodeInfo) -> Verdict:
        depth = 0 if found.height is None else info.height - found.height
        is_settled = depth >= self._options.settled_after
        state = PaymentState.SETTLED if is_settled else PaymentState.PUBLISHED
        await self._put(payment, replace(payment, state=state, height=found.height, conflict=None))
        if is_settled:
            return Verdict(Outcome.SETTLED)
        return Verdict(Outcome.PENDING, f"{depth} of {self._options.settled_after} confirmations")

    async def _absent(self, payment: Payment) -> Verdict:
        await self._put(payment, replace(payment, height=None, conflict=None))
        return Verdict(Outcome.ABSENT)

    async def _in_conflict(self, payment: Payment, info: NodeInfo) -> Verdict:
        """Something else has spent an input, in this chain up to ``info``'s top.

        The node doesn't say in which block. The top at the first sight of it bounds that from
        above: once that block is deep, and still there, so is the one in question.
        """
        since = await self._conflict_since(payment, info)
        depth = info.height - since.height
        if depth >= self._options.failed_after:
            over = replace(payment, state=PaymentState.FAILED, height=None, conflict=since)
            await self._put(payment, over)
            return Verdict(
                Outcome.FAILED,
                f"another transaction has spent its inputs, {depth} confirmations ago",
            )
        await self._put(payment, replace(payment, height=None, conflict=since))
        return Verdict(
            Outcome.UNKNOWN,
            f"another transaction has spent its inputs, at least {depth} of"
            f" {self._options.failed_after} confirmations ago",
        )

    async def _conflict_since(self, payment: Payment, info: NodeInfo) -> Cursor:
        top = Cursor(info.height - 1, info.top_hash)
        known = payment.conflict
        if known is None:
            return top
        header = await self._link.node.header_at(known.height)
        return known if header is not None and header.hash == known.hash else top

    async def _put(self, before: Payment, after: Payment) -> None:
        if after != before and not before.state.is_over:
            await self._ledger.put_payment(after)
