"""The state of an XMR payment: mined, in the pool, absent, or displaced by a double spend.

A spent key image proves nothing alone: two answers may come from two nodes behind one address.
Only another mined transaction with that key image does; the wallet lists it, since only its keys
can sign. A payment that a reorganisation dropped is published again, with the same bytes: nothing
new is paid. Outputs frozen for a payment that can never be made are thawed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.clock import Clock, iso8601
from rpcsvc.health import Condition, Severity, faults, notes
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure, TooLarge
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import (
    MoneroSubmission,
    NodeInfo,
    NodeTransaction,
    PoolTransaction,
    Spent,
)
from rpcsvc.settlement.onchain.monero.records import (
    NETWORK,
    UNPUBLISHED,
    Cursor,
    MoneroOptions,
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
)
from rpcsvc.settlement.onchain.monero.wallet import list_unspent
from rpcsvc.settlement.onchain.monero.wallet_types import OutputFilter, WalletTransferKind
from rpcsvc.settlement.onchain.unrecorded import NotAdopted

log = structlog.get_logger(__name__)


# Nothing is signed with outputs that the wallet has seen spent: they were spent later, give or take
# a reorganisation and the error of clocks. Blocks come every two minutes.
_LEAST_BLOCK_MS: Final = 60_000
_MARGIN: Final = 720
# A double spend of inputs that nothing shows as spent may be this very payment, still hidden.
_IN_VAIN = (MoneroSubmission.INVALID, MoneroSubmission.REFUSED)
# Blocks that a payment may wait in the node's pool: before it is relayed again, and before the
# operator has to look.
_RELAY_AFTER: Final = 3
_LATE_AFTER: Final = 10


class InputSpender(Struct, frozen=True):
    """A mined transaction that has spent an input of a payment, and its block."""

    txid: str
    block: Cursor


class SpentInputs:
    """Finds the transaction that spent an input of a payment, and remembers it by payment id.

    While nothing is found, it searches again with each new block. May raise RpcFailure and
    ChainUnusable.
    """

    def __init__(self, connection: MoneroConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._found: dict[str, InputSpender] = {}
        self._in_vain: dict[str, str] = {}

    async def find(
        self, payment: MoneroPayment, since: Cursor, top: NodeInfo
    ) -> InputSpender | None:
        """The payment's spender in the block ``since`` or before; None when nothing shows it."""
        name = payment.payment_id
        known = self._found.pop(name, None)
        if known is None and self._in_vain.get(name) == top.top_hash:
            return None
        found = await self._search(payment, since, [known.txid] if known else None)
        if found is None:
            self._in_vain[name] = top.top_hash
        else:
            self._found[name] = found
        return found

    def forget(self, payment_id: str) -> None:
        """Forget the spender of a payment's inputs: the payment is over, or to be searched for
        again.
        """
        self._found.pop(payment_id, None)
        self._in_vain.pop(payment_id, None)

    async def _search(
        self, payment: MoneroPayment, since: Cursor, known: list[str] | None
    ) -> InputSpender | None:
        txids = known or await self._sent(payment, since)
        for txid, made in (await self._connection.node.bodies(txids)).items():
            if made.height is None or txid == payment.txid:
                continue
            if not set(payment.key_images).isdisjoint(made.key_images):
                header = await self._connection.node.header_at(made.height)
                return InputSpender(txid, Cursor(made.height, header.hash)) if header else None
        return None

    async def _sent(self, payment: MoneroPayment, since: Cursor) -> list[str]:
        """The wallet's own transactions in blocks since the payment was signed."""
        await self._connection.require_wallet()
        await self._connection.wallet.refresh()
        blocks = max(0, self._clock.now_ms() - payment.prepared_at) // _LEAST_BLOCK_MS
        first = max(0, since.height - blocks - _MARGIN)
        listed = await self._connection.wallet.transfers(first, (WalletTransferKind.OUTGOING,))
        return sorted({item.txid for item in listed})


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

    async def verdict(self, payment: MoneroPayment) -> Verdict:
        """Ask the node, record how far the payment is, and say it."""
        node, txid = self._connection.node, payment.txid
        if (found := (await node.transactions([txid])).get(txid)) is None:
            before = await self._connection.check_node()
            spent = await node.key_images(payment.key_images)
            found = (await self._connection.find_transactions([txid])).get(txid)
        after = await self._connection.check_node()
        if found is not None:
            self._spent.forget(payment.payment_id)
            return await self._present(payment, found, after)
        if before.top_hash != after.top_hash or Spent.IN_CHAIN not in spent.values():
            return await self._absent(payment)
        return await self._in_conflict(payment, after)

    async def _present(
        self, payment: MoneroPayment, found: NodeTransaction, info: NodeInfo
    ) -> Verdict:
        """Record where it is. SETTLED is final, so its block must be on the chain of ``info``'s
        top: of several nodes behind one name, one may have found it on a replaced branch.
        """
        depth = 0 if found.height is None else info.height - found.height
        is_settled = (
            found.height is not None
            and depth >= self._options.settled_after
            and await self._connection.is_on_chain({found.txid: found.height}, info)
        )
        state = MoneroPaymentState.SETTLED if is_settled else MoneroPaymentState.PUBLISHED
        await self._put(payment, replace(payment, state=state, height=found.height, conflict=None))
        if is_settled:
            return Verdict(Outcome.SETTLED)
        needed = self._options.settled_after
        mined_at = info.height if found.height is None else found.height
        reason = f"{depth} of {needed} confirmations"
        if depth >= needed:
            reason = f"block {found.height}, where the node has it, is not shown to be on the chain"
        return Verdict(Outcome.PENDING, reason, settles_at=mined_at + needed - 1)

    async def _absent(self, payment: MoneroPayment) -> Verdict:
        await self._put(payment, replace(payment, height=None, conflict=None))
        return Verdict(Outcome.ABSENT)

    async def _in_conflict(self, payment: MoneroPayment, info: NodeInfo) -> Verdict:
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
        place = {found.txid: found.block.height}
        if depth < needed or not await self._connection.is_on_chain(place, info):
            await self._put(payment, after)
            return Verdict(Outcome.UNKNOWN, f"{why}, {depth} of {needed} confirmations ago")
        await self._put(payment, replace(after, state=MoneroPaymentState.FAILED))
        return Verdict(Outcome.FAILED, f"{why}, {depth} confirmations ago")

    async def _conflict_since(self, payment: MoneroPayment, info: NodeInfo) -> Cursor:
        """The block in which the spend was first seen, while it is on the chain."""
        top = Cursor(info.height - 1, info.top_hash)
        known = payment.conflict
        if known is None:
            return top
        header = await self._connection.node.header_at(known.height)
        return known if header is not None and header.hash == known.hash else top

    async def _put(self, before: MoneroPayment, after: MoneroPayment) -> None:
        if after != before and not before.state.is_over:
            await self._ledger.put_payment(after)


