"""Where a payment of XMR is, by the node's word: in a block, in the pool, nowhere, or impossible.

What does not live here: finding what has spent its inputs (spent.py), what is done about it
(payments.py).
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.clock import Clock
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import (
    Cursor,
    MoneroLedger,
    MoneroOptions,
    Payment,
    PaymentState,
)
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo, NodeTransaction, Spent
from rpcsvc.settlement.onchain.monero.spent import SpentInputs


class MoneroPresence:
    """Looks payments up and records how far they are. May raise RpcFailure and ChainUnusable."""

    def __init__(
        self,
        connection: MoneroConnection,
        ledger: MoneroLedger,
        clock: Clock,
        options: MoneroOptions,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._options = options
        self._spent = SpentInputs(connection, clock)

    async def verdict(self, payment: Payment) -> Verdict:
        """Ask the node, record how far the payment is, and say it."""
        before = await self._connection.check_node()
        spent = await self._connection.node.key_images(payment.key_images)
        found = (await self._connection.node.transactions([payment.txid])).get(payment.txid)
        after = await self._connection.check_node()
        if found is not None:
            self._spent.forget(payment.payment_id)
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
        """An input is spent, in this chain up to ``info``'s top, and the payment is nowhere.

        Without the transaction that spent it nothing is said: the payment itself may be mined, and
        the node that answered for it may not have it.
        """
        since = await self._conflict_since(payment, info)
        found = await self._spent.find(payment, since, info)
        if found is None:
            await self._put(payment, replace(payment, height=None, conflict=since))
            return Verdict(
                Outcome.UNKNOWN,
                "an input of it is spent, and no other transaction of the wallet is found that did"
                f" it ({info.height - since.height} blocks ago at least)",
            )
        depth, needed = info.height - found.block.height, self._options.failed_after
        after = replace(payment, height=None, conflict=found.block)
        why = f"another transaction, {found.txid}, has spent its inputs"
        if depth < needed:
            await self._put(payment, after)
            return Verdict(Outcome.UNKNOWN, f"{why}, {depth} of {needed} confirmations ago")
        await self._put(payment, replace(after, state=PaymentState.FAILED))
        return Verdict(Outcome.FAILED, f"{why}, {depth} confirmations ago")

    async def _conflict_since(self, payment: Payment, info: NodeInfo) -> Cursor:
        """A block by which it was spent: that of the first sight, while it is still there."""
        top = Cursor(info.height - 1, info.top_hash)
        known = payment.conflict
        if known is None:
            return top
        header = await self._connection.node.header_at(known.height)
        return known if header is not None and header.hash == known.hash else top

    async def _put(self, before: Payment, after: Payment) -> None:
        if after != before and not before.state.is_over:
            await self._ledger.put_payment(after)
