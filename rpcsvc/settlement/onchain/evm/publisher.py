"""Publishes, follows and replaces the signed payments of one EVM network.

An attempt is committed before it is published. A node's answer proves nothing: after each step the
payment is looked up on the network. A stuck payment is replaced at the same nonce with higher fees.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.clock import Clock
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm.gas import EvmGas, GasPrice
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, TransactionPlan
from rpcsvc.settlement.onchain.evm.node import Conditions, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmSubmission, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.presence import EvmPresence
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    BlockPoint,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
)

log = structlog.get_logger(__name__)

_LIVE: Final = (EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED)
# Between the tries to hand over a payment that the network has lost and its node does not take.
_FIRST_PAUSE_MS: Final = 4_000
_LONGEST_PAUSE_MS: Final = 60_000
_TAKEN: Final = (EvmSubmission.ACCEPTED, EvmSubmission.KNOWN)
# Answers that a higher fee may change. KNOWN: the node has it, and yet nobody mines it. REFUSED
# is in words that say nothing to us, and some nodes have their own for fees.
_MORE_MAY_HELP: Final = (
    EvmSubmission.KNOWN,
    EvmSubmission.REPLACEMENT_UNDERPRICED,
    EvmSubmission.UNDERPRICED,
    EvmSubmission.REFUSED,
)


class NodeReply(Struct, frozen=True):
    """A node's reply to a transaction; it proves nothing. ``submission`` None: none came."""

    text: str
    submission: EvmSubmission | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the node says that it has it."""
        return self.submission in _TAKEN

    @property
    def more_may_help(self) -> bool:
        """Whether the node may take, or mine, the same for a higher fee."""
        return self.submission in _MORE_MAY_HELP


class EvmPublisher:
    """Publishes and looks up. What asks a node may raise RpcFailure and ChainUnusable."""

    def __init__(
        self,
        connection: EvmConnection,
        signer: EvmSigner,
        ledger: EvmPaymentLedger,
        clock: Clock,
        conditions: Conditions,
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._signer = signer
        self._ledger = ledger
        self._clock = clock
        self._presence = EvmPresence(connection, conditions)
        # Held from reading a payment to recording how far it is: look-ups run beside the writer.
        self._recording = asyncio.Lock()

    def attempt(self, order: EvmPaymentOrder, nonce: int, price: GasPrice) -> Attempt:
        """Sign; nothing is recorded or sent."""
        plan = TransactionPlan(
            chain_id=self._network.chain_id, nonce=nonce, to=order.contract, gas=order.gas,
            max_fee=price.max_fee, tip=price.tip, data=order.data,
        )  # fmt: skip
        signed = self._signer.sign(plan)
        now = self._clock.now_ms()
        return Attempt(signed.txid, signed.raw.hex(), price.max_fee, price.tip, now)

    async def recorded(self, payment_id: str) -> EvmPayment:
        """The payment as last committed. Raises LookupError."""
        payment = await self._ledger.payment(payment_id)
        if payment is None:
            raise LookupError(f"no payment is recorded for {payment_id}")
        return payment

    async def own(self, *states: EvmPaymentState) -> list[EvmPayment]:
        """This hot wallet's payments in these states, lowest nonce first."""
        found = await self._ledger.payments_in(self._network.name, *states)
        return [item for item in found if item.sender == self._signer.address]

    async def unmined(self) -> list[EvmPayment]:
        """Payments that are signed, and nothing was mined with their nonce as of the last check.

        Once something was, the wallet's balances tell what it took.
        """
        return [
            item
            for item in await self.own(*_LIVE)
            if item.inclusion is None and item.conflict is None
        ]

    async def verdict(self, payment: EvmPayment) -> Verdict:
        """Ask the node, record the payment's state, and return the verdict."""
        judged = await self._presence.judge(payment)
        if judged.payment == payment or payment.state.is_over:
            return judged.verdict
        async with self._recording:
            if await self._ledger.payment(payment.payment_id) == payment:
                await self._ledger.put_payment(judged.payment)
                return judged.verdict
        # Something else was found out, and recorded, while the node was asked.
        if judged.verdict.outcome is Outcome.FAILED:
            return Verdict(Outcome.UNKNOWN, "the payment changed while it was looked up")
        return judged.verdict

    async def advance(self, payment_id: str) -> Verdict:
        """Look the payment up; publish the same bytes when it is absent; look again.

        Only for who holds the network's one writer.
        """
        verdict = await self.verdict(await self.recorded(payment_id))
        if verdict.outcome is not Outcome.ABSENT:
            return verdict
        payment = await self.recorded(payment_id)
        if payment.state.is_over:
            return Verdict(Outcome.UNKNOWN, f"the payment is {payment.state}: not published")
        if self._is_held_back(payment):
            return Verdict(Outcome.UNKNOWN, "the token is paused: published when it moves again")
        reply = await self.hand_over(payment)
        verdict = await self.verdict(await self.recorded(payment_id))
        if verdict.outcome is Outcome.ABSENT:
            return Verdict(Outcome.UNKNOWN, f"not on the network yet; the node said: {reply.text}")
        return verdict

    def _is_held_back(self, payment: EvmPayment) -> bool:
        """Mined while the token is paused, it would fail for good."""
        return self._connection.paused and payment.state is EvmPaymentState.PREPARED

    async def _mark_published(self, payment: EvmPayment) -> None:
        """Record that a node may have it. Raises StoreConflict when it is over by now."""
        async with self._recording:
            known, now = await self.recorded(payment.payment_id), self._clock.now_ms()
            await self._ledger.put_payment(
                replace(known, state=EvmPaymentState.PUBLISHED, published_at=now)
            )

    async def hand_over(self, payment: EvmPayment) -> NodeReply:
        """Submit the latest attempt; the node's reply."""
        if payment.state is EvmPaymentState.PREPARED:
            await self._mark_published(payment)
        try:
            answer = await self._connection.client.submit(bytes.fromhex(payment.latest.raw))
        except RpcFailure as failure:
            log.warning("evm_submit_failed", txid=payment.latest.txid, reason=str(failure))
            return NodeReply(str(failure))
        reply = f"{answer.submission.value} {answer.text}".strip()
        log.info("evm_submitted", txid=payment.latest.txid, nonce=payment.nonce, answer=reply)
        return NodeReply(reply, answer.submission)


