"""Payments after their publication: again when the network lost them, dearer when they are stuck.

What does not live here: the first publication (payments.py), fees (gas.py, fees.py).
"""

from __future__ import annotations

import structlog

from rpcsvc.clock import Clock
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.evm.conditions import Conditions
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.gas import EvmGas
from rpcsvc.settlement.onchain.evm.node_types import Block, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import (
    BlockPoint,
    EvmPayment,
    EvmPaymentLedger,
    PaymentState,
)
from rpcsvc.settlement.onchain.evm.publisher import EvmPublisher, Said

log = structlog.get_logger(__name__)


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
        # When the latest attempt of a payment was handed over, and of which the operator was told;
        # both by the payment's id.
        self._offered: dict[str, int] = {}
        self._told: set[str] = set()
        # Payments that were mined and moved nothing that the token tells of.
        self._without_event: set[str] = set()

    # --- published -----------------------------------------------------------------------------

    def forget_all_but(self, waiting: set[str]) -> None:
        """Drop what was noted of payments that don't wait any more."""
        for payment_id in (self._told | self._offered.keys()) - waiting:
            self._forget(payment_id)
        for payment_id in self._without_event - waiting:
            self._tell_of_event(payment_id, None)

    def _forget(self, payment_id: str) -> None:
        self._well(payment_id)
        self._offered.pop(payment_id, None)

    async def follow(self, payment_id: str) -> None:
        """Publish again what the network lost; replace what has waited too long.

        What a higher fee would not help, or that may cost no more, is handed over once more: its
        node may have it and those that make the blocks may not.
        """
        verdict = await self._publisher.verdict(await self._publisher.recorded(payment_id))
        was_lost = verdict.outcome is Outcome.ABSENT
        if was_lost:
            verdict = await self._publisher.advance(payment_id)
        payment = await self._publisher.recorded(payment_id)
        is_missing = verdict.outcome is Outcome.UNKNOWN and _has_no_event(payment)
        self._tell_of_event(payment_id, verdict.reason if is_missing else None)
        if not _is_waiting(payment):
            self._forget(payment_id)
        elif not self._is_late(payment):
            return
        elif await self._needs_more(payment, verdict, was_lost):
            await self._bump(payment)
        else:
            await self._offer(payment)

    def _tell_of_event(self, payment_id: str, problem: str | None) -> None:
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
            self._tell(payment, f"a higher fee can't be reckoned: {error.message}", refused)
            return
        if price is None:
            said = refused or await self._offer(payment)
            self._tell(payment, "a higher fee would cost more than highest_fee allows", said)
            return
        attempt = self._publisher.attempt(payment.order, payment.nonce, price)
        await self._ledger.add_attempt(payment, attempt)
        log.info("evm_payment_replaced", payment_id=payment.payment_id, txid=attempt.txid,
                 max_fee=attempt.max_fee, tip=attempt.tip)  # fmt: skip
        said = await self._offer(await self._publisher.recorded(payment.payment_id))
        if said.more_may_help and not said.is_taken:
            self._tell(payment, "the next attempt will offer more", said)

    async def _offered_again(self, payment: EvmPayment) -> Said | None:
        """Hand the latest attempt over if the node lacks it; None: the node has it.

        It may have been lost on the way, or refused for want of ether: more would not help then.
        """
        if await self._connection.client.transaction(payment.latest.txid) is not None:
            return None
        return await self._offer(payment)

    async def _offer(self, payment: EvmPayment) -> Said:
        """Hand the latest attempt over, and tell the operator unless the node has taken it."""
        self._offered[payment.payment_id] = self._clock.now_ms()
        said = await self._publisher.hand_over(payment)
        if said.is_taken:
            self._well(payment.payment_id)
        elif not said.more_may_help:
            self._tell(payment, "it is handed over again", said)
        return said

    def _tell(self, payment: EvmPayment, what: str, said: Said | None) -> None:
        """Put it into health and log. ``said``: what the node said to a replacement, if it did."""
        answer = ""
        if said is not None and not said.is_taken:
            answer = f", the node does not take its replacement ({said.text})"
        name = self._network.name
        text = f"payment {payment.payment_id} on {name} is not mined{answer}, and {what}"
        self._conditions.set(_key(payment.payment_id), text)
        self._told.add(payment.payment_id)

    def _well(self, payment_id: str) -> None:
        self._conditions.set(_key(payment_id), None)
        self._told.discard(payment_id)

    # --- settled -------------------------------------------------------------------------------

    async def watch_settled(self, top: Block) -> None:
        """Publish again, with the same bytes, what a deep reorganisation took off the chain.

        A sweep goes out again at once, though the token refuses it while its deposit is away: the
        nonces after it wait for its own. Then it has failed, and took nothing but gas.

        Blocks below one that is still there are still there: only younger ones are compared.
        """
        above = top.number - self._network.tracked_blocks
        if self._compared is not None and await self._connection.has(self._compared):
            above = max(above, self._compared.number)
        for payment in await self._ledger.settled_above(self._network.name, above):
            await self._compare(payment)
        self._compared = BlockPoint(top.number, top.hash)

    async def _compare(self, payment: EvmPayment) -> None:
        mined, key = payment.inclusion, f"settled-{payment.payment_id}"
        if mined is not None and await self._connection.has(mined.block):
            self._conditions.set(key, None)
            return
        verdict = await self._publisher.verdict(payment)
        if verdict.outcome is Outcome.FAILED:
            log.warning("evm_settled_payment_failed", payment_id=payment.payment_id,
                        reason=verdict.reason)  # fmt: skip
        if verdict.outcome in (Outcome.SETTLED, Outcome.PENDING, Outcome.FAILED):
            self._conditions.set(key, None)
            return
        self._conditions.set(
            key,
            f"payment {payment.payment_id} was settled and a reorganisation of"
            f" {self._network.name} took it away; it is published again ({verdict.reason});"
            f" if it stays away: rpcsvc payouts close {payment.payment_id} --note TEXT",
        )
        await self._publisher.hand_over(payment)


def _key(payment_id: str) -> str:
    return f"bump-{payment_id}"


def _has_no_event(payment: EvmPayment) -> bool:
    """Whether it is mined, and the token tells of no transfer in it."""
    return payment.inclusion is not None and payment.inclusion.log_index is None


def _is_waiting(payment: EvmPayment) -> bool:
    """Whether it is published, and neither it nor another has been mined for its nonce."""
    is_published = payment.state is PaymentState.PUBLISHED
    return is_published and payment.inclusion is None and payment.conflict is None
