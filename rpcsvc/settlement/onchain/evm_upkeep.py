"""Payments after their publication: again when the network lost them, dearer when they are stuck.

What does not live here: the first publication (evm_payments.py), fees (evm_gas.py, evm_fees.py).
"""

from __future__ import annotations

import structlog

from rpcsvc.clock import Clock
from rpcsvc.orders.ports import Outcome, Verdict
from rpcsvc.settlement.onchain.evm import Block, Tag
from rpcsvc.settlement.onchain.evm_gas import EvmGas
from rpcsvc.settlement.onchain.evm_link import EvmLink
from rpcsvc.settlement.onchain.evm_payment_ledger import (
    BlockPoint,
    EvmPayment,
    EvmPaymentLedger,
    PaymentState,
)
from rpcsvc.settlement.onchain.evm_publisher import EvmPublisher

log = structlog.get_logger(__name__)


class Conditions:
    """What the operator should know, in words; said in the log when it is new."""

    def __init__(self, network: str) -> None:
        self._network = network
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str | None) -> None:
        """Keep a condition, or drop it (None)."""
        if text is None:
            self._texts.pop(key, None)
            return
        if self._texts.get(key) != text:
            log.error("evm_condition", network=self._network, condition=text)
        self._texts[key] = text

    def texts(self) -> list[str]:
        """All that hold."""
        return list(self._texts.values())


class EvmUpkeep:
    """Follows payments of one network. Everything may raise RpcFailure and evm_link.Refused.

    Its methods are only for who holds the network's one writer.
    """

    def __init__(
        self,
        link: EvmLink,
        publisher: EvmPublisher,
        gas: EvmGas,
        ledger: EvmPaymentLedger,
        clock: Clock,
        conditions: Conditions,
    ) -> None:
        self._link = link
        self._network = link.network
        self._publisher = publisher
        self._gas = gas
        self._ledger = ledger
        self._clock = clock
        self._conditions = conditions
        # The newest block up to which settled payments were found in their blocks.
        self._compared: BlockPoint | None = None

    # --- published -----------------------------------------------------------------------------

    async def follow(self, payment_id: str) -> None:
        """Publish again what the network lost; replace what has waited too long."""
        verdict = await self._publisher.verdict(self._publisher.recorded(payment_id))
        was_lost = verdict.outcome is Outcome.ABSENT
        if was_lost:
            verdict = await self._publisher.advance(payment_id)
        payment = self._publisher.recorded(payment_id)
        if not _is_waiting(payment):
            self._conditions.set(f"bump-{payment_id}", None)
        elif self._is_late(payment) and await self._needs_more(payment, verdict, was_lost):
            await self._bump(payment)

    def _is_late(self, payment: EvmPayment) -> bool:
        since = max(payment.latest.made_at, payment.published_at or 0)
        return self._clock.now_ms() - since >= self._network.bump_after_ms

    async def _needs_more(self, payment: EvmPayment, verdict: Verdict, was_lost: bool) -> bool:
        """Its price is too low; or it is the next to be mined, and was there all the time.

        Those behind the next wait for that one. One that a reorganisation took away comes back
        with the bytes that it had.
        """
        if verdict.outcome is not Outcome.PENDING or await self._gas.is_too_low(payment):
            return True
        is_next = await self._link.client.nonce(payment.sender, Tag.LATEST) >= payment.nonce
        return is_next and not was_lost

    async def _bump(self, payment: EvmPayment) -> None:
        """Replace it at the same nonce. Committed first: either attempt may be mined."""
        key = f"bump-{payment.payment_id}"
        price = await self._gas.raised_price(payment)
        if price is None:
            self._conditions.set(
                key,
                f"payment {payment.payment_id} on {self._network.name} is not mined, and a higher"
                " fee would cost more than highest_fee allows",
            )
            return
        attempt = self._publisher.attempt(payment.order, payment.nonce, price)
        await self._ledger.add_attempt(payment, attempt)
        log.info("evm_payment_replaced", payment_id=payment.payment_id, txid=attempt.txid)
        self._conditions.set(key, None)
        await self._publisher.hand_over(self._publisher.recorded(payment.payment_id))

    # --- settled -------------------------------------------------------------------------------

    async def watch_settled(self, top: Block) -> None:
        """Publish again, with the same bytes, what a deep reorganisation took off the chain.

        Blocks below one that is still there are still there: only younger ones are compared.
        """
        above = top.number - self._network.tracked_blocks
        if self._compared is not None and await self._is_canonical(self._compared):
            above = max(above, self._compared.number)
        for payment in self._ledger.settled_above(self._network.name, above):
            await self._compare(payment)
        self._compared = BlockPoint(top.number, top.hash)

    async def _is_canonical(self, point: BlockPoint) -> bool:
        block = await self._link.client.block(point.number)
        return block is not None and block.hash == point.hash

    async def _compare(self, payment: EvmPayment) -> None:
        mined, key = payment.inclusion, f"settled-{payment.payment_id}"
        if mined is not None and await self._is_canonical(mined.block):
            return
        verdict = await self._publisher.verdict(payment)
        if verdict.outcome in (Outcome.SETTLED, Outcome.PENDING):
            self._conditions.set(key, None)
            return
        self._conditions.set(
            key,
            f"payment {payment.payment_id} was settled and a reorganisation of"
            f" {self._network.name} took it away; it is published again ({verdict.reason})",
        )
        await self._publisher.hand_over(payment)


def _is_waiting(payment: EvmPayment) -> bool:
    """Whether it is published, and neither it nor another has been mined for its nonce."""
    is_published = payment.state is PaymentState.PUBLISHED
    return is_published and payment.inclusion is None and payment.conflict is None