class MoneroPayoutEnd:
    """Looks at one wallet and its node, both open. Everything raises RpcFailure, ChainUnusable.

    ``annotate`` records, before it is published, a transaction of the wallet to itself.
    ``is_by_word``: the operator has asked other nodes, and says that a payment is on none of them.
    ``took_word``: whether a payment was ended by that alone.
    """

    def __init__(
        self,
        connection: MoneroConnection,
        ledger: MoneroLedger,
        clock: Clock,
        options: MoneroOptions,
        annotate: Callable[[str], Awaitable[None]],
        *,
        is_by_word: bool = False,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._options = options
        self._annotate = annotate
        self._is_by_word = is_by_word
        self.took_word = False
        self._spent = SpentInputs(connection, clock)

    async def end(self, payment: MoneroPayment) -> str | None:
        """Return None: the payment can't be mined; or the transaction that must be deep before
        that.

        Raises NotAdopted when it may be mined yet, and nothing can be done about it now.
        """
        info = await self._connection.check_node()
        found = (await self._connection.find_transactions([payment.txid])).get(payment.txid)
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

    async def _rival(self, payment: MoneroPayment, info: NodeInfo) -> str | None:
        """The spender of one of its inputs; None once that is deep. Raises NotAdopted."""
        top = Cursor(info.height - 1, info.top_hash)
        await self._connection.check_wallet()
        found = await self._spent.find(payment, top, info)
        if found is None:
            raise NotAdopted(
                "an input of it is spent, and no other transaction of the wallet is found that did"
                " it: the node may lack blocks, ask another one (onchain.monerod_url)."
            )
        is_deep = info.height - found.block.height >= self._options.failed_after
        place = {found.txid: found.block.height}
        is_over = is_deep and await self._connection.is_on_chain(place, info)
        return None if is_over else found.txid

    async def _spend(self, payment: MoneroPayment, info: NodeInfo) -> str | None:
        """Have the wallet spend its first input; None when the operator says that the chain has
        none of them.
        """
        await self._connection.check_wallet()
        await self._connection.wallet.refresh()
        # The wallet may count them as spent by the payment still.
        await self._connection.wallet.rescan_spent()
        listed, is_complete = await list_unspent(self._connection.wallet)
        inputs = [item for item in listed if item.key_image in payment.key_images]
        if not inputs:
            await self._require_no_other(payment, info, is_complete=is_complete)
            await self._require_word(payment)
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
                " was mined again is locked for ten blocks. Try again after them."
            ) from error
        await self._annotate(made.txid)
        await self._connection.wallet.relay(made.metadata)
        await self._connection.wallet.store()
        return made.txid

    async def _require_no_other(
        self, payment: MoneroPayment, info: NodeInfo, *, is_complete: bool
    ) -> None:
        """Require that its inputs are not spent just now, nor about to come back.

        Raises NotAdopted.
        """
        if (await self._connection.check_node()).top_hash != info.top_hash:
            raise NotAdopted("a block came meanwhile, and it may be mined by now: try again.")
        scanned, held = await self._ledger.scanned_height(), await self._connection.wallet.height()
        if scanned is not None and scanned >= info.height:
            raise NotAdopted(
                f"the node is at block {info.height - 1}, and the service has read block {scanned}:"
                " the node is late. Ask another one (onchain.monerod_url)."
            )
        if held != info.height:
            raise NotAdopted(f"the wallet is at height {held}, the node at {info.height}.")
        if not is_complete:
            raise NotAdopted("the wallet has more outputs than one answer can list: join some.")
        out = (
            *await self._ledger.payments_in(MoneroPaymentState.PUBLISHED),
            *await self._ledger.settled_above(info.height),
        )
        for other in out:
            if other.height is None and other.txid != payment.txid:
                raise NotAdopted(
                    f"{other.payment_id} is not mined either, and may bring its inputs back: end"
                    " that one first."
                )

    async def _require_word(self, payment: MoneroPayment) -> None:
        """Require that the wallet has no input of it, spent or not, and the operator's word.

        Absence proves nothing: the node may be late, the wallet restored and behind, and the
        payment mined. Raises NotAdopted.
        """
        try:
            spent = await self._connection.wallet.outputs(OutputFilter.UNAVAILABLE)
        except TooLarge:  # those of years, some 66,000: only the word is left
            spent = []
        if any(item.key_image in payment.key_images for item in spent):
            raise NotAdopted(
                "the wallet has an input of it as spent, and the node does not: one of them is"
                " late. Ask another node (onchain.monerod_url)."
            )
        if not self._is_by_word:
            raise NotAdopted(
                f"the wallet has none of its inputs, which proves nothing: {payment.txid} may be"
                " mined, and node and wallet late. Ask nodes of others for it and for its inputs:"
                f" {', '.join(payment.key_images)}. Only if all of them are up to date and none"
                " has it or has an input spent: the same with --unproven."
            )
        self.took_word = True


