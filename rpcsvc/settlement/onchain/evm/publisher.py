"""One network's signed payments on their way: signing attempts, publishing them, looking them up.

An attempt is committed before it is published; what a node answers proves nothing, so that what
became of a payment is read off the network after each step. What does not live here: which nonce
and price a payment gets (payments.py), when it gets another attempt (upkeep.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm.conditions import Conditions
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.fees import GasPrice
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, TransactionPlan
from rpcsvc.settlement.onchain.evm.node_types import Submission
from rpcsvc.settlement.onchain.evm.payment_ledger import (
    Attempt,
    EvmPayment,
    EvmPaymentLedger,
    PaymentOrder,
    PaymentState,
)
from rpcsvc.settlement.onchain.evm.presence import EvmPresence

log = structlog.get_logger(__name__)

_LIVE: Final = (PaymentState.PREPARED, PaymentState.PUBLISHED)
_TAKEN: Final = (Submission.ACCEPTED, Submission.KNOWN)
# Answers that a higher fee may change. KNOWN: the node has it, and yet nobody mines it. REFUSED
# is in words that say nothing to us, and some nodes have their own for fees.
_MORE_MAY_HELP: Final = (
    Submission.KNOWN,
    Submission.REPLACEMENT_UNDERPRICED,
    Submission.UNDERPRICED,
    Submission.REFUSED,
)


@dataclass(frozen=True, slots=True)
class Said:
    """What a node said to a transaction; it proves nothing. ``submission`` None: no answer came."""

    text: str
    submission: Submission | None = None

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

    def attempt(self, order: PaymentOrder, nonce: int, price: GasPrice) -> Attempt:
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

    async def own(self, *states: PaymentState) -> list[EvmPayment]:
        """This hot wallet's payments in these states, lowest nonce first."""
        found = await self._ledger.payments_in(self._network.name, *states)
        return [item for item in found if item.sender == self._signer.address]

    async def unmined(self) -> list[EvmPayment]:
        """Payments that are signed, and nothing was mined with their nonce as of the last look.

        Once something was, the wallet's balances tell what it took.
        """
        return [
            item
            for item in await self.own(*_LIVE)
            if item.inclusion is None and item.conflict is None
        ]

    async def verdict(self, payment: EvmPayment) -> Verdict:
        """Ask the node, record how far the payment is, and say it."""
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
        said = await self.hand_over(payment)
        verdict = await self.verdict(await self.recorded(payment_id))
        if verdict.outcome is Outcome.ABSENT:
            return Verdict(Outcome.UNKNOWN, f"not on the network yet; the node said: {said.text}")
        return verdict

    def _is_held_back(self, payment: EvmPayment) -> bool:
        """Mined while the token is paused, it would fail for good."""
        return self._connection.paused and payment.state is PaymentState.PREPARED

    async def _mark_published(self, payment: EvmPayment) -> None:
        """Record that a node may have it. Raises StoreConflict when it is over by now."""
        async with self._recording:
            known, now = await self.recorded(payment.payment_id), self._clock.now_ms()
            await self._ledger.put_payment(
                replace(known, state=PaymentState.PUBLISHED, published_at=now)
            )

    async def hand_over(self, payment: EvmPayment) -> Said:
        """Submit the latest attempt; what the node said."""
        if payment.state is PaymentState.PREPARED:
            await self._mark_published(payment)
        try:
            answer = await self._connection.client.submit(bytes.fromhex(payment.latest.raw))
        except RpcFailure as failure:
            log.warning("evm_submit_failed", txid=payment.latest.txid, reason=str(failure))
            return Said(str(failure))
        said = f"{answer.submission.value} {answer.text}".strip()
        log.info("evm_submitted", txid=payment.latest.txid, nonce=payment.nonce, answer=said)
        return Said(said, answer.submission)
