"""Pays XMR, exactly once.

A payment is signed and committed with its bytes, key images and transaction key before it may be
published. The wallet reserves nothing for a signed payment, so one is unpublished at a time. The
wallet relays a payment at most once, since relaying a mined one inflates its balance permanently;
after that the node gets the signed bytes. A payment's state is read off the network, never from an
error. It has failed only if another transaction that spends one of its inputs is deep in the chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog
from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import Clock, iso8601, steady_ms
from rpcsvc.domain.money import XMR, format_units
from rpcsvc.domain.order import Transfer
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, faults
from rpcsvc.orders.ports.wallets import (
    LacksFunds,
    Outcome,
    PreparedTransfer,
    Record,
    TransferRejected,
    Verdict,
)
from rpcsvc.settlement.onchain.adapter import Payments
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.monero.presence import MoneroPresence
from rpcsvc.settlement.onchain.monero.records import (
    UNPUBLISHED,
    MoneroOptions,
    MoneroPayment,
    MoneroPaymentOrder,
    MoneroPaymentState,
    MoneroPurpose,
    Payee,
)
from rpcsvc.settlement.onchain.monero.wallet import MOST_DESTINATIONS
from rpcsvc.settlement.onchain.monero.wallet_types import (
    AddressCheck,
    Destination,
    PreparedPayment,
    WalletCode,
)
from rpcsvc.store.database import Rows

log = structlog.get_logger(__name__)

# The wallet's own choice while the pool has room, and the next, some four times as dear.
OWN_PRIORITY: Final = 1
RAISED_PRIORITY: Final = 2
# Ten blocks: a payment that waits for longer is too cheap for the network of the moment.
_WAITED_MS: Final = 20 * 60 * 1000
_LONG_MS: Final = 10 * 60 * 1000
_UNMINED_MS: Final = 60 * 60 * 1000
# Between the tries to hand over a payment of the wallet to itself that the node does not take.
_FIRST_PAUSE_MS: Final = 4_000
_LONGEST_PAUSE_MS: Final = 60_000
# As measured with Monero 0.18: bytes of a payment with two outputs, without its inputs; of each
# input; and of each further output.
_OUTPUTS_WEIGHT: Final = 850
_SPENT_WEIGHT: Final = 660
_FURTHER_WEIGHT: Final = 355
# As long as the turns of a batch's transfers take; a payment may leave the pool without a block.
_LOOKED_MS: Final = 5_000
# Addresses whose check is remembered: those of the payouts that wait.
_MOST_CHECKED: Final = 1_000
# Codes about the wallet, not about this payment.
_NO_WALLET = (WalletCode.NOT_OPEN, WalletCode.NO_DAEMON, WalletCode.DAEMON_BUSY)
_SHORT_OF_MONEY = (
    WalletCode.NOT_ENOUGH_MONEY,
    WalletCode.NOT_ENOUGH_UNLOCKED,
    WalletCode.TX_NOT_POSSIBLE,
)


class MoneroFees:
    """Upper bounds of the fees of payments, in piconero, by the node's rate for RAISED_PRIORITY.

    ``per_byte`` is None before ``poll``: the methods that return a fee then raise
    errors.Unavailable.
    """

    def __init__(self, connection: MoneroConnection, options: MoneroOptions) -> None:
        self._connection = connection
        self._options = options
        self.per_byte: int | None = None

    async def poll(self) -> None:
        """Ask the node for the rate of the moment. Raises RpcFailure."""
        fees = (await self._connection.node.fees()).per_byte
        self.per_byte = fees[min(RAISED_PRIORITY, len(fees)) - 1]

    def typical(self) -> int:
        """Return the fee of a payment, with a margin."""
        return self.of_weight(self._options.typical_weight)

    def of_weight(self, weight: int) -> int:
        """Return the fee of a payment of ``weight`` bytes, with a margin."""
        return -(-self._rate() * weight * (100 + self._options.fee_margin_percent) // 100)

    def estimate(self, inputs: int, parts: int = 1) -> int:
        """Return the fee of a payment into ``parts`` outputs and the change, without a margin."""
        further = _FURTHER_WEIGHT * (parts - 1)
        return self._rate() * (_OUTPUTS_WEIGHT + _SPENT_WEIGHT * inputs + further)

    def too_dear(self) -> str | None:
        """Return why the network's fee keeps payments from being signed; None: it does not."""
        if self._is_affordable(1):
            return None
        least, highest = self.estimate(1), self._options.highest_fee
        return (
            f"nothing is paid: the Monero network may take {format_units(least, XMR)} XMR for"
            f" a payment, and the service gives {format_units(highest, XMR)} at most: wait until"
            " the network's fee falls"
        )

    def require_affordable(self, transfers: int = 1) -> None:
        """Raise errors.Unavailable if a payment of ``transfers`` would cost too much."""
        if not self._is_affordable(transfers):
            raise Unavailable("The Monero network's fee is too high for this payment right now.")

    def _is_affordable(self, transfers: int) -> bool:
        if self.per_byte is None:
            return True
        return self.estimate(1, transfers) <= self._options.highest_fee * transfers

    def _rate(self) -> int:
        if self.per_byte is None:
            raise Unavailable("The Monero network's fee is not known yet. Try again in a moment.")
        return self.per_byte


