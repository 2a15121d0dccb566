"""The state of an EVM payment: mined, pending, absent, or displaced by another use of its nonce.

Read off blocks, receipts and the account's nonce, never off an error or a missing answer: a node
may have dropped old receipts. Only another mined transaction with the sender and nonce proves a
failure.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure
from rpcsvc.settlement.onchain.evm.node import Conditions, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmTransaction, Log, Receipt
from rpcsvc.settlement.onchain.evm.records import (
    BlockPoint,
    EvmPayment,
    EvmPaymentState,
    EvmPurpose,
    Inclusion,
)
from rpcsvc.settlement.onchain.unrecorded import NotAdopted

log = structlog.get_logger(__name__)

_RETRY_SECONDS: Final = 60


class NonceSpender(Struct, frozen=True):
    """The transaction that has spent a nonce, and its block."""

    made: EvmTransaction
    block: BlockPoint

    def is_attempt_of(self, payment: EvmPayment) -> bool:
        """Whether it is a recorded attempt of the payment."""
        return self.made.txid in {attempt.txid for attempt in payment.attempts}

    def calls_as(self, payment: EvmPayment) -> bool:
        """Whether it makes the call of a payout: a replacement that is not on record.

        A database that was restored from an older copy lacks replacements made since.
        """
        order, to = payment.order, self.made.to or ""
        same = (to.lower(), self.made.data) == (order.contract.lower(), order.data)
        return same and order.purpose is EvmPurpose.TRANSFER


class NotFound(Struct, frozen=True):
    """The result of a search that found no spender.

    ``at``: the newest block then; ``by``: the newest that was searched; ``why``: for the operator.
    """

    at: int
    by: int
    why: str


class SpentNonces:
    """Finds the transaction that has spent a payment's nonce, and remembers it, by the payment's
    id.

    A failed search is repeated about once a minute: it may ask the node some dozens of times.
    """

    def __init__(self, connection: EvmConnection) -> None:
        self._connection = connection
        self._found: dict[str, NonceSpender | NotFound] = {}

    async def find(
        self, payment: EvmPayment, by: BlockPoint, top: Block
    ) -> NonceSpender | NotFound:
        """Return the transaction that spent the nonce in the block ``by`` or before. Raises
        RpcFailure.

        A node that can't answer about the past raises nothing: that is NotFound.
        """
        known = self._found.get(payment.payment_id)
        if isinstance(known, NotFound) and self._still_holds(known, by, top):
            return known
        if isinstance(known, NonceSpender) and await self._connection.has(known.block):
            return known
        found = await self._search(payment, by, top)
        self._found[payment.payment_id] = found
        return found

    def forget(self, payment_id: str) -> None:
        """Forget the spender of a payment's nonce: the payment is over, or to be searched for
        again.
        """
        self._found.pop(payment_id, None)

    def _still_holds(self, known: NotFound, by: BlockPoint, top: Block) -> bool:
        return by.number <= known.by and abs(top.number - known.at) < self._retry_blocks()

    def _retry_blocks(self) -> int:
        return max(1, round(_RETRY_SECONDS / self._connection.network.block_seconds))

    async def _search(
        self, payment: EvmPayment, by: BlockPoint, top: Block
    ) -> NonceSpender | NotFound:
        try:
            found = await self._in_body(payment, by.number)
            if found is None:
                number = await self._first_block_with(payment, by.number)
                found = await self._in_body(payment, number)
        except RpcFailure as failure:
            # Not the node's health: it may have all that others need, and lack old states.
            log.info("evm_nonce_trace_failed", payment_id=payment.payment_id, reason=str(failure))
            why = f"the node can't tell in which block ({failure})"
            return NotFound(top.number, by.number, why)
        if found is None:
            why = "the node shows no block with a transaction that did it"
            return NotFound(top.number, by.number, why)
        return found

    async def _in_body(self, payment: EvmPayment, number: int) -> NonceSpender | None:
        sent = await self._connection.client.sent_in(number, payment.sender)
        made = None if sent is None else sent.sent.get(payment.nonce)
        if sent is None or made is None:
            return None
        return NonceSpender(made, BlockPoint(sent.block.number, sent.block.hash))

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


class Judgement(Struct, frozen=True):
    """A verdict, and the payment as it is to be recorded after it."""

    verdict: Verdict
    payment: EvmPayment


class EvmPresence:
    """Looks payments up on one network. Every method raises RpcFailure and ChainUnusable.

    ``conditions`` get the reasons that keep a payment from an end for long.
    """

    def __init__(self, connection: EvmConnection, conditions: Conditions) -> None:
        self._connection = connection
        self._network = connection.network
        self._conditions = conditions
        self._spent = SpentNonces(connection)

    async def judge(self, payment: EvmPayment, top: Block | None = None) -> Judgement:
        """Return the state of a payment on the network. ``top``: the newest block, if known."""
        judged = await self._judge(payment, top)
        if judged.payment.conflict is None or judged.verdict.outcome is Outcome.FAILED:
            self._spent.forget(payment.payment_id)
            self._report(payment, None)
        return judged

    async def _judge(self, payment: EvmPayment, known: Block | None) -> Judgement:
        with self._connection.client.rpc.together():
            top, receipt, is_known = await asyncio.gather(
                self._top(known), self._receipt(payment), self._is_known(payment)
            )
        if receipt is not None:
            return await self._mined(payment, receipt, top)
        if is_known:
            return _judged(payment, Outcome.PENDING, "waits to be mined")
        return await self._absent(payment, top)

    async def _top(self, known: Block | None) -> Block:
        """Return the newest block: the known one, unless the node was lost since."""
        if known is None or self._connection.problem is not None:
            return await self._connection.head()
        return known

    async def _receipt(self, payment: EvmPayment) -> Receipt | None:
        """Return the receipt of the attempt that was mined; None: the node shows none."""
        read = self._connection.client.receipt
        found = await asyncio.gather(*(read(item.txid) for item in reversed(payment.attempts)))
        return next((receipt for receipt in found if receipt is not None), None)

    async def _is_known(self, payment: EvmPayment) -> bool:
        read = self._connection.client.transaction
        found = await asyncio.gather(*(read(item.txid) for item in payment.attempts))
        return any(made is not None for made in found)

    # --- mined ---------------------------------------------------------------------------------

    async def _mined(self, payment: EvmPayment, receipt: Receipt, top: Block) -> Judgement:
        block = BlockPoint(receipt.block_number, receipt.block_hash)
        if not await self._connection.has(block):
            return _judged(payment, Outcome.PENDING, "its block is being replaced")
        depth = max(top.number - block.number + 1, 0)
        if not receipt.ok:
            return self._mined_in_vain(payment, receipt, depth)
        event = self._event(payment, receipt)
        mined = _inclusion(receipt, event)
        if event is None and payment.order.purpose is EvmPurpose.TRANSFER:
            reason = f"{receipt.txid} was mined, yet the token shows no such transfer in it"
            return _judged(payment, Outcome.UNKNOWN, reason, mined)
        needed = self._network.settled_after
        if depth < needed:
            reason = f"{depth} of {needed} confirmations"
            verdict = Verdict(Outcome.PENDING, reason, settles_at=block.number + needed - 1)
            return Judgement(verdict, _published(_seen(payment, mined)))
        after = _seen(payment, mined)
        return Judgement(Verdict(Outcome.SETTLED), replace(after, state=EvmPaymentState.SETTLED))

    def _mined_in_vain(self, payment: EvmPayment, receipt: Receipt, depth: int) -> Judgement:
        """Judge a payment that was mined and moved nothing: it has failed once that is deep."""
        needed = self._network.failed_after
        mined = _inclusion(receipt, None)
        why = f"the token refused it in {receipt.txid}"
        if _is_paid(payment):
            return _judged(payment, Outcome.UNKNOWN, why)
        if depth < needed:
            reason = f"{why}, {depth} of {needed} confirmations ago"
            # A settled payment is judged again only while it is on record in no block.
            at = None if payment.state is EvmPaymentState.SETTLED else mined
            return _judged(payment, Outcome.PENDING, reason, at)
        after = replace(_seen(payment, mined), state=EvmPaymentState.FAILED)
        return Judgement(Verdict(Outcome.FAILED, f"{why}, {depth} confirmations ago"), after)

    def _event(self, payment: EvmPayment, receipt: Receipt) -> Log | None:
        """Return the token's event of the transfer from the hot wallet; None without one."""
        wanted = usdc.TransferEvent(payment.sender, payment.order.recipient, payment.order.units)
        token = self._network.token.lower()
        for log in receipt.logs:
            if log.address.lower() == token and usdc.transfer_in(log.topics, log.data) == wanted:
                return log
        return None

    # --- not mined -----------------------------------------------------------------------------

    async def _absent(self, payment: EvmPayment, top: Block) -> Judgement:
        """Judge a payment that the node does not know: the nonce shows whether one was mined all
        the same.
        """
        spent = await self._connection.client.nonce(payment.sender, top.number) > payment.nonce
        if not spent:
            return _judged(payment, Outcome.ABSENT, "")
        since = await self._conflict(payment) or BlockPoint(top.number, top.hash)
        # Looked for after the nonce was read: it may have been mined between two questions.
        with self._connection.client.rpc.together():
            receipt = await self._receipt(payment)
        if receipt is not None:
            return await self._mined(payment, receipt, top)
        return await self._spent_nonce(payment, since, top)

    async def _conflict(self, payment: EvmPayment) -> BlockPoint | None:
        """Return the recorded block by which the nonce was spent, if it still is.

        A node that lagged, or was about to add the next block, may have said so of one too early.
        """
        known = payment.conflict
        if known is None or not await self._connection.has(known):
            return None
        try:
            nonce = await self._connection.client.nonce(payment.sender, known.number)
        except NodeError:
            return known  # the node has no states that old
        return known if nonce > payment.nonce else None

    async def _spent_nonce(self, payment: EvmPayment, since: BlockPoint, top: Block) -> Judgement:
        """Judge a payment without a receipt whose nonce is spent, at ``since`` already.

        The spender is looked for in the blocks. Without it the outcome stays open: the node may
        have thrown the receipt away, or not have it in its index yet.
        """
        found = await self._spent.find(payment, since, top)
        if isinstance(found, NonceSpender):
            since = found.block
        if not await self._connection.has(since):
            return _judged(payment, Outcome.UNKNOWN, "the chain is being reorganised")
        depth = max(top.number - since.number + 1, 0)
        after = replace(_seen(payment, None), conflict=since)
        if not isinstance(found, NonceSpender):
            why = f"nonce {payment.nonce} of the hot wallet is spent, and {found.why}"
            return self._open(after, why, depth)
        if found.is_attempt_of(payment):
            why = (
                f"{found.made.txid} is in block {since.number}, and the node shows no receipt of it"
            )
            return self._open(_published(after), why, depth)
        if found.calls_as(payment) and not await self._was_in_vain(found):
            why = f"{found.made.txid} makes the same payout with its nonce, and is not on record"
            return self._open(_published(after), why, depth)
        return self._displaced(after, found, depth)

    async def _was_in_vain(self, found: NonceSpender) -> bool:
        """Whether its receipt says that it failed. No receipt says nothing."""
        receipt = await self._connection.client.receipt(found.made.txid)
        return receipt is not None and not receipt.ok

    def _open(self, after: EvmPayment, why: str, depth: int) -> Judgement:
        """Judge a payment neither paid nor failed; report it once a node that only lags has caught
        up.
        """
        if depth >= self._network.failed_after:
            self._report(after, why)
        return Judgement(Verdict(Outcome.UNKNOWN, why), after)

    def _displaced(self, after: EvmPayment, found: NonceSpender, depth: int) -> Judgement:
        """Judge a payment whose nonce another transaction has: no attempt of it can be mined
        meanwhile.
        """
        needed = self._network.failed_after
        txid = found.made.txid
        why = f"another transaction of the hot wallet, {txid}, has used nonce {after.nonce}"
        self._report(after, None)
        if depth < needed or _is_paid(after):
            verdict = Verdict(Outcome.UNKNOWN, f"{why}, {depth} of {needed} blocks ago")
            return Judgement(verdict, after)
        verdict = Verdict(Outcome.FAILED, f"{why}, {depth} blocks ago")
        return Judgement(verdict, replace(after, state=EvmPaymentState.FAILED))

    def _report(self, payment: EvmPayment, problem: str | None) -> None:
        """Ask the operator for another node: this one can't prove more."""
        which = f"payment {payment.payment_id} on {self._network.name}"
        text = None if problem is None else f"what became of {which} can't be proved: {problem}"
        self._conditions.set(f"spent-{payment.payment_id}", text)


