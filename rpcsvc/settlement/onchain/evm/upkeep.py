"""Follows the payments of one EVM network until they are settled: publishes again, and replaces.

A stuck payment is replaced at the same nonce with higher fees; the replacement is committed before
it is published. A settled payment that a reorganisation took away goes out again with its bytes,
and is replaced once these have waited too long. So does a sweep that had failed: the nonces after
its own wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmPayments, NodeReply
from rpcsvc.settlement.onchain.evm.records import (
    BlockPoint,
    EvmPayment,
    EvmPaymentState,
    EvmPurpose,
)

log = structlog.get_logger(__name__)

# Between the tries to hand over a payment that the network has lost and its node does not take.
_FIRST_PAUSE_MS: Final = 4_000
_LONGEST_PAUSE_MS: Final = 60_000


class _Refusals:
    """Keeps a node's refusals about one payment from the others.

    Of several nodes behind one address, one that lags refuses each question about a newer block.
    """

    def __init__(self) -> None:
        self._first: NodeError | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a NodeError for the end of the round."""
        try:
            yield
        except NodeError as refusal:
            self._first = self._first or refusal

    def raise_first(self) -> None:
        """Raise the first NodeError that was kept."""
        if self._first is not None:
            raise self._first


class EvmUpkeep:
    """Follows the payments of one network. Every method may raise RpcFailure and ChainUnusable."""

    def __init__(
        self,
        connection: EvmConnection,
        payments: EvmPayments,
        ledger: EvmPaymentLedger,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._payments = payments
        self._gas = payments.gas
        self._conditions = payments.board
        self._ledger = ledger
        self._clock = clock
        # The newest block up to which ended payments were found in their blocks.
        self._compared: BlockPoint | None = None
        # The time when a payment's latest attempt was handed over, and the payments that the
        # operator was shown; both by the payment's id.
        self._offered: dict[str, int] = {}
        self._reported: set[str] = set()
        # Payments that were mined without the token's event of a transfer.
        self._without_event: set[str] = set()
        # Lost payments that the node does not take: published ones, and those that had ended.
        self._lost = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self._lost_ended = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        # Payments that had ended, and that are in no block since a reorganisation; and those that
        # the operator was told of.
        self._gone: set[str] = set()
        self._told: set[str] = set()

    @property
    def awaits_again(self) -> bool:
        """Whether a payment that had ended is in no block since a reorganisation."""
        return bool(self._gone)

    async def maintain(self, top: Block) -> None:
        """Finish, publish again and replace payments where needed; ``top``: the newest block.

        To be called every few seconds.
        """
        if not self._payments.is_payout_waiting:  # it does the same first
            async with self._payments.writer:
                await self._payments.finish_earlier()
        published = await self._payments.own(EvmPaymentState.PUBLISHED)
        self._forget_all_but({payment.payment_id for payment in published} | self._gone)
        refusals = _Refusals()
        # Looked up beside the writer: a payout waits for none of them, and for one that is touched.
        looked = await self._payments.verdicts(published, top)
        for payment, found in zip(published, looked, strict=True):
            with refusals.kept():
                if isinstance(found, Exception):
                    raise found
                await self._follow(payment.payment_id, found)
        with refusals.kept():
            await self._watch_ended(top)
        refusals.raise_first()

    # --- published -----------------------------------------------------------------------------

    def _forget_all_but(self, waiting: set[str]) -> None:
        """Drop the notes on payments that don't wait any more."""
        for payment_id in (self._reported | self._offered.keys()) - waiting:
            self._forget(payment_id)
        for payment_id in self._without_event - waiting:
            self._report_missing_event(payment_id, None)
        self._lost.forget_all_but(waiting)

    def _forget(self, payment_id: str) -> None:
        self._clear(payment_id)
        self._offered.pop(payment_id, None)

    async def _follow(self, payment_id: str, verdict: Verdict) -> None:
        """Publish a payment again that the network lost; replace one that has waited too long.

        A payment that a higher fee would not help, or that may cost no more, is handed over once
        more: its node may have it, and the block builders may not.
        """
        was_lost = verdict.outcome is Outcome.ABSENT
        if was_lost and self._lost.is_due(payment_id):
            async with self._payments.writer:
                verdict = await self._payments.advance(payment_id)
            if verdict.outcome is Outcome.PENDING:
                self._lost.forget(payment_id)
            else:
                self._lost.note(payment_id)
        payment = await self._payments.payment(payment_id)
        # An older database that was put in place may have one under way that had ended.
        self._note_taken(payment)
        is_missing = verdict.outcome is Outcome.UNKNOWN and _has_no_event(payment)
        self._report_missing_event(payment_id, verdict.reason if is_missing else None)
        if not _is_waiting(payment):
            self._forget(payment_id)
        elif self._is_late(payment):
            async with self._payments.writer:
                # Another may have had the writer for long: it may have been mined meanwhile.
                verdict = await self._payments.verdict(await self._payments.payment(payment_id))
                payment = await self._payments.payment(payment_id)
                if _is_waiting(payment):
                    await self._replace_late(payment, verdict, was_lost)

    async def _replace_late(self, payment: EvmPayment, verdict: Verdict, was_lost: bool) -> None:
        """Replace a payment that has waited too long to be mined, or hand it over again.

        One that had ended, and whose nonce is spent, was mined again: it waits to be deep. Only for
        the holder of the payments' ``writer``.
        """
        if not self._is_late(payment):
            return
        if payment.state is not EvmPaymentState.PUBLISHED and await self._has_spent_nonce(payment):
            return
        if await self._payments.paid_out_attempt(payment) is not None:
            reply = await self._offer(payment)
            what = "its fees stay: its order has paid out what it brought in by this transaction"
            self._report(payment, what, reply)
        elif await self._needs_more(payment, verdict, was_lost):
            await self._bump(payment)
        else:
            await self._offer(payment)

    def _report_missing_event(self, payment_id: str, problem: str | None) -> None:
        """Report a problem to the operator, or drop it: the service can't do anything about it."""
        if problem is None:
            self._without_event.discard(payment_id)
            self._conditions.set(f"event-{payment_id}", None)
            return
        self._without_event.add(payment_id)
        text = f"payment {payment_id} on {self._network.name} is not settled: {problem}"
        self._conditions.set(f"event-{payment_id}", text)

    def _is_late(self, payment: EvmPayment) -> bool:
        offered = self._offered.get(payment.payment_id, 0)
        since = max(payment.latest.made_at, payment.published_at or 0, offered)
        return self._clock.now_ms() - since >= self._network.bump_after_ms

    async def _needs_more(self, payment: EvmPayment, verdict: Verdict, was_lost: bool) -> bool:
        """Whether its price is too low; or it is the next to be mined, and was there all the time.

        Payments behind the next wait for that one. A payment that a reorganisation took away comes
        back with its bytes.
        """
        if verdict.outcome is not Outcome.PENDING or await self._gas.is_too_low(payment):
            return True
        is_next = await self._mined_nonces(payment) >= payment.nonce
        return is_next and not was_lost

    async def _has_spent_nonce(self, payment: EvmPayment) -> bool:
        return await self._mined_nonces(payment) > payment.nonce

    async def _mined_nonces(self, payment: EvmPayment) -> int:
        return await self._connection.client.nonce(payment.sender, Tag.LATEST)

    async def _bump(self, payment: EvmPayment) -> None:
        """Replace a payment at its nonce. The replacement is committed first: either attempt may be
        mined.

        A node takes a replacement only when its fees are higher, by the node's own measure, than
        those of the attempt it holds, which need not be the one on record. So a refused attempt is
        raised further, each time from the refused fees, as long as highest_fee allows.
        """
        refused = await self._offered_again(payment)
        if refused is not None and not refused.more_may_help:
            return
        try:
            price = await self._gas.raised_price(payment)
        except Unavailable as error:
            self._offered[payment.payment_id] = self._clock.now_ms()
            self._report(payment, f"a higher fee can't be reckoned: {error.message}", refused)
            return
        if price is None:
            reply = refused or await self._offer(payment)
            self._report(payment, "a higher fee would cost more than highest_fee allows", reply)
            return
        attempt = self._payments.attempt(payment.order, payment.nonce, price)
        await self._ledger.add_attempt(payment, attempt)
        log.info("evm_payment_replaced", payment_id=payment.payment_id, txid=attempt.txid,
                 max_fee=attempt.max_fee, tip=attempt.tip)  # fmt: skip
        reply = await self._offer(await self._payments.payment(payment.payment_id))
        if reply.more_may_help and not reply.is_taken:
            self._report(payment, "the next attempt will offer more", reply)

    async def _offered_again(self, payment: EvmPayment) -> NodeReply | None:
        """Hand the latest attempt over if the node lacks it; None: the node has it.

        The attempt may have been lost on the way, or refused for want of ether: more would not help
        then.
        """
        if await self._connection.client.transaction(payment.latest.txid) is not None:
            return None
        return await self._offer(payment)

    async def _offer(self, payment: EvmPayment) -> NodeReply:
        """Hand the latest attempt over, and tell the operator unless the node has taken it."""
        self._offered[payment.payment_id] = self._clock.now_ms()
        (reply,) = await self._payments.hand_over([payment])
        if reply.is_taken:
            self._clear(payment.payment_id)
        elif not reply.more_may_help:
            self._report(payment, "it is handed over again", reply)
        return reply

    def _report(self, payment: EvmPayment, what: str, reply: NodeReply | None) -> None:
        """Put it into health and log. ``reply``: the node's to a replacement, if there was one."""
        answer = ""
        if reply is not None and not reply.is_taken:
            answer = f", the node does not take its replacement ({reply.text})"
        name = self._network.name
        text = f"payment {payment.payment_id} on {name} is not mined{answer}, and {what}"
        self._conditions.set(_key(payment.payment_id), text)
        self._reported.add(payment.payment_id)

    def _clear(self, payment_id: str) -> None:
        self._conditions.set(_key(payment_id), None)
        self._reported.discard(payment_id)

    # --- ended ---------------------------------------------------------------------------------

    async def _watch_ended(self, top: Block) -> None:
        """Publish payments again, with their bytes, that a deep reorganisation took off the chain.

        One that is not mined for long is replaced as any other: the nonces after it wait for its
        own, and the fees of its time may be too low by now. A sweep goes out again at once, though
        the token refuses it while its deposit is away. Then it has failed, and took nothing but
        gas. A failed payment of an order never goes out again: the order has been told.

        Blocks below one that is still there are still there: only younger ones are compared. A node
        that lags proves nothing about the blocks that it lacks.
        """
        above = top.number - self._network.tracked_blocks
        if self._compared is not None and await self._is_below(top, self._compared):
            above = max(above, self._compared.number)
        refusals = _Refusals()
        ended = await self._ledger.ended_above(self._network.name, above)
        await self._drop_notes((self._gone | self._told) - {each.payment_id for each in ended})
        for payment in ended:
            if payment.inclusion is None or payment.inclusion.block.number <= top.number:
                with refusals.kept():
                    await self._compare(payment, top)
        refusals.raise_first()
        self._compared = BlockPoint(top.number, top.hash)

    async def _drop_notes(self, payment_ids: set[str]) -> None:
        """Drop the notes on those that another look has found mined again, in a block that is
        compared already.
        """
        for payment_id in sorted(payment_ids):
            payment = await self._ledger.payment(payment_id)
            if payment is None or payment.inclusion is None:
                continue
            if await self._connection.has(payment.inclusion.block):
                self._note_back(payment)

    async def _is_below(self, top: Block, known: BlockPoint) -> bool:
        return known.hash in (top.hash, top.parent) or await self._connection.has(known)

    async def _compare(self, payment: EvmPayment, top: Block) -> None:
        mined = payment.inclusion
        if mined is not None and await self._connection.has(mined.block):
            self._note_back(payment)
            return
        async with self._payments.writer:
            await self._follow_ended(await self._payments.payment(payment.payment_id), top)

    async def _follow_ended(self, payment: EvmPayment, top: Block) -> None:
        """Look up a payment that had ended and is not in its block; publish or replace it if it is
        gone. Only for the holder of the payments' ``writer``.
        """
        verdict = await self._payments.verdict(payment, top)
        if verdict.outcome is Outcome.FAILED and payment.state is EvmPaymentState.SETTLED:
            log.warning("evm_settled_payment_failed", payment_id=payment.payment_id,
                        reason=verdict.reason)  # fmt: skip
        payment = await self._payments.payment(payment.payment_id)
        is_unmined = payment.inclusion is None and payment.conflict is None
        if verdict.outcome in (Outcome.SETTLED, Outcome.FAILED) or not is_unmined:
            self._note_back(payment)
        if payment.state is EvmPaymentState.FAILED and not is_unmined:
            return
        if payment.state is EvmPaymentState.FAILED and not _is_sweep(payment):
            self._report_free_nonce(payment)
        elif verdict.outcome is Outcome.PENDING and is_unmined:
            self._await_again(payment)
            self._note_taken(payment)
            await self._replace_late(payment, verdict, was_lost=False)
        elif verdict.outcome is Outcome.ABSENT:
            self._await_again(payment)
            if not await self._publish_again(payment, verdict):
                await self._replace_late(payment, verdict, was_lost=True)
        elif verdict.outcome is Outcome.UNKNOWN:
            await self._publish_again(payment, verdict)

    def _note_back(self, payment: EvmPayment) -> None:
        """Drop the notes on a payment that has ended and is in a block, or has failed now."""
        self._note_taken(payment)
        self._gone.discard(payment.payment_id)
        self._forget(payment.payment_id)

    def _note_taken(self, payment: EvmPayment) -> None:
        """Drop the note that a payment that had ended is neither in a block nor in the pool."""
        key = _ended_key(payment.payment_id)
        self._lost_ended.forget(key)
        self._told.discard(payment.payment_id)
        self._conditions.set(key, None)

    def _await_again(self, payment: EvmPayment) -> None:
        """Count the time from now on in which a payment that had ended waits to be mined again."""
        self._gone.add(payment.payment_id)
        self._offered.setdefault(payment.payment_id, self._clock.now_ms())

    async def _publish_again(self, payment: EvmPayment, verdict: Verdict) -> bool:
        """Report a payment that had ended and is gone; return whether it was handed over now."""
        key = _ended_key(payment.payment_id)
        self._told.add(payment.payment_id)
        self._conditions.set(
            key,
            f"payment {payment.payment_id} was {payment.state} and a reorganisation of"
            f" {self._network.name} took it away; it is published again ({verdict.reason});"
            f" if it stays away: rpcsvc payouts close {payment.payment_id} --note TEXT",
        )
        if not self._lost_ended.is_due(key):
            return False
        (reply,) = await self._payments.hand_over([payment])
        if not reply.is_taken:
            self._lost_ended.note(key)
        return True

    def _report_free_nonce(self, payment: EvmPayment) -> None:
        """Report a failed payment of an order whose nonce a reorganisation has freed.

        Its bytes could pay after the order was told that they did not: only others may fill it.
        """
        self._conditions.set(
            _ended_key(payment.payment_id),
            f"payment {payment.payment_id} was failed and a reorganisation of {self._network.name}"
            f" took its block: later payments wait for nonce {payment.nonce}; unless it is mined"
            " again, send 0 ether from the hot wallet to itself with that nonce",
        )


def _ended_key(payment_id: str) -> str:
    return f"ended-{payment_id}"


def _key(payment_id: str) -> str:
    return f"bump-{payment_id}"


def _is_sweep(payment: EvmPayment) -> bool:
    return payment.order.purpose is EvmPurpose.SWEEP


def _has_no_event(payment: EvmPayment) -> bool:
    """Whether it is mined, and the token tells of no transfer in it."""
    return payment.inclusion is not None and payment.inclusion.log_index is None


def _is_waiting(payment: EvmPayment) -> bool:
    """Whether it is published, and no transaction with its nonce has been mined."""
    is_published = payment.state is EvmPaymentState.PUBLISHED
    return is_published and payment.inclusion is None and payment.conflict is None