class EvmUpkeep:
    """Follows payments of one network. Everything may raise RpcFailure and ChainUnusable.

    Its methods are only for who holds the network's one writer.
    """

    def __init__(
        self,
        connection: EvmConnection,
        publisher: EvmPublisher,
        gas: EvmGas,
        ledger: EvmPaymentLedger,
        clock: Clock,
        conditions: Conditions,
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._publisher = publisher
        self._gas = gas
        self._ledger = ledger
        self._clock = clock
        self._conditions = conditions
        # The newest block up to which settled payments were found in their blocks.
        self._compared: BlockPoint | None = None
        # When the latest attempt of a payment was handed over, and which the operator was shown;
        # both by the payment's id.
        self._offered: dict[str, int] = {}
        self._reported: set[str] = set()
        # Payments that were mined and moved nothing that the token tells of.
        self._without_event: set[str] = set()
        # Lost payments that the node does not take: published ones, and those that were settled.
        self._lost = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self._lost_settled = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)

    # --- published -----------------------------------------------------------------------------

    def forget_all_but(self, waiting: set[str]) -> None:
        """Drop what was noted of payments that don't wait any more."""
        for payment_id in (self._reported | self._offered.keys()) - waiting:
            self._forget(payment_id)
        for payment_id in self._without_event - waiting:
            self._report_missing_event(payment_id, None)
        self._lost.forget_all_but(waiting)

    def _forget(self, payment_id: str) -> None:
        self._clear(payment_id)
        self._offered.pop(payment_id, None)

    async def follow(self, payment_id: str) -> None:
        """Publish again what the network lost; replace what has waited too long.

        What a higher fee would not help, or that may cost no more, is handed over once more: its
        node may have it and those that make the blocks may not.
        """
        verdict = await self._publisher.verdict(await self._publisher.recorded(payment_id))
        was_lost = verdict.outcome is Outcome.ABSENT
        if was_lost and self._lost.is_due(payment_id):
            verdict = await self._publisher.advance(payment_id)
            if verdict.outcome is Outcome.PENDING:
                self._lost.forget(payment_id)
            else:
                self._lost.note(payment_id)
        payment = await self._publisher.recorded(payment_id)
        is_missing = verdict.outcome is Outcome.UNKNOWN and _has_no_event(payment)
        self._report_missing_event(payment_id, verdict.reason if is_missing else None)
        if not _is_waiting(payment):
            self._forget(payment_id)
        elif not self._is_late(payment):
            return
        elif await self._needs_more(payment, verdict, was_lost):
            await self._bump(payment)
        else:
            await self._offer(payment)

    def _report_missing_event(self, payment_id: str, problem: str | None) -> None:
        """The operator has to look: nothing that the service could do would change it."""
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
        """Its price is too low; or it is the next to be mined, and was there all the time.

        Those behind the next wait for that one. One that a reorganisation took away comes back
        with the bytes that it had.
        """
        if verdict.outcome is not Outcome.PENDING or await self._gas.is_too_low(payment):
            return True
        is_next = await self._connection.client.nonce(payment.sender, Tag.LATEST) >= payment.nonce
        return is_next and not was_lost

    async def _bump(self, payment: EvmPayment) -> None:
        """Replace it at the same nonce. Committed first: either attempt may be mined.

        A node takes a replacement only when its fees are higher by that node's own measure than
        what it holds, which need not be what is on record. So what it refuses is raised further,
        each time from what was refused, as long as highest_fee allows.
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
        attempt = self._publisher.attempt(payment.order, payment.nonce, price)
        await self._ledger.add_attempt(payment, attempt)
        log.info("evm_payment_replaced", payment_id=payment.payment_id, txid=attempt.txid,
                 max_fee=attempt.max_fee, tip=attempt.tip)  # fmt: skip
        reply = await self._offer(await self._publisher.recorded(payment.payment_id))
        if reply.more_may_help and not reply.is_taken:
            self._report(payment, "the next attempt will offer more", reply)

    async def _offered_again(self, payment: EvmPayment) -> NodeReply | None:
        """Hand the latest attempt over if the node lacks it; None: the node has it.

        It may have been lost on the way, or refused for want of ether: more would not help then.
        """
        if await self._connection.client.transaction(payment.latest.txid) is not None:
            return None
        return await self._offer(payment)

    async def _offer(self, payment: EvmPayment) -> NodeReply:
        """Hand the latest attempt over, and tell the operator unless the node has taken it."""
        self._offered[payment.payment_id] = self._clock.now_ms()
        reply = await self._publisher.hand_over(payment)
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

    # --- settled -------------------------------------------------------------------------------

    async def watch_settled(self, top: Block) -> None:
        """Publish again, with the same bytes, what a deep reorganisation took off the chain.

        A sweep goes out again at once, though the token refuses it while its deposit is away: the
        nonces after it wait for its own. Then it has failed, and took nothing but gas.

        Blocks below one that is still there are still there: only younger ones are compared. A
        node that lags says nothing about the blocks that it lacks.
        """
        above = top.number - self._network.tracked_blocks
        if self._compared is not None and await self._connection.has(self._compared):
            above = max(above, self._compared.number)
        for payment in await self._ledger.settled_above(self._network.name, above):
            if payment.inclusion is None or payment.inclusion.block.number <= top.number:
                await self._compare(payment)
        self._compared = BlockPoint(top.number, top.hash)

    async def _compare(self, payment: EvmPayment) -> None:
        mined, key = payment.inclusion, f"settled-{payment.payment_id}"
        if mined is not None and await self._connection.has(mined.block):
            self._lost_settled.forget(key)
            self._conditions.set(key, None)
            return
        verdict = await self._publisher.verdict(payment)
        if verdict.outcome is Outcome.FAILED:
            log.warning("evm_settled_payment_failed", payment_id=payment.payment_id,
                        reason=verdict.reason)  # fmt: skip
        if verdict.outcome in (Outcome.SETTLED, Outcome.PENDING, Outcome.FAILED):
            self._lost_settled.forget(key)
            self._conditions.set(key, None)
            return
        self._conditions.set(
            key,
            f"payment {payment.payment_id} was settled and a reorganisation of"
            f" {self._network.name} took it away; it is published again ({verdict.reason});"
            f" if it stays away: rpcsvc payouts close {payment.payment_id} --note TEXT",
        )
        if self._lost_settled.is_due(key):
            reply = await self._publisher.hand_over(payment)
            if not reply.is_taken:
                self._lost_settled.note(key)


def _key(payment_id: str) -> str:
    return f"bump-{payment_id}"


def _has_no_event(payment: EvmPayment) -> bool:
    """Whether it is mined, and the token tells of no transfer in it."""
    return payment.inclusion is not None and payment.inclusion.log_index is None


def _is_waiting(payment: EvmPayment) -> bool:
    """Whether it is published, and no transaction with its nonce has been mined."""
    is_published = payment.state is EvmPaymentState.PUBLISHED
    return is_published and payment.inclusion is None and payment.conflict is None
