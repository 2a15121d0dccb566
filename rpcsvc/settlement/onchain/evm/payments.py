"""Pays USDC from the hot wallet of one network, exactly once.

A payment is a nonce. It is committed with its signed bytes before it may be published, and its
nonce is never given to anything else, so at most one of its transactions is mined. A node's answer
proves nothing: the payment's state is read off the network (presence.py). Each nonce that the node
has is on record; where one is not, the database is an older copy or the key is in other hands, and
nothing more is signed (unrecorded.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import structlog
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import Clock, iso8601, steady_ms
from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import parse_evm_address
from rpcsvc.domain.money import USDC, format_units
from rpcsvc.domain.order import Transfer
from rpcsvc.domain.withdrawals import is_withdrawal
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.health import Condition, faults
from rpcsvc.orders.ports.wallets import (
    LacksFunds,
    NonceGap,
    Outcome,
    PreparedTransfer,
    Record,
    TransferRejected,
    Verdict,
)
from rpcsvc.settlement.onchain.adapter import Payments
from rpcsvc.settlement.onchain.daemon_rpc import MOST_CALLS, NodeError, RpcFailure
from rpcsvc.settlement.onchain.evm.gas import CallCost, EvmGas, GasPrice, PricedCall
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, TransactionPlan
from rpcsvc.settlement.onchain.evm.node import Conditions, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import (
    Block,
    EvmSubmission,
    EvmSubmissionResult,
    FeeData,
    Reverted,
    Tag,
)
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.presence import EvmPresence
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    Sweep,
)
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger, pause_for, reason_of
from rpcsvc.store.database import Rows

log = structlog.get_logger(__name__)

_NONCE: Final = "nonce"
_MEASURED_MS: Final = 60_000
_LONG_MS: Final = 10 * 60 * 1000
# How long the check before a signature serves for handing it over.
_JUST_ASKED_MS: Final = 1_000
_LIVE: Final = (EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED)
_TAKEN: Final = (EvmSubmission.ACCEPTED, EvmSubmission.KNOWN)
# Answers that a higher fee may change. KNOWN: the node has it, and yet nobody mines it. REFUSED
# is in words that say nothing to us, and some nodes have their own for fees.
_MORE_MAY_HELP: Final = (
    EvmSubmission.KNOWN,
    EvmSubmission.REPLACEMENT_UNDERPRICED,
    EvmSubmission.UNDERPRICED,
    EvmSubmission.REFUSED,
)


class EvmNonces:
    """The nonces of one hot wallet on one network. Methods that ask the node may raise RpcFailure.

    ``gap``: as last measured; None before.
    """

    def __init__(
        self,
        connection: EvmConnection,
        sender: str,
        payments: EvmPaymentLedger,
        unrecorded: UnrecordedLedger,
        switch: PauseSwitch,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._connection = connection
        self._network = connection.network.name
        self._sender = sender
        self._payments = payments
        self._unrecorded = unrecorded
        self._switch = switch
        self._wallet = f"the hot wallet on {self._network}"
        self._conditions = Conditions(self._network)
        self._has_looked = self._has_compared = False
        self._steady = steady
        self._measured_at: int | None = None
        self.gap: NonceGap | None = None

    def conditions(self) -> list[Condition]:
        """Return conditions for the operator."""
        return self._conditions.present()

    async def pending(self) -> int:
        """Return the node's next nonce, its pool included."""
        return await self._connection.client.nonce(self._sender, Tag.PENDING)

    async def next(self, pending: int) -> int:
        """Return the nonce to sign with; only for the holder of the network's writer.

        ``pending``: what ``pending`` has just returned; a payment committed since can only make the
        nonce more. Raises errors.Unavailable while there are transactions that are not on record,
        and the operator has not looked at them.
        """
        own = await self._payments.next_nonce(self._network, self._sender)
        problem = await self._problem(own, pending)
        self._conditions.set(_NONCE, problem)
        self._has_looked = True
        if problem is not None:
            raise Unavailable(
                f"The hot wallet on {self._network} has sent what is not on record. Nothing is"
                " signed with it before the operator has looked."
            )
        return max(pending, own)

    async def reconcile(self) -> None:
        """Find out once after a start whether the wallet may sign, and pause payouts if not.

        Repeat while it may not: once the operator has let money out, health is well.
        """
        if self._has_looked and not self._conditions.present():
            return
        try:
            await self.next(await self.pending())
        except Unavailable:
            # If it has looked, the condition says why. If not, the database or the node has failed.
            if not self._has_looked:
                raise

    async def measure(self) -> None:
        """Compare the node's nonces with those on record, once a minute. Decides on nothing."""
        now = self._steady()
        if self._measured_at is not None and now - self._measured_at < _MEASURED_MS:
            return
        # In the order of ``next``, for its reason.
        pending = await self.pending()
        own = await self._payments.next_nonce(self._network, self._sender)
        self.gap = NonceGap(
            pending - own, await self._taken(own, pending), await self._missing(pending, own)
        )
        self._measured_at = now

    async def _taken(self, own: int, pending: int) -> int:
        """Return how many nonces others used, including those that payouts are paused for."""
        if self._conditions.present():
            return max(0, pending - own)
        acknowledged = await self._payments.acknowledged_nonce(self._network, self._sender)
        if acknowledged is None:
            return 0  # before the first payment: whatever was sent until then is acknowledged
        return await self._count_unannotated(range(max(own, acknowledged), pending))

    async def _missing(self, pending: int, own: int) -> int:
        """Return how many nonces the node waits for, and no payment on record waits with."""
        if pending >= own:
            return 0
        waiting = await self._payments.payments_in(
            self._network, EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED
        )
        held = {item.nonce for item in waiting if item.sender == self._sender}
        return own - pending - sum(pending <= nonce < own for nonce in held)

    async def _problem(self, own: int, pending: int) -> str | None:
        """Return what the hot wallet has sent without a record, in words; None: nothing.

        Looks below ``own`` once after a start: the payment journal may have brought an older copy
        of the database payments that are later than those on no record.
        """
        acknowledged, end = await self._acknowledged(own, pending), max(own, pending)
        first = max(own, acknowledged) if self._has_compared else acknowledged
        missing = await self._payments.unused_nonces(self._network, self._sender, first, end)
        if missing and await self._count_unannotated(missing):
            if pause_for(self._switch, self._wallet):
                await self._payments.acknowledge_nonce(self._network, self._sender, end)
                self._has_compared = True
        else:
            if missing:  # one day the node may not show any more what is annotated
                await self._payments.acknowledge_nonce(self._network, self._sender, end)
            self._has_compared = True
            is_told = pending > own or bool(self._conditions.present())
            if not is_told or self._switch.reason() != reason_of(self._wallet):
                return None
        named = f"nonce {missing[0]} is on no record, " if missing else ""
        return (
            f"something else sends from the hot wallet on {self._network}: {named}the network is at"
            f" nonce {pending}, this service at {own}"
        )

    async def _acknowledged(self, own: int, pending: int) -> int:
        """Return the nonce below which all are acknowledged; at first, all from before the
        service.
        """
        acknowledged = await self._payments.acknowledged_nonce(self._network, self._sender)
        if acknowledged is None:
            acknowledged = own or pending
            await self._payments.acknowledge_nonce(self._network, self._sender, acknowledged)
        return acknowledged

    async def _count_unannotated(self, nonces: Collection[int]) -> int:
        """Return how many nonces are of no annotated transaction."""
        if not nonces:
            return 0
        annotated: set[int] = set()
        for txid in await self._unrecorded.annotated(self._network):
            made = await self._connection.client.transaction(txid)
            if made is not None and made.sender.lower() == self._sender.lower():
                annotated.add(made.nonce)
        return len(nonces) - len(annotated.intersection(nonces))


