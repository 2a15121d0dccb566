"""Rebroadcasts XMR payments dropped by a reorg, and abandons those of the wallet to itself.

Only bytes that were published before are handed over: nothing new is paid. Outputs frozen for a
payment that can never be made are thawed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import structlog

from rpcsvc.clock import iso8601
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import (
    NETWORK,
    MoneroLedger,
    MoneroOptions,
    Payment,
    PaymentState,
    Purpose,
)
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo, PoolTransaction
from rpcsvc.settlement.onchain.monero.wallet import list_unspent

log = structlog.get_logger(__name__)

# Blocks that a payment may wait in the node's pool: before it is relayed again, and before the
# operator has to look.
_RELAY_AFTER: Final = 3
_LATE_AFTER: Final = 10


class MoneroReorgRecovery:
    """Looks for payments that will not come back by themselves.

    ``problem`` is what the operator has to do about one of them; ``waiting``: that one waits in
    the node's pool for some blocks, ``overdue``: for many. ``gone``: that a payee who was paid has
    lost it again, for the operator. Each is None when there is nothing to say.
    """

    def __init__(
        self, connection: MoneroConnection, ledger: MoneroLedger, options: MoneroOptions
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._options = options
        self._looked_at = ""
        # Height of the chain when a payment was first found waiting in the pool, and when one of
        # the wallet to itself was first found missing, by their transaction ids.
        self._waiting_since: dict[str, int] = {}
        self._missing_since: dict[str, int] = {}
        self.problem: str | None = None
        self.waiting: str | None = None
        self.overdue: str | None = None
        self.gone: str | None = None

    async def look(self, info: NodeInfo) -> None:
        """Bring back what is gone or given up. Raises RpcFailure."""
        waiting = await self._rebroadcast_settled(info)
        if info.top_hash == self._looked_at:
            return  # the pool of a busy network is megabytes
        waiting += [
            item
            for item in await self._ledger.payments_in(PaymentState.PUBLISHED)
            if item.height is None
        ]
        await self._reoffer({item.txid: item for item in waiting}, info.height)
        await self._abandon_upkeep(info)
        await self._thaw_unused()
        self._looked_at = info.top_hash

    async def _rebroadcast_settled(self, info: NodeInfo) -> list[Payment]:
        """Publish what a deep reorganisation took off the chain; those that are in the pool.

        One that is in no block stays on record as such, however many follow: it may never be valid
        again, since what it spends, or hides among, is not on the chain any more.
        """
        settled = await self._ledger.settled_above(info.height - self._options.tracked_blocks)
        found = await self._connection.node.transactions([item.txid for item in settled])
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
                said = (await self._connection.node.submit(item.raw)).submission.value
            self.gone = (
                f"payment {item.payment_id} was settled and a reorganisation of {NETWORK} took it"
                f" away; it is published again ({said}); if it stays away: rpcsvc payouts close"
                f" {item.payees[0].transfer_id} --note TEXT"
            )

    async def _reoffer(self, waiting: dict[str, Payment], height: int) -> None:
        """Have the node relay, or try again to mine, what would stay in its pool otherwise."""
        self.problem = None
        pool = await self._connection.node.pool() if waiting else []
        found = [seen for seen in pool if seen.txid in waiting]
        self._waiting_since = _since(self._waiting_since, [seen.txid for seen in found], height)
        for seen in found:
            payment, blocks = waiting[seen.txid], height - self._waiting_since[seen.txid]
            if seen.abandoned:
                await self._offer(payment)
            elif not seen.relayed or blocks >= _RELAY_AFTER:
                await self._relay(payment, seen)
        self._report([waiting[seen.txid] for seen in found], height)

    def _report(self, in_pool: Sequence[Payment], height: int) -> None:
        """For the operator: the payment that has waited for the most blocks."""
        self.waiting = self.overdue = None
        if not in_pool:
            return
        payment = min(in_pool, key=lambda item: self._waiting_since[item.txid])
        blocks = height - self._waiting_since[payment.txid]
        since = iso8601(payment.relayed_at or payment.prepared_at)
        text = (
            f"payment {payment.payment_id}, published at {since}, waits in the node's pool for"
            f" {blocks} blocks and is relayed again with each: look whether the node has peers"
        )
        if blocks >= _LATE_AFTER:
            self.overdue = text
        elif blocks >= _RELAY_AFTER:
            self.waiting = text

    async def _relay(self, payment: Payment, seen: PoolTransaction) -> None:
        """Send it to the node's peers.

        A node that was killed after it took a transaction, and before it relayed it, keeps it
        unrelayed for ever; and the peers may have lost one that they had.
        """
        log.warning(
            "monero_payment_relayed_again", payment_id=payment.payment_id, relayed=seen.relayed
        )
        try:
            await self._connection.node.relay([payment.txid])
        except RpcFailure as failure:
            log.warning("monero_relay_refused", txid=payment.txid, reason=str(failure))
            self.problem = (
                f"payment {payment.payment_id} waits in the node's pool and the node does not let"
                f" us relay it: relay_tx {payment.txid}"
            )

    async def _offer(self, payment: Payment) -> None:
        """Take it off the node's pool and hand it over again: then it is as new.

        A node never tries again to mine a transaction that was not valid for a moment while
        blocks were replaced, such as one that spends money that had only just unlocked.
        """
        log.warning("monero_node_gave_payment_up", payment_id=payment.payment_id)
        try:
            await self._connection.node.flush_pool([payment.txid])
        except RpcFailure as failure:
            log.warning("monero_pool_not_flushed", txid=payment.txid, reason=str(failure))
            self.problem = (
                f"the node has given up payment {payment.payment_id} and does not let us offer it"
                f" anew: flush_txpool {payment.txid}"
            )
            return
        await self._connection.node.submit(payment.raw)

    async def _abandon_upkeep(self, info: NodeInfo) -> None:
        """Give up payments of the wallet to itself that the node has refused for many blocks.

        What such a one spends, or hides among, may be gone for good. Nobody is owed it, and if it
        is mined all the same, nothing has left the wallet.
        """
        published = await self._ledger.payments_in(PaymentState.PUBLISHED)
        settled = await self._ledger.settled_above(info.height)
        away = {
            item.txid: item
            for item in (*published, *settled)
            if item.purpose is Purpose.UPKEEP and item.height is None
        }
        found = await self._connection.node.transactions(list(away))
        self._missing_since = _since(self._missing_since, away.keys() - found.keys(), info.height)
        for txid, since in self._missing_since.items():
            if info.height - since >= self._options.failed_after:
                log.warning("monero_upkeep_abandoned", payment_id=away[txid].payment_id)
                await self._ledger.put_payment(replace(away[txid], state=PaymentState.FAILED))

    async def _thaw_unused(self) -> None:
        """Money held back in the wallet for a payment that can never be made is free again."""
        free = await self._ledger.free_key_images()
        if not free:
            return
        unspent, _ = await list_unspent(self._connection.wallet)
        for output in unspent:
            if output.frozen and output.key_image in free:
                log.info("monero_output_let_go", amount=output.amount)
                await self._connection.wallet.thaw(output.key_image)


def _since(known: dict[str, int], txids: Collection[str], height: int) -> dict[str, int]:
    """The height at which each was first found in its state; the others are forgotten."""
    return {txid: min(known.get(txid, height), height) for txid in txids}
