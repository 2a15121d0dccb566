"""Payments that a reorganisation hurt, and money that one of them held back.

Payments are handed to the node once more, with the bytes that are published already: nothing is
paid that was not before. What does not live here: payments that go their way (payments.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.monero.holdings import list_unspent
from rpcsvc.settlement.onchain.monero.ledger import (
    NETWORK,
    MoneroLedger,
    MoneroOptions,
    Payment,
    PaymentState,
)
from rpcsvc.settlement.onchain.monero.link import MoneroLink
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo

log = structlog.get_logger(__name__)


class MoneroRescue:
    """Looks for payments that will not come back by themselves.

    ``problem`` is what the operator has to do about one of them. ``gone``: that a payee who was
    paid has lost it again, for the operator; None: none has.
    """

    def __init__(self, link: MoneroLink, ledger: MoneroLedger, options: MoneroOptions) -> None:
        self._link = link
        self._ledger = ledger
        self._options = options
        self._looked_at = ""
        self.problem: str | None = None
        self.gone: str | None = None

    async def look(self, info: NodeInfo) -> None:
        """Bring back what is gone or given up. Raises RpcFailure."""
        waiting = await self._bring_back_settled(info)
        if info.top_hash == self._looked_at:
            return  # the pool of a busy network is megabytes
        waiting += [
            item for item in self._ledger.payments_in(PaymentState.PUBLISHED) if item.height is None
        ]
        await self._offer_anew({item.txid: item for item in waiting})
        await self._let_go()
        self._looked_at = info.top_hash

    async def _bring_back_settled(self, info: NodeInfo) -> list[Payment]:
        """Publish what a deep reorganisation took off the chain; those that are in the pool.

        One that is in no block stays on record as such, however many follow: it may never be valid
        again, since what it spends, or hides among, is not on the chain any more.
        """
        settled = self._ledger.settled_above(info.height - self._options.tracked_blocks)
        found = await self._link.node.transactions([item.txid for item in settled])
        for item in settled:
            height = found[item.txid].height if item.txid in found else None
            if height != item.height:
                await self._ledger.put_payment(replace(item, height=height))
        out = [item for item in settled if item.txid not in found or found[item.txid].in_pool]
        waiting = [item for item in out if item.txid in found]
        await self._publish_again(out, waiting)
        return waiting

    async def _publish_again(self, out: Sequence[Payment], waiting: Sequence[Payment]) -> None:
        """Those that are in no block; ``waiting`` ones the node has: it put them into its pool."""
        if not out:
            self.gone = None
        for item in out:
            if item.height is not None:
                log.error("monero_settled_payment_is_gone", payment_id=item.payment_id)
            said = "in the pool"
            if item not in waiting:
                said = (await self._link.node.submit(item.raw)).submission.value
            self.gone = (
                f"payment {item.payment_id} was settled and a reorganisation of {NETWORK} took it"
                f" away; it is published again ({said})"
            )

    async def _offer_anew(self, waiting: dict[str, Payment]) -> None:
        """What the node keeps in its pool and never tries to mine again.

        So it treats a transaction that was not valid for a moment while blocks were replaced,
        such as one that spends money that had only just unlocked. Taken off its pool and handed
        over again it is as new.
        """
        self.problem = None
        if not waiting:
            return
        for seen in await self._link.node.pool():
            if seen.given_up and seen.txid in waiting:
                await self._offer(waiting[seen.txid])

    async def _offer(self, payment: Payment) -> None:
        log.warning("monero_node_gave_payment_up", payment_id=payment.payment_id)
        try:
            await self._link.node.flush_pool([payment.txid])
        except RpcFailure as failure:
            log.warning("monero_pool_not_flushed", txid=payment.txid, reason=str(failure))
            self.problem = (
                f"the node has given up payment {payment.payment_id} and does not let us offer it"
                f" anew: flush_txpool {payment.txid}"
            )
            return
        await self._link.node.submit(payment.raw)

    async def _let_go(self) -> None:
        """Money held back in the wallet for a payment that can never be made is free again."""
        free = self._ledger.free_key_images()
        if not free:
            return
        unspent, _ = await list_unspent(self._link.wallet)
        for output in unspent:
            if output.frozen and output.key_image in free:
                log.info("monero_output_let_go", amount=output.amount)
                await self._link.wallet.thaw(output.key_image)