class MoneroReorgRecovery:
    """Looks for payments that will not come back by themselves."""

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
        # For the operator: a payee who was paid has lost the payment again; the node refuses help
        # for one; one waits in the node's pool.
        self._gone: str | None = None
        self._refused: str | None = None
        self._waiting: Condition | None = None

    def conditions(self) -> list[Condition]:
        """Return conditions for the operator. One that waits is a fault after many blocks."""
        waiting = [] if self._waiting is None else [self._waiting]
        return faults(self._gone) + notes(self._refused) + waiting

    async def poll(self, info: NodeInfo) -> None:
        """Publish payments again that are gone or abandoned. Raises RpcFailure."""
        is_new = info.top_hash != self._looked_at
        waiting = await self._rebroadcast_settled(info, is_new=is_new)
        if not is_new:
            return  # the pool of a busy network is megabytes
        waiting += [
            item
            for item in await self._ledger.payments_in(MoneroPaymentState.PUBLISHED)
            if item.height is None
        ]
        await self._reoffer({item.txid: item for item in waiting}, info.height)
        await self._abandon_upkeep(info)
        await self._thaw_unused()
        self._looked_at = info.top_hash

    async def _rebroadcast_settled(self, info: NodeInfo, *, is_new: bool) -> list[MoneroPayment]:
        """Publish payments again that a deep reorganisation took off the chain; return those in the
        pool.

        Once for each top block: a payment that its node refuses is refused until the next one.

        A payment in no block stays on record as settled, however many blocks follow: it may never
        be valid again, since the outputs that it spends, or hides among, are not on the chain any
        more.
        """
        settled = await self._ledger.settled_above(info.height - self._options.tracked_blocks)
        found = await self._connection.find_transactions([item.txid for item in settled])
        for item in settled:
            height = found[item.txid].height if item.txid in found else None
            if height != item.height:
                await self._ledger.put_payment(replace(item, height=height))
        out = [item for item in settled if item.txid not in found or found[item.txid].in_pool]
        waiting = [item for item in out if item.txid in found]
        if is_new or not out or any(item.height is not None for item in out):
            await self._publish_again(out, waiting)
        return waiting

    async def _publish_again(
        self, out: Sequence[MoneroPayment], waiting: Sequence[MoneroPayment]
    ) -> None:
        """Publish payments that are in no block; those ``waiting`` are in the node's pool.

        Of several the last payout is reported: nobody is owed a payment of the wallet to itself.
        """
        if not out:
            self._gone = None
        for item in sorted(out, key=_is_owed):
            if item.height is not None:
                log.error("monero_settled_payment_dropped", payment_id=item.payment_id)
            said = "in the pool"
            if item not in waiting:
                said = (await self._connection.node.submit(item.raw)).submission.value
            self._gone = (
                f"payment {item.payment_id} was settled and a reorganisation of {NETWORK} took it"
                f" away; it is published again ({said}); if it stays away:"
                f" {self._ending(item)}"
            )

    def _ending(self, payment: MoneroPayment) -> str:
        """Return how a payment ends that the network never takes again."""
        if not _is_owed(payment):
            return f"it counts as failed after {self._options.failed_after} blocks"
        return f"rpcsvc payouts close {payment.payees[0].transfer_id} --note TEXT"

    async def _reoffer(self, waiting: dict[str, MoneroPayment], height: int) -> None:
        """Have the node relay, or try again to mine, payments that would stay in its pool
        otherwise.
        """
        self._refused = None
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

    def _report(self, in_pool: Sequence[MoneroPayment], height: int) -> None:
        """Report the payment that has waited for the most blocks to the operator."""
        self._waiting = None
        if not in_pool:
            return
        payment = min(in_pool, key=lambda item: self._waiting_since[item.txid])
        blocks = height - self._waiting_since[payment.txid]
        since = iso8601(payment.relayed_at or payment.prepared_at)
        text = (
            f"payment {payment.payment_id}, published at {since}, waits in the node's pool for"
            f" {blocks} blocks and is relayed again with each: check that the node has peers"
        )
        if blocks >= _RELAY_AFTER:
            severity = Severity.FAULT if blocks >= _LATE_AFTER else Severity.NOTE
            self._waiting = Condition(text, severity)

    async def _relay(self, payment: MoneroPayment, seen: PoolTransaction) -> None:
        """Send a payment to the node's peers.

        A node that was killed after it took a transaction, and before it relayed it, keeps it
        unrelayed for ever; and the peers may have lost a transaction that they had.
        """
        log.warning("monero_payment_relayed", payment_id=payment.payment_id, relayed=seen.relayed)
        try:
            await self._connection.node.relay([payment.txid])
        except RpcFailure as failure:
            log.warning("monero_relay_refused", txid=payment.txid, reason=str(failure))
            self._refused = (
                f"payment {payment.payment_id} waits in the node's pool and the node does not let"
                f" us relay it: relay_tx {payment.txid}"
            )

    async def _offer(self, payment: MoneroPayment) -> None:
        """Take a payment off the node's pool and hand it over again: then it is new to the node.

        A node never tries again to mine a transaction that was not valid for a moment while blocks
        were replaced, for example one that spends money that had only just unlocked.
        """
        log.warning("monero_payment_abandoned_by_node", payment_id=payment.payment_id)
        try:
            await self._connection.node.flush_pool([payment.txid])
        except RpcFailure as failure:
            log.warning("monero_pool_flush_failed", txid=payment.txid, reason=str(failure))
            self._refused = (
                f"the node has abandoned payment {payment.payment_id} and does not let us offer it"
                f" again: flush_txpool {payment.txid}"
            )
            return
        await self._connection.node.submit(payment.raw)

    async def _abandon_upkeep(self, info: NodeInfo) -> None:
        """Mark payments of the wallet to itself as failed that the node has lacked for many blocks.

        The outputs that they spend, or hide among, may be gone permanently. One that the network
        never had would keep everything else from being signed. Nobody is owed these payments, and
        if one is mined all the same, nothing has left the wallet.
        """
        live = await self._ledger.payments_in(*UNPUBLISHED, MoneroPaymentState.PUBLISHED)
        settled = await self._ledger.settled_above(info.height)
        away = {
            item.txid: item
            for item in (*live, *settled)
            if not _is_owed(item) and item.height is None
        }
        found = await self._connection.find_transactions(list(away))
        self._missing_since = _since(self._missing_since, away.keys() - found.keys(), info.height)
        for txid, since in self._missing_since.items():
            if info.height - since >= self._options.failed_after:
                log.warning("monero_upkeep_abandoned", payment_id=away[txid].payment_id)
                await self._ledger.put_payment(replace(away[txid], state=MoneroPaymentState.FAILED))

    async def _thaw_unused(self) -> None:
        """Thaw outputs that the wallet held back for a payment that can never be made."""
        free = await self._ledger.free_key_images()
        if not free:
            return
        unspent, _ = await list_unspent(self._connection.wallet)
        for output in unspent:
            if output.frozen and output.key_image in free:
                log.info("monero_output_released", amount=output.amount)
                await self._connection.wallet.thaw(output.key_image)


def _is_owed(payment: MoneroPayment) -> bool:
    """Whether a payment goes to others, and not from the wallet to itself."""
    return payment.purpose is MoneroPurpose.TRANSFER


def _since(known: dict[str, int], txids: Collection[str], height: int) -> dict[str, int]:
    """The height at which each was first found in its state; the others are forgotten."""
    return {txid: min(known.get(txid, height), height) for txid in txids}