class _Looked(NamedTuple):
    """The last verdict of a batch, the node's top block before it, and when (steady ms) it came."""

    payment_id: str
    top_hash: str
    at: int
    verdict: Verdict

    def is_of(self, payment: MoneroPayment, top_hash: str, now: int) -> bool:
        """Return whether it is as good as a new one."""
        same = (self.payment_id, self.top_hash) == (payment.payment_id, top_hash)
        return same and now - self.at < _LOOKED_MS


class MoneroPayments(Payments):
    """Prepares, publishes and follows payments.

    The methods that take a transfer raise errors.Unavailable when node or wallet fail; the others
    may raise RpcFailure and ChainUnusable, and are for code of this folder.
    """

    def __init__(
        self,
        connection: MoneroConnection,
        ledger: MoneroLedger,
        clock: Clock,
        options: MoneroOptions,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._steady = steady
        self._looked: _Looked | None = None
        self._checked: dict[str, AddressCheck] = {}
        # Payments that this process has signed, and gave to nobody: no node can have them.
        self._unseen: set[str] = set()
        self.fees = MoneroFees(connection, options)
        self._clock = clock
        self._options = options
        self._presence = MoneroPresence(connection, ledger, clock, options)
        self._backoff = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self._writer = asyncio.Lock()

    # --- prepare -------------------------------------------------------------------------------

    @override
    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        known = await self._ledger.payment(transfer.transfer_id)
        if known is None:
            return None
        _require_same(known, transfer)
        if known.state.is_over:
            raise TransferRejected(f"its payment {known.txid} is {known.state}")
        return PreparedTransfer(known.txid, (transfer.transfer_id,))

    @override
    async def prepare(
        self,
        transfer: Transfer,
        companions: Sequence[Transfer],
        record: Record,
        leaves: Mapping[str, int],
    ) -> Sequence[Transfer]:
        with self._connection.watched():
            self.fees.require_affordable(1 + len(companions))
            async with self._writer:
                # Another wallet would compare the destination with its own addresses.
                info = await self._connection.ready()
                check = await self._check_destination(transfer.address)
                # A transaction with a payment id has one recipient.
                fit = [] if check.integrated else await self._fit(companions)
                await self._require_published()
                affordable = await self._affordable([transfer, *fit], leaves)
                payment = await self._sign_together(affordable, info)

                async def commit(rows: Rows) -> None:
                    await self._ledger.add_payment(payment, rows)

                paid = tuple(item.transfer_id for item in payment.payees)
                await record([PreparedTransfer(payment.txid, paid)], commit)
                self._unseen.add(payment.payment_id)
        # The next transaction may pay all others: each locks an output, so there is to be one.
        return [item for item in fit if item not in affordable]

    async def prepare_upkeep(self, order: MoneroPaymentOrder) -> MoneroPayment:
        """Sign and commit a payment of the wallet to itself. Raises Unavailable as prepare does."""
        async with self._writer:
            await self._require_published()
            await self._connection.require_wallet()
            payment = await self._sign(order)
            await self._ledger.add_payment(payment)
            self._unseen.add(payment.payment_id)
            return payment

    async def _fit(self, companions: Sequence[Transfer]) -> list[Transfer]:
        """The transfers that can be paid together with others and have no payment yet."""
        fit = []
        for item in companions:
            if await self._ledger.payment(item.transfer_id) is not None:
                continue
            try:
                check = await self._check_destination(item.address)
            except TransferRejected:
                continue  # it is rejected when its own turn comes
            if not check.integrated:
                fit.append(item)
        return fit

    async def _affordable(
        self, transfers: Sequence[Transfer], leaves: Mapping[str, int]
    ) -> list[Transfer]:
        """Return the transfers after which what must be left is left, locked or not.

        A deposit that no order has on record yet is nobody's to take: it is in no claim. The wallet
        that has answered is the one that may sign. Raises LacksFunds for the first one.
        """
        affordable = list[Transfer]()
        left = await self._connection.total_of_wallet() - await self._ledger.on_no_order()
        for item in transfers:
            kept = leaves.get(item.transfer_id, 0)
            # The fee has a margin: a refund, which leaves nothing, is tried without it.
            taken = item.units + (item.fee if kept else 0)
            missing = taken + kept - left
            if missing <= 0:
                affordable.append(item)
                left -= taken
            elif item is transfers[0]:
                raise LacksFunds(item, missing)
        return affordable

    async def _sign_together(self, transfers: Sequence[Transfer], info: NodeInfo) -> MoneroPayment:
        """Sign one payment for all that fit; for the first alone if that can't be made."""
        first = transfers[0]
        alone = MoneroPaymentOrder(
            first.transfer_id, MoneroPurpose.TRANSFER, first.address, first.units
        )
        payees = _payees(transfers)
        if len(payees) == 1:
            return await self._sign(alone, info=info)
        together = replace(alone, units=sum(item.units for item in payees), batch=payees)
        return await self._sign(together, alone, info)

    async def _sign(
        self,
        order: MoneroPaymentOrder,
        otherwise: MoneroPaymentOrder | None = None,
        info: NodeInfo | None = None,
    ) -> MoneroPayment:
        """Sign ``order``, or ``otherwise`` if the wallet can't make it.

        No payment may be unpublished, and the wallet has just said which one it is.
        """
        found, waiting = await asyncio.gather(
            self._connection.in_step(info), self._connection.node.pool_weight()
        )
        priority = await self._priority(is_full=waiting > found.block_weight_limit // 2)
        try:
            signed = await self._unspent(order, priority)
        except (Unavailable, TransferRejected) as reason:
            if otherwise is None:
                raise
            log.info("monero_batch_refused", transfers=len(order.batch), reason=str(reason))
            order, signed = otherwise, await self._unspent(otherwise, priority)
        return _payment(order, signed, self._clock.now_ms())

    async def _priority(self, *, is_full: bool) -> int:
        """Return the wallet's own priority, unless a payment or the pool waits for blocks.

        A payment can't be replaced by a dearer one: it waits until its own bytes are mined.
        """
        is_late = is_full or bool(await self._unmined(_WAITED_MS))
        return RAISED_PRIORITY if is_late else OWN_PRIORITY

    async def _unspent(self, order: MoneroPaymentOrder, priority: int) -> PreparedPayment:
        """Have it signed with money that no other payment may spend."""
        signed = await self._signed(order, priority)
        if taken := await self._ledger.live_key_images(signed.key_images):
            # The wallet has forgotten a payment (killed before it stored): keep it from
            # offering those outputs again, and let it choose others.
            await self._freeze(taken)
            signed = await self._signed(order, priority)
        await self._check(order, signed)
        return signed

    async def _require_published(self) -> None:
        """Raise Unavailable while a payment is signed and not on the network."""
        for earlier in await self._ledger.payments_in(*UNPUBLISHED):
            verdict = await self._verdict(earlier)
            if verdict.outcome not in (Outcome.SETTLED, Outcome.PENDING, Outcome.FAILED):
                raise Unavailable(
                    "An earlier XMR payment is signed and not on the network yet. Nothing new is"
                    " signed before it is.",
                    details={"paymentId": earlier.payment_id},
                )

    async def _check_destination(self, address: str) -> AddressCheck:
        """The wallet's check of an address that can be paid. Raises TransferRejected."""
        check = self._checked.get(address)
        if check is None:
            check = await self._require_foreign(address)
            if len(self._checked) >= _MOST_CHECKED:
                self._checked.clear()
            self._checked[address] = check
        elif await self._ledger.address_minor(address) is not None:
            raise _own_destination()
        return check

    async def _require_foreign(self, address: str) -> AddressCheck:
        """Have the wallet check an address. Raises TransferRejected."""
        check = await self._connection.wallet.validate(address)
        if not check.valid:
            raise TransferRejected("the destination is no Monero address")
        if check.nettype != self._options.address_nettype:
            raise TransferRejected(
                f"the destination is an address of {check.nettype}, not of"
                f" {self._options.address_nettype}"
            )
        if await self._is_ours(address):
            raise _own_destination()
        return check

    async def _is_ours(self, address: str) -> bool:
        if await self._ledger.address_minor(address) is not None:
            return True
        return await self._connection.wallet.index_of(address) is not None

    async def _signed(self, order: MoneroPaymentOrder, priority: int) -> PreparedPayment:
        try:
            return await self._connection.wallet.prepare(
                _destinations(order), priority=priority, from_indices=order.from_indices
            )
        except NodeError as error:
            if error.code == WalletCode.WRONG_ADDRESS:
                raise TransferRejected("the wallet refuses the destination address") from error
            if error.code in _SHORT_OF_MONEY:
                raise Unavailable("Not enough XMR is unlocked for this payment.") from error
            if error.code in _NO_WALLET:
                raise
            log.warning("monero_payment_preparation_failed", reason=str(error))
            raise Unavailable("The XMR wallet can't make this payment just now.") from error

    async def _freeze(self, images: set[str]) -> None:
        log.warning("monero_wallet_payment_forgotten", outputs=len(images))
        for image in sorted(images):
            await self._connection.wallet.freeze(image)

    async def _check(self, order: MoneroPaymentOrder, signed: PreparedPayment) -> None:
        """The last check before it is committed. Raises Unavailable: it was not published."""
        if signed.amount != order.units:
            raise Unavailable("The wallet signed another amount than asked for.")
        highest = self._options.highest_fee * max(1, len(order.batch))
        if signed.fee > highest:
            log.warning("monero_fee_refused", fee=signed.fee, highest=highest)
            raise Unavailable("The Monero network's fee is too high for this payment right now.")
        if await self._ledger.live_key_images(signed.key_images):
            raise Unavailable("The wallet offers money that an earlier payment has spent.")

    # --- publish -------------------------------------------------------------------------------

    @override
    async def publish(self, transfer: Transfer) -> Verdict:
        with self._connection.watched():
            self._connection.addresses.require_scanned()
            payment = await self._known(transfer)
            async with self._writer:
                self._looked = None
                return await self.advance(payment.payment_id)

    async def advance(self, payment_id: str) -> Verdict:
        """Look the payment up; publish its signed bytes when it is absent; look again."""
        payment = await self._ledger.payment(payment_id)
        if payment is None:
            raise LookupError(f"no payment is recorded for {payment_id}")
        verdict = await self._verdict(payment)
        if verdict.outcome is not Outcome.ABSENT:
            return verdict
        if payment.state.is_over:
            return Verdict(Outcome.UNKNOWN, f"the payment is {payment.state}: not published")
        said = await self._hand_over(payment)
        verdict = await self._presence.verdict(await self._ledger.payment(payment_id) or payment)
        if verdict.outcome is Outcome.ABSENT:
            return Verdict(Outcome.UNKNOWN, f"not on the network yet; the node said: {said}")
        return verdict

    async def _hand_over(self, payment: MoneroPayment) -> str:
        """Submit by the wallet the first time, by the node ever after; return the answer."""
        if payment.state is MoneroPaymentState.PREPARED:
            # It may have waited for long, and the wallet relays it once at most.
            await self._connection.require_both()
            self._unseen.discard(payment.payment_id)
            marked = replace(
                payment, state=MoneroPaymentState.RELAYING, relayed_at=self._clock.now_ms()
            )
            await self._ledger.put_payment(marked)
            said = await self._relay(marked)
            if said is None:
                return "relayed"
        answer = await self._connection.node.submit(payment.raw)
        log.info("monero_submitted", txid=payment.txid, answer=answer.submission.value)
        return f"{answer.submission.value} {answer.reason}".strip()

    async def _relay(self, payment: MoneroPayment) -> str | None:
        """Have the wallet relay and note the payment; return a failure. Neither proves anything."""
        try:
            # A wallet that was killed notes a payment only after it has seen its outputs again.
            if not await self._connection.is_where_it_was():
                await self._connection.wallet.refresh()
            await self._connection.wallet.relay(payment.metadata)
            await self._connection.wallet.store()
        except RpcFailure as failure:
            log.warning("monero_relay_failed", txid=payment.txid, reason=str(failure))
            return str(failure)
        return None

    # --- look up -------------------------------------------------------------------------------

    @override
    async def look_up(self, transfer: Transfer) -> Verdict:
        with self._connection.watched():
            payment = await self._known(transfer)
            if payment.batch and payment.state is not MoneroPaymentState.PREPARED:
                return await self._verdict_of_batch(payment)
            return await self._verdict(payment)

    async def _verdict(self, payment: MoneroPayment) -> Verdict:
        """Look the payment up, unless nobody was given it yet."""
        is_unseen = payment.payment_id in self._unseen
        if is_unseen and payment.state is MoneroPaymentState.PREPARED:
            return Verdict(Outcome.ABSENT)
        return await self._presence.verdict(payment)

    async def _verdict_of_batch(self, payment: MoneroPayment) -> Verdict:
        """Return the verdict of a batch, once for all its transfers: they ask one after another.

        Until a new block is seen one that waits still waits; what else it was, the node's block of
        the moment has to bear out.
        """
        looked, top_hash = self._looked, self._connection.top_hash
        if looked is None or looked.verdict.outcome is not Outcome.PENDING:
            top_hash = (await self._connection.check_node()).top_hash
        if looked is not None and looked.is_of(payment, top_hash, self._steady()):
            return looked.verdict
        verdict = await self._presence.verdict(payment)
        self._looked = _Looked(payment.payment_id, top_hash, self._steady(), verdict)
        return verdict

    async def _known(self, transfer: Transfer) -> MoneroPayment:
        payment = await self._ledger.payment(transfer.transfer_id)
        if payment is None or payment.txid != transfer.txid:
            # Only a database put together from two could bring this about: touch nothing.
            raise LookupError(f"the payment of {transfer.transfer_id} is not the recorded one")
        return payment

    # --- afterwards ----------------------------------------------------------------------------

    async def finish_upkeep(self) -> bool:
        """Bring the wallet's payments to itself to their end; return whether one is still under
        way.

        Likewise payments that the payment journal brought back, of orders that the database lacks.
        """
        async with self._writer:
            live = await self._ledger.payments_in(*UNPUBLISHED, MoneroPaymentState.PUBLISHED)
            own = [item for item in live if item.purpose is MoneroPurpose.UPKEEP]
            due = [*own, *await self._ledger.without_order()]
            self._backoff.forget_all_but({item.payment_id for item in due})
            outcomes = [await self._finish(item) for item in due]
        return any(item not in (Outcome.SETTLED, Outcome.FAILED) for item in outcomes)

    async def _finish(self, payment: MoneroPayment) -> Outcome:
        """Look the payment up; hand it over, unless the node has just refused it."""
        name = payment.payment_id
        if not self._backoff.is_due(name):
            return (await self._presence.verdict(payment)).outcome
        outcome = (await self.advance(name)).outcome
        if outcome is Outcome.UNKNOWN:
            self._backoff.note(name)
        else:
            self._backoff.forget(name)
        return outcome

    async def conditions(self) -> list[Condition]:
        """Return the first payment that is overdue, for the operator."""
        return faults(await self._overdue())

    async def _overdue(self) -> str | None:
        now = self._clock.now_ms()
        for item in await self._ledger.payments_in(*UNPUBLISHED):
            if item.prepared_at < now - _LONG_MS:
                return self._reported(item, "is signed and the network does not take it")
        for item in await self._unmined(_UNMINED_MS):
            return self._reported(item, "was published and is not mined for long")
        return None

    def _reported(self, payment: MoneroPayment, problem: str) -> str:
        """Return a problem for the operator: whether the node may know more than it shows, and what
        ends a payment that the node refuses permanently.
        """
        spent = ", and something has spent an input of it" if payment.conflict is not None else ""
        since = iso8601(payment.relayed_at or payment.prepared_at)
        if payment.purpose is MoneroPurpose.UPKEEP:
            blocks = self._options.failed_after
            end = f"it pays nobody, and fails once its node has lacked it for {blocks} blocks"
        else:
            name = payment.payees[0].transfer_id
            end = f"if its node refuses it permanently: rpcsvc payouts close {name} --note TEXT"
        return f"payment {payment.payment_id} {problem}, since {since}{spent}; {end}"

    async def _unmined(self, since_ms: int) -> list[MoneroPayment]:
        """Return published payments that no block has taken for longer than ``since_ms``.

        Those to others come first: they are owed.
        """
        oldest = self._clock.now_ms() - since_ms
        published = await self._ledger.payments_in(MoneroPaymentState.PUBLISHED)
        unmined = [
            item
            for item in published
            if item.height is None and (item.relayed_at or item.prepared_at) < oldest
        ]
        return sorted(unmined, key=lambda item: item.purpose is MoneroPurpose.UPKEEP)

    async def under_way(self) -> frozenset[tuple[str, MoneroPaymentState]]:
        """The id and state of each unsettled payment: a change may change the spendable outputs."""
        live = await self._ledger.payments_in(*UNPUBLISHED, MoneroPaymentState.PUBLISHED)
        return frozenset((item.payment_id, item.state) for item in live)

    @property
    def is_paying(self) -> bool:
        """Whether a payment is being signed or published, or was signed and goes out next."""
        return self._writer.locked() or bool(self._unseen)

    async def is_busy(self) -> bool:
        """Whether a payment is signed and not known to be on the network."""
        return bool(await self._ledger.payments_in(*UNPUBLISHED))

    @override
    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        with self._connection.watched():
            await self._connection.ready()
            payment = await self._known(transfer)
            if payment.state is not MoneroPaymentState.SETTLED or payment.height is None:
                raise Unavailable("The payment is not settled yet: there is no receipt for it.")
            payee = payment.payee(transfer.transfer_id)
            proof = await self._prove(payment.txid, payee)
        return {
            "network": self._options.network_name,
            "asset": XMR.symbol,
            "txid": payment.txid,
            "address": payee.address,
            "amount": format_units(payee.units, XMR),
            "block": payment.height,
            "transactionKey": payment.tx_key,
            "transactionProof": proof,
            "proofMessage": payee.transfer_id,
        }

    async def _prove(self, txid: str, payee: Payee) -> str | None:
        try:
            return await self._connection.wallet.prove_payment(
                txid, payee.address, payee.transfer_id
            )
        except NodeError as error:
            log.warning("monero_proof_failed", txid=txid, reason=str(error))
            return None


def _own_destination() -> TransferRejected:
    return TransferRejected("the destination is an address of the service itself")


def _payees(transfers: Sequence[Transfer]) -> tuple[Payee, ...]:
    """Return the payees that one transaction takes, the first transfer's first.

    A transaction pays an address once: the address tells whose payout it was.
    """
    by_address: dict[str, Payee] = {}
    for item in transfers:
        payee = Payee(item.transfer_id, item.address, item.units)
        by_address.setdefault(item.address, payee)
    return tuple(by_address.values())[:MOST_DESTINATIONS]


def _destinations(order: MoneroPaymentOrder) -> list[Destination]:
    if order.batch:
        return [Destination(item.address, item.units) for item in order.batch]
    share, rest = divmod(order.units, order.parts)
    amounts = [share + rest] + [share] * (order.parts - 1)
    return [Destination(order.address, amount) for amount in amounts]


def _payment(order: MoneroPaymentOrder, signed: PreparedPayment, now: int) -> MoneroPayment:
    return MoneroPayment(
        payment_id=f"batch_{signed.txid[:32]}" if order.batch else order.payment_id,
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
        batch=order.batch,
    )


def _require_same(payment: MoneroPayment, transfer: Transfer) -> None:
    payee = payment.payee(transfer.transfer_id)
    if (payee.address, payee.units) != (transfer.address, transfer.units):
        raise LookupError(f"the payment of {transfer.transfer_id} has another recipient or amount")
