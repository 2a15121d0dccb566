"""Ends an XMR payout that its node refuses for good, so that no block can take it any more.

Another transaction has spent its inputs, and has to be deep. Where none has, the wallet sends them
to itself. Where they are on the chain no more, neither is possible, nor needed.
"""

from __future__ import annotations

from collections.abc import Callable

from rpcsvc.clock import Clock
from rpcsvc.settlement.onchain.adoption import NotAdopted
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.holdings import list_unspent
from rpcsvc.settlement.onchain.monero.ledger import (
    Cursor,
    MoneroLedger,
    MoneroOptions,
    Payment,
    PaymentState,
)
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo, Spent, Submission
from rpcsvc.settlement.onchain.monero.spent import SpentInputs

# A double spend of inputs that nothing shows as spent may be this very payment, still hidden.
_IN_VAIN = (Submission.INVALID, Submission.REFUSED)


class MoneroGone:
    """Looks at one wallet and its node, both open. Everything raises RpcFailure, ChainUnusable.

    ``explain`` records, before it is published, a transaction of the wallet to itself.
    """

    def __init__(
        self,
        connection: MoneroConnection,
        ledger: MoneroLedger,
        clock: Clock,
        options: MoneroOptions,
        explain: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._options = options
        self._explain = explain
        self._spent = SpentInputs(connection, clock)

    async def end(self, payment: Payment) -> str | None:
        """None: it can't be mined. Otherwise the transaction that has to be deep before that.

        Raises NotAdopted when it may be mined yet, and nothing can be done about it now.
        """
        info = await self._connection.check_node()
        found = (await self._connection.node.transactions([payment.txid])).get(payment.txid)
        if found is not None:
            where = "the node's pool" if found.height is None else f"block {found.height}"
            raise NotAdopted(f"its payment {payment.txid} is in {where}: the service follows it.")
        spent = set((await self._connection.node.key_images(payment.key_images)).values())
        if Spent.IN_CHAIN in spent:
            return await self._rival(payment, info)
        if Spent.IN_POOL in spent:
            raise NotAdopted("what spends its inputs waits to be mined: try again in some blocks.")
        said = await self._connection.node.submit(payment.raw)
        if said.submission not in _IN_VAIN:
            raise NotAdopted(
                f"it was handed over once more, and the node said: {said.submission.value}. It may"
                " be mined yet: look again in some blocks."
            )
        return await self._spend(payment, info)

    async def _rival(self, payment: Payment, info: NodeInfo) -> str | None:
        """What has spent an input of it; None once that is deep. Raises NotAdopted."""
        top = Cursor(info.height - 1, info.top_hash)
        await self._connection.check_wallet()
        found = await self._spent.find(payment, top, info)
        if found is None:
            raise NotAdopted(
                "an input of it is spent, and no other transaction of the wallet is found that did"
                " it: the node may lack blocks, ask another one (onchain.monerod_url)."
            )
        return found.txid if info.height - found.block.height < self._options.failed_after else None

    async def _spend(self, payment: Payment, info: NodeInfo) -> str | None:
        """Have the wallet spend its first input; None when the chain has none of them."""
        await self._connection.check_wallet()
        await self._connection.wallet.refresh()
        # The wallet may count them as spent by the payment still.
        await self._connection.wallet.rescan_spent()
        listed, is_whole = await list_unspent(self._connection.wallet)
        inputs = [item for item in listed if item.key_image in payment.key_images]
        if not inputs:
            await self._require_no_other(payment, info, is_whole=is_whole)
            return None
        for item in inputs:
            if item.frozen:
                await self._connection.wallet.thaw(item.key_image)
        address = await self._connection.wallet.primary_address()
        try:
            made = await self._connection.wallet.prepare_sweep(inputs[0].key_image, address)
        except NodeError as error:
            raise NotAdopted(
                f"its inputs can't be spent yet, nor can it be mined ({error.text}): an output that"
                " was mined anew is locked for ten blocks. Try again after them."
            ) from error
        self._explain(made.txid)
        await self._connection.wallet.relay(made.metadata)
        await self._connection.wallet.store()
        return made.txid

    async def _require_no_other(self, payment: Payment, info: NodeInfo, *, is_whole: bool) -> None:
        """Its inputs must not be about to come back. Raises NotAdopted."""
        if not is_whole:
            raise NotAdopted("the wallet has more outputs than one answer can list: join some.")
        out = (
            *await self._ledger.payments_in(PaymentState.PUBLISHED),
            *await self._ledger.settled_above(info.height),
        )
        for other in out:
            if other.height is None and other.txid != payment.txid:
                raise NotAdopted(
                    f"{other.payment_id} is not mined either, and may bring its inputs back: end"
                    " that one first."
                )