class NodeReply(Struct, frozen=True):
    """A node's reply to a transaction; it proves nothing. ``submission`` None: none came."""

    text: str
    submission: EvmSubmission | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the node claims to have the transaction."""
        return self.submission in _TAKEN

    @property
    def more_may_help(self) -> bool:
        """Whether the node may take, or mine, the payment for a higher fee."""
        return self.submission in _MORE_MAY_HELP


class SigningMoment(Struct, frozen=True):
    """The state of the node just before a payment is signed.

    ``unmined``: payments that waited to be mined before ``ether``, the hot wallet's wei, was asked
    for; ``pending``: its next nonce.
    """

    unmined: list[EvmPayment]
    fees: FeeData
    ether: int
    pending: int


class _TriedTransfer(NamedTuple):
    """A transfer, and what the token says of it: the gas limit of its call, or the refusal."""

    transfer: Transfer
    recipient: str
    is_blacklisted: bool
    gas: int | NodeError


class _Funds(NamedTuple):
    """USDC units that the hot wallet has, those of payouts under way left out; those of deposits
    that are still to be swept; and those of sweeps under way, some of which it may have.
    """

    held: int
    coming: int
    under_way: int

    def after(self, orders: Sequence[EvmPaymentOrder]) -> _Funds:
        """Return what is left once the orders are paid."""
        return self._replace(held=self.held - sum(order.units for order in orders))


class EvmPayments(Payments):
    """Prepares, publishes and looks up payments.

    The methods that take a transfer raise errors.Unavailable when the node fails; the others may
    raise RpcFailure and ChainUnusable, and are for code of this folder. ``is_ours`` tells whether
    an address (EIP-55) belongs to the service; ``hot_wallet`` is the one that pays (EIP-55).
    ``writer`` is held to sign or publish. ``board``: conditions for the operator.
    """

    def __init__(
        self,
        connection: EvmConnection,
        signer: EvmSigner,
        ledger: EvmPaymentLedger,
        clock: Clock,
        is_ours: Callable[[str], Awaitable[bool]],
        nonces: EvmNonces,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._signer = signer
        self._ledger = ledger
        self._clock = clock
        self._is_ours = is_ours
        self.hot_wallet = signer.address
        self.gas = EvmGas(connection, signer.address, clock)
        self.nonces = nonces
        self.board = Conditions(connection.network.name)
        self.writer = asyncio.Lock()
        self._presence = EvmPresence(connection, self.board)
        self._payouts_waiting = 0
        # Payments that this process has signed, and that no node was given: none can have them.
        # With each, when the node was asked about it (steady ms).
        self._unseen: dict[str, int] = {}
        self._steady = steady
        # How many companions the node may be asked about: fewer once that were too many calls.
        self._room = MOST_CALLS
        # Held from reading a payment to recording how far it is: look-ups run beside the writer.
        self._recording = asyncio.Lock()

    # --- prepare -------------------------------------------------------------------------------

    @override
    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        known = await self._ledger.payment(transfer.transfer_id)
        if known is None:
            return None
        _require_same(known, transfer)
        if known.state.is_over:
            raise TransferRejected(f"its payment {known.attempts[0].txid} is {known.state}")
        return known.prepared

    @override
    async def prepare(
        self,
        transfer: Transfer,
        companions: Sequence[Transfer],
        record: Record,
        leaves: Mapping[str, int],
    ) -> Sequence[Transfer]:
        with self._connection.watched():
            async with self._payout_slot():
                await self._require_earlier_out()
                asked_at = self._steady()
                tried = companions[: self._room]
                payments = await self._sign_together(transfer, tried, leaves)

                async def commit(rows: Rows) -> None:
                    await self._ledger.add_payouts(payments, rows)

                await record([payment.prepared for payment in payments], commit)
        signed = {payment.payment_id for payment in payments}
        self._unseen |= dict.fromkeys(signed, asked_at)
        return [each for each in tried if each.transfer_id not in signed]

    async def _sign_together(
        self, transfer: Transfer, companions: Sequence[Transfer], leaves: Mapping[str, int]
    ) -> list[EvmPayment]:
        """Sign a transfer, and those of its companions that can be paid as well.

        A node that fails may have been asked too much at once: fewer go along the next time, and
        more again after each success.
        """
        try:
            payments = await self._sign(*await self._checked(transfer, companions, leaves))
        except NodeError:
            raise  # about one call
        except RpcFailure:
            self._room = len(companions) // 2
            raise
        self._room = min(2 * self._room + 1, MOST_CALLS)
        return payments

    @asynccontextmanager
    async def _payout_slot(self) -> AsyncIterator[None]:
        """The one writer, for a payout: sweeps see that it waits, and let it go first."""
        self._payouts_waiting += 1
        try:
            async with self.writer:
                yield
        finally:
            self._payouts_waiting -= 1

    async def _checked(
        self, transfer: Transfer, companions: Sequence[Transfer], leaves: Mapping[str, int]
    ) -> tuple[list[EvmPaymentOrder], SigningMoment]:
        """Return the calls to be signed now: the transfer's, and those of companions that can be
        paid as well. Raises as ``prepare`` does.

        The node must have the newest block with a payment: until then it shows that payment's units
        as still there.
        """
        # In this order: a payment found mined meanwhile counts twice, rather than not at all.
        owed, mined_to = await self._owed(), await self.mined_to()
        coming = await self._ledger.coming(self._network.name, self._network.sweep_units)
        sweeps = await self._ledger.sweeps_under_way(self._network.name)
        recipient = await self._destination(transfer)
        top = await self._connection.check()
        if top.number < mined_to:
            raise Unavailable(f"The node of {self._network.name} lags. Try again later.")
        if self._connection.paused:
            raise Unavailable(f"USDC on {self._network.name} is paused by its issuer.")
        with self._connection.client.rpc.together():
            held, moment, tried = await asyncio.gather(
                self._connection.balance(self.hot_wallet, top.number),
                self._moment(top),
                self._tried(transfer, recipient),
            )
        # Before the companions are asked about: one that waits for long must cost little.
        funds = _Funds(held - owed, coming, sum(sweep.units for sweep in sweeps))
        orders = [self._payable(tried, funds, leaves.get(transfer.transfer_id, 0))]
        for found in await self._companions(companions):
            kept = leaves.get(found.transfer.transfer_id, 0)
            with suppress(TransferRejected, Unavailable, NodeError):  # its own turn says why
                orders.append(self._payable(found, funds.after(orders), kept))
        return orders, moment

    async def _companions(self, companions: Sequence[Transfer]) -> list[_TriedTransfer]:
        """Return the companions that have no payment, and an address that may be paid."""
        fit = list[tuple[Transfer, str]]()
        for item in companions:
            if await self._ledger.payment(item.transfer_id) is None:
                with suppress(TransferRejected):  # in its own turn
                    fit.append((item, await self._destination(item)))
        with self._connection.client.rpc.together():
            return await asyncio.gather(*(self._tried(*each) for each in fit))

    async def _tried(self, transfer: Transfer, recipient: str) -> _TriedTransfer:
        """Ask the token whether it would make a transfer now."""
        is_blacklisted, gas = await asyncio.gather(
            self._connection.is_blacklisted(recipient),
            self._estimated(usdc.transfer(recipient, transfer.units)),
        )
        return _TriedTransfer(transfer, recipient, is_blacklisted, gas)

    def _payable(self, tried: _TriedTransfer, funds: _Funds, leaves: int) -> EvmPaymentOrder:
        """Return the call that makes a transfer; ``leaves``: the USDC units to be left after it.

        Raises TransferRejected, and Unavailable or NodeError when it can't be made now.
        """
        transfer, recipient, is_blacklisted, gas = tried
        if is_blacklisted:
            raise TransferRejected("the destination is on the token's blacklist")
        missing = transfer.units + leaves - funds.held - funds.coming
        if missing > funds.under_way:
            raise LacksFunds(transfer, missing - funds.under_way)
        if missing > 0 or funds.held < transfer.units:
            raise Unavailable(f"Not enough USDC is left on {self._network.name} for this payment.")
        if isinstance(gas, Reverted):
            log.warning(
                "evm_payment_preparation_failed", network=self._network.name, reason=str(gas)
            )
            raise Unavailable(
                f"The token on {self._network.name} refuses this payment just now."
            ) from gas
        if isinstance(gas, NodeError):
            raise gas
        data = usdc.transfer(recipient, transfer.units)
        return EvmPaymentOrder(
            transfer.transfer_id, EvmPurpose.TRANSFER, recipient, transfer.units,
            self._network.token, data, gas,
        )  # fmt: skip

    async def _moment(self, top: Block) -> SigningMoment:
        """Ask what a signature depends on, ``top`` being the newest block."""
        # In this order: a payment found mined meanwhile counts twice, rather than not at all.
        unmined = await self.unmined()
        with self._connection.client.rpc.together():
            return SigningMoment(
                unmined,
                *await asyncio.gather(
                    self._connection.client.fees(top),
                    self._connection.client.ether(self.hot_wallet),
                    self.nonces.pending(),
                ),
            )

    async def _owed(self) -> int:
        """Return the USDC units of payouts that wait to be mined: the chain's balance has them
        still.
        """
        waiting = await self.unmined()
        return sum(item.order.units for item in waiting if _is_payout(item))

    async def mined_to(self) -> int:
        """The newest block with a payment on record; 0: there is none."""
        return await self._ledger.mined_to(self._network.name)

    async def _destination(self, transfer: Transfer) -> str:
        """Return the address that a transfer pays (EIP-55). Raises TransferRejected."""
        if transfer.network != self._network.name:
            raise LookupError(f"{transfer.transfer_id} is to be paid on {transfer.network}")
        try:
            recipient = parse_evm_address(transfer.address, forbidden={self._network.token.lower()})
        except InvalidDestination as refused:
            raise TransferRejected(f"the destination can't be paid: {refused.message}") from refused
        if recipient == self.hot_wallet or await self._is_ours(recipient):
            raise TransferRejected("the destination is an address of the service itself")
        return recipient

    async def _estimated(self, data: bytes) -> int | NodeError:
        """Return the gas limit of a call, or the refusal: payee or balance may explain it.

        Some nodes have words of their own for a call that reverts.
        """
        try:
            return await self.gas.estimate(data)
        except NodeError as refusal:
            return refusal

    async def _require_earlier_out(self) -> None:
        """Raise Unavailable while a payout that was signed earlier is not on the network."""
        if waiting := await self.finish_earlier():
            raise Unavailable(
                f"An earlier payment on {self._network.name} is signed and not on the network yet."
                " Nothing new is signed before it is.",
                details={"transferId": waiting},
            )

    async def _sign(
        self, orders: Sequence[EvmPaymentOrder], moment: SigningMoment
    ) -> list[EvmPayment]:
        """Sign the first call, and the others that can be paid for, with the next nonces.

        A nonce is used up only once it is on record.
        """
        calls = await self._paid_for(await self._priced(orders, moment), moment)
        nonce, payments = await self.nonces.next(moment.pending), list[EvmPayment]()
        for order, price in calls:
            made = self.attempt(order, nonce + len(payments), price)
            payments.append(
                EvmPayment(
                    self._network.name, self.hot_wallet, nonce + len(payments), order, (made,),
                    made.made_at,
                )
            )  # fmt: skip
        return payments

    async def _priced(
        self, orders: Sequence[EvmPaymentOrder], moment: SigningMoment
    ) -> list[PricedCall]:
        """Return the calls with their prices. Raises Unavailable for the first if gas is too dear
        for it; others are left out then.
        """
        with self._connection.client.rpc.together():
            found = await asyncio.gather(
                *(self.gas.first_price(order, moment.fees) for order in orders),
                return_exceptions=True,
            )
        calls = []
        for order, price in zip(orders, found, strict=True):
            if isinstance(price, GasPrice):
                calls.append(PricedCall(order, price))
            elif order is orders[0] or not isinstance(price, Unavailable):
                raise price
        return calls

    def attempt(self, order: EvmPaymentOrder, nonce: int, price: GasPrice) -> Attempt:
        """Sign; nothing is recorded or sent."""
        plan = TransactionPlan(
            chain_id=self._network.chain_id, nonce=nonce, to=order.contract, gas=order.gas,
            max_fee=price.max_fee, tip=price.tip, data=order.data,
        )  # fmt: skip
        signed = self._signer.sign(plan)
        now = self._clock.now_ms()
        return Attempt(signed.txid, signed.raw.hex(), price.max_fee, price.tip, now)

    async def _paid_for(
        self, calls: Sequence[PricedCall], moment: SigningMoment
    ) -> Sequence[PricedCall]:
        """Return the first calls, as many as the hot wallet has the ether for. Raises Unavailable
        when that is none.

        Payments that wait to be mined count as spent. Only payouts and refunds may use the reserve.
        """
        first, reserve = calls[0].order, 0
        if first.purpose is not EvmPurpose.TRANSFER or is_withdrawal(first.payment_id):
            reserve = self._network.gas_reserve
        needed = await self.gas.needed(calls, moment.unmined)
        fit = sum(wei + reserve <= moment.ether for wei in needed)
        if not fit:
            raise Unavailable(f"The hot wallet on {self._network.name} lacks ether for gas.")
        return calls[:fit]

    # --- earlier payments ----------------------------------------------------------------------

    async def finish_earlier(self) -> str | None:
        """Publish signed payments of the service's own; return a payout that is not on the network
        yet.

        The order layer alone publishes a payout, and holds it back while payouts are paused. Only
        for the holder of ``writer``.
        """
        earlier = await self.own(EvmPaymentState.PREPARED)
        for payment in earlier:
            if not _is_payout(payment):
                await self.advance(payment.payment_id)
        payouts = [payment for payment in earlier if _is_payout(payment)]
        for payment, found in zip(payouts, await self.verdicts(payouts), strict=True):
            if isinstance(found, Exception):
                raise found
            if found.outcome is Outcome.ABSENT:
                return payment.payment_id
        return None

    # --- publish -------------------------------------------------------------------------------

    @override
    async def publish(self, transfer: Transfer) -> Verdict:
        with self._connection.watched():
            payment = await self._known(transfer)
            async with self._payout_slot():
                return await self.advance(payment.payment_id)

    async def cost(self, order: EvmPaymentOrder) -> CallCost:
        """The most that a call may cost. Raises Unavailable: gas too dear, or ether lacking."""
        moment = await self._moment(await self._connection.head())
        price = await self.gas.first_price(order, moment.fees)
        await self._paid_for([PricedCall(order, price)], moment)
        return CallCost(order.gas * price.max_fee, await self.gas.l1_fee(order))

    async def send(self, order: EvmPaymentOrder, sweep: Sweep | None = None) -> Verdict:
        """Sign, commit and publish a call of the service's own. Raises as prepare does."""
        async with self.writer:
            await self._require_earlier_out()
            moment = await self._moment(await self._connection.head())
            (payment,) = await self._sign([order], moment)
            await self._ledger.add_payment(payment, sweep)
            return await self.advance(payment.payment_id)

    async def advance(self, payment_id: str) -> Verdict:
        """Look the payment up; publish its signed bytes when it is absent; look again.

        A payment that no node was given is not looked up before: its bytes and its nonce are its
        own, wherever else they may be. A payout goes out with all that were signed with it, lowest
        nonce first: a nonce waits for those below it. Only for the holder of ``writer``.
        """
        payment = await self.payment(payment_id)
        if payment.state is EvmPaymentState.PREPARED:
            # It may have waited for long, and fails if it is mined while the token is paused.
            if not self._was_just_asked_about(payment_id):
                await self._connection.check()
            if self._connection.paused:
                why = "the token is paused: published when it moves again"
                return Verdict(Outcome.UNKNOWN, why)
        else:
            verdict = await self.verdict(payment)
            if verdict.outcome is not Outcome.ABSENT:
                return verdict
            payment = await self.payment(payment_id)
        if payment.state.is_over:
            return Verdict(Outcome.UNKNOWN, f"the payment is {payment.state}: not published")
        along = await self._along(payment)
        replies = dict(zip(along, await self.hand_over(along), strict=True))
        verdict = await self.verdict(await self.payment(payment_id))
        if verdict.outcome is Outcome.ABSENT:
            said = replies[payment].text
            return Verdict(Outcome.UNKNOWN, f"not on the network yet; the node said: {said}")
        return verdict

    def _was_just_asked_about(self, payment_id: str) -> bool:
        asked_at = self._unseen.get(payment_id)
        return asked_at is not None and self._steady() - asked_at < _JUST_ASKED_MS

    async def _along(self, payment: EvmPayment) -> list[EvmPayment]:
        """Return the payments that are handed over together with one, lowest nonce first.

        None of which the network has shown anything: its own turn says what becomes of it.
        """
        if payment.state is not EvmPaymentState.PREPARED or not _is_payout(payment):
            return [payment]
        waiting = [item for item in await self.unmined() if _is_payout(item)]
        signed = [item for item in waiting if item.state is EvmPaymentState.PREPARED]
        return signed if payment in signed else [payment]

    async def _mark_published(self, payments: Sequence[EvmPayment]) -> None:
        """Record that a node may have them. Raises StoreConflict when one is over by now."""
        async with self._recording:
            known, now = [await self.payment(e.payment_id) for e in payments], self._clock.now_ms()
            await self._ledger.put_payment(
                *(replace(e, state=EvmPaymentState.PUBLISHED, published_at=now) for e in known)
            )

    async def hand_over(self, payments: Sequence[EvmPayment]) -> list[NodeReply]:
        """Submit of each payment the attempt that may be mined, in this order; return the node's
        replies. Only for the holder of ``writer``.
        """
        if unknown := [each for each in payments if each.state is EvmPaymentState.PREPARED]:
            await self._mark_published(unknown)
        for each in payments:
            self._unseen.pop(each.payment_id, None)
        attempts = [await self.paid_out_attempt(each) or each.latest for each in payments]
        answers = await self._connection.client.submit_each(
            [bytes.fromhex(attempt.raw) for attempt in attempts]
        )
        return [_reply(*each) for each in zip(payments, attempts, answers, strict=True)]

    async def paid_out_attempt(self, payment: EvmPayment) -> Attempt | None:
        """Return the attempt by which an authorization has paid its order, which has spent that.

        After a reorganisation it must come back as it was: its deposit is known by its txid, and
        another attempt would make a deposit that is sent back.
        """
        if payment.order.purpose is not EvmPurpose.AUTHORIZATION:
            return None
        return await self._ledger.paid_out_attempt(payment)

    # --- look up -------------------------------------------------------------------------------

    @override
    async def look_up(self, transfer: Transfer) -> Verdict:
        with self._connection.watched():
            payment = await self._known(transfer)
            if payment.state is EvmPaymentState.PREPARED and payment.payment_id in self._unseen:
                return Verdict(Outcome.ABSENT)
            return await self.verdict(payment)

    async def verdict(self, payment: EvmPayment, top: Block | None = None) -> Verdict:
        """Ask the node, record the payment's state, and return the verdict.

        ``top``: the newest block, if that is known.
        """
        judged = await self._presence.judge(payment, top)
        after = judged.payment
        if payment.state is EvmPaymentState.FAILED:
            after = replace(after, state=EvmPaymentState.FAILED)  # wherever it is mined by now
        if after == payment:
            return judged.verdict
        async with self._recording:
            if await self._ledger.payment(payment.payment_id) == payment:
                await self._ledger.put_payment(after)
                return judged.verdict
        # Something else was found out, and recorded, while the node was asked.
        if judged.verdict.outcome is Outcome.FAILED:
            return Verdict(Outcome.UNKNOWN, "the payment changed while it was looked up")
        return judged.verdict

    async def verdicts(
        self, payments: Sequence[EvmPayment], top: Block | None = None
    ) -> list[Verdict | Exception]:
        """Return the verdict of each payment, or the failure of its look-up, as ``verdict`` does.

        Their questions are sent together.
        """
        with self._connection.client.rpc.together():
            found = await asyncio.gather(
                *(self.verdict(payment, top) for payment in payments), return_exceptions=True
            )
        return [each for each in found if isinstance(each, Verdict | Exception)]

    async def _known(self, transfer: Transfer) -> EvmPayment:
        payment = await self._ledger.payment(transfer.transfer_id)
        if payment is None or payment.attempts[0].txid != transfer.txid:
            # Only a database put together from two could bring this about: touch nothing.
            raise LookupError(f"the payment of {transfer.transfer_id} is not the recorded one")
        return payment

    async def payment(self, payment_id: str) -> EvmPayment:
        """Return the payment as last committed. Raises LookupError."""
        payment = await self._ledger.payment(payment_id)
        if payment is None:
            raise LookupError(f"no payment is recorded for {payment_id}")
        return payment

    async def own(self, *states: EvmPaymentState) -> list[EvmPayment]:
        """Return this hot wallet's payments in these states, lowest nonce first."""
        found = await self._ledger.payments_in(self._network.name, *states)
        return [item for item in found if item.sender == self._signer.address]

    async def under_way(self) -> bool:
        """Whether a payment is signed and has not ended."""
        return bool(await self._ledger.payments_in(self._network.name, *_LIVE))

    async def unmined(self) -> list[EvmPayment]:
        """Return signed payments with whose nonce nothing was mined as of the last check.

        Once something was, the wallet's balances include it.
        """
        return [
            item
            for item in await self.own(*_LIVE)
            if item.inclusion is None and item.conflict is None
        ]

    # --- conditions -----------------------------------------------------------------------------

    async def conditions(self) -> list[Condition]:
        """Return conditions for the operator."""
        overdue = faults(await self._overdue())
        return overdue + self.board.present() + self.nonces.conditions()

    async def _overdue(self) -> str | None:
        """Return the first payment that is signed and has long not been mined, in words."""
        since = self._clock.now_ms() - _LONG_MS
        late = [item for item in await self.unmined() if item.prepared_at < since]
        if not late:
            return None
        which = f"payment {late[0].payment_id} on {self._network.name}"
        return f"{which} is signed and not mined for long, since {iso8601(late[0].prepared_at)}"

    @property
    def is_payout_waiting(self) -> bool:
        """Whether a payout waits for the writer, or has it."""
        return self._payouts_waiting > 0

    async def payouts_first(self) -> bool:
        """Whether sweeps have to wait for a payout that is not yet signed, published or mined."""
        return self.is_payout_waiting or any(map(_is_payout, await self.unmined()))

    async def reconcile(self) -> None:
        """Find out once after a start whether the hot wallet has sent transactions that are not on
        record.
        """
        async with self.writer:
            await self.nonces.reconcile()

    @override
    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        payment, network = await self._known(transfer), self._network
        mined = payment.inclusion
        is_settled = payment.state is EvmPaymentState.SETTLED
        if not is_settled or mined is None or mined.log_index is None:
            raise Unavailable("The payment is not settled yet: there is no receipt for it.")
        return {
            "network": network.name,
            "asset": USDC.symbol,
            "txid": mined.txid,
            "address": payment.order.recipient,
            "amount": format_units(payment.order.units, USDC),
            "block": mined.block.number,
            "chainId": network.chain_id,
            "token": network.token,
            "logIndex": mined.log_index,
        }


def _reply(
    payment: EvmPayment, attempt: Attempt, answer: EvmSubmissionResult | RpcFailure
) -> NodeReply:
    if isinstance(answer, RpcFailure):
        log.warning("evm_submit_failed", txid=attempt.txid, reason=str(answer))
        return NodeReply(str(answer))
    said = f"{answer.submission.value} {answer.text}".strip()
    log.info("evm_submitted", txid=attempt.txid, nonce=payment.nonce, answer=said)
    return NodeReply(said, answer.submission)


def _is_payout(payment: EvmPayment) -> bool:
    return payment.order.purpose is EvmPurpose.TRANSFER


def _require_same(payment: EvmPayment, transfer: Transfer) -> None:
    paid = (payment.order.recipient.lower(), payment.order.units)
    if paid != (transfer.address.lower(), transfer.units):
        raise LookupError(f"the payment of {transfer.transfer_id} has another recipient or amount")