def _judged(
    payment: EvmPayment, outcome: Outcome, reason: str, mined: Inclusion | None = None
) -> Judgement:
    after = _seen(payment, mined)
    if outcome is Outcome.PENDING:
        after = _published(after)
    return Judgement(Verdict(outcome, reason), after)


def _is_paid(payment: EvmPayment) -> bool:
    """Whether it was settled for an order: that is never undone.

    A settled sweep that a reorganisation took may fail: nobody was paid by it.
    """
    return payment.state is EvmPaymentState.SETTLED and payment.order.purpose is EvmPurpose.TRANSFER


def _published(payment: EvmPayment) -> EvmPayment:
    """A node has, or had it."""
    if payment.state is not EvmPaymentState.PREPARED:
        return payment
    return replace(payment, state=EvmPaymentState.PUBLISHED)


def _seen(payment: EvmPayment, mined: Inclusion | None) -> EvmPayment:
    return replace(payment, inclusion=mined, conflict=None)


def _inclusion(receipt: Receipt, event: Log | None) -> Inclusion:
    return Inclusion(
        receipt.txid,
        BlockPoint(receipt.block_number, receipt.block_hash),
        receipt.gas_used,
        receipt.gas_price,
        None if event is None else receipt.position_of(event.log_index),
        None if event is None else event.log_index,
        receipt.l1_fee,
    )


async def require_unminable(connection: EvmConnection, payment: EvmPayment) -> None:
    """Raise NotAdopted when the payment may be mined yet; RpcFailure, ChainUnusable."""
    # A settled payment is never called failed: judge it as one that is not.
    asked = replace(payment, state=EvmPaymentState.PUBLISHED, inclusion=None)
    presence = EvmPresence(connection, Conditions(connection.network.name))
    verdict = (await presence.judge(asked)).verdict
    if verdict.outcome is Outcome.FAILED:
        return
    if verdict.outcome is Outcome.SETTLED:
        raise NotAdopted(f"its payment {payment.latest.txid} is on the chain: nothing is missing.")
    why = verdict.reason or f"nonce {payment.nonce} of the hot wallet is not spent yet"
    raise NotAdopted(f"it may be mined yet: {why}.")
