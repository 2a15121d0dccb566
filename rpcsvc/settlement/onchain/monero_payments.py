"""Paying XMR, exactly once.

A payment is signed, committed with its bytes, key images and transaction key, and only then may
be published. The wallet reserves nothing for a signed payment, so there is one unpublished at a
time; its key images are unique among all that was, or may yet be, made. The wallet relays a
payment at most once, since doing it again for a mined one inflates its balance for good; after
that the same bytes go to the node. What became of a payment is read off the network, never from
an error. It failed only if something else has spent an input of it in a block that is deep.

What does not live here: which transfers are due (orders/payouts.py), fees and outputs
(monero_inventory.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.order import Transfer
from rpcsvc.domain.states import TransferState
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports import Outcome, PreparedTransfer, TransferRejected, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure
from rpcsvc.settlement.onchain.monero import (
    Destination,
    NodeInfo,
    NodeTransaction,
    PreparedPayment,
    Spent,
    WalletCode,
)
from rpcsvc.settlement.onchain.monero_ledger import (
    Cursor,
    MoneroLedger,
    MoneroOptions,
    Payment,
    PaymentOrder,
    PaymentState,
    Purpose,
    Receipt,
)
from rpcsvc.settlement.onchain.monero_link import MoneroLink

log = structlog.get_logger(__name__)

_LONG_MS: Final = 10 * 60 * 1000
_UNPUBLISHED = (PaymentState.PREPARED, PaymentState.RELAYING)
# Not about this payment, but about the wallet as such.
_NO_WALLET = (WalletCode.NOT_OPEN, WalletCode.NO_DAEMON, WalletCode.DAEMON_BUSY)
_SHORT_OF_MONEY = (
    WalletCode.NOT_ENOUGH_MONEY,
    WalletCode.NOT_ENOUGH_UNLOCKED,
    WalletCode.TX_NOT_POSSIBLE,
)


class MoneroPayments:
    """Prepares, publishes and follows payments. All may raise RpcFailure and link.Refused."""

    def __init__(
        self, link: MoneroLink, ledger: MoneroLedger, clock: Clock, options: MoneroOptions
    ) -> None:
        self._link = link
        self._ledger = ledger
        self._clock = clock
        self._options = options
        self._writer = asyncio.Lock()

    # --- prepare -------------------------------------------------------------------------------

    async def prepare(self, transfer: Transfer) -> PreparedTransfer:
        """Sign and commit, or give back what was signed and committed before.

        Raises TransferRejected for an address that can't be paid; Unavailable while another
        payment is unpublished, for want of unlocked money, or if it would cost too much.
        """
        async with self._writer:
            known = self._ledger.payment(transfer.transfer_id)
            if known is None:
                # Another wallet would judge the destination by what is its own: check that first.
                await self._link.check_wallet()
                await self._check_destination(transfer.address)
                order = PaymentOrder(
                    transfer.transfer_id, Purpose.TRANSFER, transfer.address, transfer.units
                )
                known = await self._sign(order)
            _require_same(known, transfer)
            if known.state.is_over:
                raise TransferRejected(f"its payment {known.txid} is {known.state}")
            return PreparedTransfer(known.txid, known.raw)

    async def prepare_upkeep(self, order: PaymentOrder) -> Payment:
        """Sign and commit a payment of the wallet to itself. Raises Unavailable as prepare does."""
        async with self._writer:
            return await self._sign(order)

    async def _sign(self, order: PaymentOrder) -> Payment:
        await self._finish_earlier()
        await self._link.check_wallet()
        await self._link.in_step()
        signed = await self._signed(order)
        if taken := self._ledger.live_key_images(signed.key_images):
            # The wallet has forgotten a payment (killed before it stored): keep it from
            # offering those outputs again, and let it choose others.
            await self._freeze(taken)
            signed = await self._signed(order)
        self._check(order, signed)
        payment = _payment(order, signed, self._clock.now_ms())
        await self._ledger.add_payment(payment)
        return payment

    async def _finish_earlier(self) -> None:
        """Nothing new while a payment is signed and not on the network. Raises Unavailable."""
        for earlier in self._ledger.payments_in(*_UNPUBLISHED):
            if self._was_taken_back(earlier):
                await self._ledger.put_payment(replace(earlier, state=PaymentState.WITHDRAWN))
                continue
            verdict = await self._verdict(earlier)
            if verdict.outcome not in (Outcome.SETTLED, Outcome.PENDING, Outcome.FAILED):
                raise Unavailable(
                    "An earlier XMR payment is signed and not on the network yet. Nothing new is"
                    " signed before it is.",
                    details={"transferId": earlier.transfer_id},
                )

    def _was_taken_back(self, payment: Payment) -> bool:
        """Whether the order layer gave it up before anything was published."""
        return (
            payment.state is PaymentState.PREPARED
            and payment.purpose is Purpose.TRANSFER
            and self._ledger.transfer_state(payment.transfer_id) is TransferState.CANCELLED
        )

    async def _check_destination(self, address: str) -> None:
        check = await self._link.wallet.validate(address)
        if not check.valid:
            raise TransferRejected("the destination is no Monero address")
        if check.nettype != self._options.address_nettype:
            raise TransferRejected(
                f"the destination is an address of {check.nettype}, not of"
                f" {self._options.address_nettype}"
            )
        if await self._is_ours(address):
            raise TransferRejected("the destination is an address of the service itself")

    async def _is_ours(self, address: str) -> bool:
        if self._ledger.address_minor(address) is not None:
            return True
        return await self._link.wallet.index_of(address) is not None

    async def _signed(self, order: PaymentOrder) -> PreparedPayment:
        share, rest = divmod(order.units, order.parts)
        amounts = [share + rest] + [share] * (order.parts - 1)
        try:
            return await self._link.wallet.prepare(
                [Destination(order.address, amount) for amount in amounts],
                priority=self._options.priority,
                from_indices=order.from_indices,
            )
        except NodeError as error:
            if error.code == WalletCode.WRONG_ADDRESS:
                raise TransferRejected("the wallet refuses the destination address") from error
            if error.code in _SHORT_OF_MONEY:
                raise Unavailable("Not enough XMR is unlocked for this payment.") from error
            if error.code in _NO_WALLET:
                raise
            log.warning("monero_payment_not_made", reason=str(error))
            raise Unavailable("The XMR wallet can't make this payment just now.") from error

    async def _freeze(self, images: set[str]) -> None:
        log.warning("monero_wallet_forgot_a_payment", outputs=len(images))
        for image in sorted(images):
            await self._link.wallet.freeze(image)

    def _check(self, order: PaymentOrder, signed: PreparedPayment) -> None:
        """The last look before it is committed. Raises Unavailable: it was not published."""
        if signed.amount != order.units:
            raise Unavailable("The wallet signed another amount than asked for.")
        if signed.fee > self._options.highest_fee:
            log.warning("monero_fee_too_high", fee=signed.fee, highest=self._options.highest_fee)
            raise Unavailable("The Monero network's fee is too high for this payment right now.")
        if self._ledger.live_key_images(signed.key_images):
            raise Unavailable("The wallet offers money that an earlier payment has spent.")

    # --- publish -------------------------------------------------------------------------------

    async def publish(self, transfer: Transfer) -> Verdict:
        """Hand the payment to the network, unless it has it already; then what it says of it."""
        payment = self._known(transfer)
        async with self._writer:
            return await self.advance(payment.transfer_id)

    async def advance(self, payment_id: str) -> Verdict:
        """Look the payment up; publish the same bytes when it is absent; look again."""
        payment = self._ledger.payment(payment_id)
        if payment is None:
            raise LookupError(f"no payment is recorded for {payment_id}")
        verdict = await self._verdict(payment)
        if verdict.outcome is not Outcome.ABSENT:
            return verdict
        if payment.state.is_over:
            return Verdict(Outcome.UNKNOWN, f"the payment is {payment.state}: not published")
        said = await self._hand_over(payment)
        verdict = await self._verdict(self._ledger.payment(payment_id) or payment)
        if verdict.outcome is Outcome.ABSENT:
            return Verdict(Outcome.UNKNOWN, f"not on the network yet; the node said: {said}")
        return verdict

    async def _hand_over(self, payment: Payment) -> str:
        """Through the wallet the first time, to the node ever after; what they said."""
        if payment.state is PaymentState.PREPARED:
            await self._link.check_wallet()
            marked = replace(payment, state=PaymentState.RELAYING, relayed_at=self._clock.now_ms())
            await self._ledger.put_payment(marked)
            said = await self._relay(marked)
            if said is None:
                return "relayed"
        answer = await self._link.node.submit(payment.raw)
        log.info("monero_submitted", txid=payment.txid, answer=answer.submission.value)
        return f"{answer.submission.value} {answer.reason}".strip()

    async def _relay(self, payment: Payment) -> str | None:
        """Have the wallet relay and note it; what went wrong. Neither proves anything."""
        try:
            # A wallet that was killed notes a payment only once it has seen its own money again.
            await self._link.wallet.refresh()
            await self._link.wallet.relay(payment.metadata)
            await self._link.wallet.store()
        except RpcFailure as failure:
            log.warning("monero_relay_failed", txid=payment.txid, reason=str(failure))
            return str(failure)
        return None

    # --- look up -------------------------------------------------------------------------------

    async def look_up(self, transfer: Transfer) -> Verdict:
        """What the network says of a transfer's payment."""
        return await self._verdict(self._known(transfer))

    def _known(self, transfer: Transfer) -> Payment:
        payment = self._ledger.payment(transfer.transfer_id)
        if payment is None or payment.txid != transfer.txid or payment.raw != transfer.raw:
            # Only a database put together from two could bring this about: touch nothing.
            raise LookupError(f"the payment of {transfer.transfer_id} is not the recorded one")
        return payment

    async def _verdict(self, payment: Payment) -> Verdict:
        """Ask the node, record how far the payment is, and say it."""
        before = await self._link.check_node()
        spent = await self._link.node.key_images(payment.key_images)
        found = (await self._link.node.transactions([payment.txid])).get(payment.txid)
        after = await self._link.check_node()
        if found is not None:
            return await self._present(payment, found, after)
        if before.top_hash != after.top_hash or Spent.IN_CHAIN not in spent.values():
            return await self._absent(payment)
        return await self._in_conflict(payment, after)

    async def _present(self, payment: Payment, found: NodeTransaction, info: NodeInfo) -> Verdict:
        depth = 0 if found.height is None else info.height - found.height
        is_settled = depth >= self._options.settled_after
        state = PaymentState.SETTLED if is_settled else PaymentState.PUBLISHED
        await self._put(payment, replace(payment, state=state, height=found.height, conflict=None))
        if is_settled:
            return Verdict(Outcome.SETTLED)
        return Verdict(Outcome.PENDING, f"{depth} of {self._options.settled_after} confirmations")

    async def _absent(self, payment: Payment) -> Verdict:
        await self._put(payment, replace(payment, height=None, conflict=None))
        return Verdict(Outcome.ABSENT)

    async def _in_conflict(self, payment: Payment, info: NodeInfo) -> Verdict:
        """Something else has spent an input, in this chain up to ``info``'s top.

        The node doesn't say in which block. The top at the first sight of it bounds that from
        above: once that block is deep, and still there, so is the one in question.
        """
        since = await self._conflict_since(payment, info)
        depth = info.height - since.height
        if depth >= self._options.failed_after:
            over = replace(payment, state=PaymentState.FAILED, height=None, conflict=since)
            await self._put(payment, over)
            return Verdict(
                Outcome.FAILED,
                f"another transaction has spent its inputs, {depth} confirmations ago",
            )
        await self._put(payment, replace(payment, height=None, conflict=since))
        return Verdict(
            Outcome.UNKNOWN,
            f"another transaction has spent its inputs, at least {depth} of"
            f" {self._options.failed_after} confirmations ago",
        )

    async def _conflict_since(self, payment: Payment, info: NodeInfo) -> Cursor:
        top = Cursor(info.height - 1, info.top_hash)
        known = payment.conflict
        if known is None:
            return top
        header = await self._link.node.header_at(known.height)
        return known if header is not None and header.hash == known.hash else top

    async def _put(self, before: Payment, after: Payment) -> None:
        if after != before and not before.state.is_over:
            await self._ledger.put_payment(after)

    # --- afterwards ----------------------------------------------------------------------------

    async def finish_upkeep(self) -> bool:
        """Bring the wallet's payments to itself to their end; whether one is still under way."""
        live = (*_UNPUBLISHED, PaymentState.PUBLISHED)
        async with self._writer:
            outcomes = [
                (await self.advance(item.transfer_id)).outcome
                for item in self._ledger.payments_in(*live)
                if item.purpose is Purpose.UPKEEP
            ]
        return any(item not in (Outcome.SETTLED, Outcome.FAILED) for item in outcomes)

    async def watch_settled(self, info: NodeInfo) -> None:
        """Publish again, with the same bytes, what a deep reorganisation took off the chain."""
        settled = self._ledger.settled_above(info.height - self._options.tracked_blocks)
        found = await self._link.node.transactions([item.txid for item in settled])
        for item in settled:
            if item.txid not in found:
                log.error("monero_settled_payment_is_gone", transfer_id=item.transfer_id)
                await self._link.node.submit(item.raw)

    def stuck(self) -> str | None:
        """The transfer whose payment is signed and has long not come to the network."""
        since = self._clock.now_ms() - _LONG_MS
        late = [
            item for item in self._ledger.payments_in(*_UNPUBLISHED) if item.prepared_at < since
        ]
        return late[0].transfer_id if late else None

    def is_busy(self) -> bool:
        """Whether a payment is signed and not known to be on the network."""
        return bool(self._ledger.payments_in(*_UNPUBLISHED))

    async def receipt(self, transfer: Transfer) -> Receipt:
        """The proof of a settled payout; made once, then kept. Raises Unavailable before that."""
        payment = self._known(transfer)
        if payment.state is not PaymentState.SETTLED or payment.height is None:
            raise Unavailable("The payment is not settled yet: there is no receipt for it.")
        if payment.proof is None:
            payment = replace(payment, proof=await self._prove(payment))
            await self._ledger.put_payment(payment)
        return Receipt(
            payment.transfer_id, payment.txid, payment.address, payment.units, payment.fee,
            payment.height or 0, payment.tx_key, payment.proof,
        )  # fmt: skip

    async def _prove(self, payment: Payment) -> str | None:
        try:
            return await self._link.wallet.prove_payment(
                payment.txid, payment.address, payment.transfer_id
            )
        except NodeError as error:
            log.warning("monero_no_proof", txid=payment.txid, reason=str(error))
            return None


def _payment(order: PaymentOrder, signed: PreparedPayment, now: int) -> Payment:
    return Payment(
        transfer_id=order.payment_id,
        purpose=order.purpose,
        address=order.address,
        units=order.units,
        fee=signed.fee,
        txid=signed.txid,
        raw=signed.raw,
        metadata=signed.metadata,
        tx_key=signed.tx_key,
        key_images=tuple(sorted(signed.key_images)),
        prepared_at=now,
    )


def _require_same(payment: Payment, transfer: Transfer) -> None:
    if (payment.address, payment.units) != (transfer.address, transfer.units):
        raise LookupError(f"the payment of {transfer.transfer_id} has another recipient or amount")
