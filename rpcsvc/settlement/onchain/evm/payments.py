"""Pays USDC from the hot wallet of one network, exactly once.

Before an order is made its address is looked up on the blacklist, and before signing everything
that could stop the payment is checked.

A payment is a nonce. It is committed with its signed bytes before it may be published, and its
nonce is never given to anything else, so at most one of its transactions is mined. What became of
it is read off the network (presence.py), never from an error. The node's nonce is never above the
database's; where it is, the database is an older copy or the key is in other hands, and nothing
more is signed (unrecorded.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from rpcsvc.clock import Clock, iso8601, steady_ms
from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import parse_evm_address
from rpcsvc.domain.order import Transfer
from rpcsvc.domain.withdrawals import is_withdrawal
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.orders.ports.wallets import (
    NonceGap,
    Outcome,
    PreparedTransfer,
    Record,
    TransferRejected,
    Verdict,
)
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, RpcFailure
from rpcsvc.settlement.onchain.evm.gas import CallCost, EvmGas, GasPrice, HotBalances
from rpcsvc.settlement.onchain.evm.keys import EvmSigner
from rpcsvc.settlement.onchain.evm.node import Conditions, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Reverted, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.publisher import EvmPublisher, EvmUpkeep
from rpcsvc.settlement.onchain.evm.records import (
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    EvmReceipt,
    Sweep,
)
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger, pause_for, reason_of
from rpcsvc.store.database import Rows

log = structlog.get_logger(__name__)


# How long an order waits for the answer; a slow node keeps nobody from ordering.
WAIT_SECONDS: Final = 0.5
KEPT_MS: Final = 60_000
_MOST_KEPT: Final = 4_096


class Blacklist:
    """The blacklist of one token, as its node reports it."""

    def __init__(self, connection: EvmConnection, now_ms: Callable[[], int] = steady_ms) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._kept: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        self._has_none = False  # the token has no such function

    async def has(self, address: str) -> bool:
        """Whether the address is on the blacklist.

        False, with a line in the log, when the node does not answer in time.
        """
        if self._has_none:
            return False
        now, key = self._now_ms(), address.lower()
        kept = self._kept.get(key)
        if kept is not None and now - kept[0] < KEPT_MS:
            return kept[1]
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                found = await self._connection.is_blacklisted(address)
        except ChainUnusable:
            self._has_none = True
            log.info("blacklist_not_found", network=self._connection.network.name)
            return False
        except (TimeoutError, RpcFailure) as failure:
            reason = str(failure) or f"no answer within {WAIT_SECONDS} s"
            log.warning(
                "blacklist_check_failed", network=self._connection.network.name, reason=reason
            )
            return False
        self._keep(key, now, found=found)
        return found

    def _keep(self, key: str, now: int, *, found: bool) -> None:
        self._kept[key] = (now, found)
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)


class EvmChecks:
    """Checks transfers of one network. Everything may raise RpcFailure and ChainUnusable."""

    def __init__(
        self,
        connection: EvmConnection,
        gas: EvmGas,
        hot_wallet: str,
        is_ours: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._gas = gas
        self._hot_wallet = hot_wallet
        self._is_ours = is_ours

    async def order_of(self, transfer: Transfer, owed: int, mined_to: int) -> EvmPaymentOrder:
        """The call that pays it. ``owed``: units that are signed for others and not mined yet.

        ``mined_to``: the newest block with a payment that is mined and so not owed any more. A
        node that has not got there shows what that took as still there.

        Raises TransferRejected for a destination that can't be paid; Unavailable while the node
        lags, the token is paused or the hot wallet holds too little.
        """
        if transfer.network != self._network.name:
            raise LookupError(f"{transfer.transfer_id} is to be paid on {transfer.network}")
        recipient = await self._destination(transfer.address)
        top = await self._connection.check()
        if top.number < mined_to:
            raise Unavailable(f"The node of {self._network.name} lags. Try again later.")
        if self._connection.paused:
            raise Unavailable(f"USDC on {self._network.name} is paused by its issuer.")
        if await self._connection.is_blacklisted(recipient):
            raise TransferRejected("the destination is on the token's blacklist")
        if await self._connection.balance(self._hot_wallet, top.number) < owed + transfer.units:
            raise Unavailable(f"Not enough USDC is left on {self._network.name} for this payment.")
        data = usdc.transfer(recipient, transfer.units)
        return EvmPaymentOrder(
            transfer.transfer_id, EvmPurpose.TRANSFER, recipient, transfer.units,
            self._network.token, data, await self._gas_for(data),
        )  # fmt: skip

    async def _destination(self, address: str) -> str:
        try:
            recipient = parse_evm_address(address, forbidden={self._network.token.lower()})
        except InvalidDestination as refused:
            raise TransferRejected(f"the destination can't be paid: {refused.message}") from refused
        if recipient == self._hot_wallet or await self._is_ours(recipient):
            raise TransferRejected("the destination is an address of the service itself")
        return recipient

    async def _gas_for(self, data: bytes) -> int:
        try:
            return await self._gas.estimate(self._network.token, data)
        except Reverted as error:
            log.warning(
                "evm_payment_preparation_failed", network=self._network.name, reason=str(error)
            )
            raise Unavailable(
                f"The token on {self._network.name} refuses this payment just now."
            ) from error


_NONCE: Final = "nonce"
_MEASURED_MS: Final = 60_000


class EvmNonces:
    """The nonces of one hot wallet on one network. What asks the node may raise RpcFailure.

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
        self._has_looked = False
        self._steady = steady
        self._measured_at: int | None = None
        self.gap: NonceGap | None = None

    def conditions(self) -> list[str]:
        """Conditions for the operator, in words."""
        return self._conditions.texts()

    async def next(self) -> int:
        """The nonce to sign with; only for who holds the network's one writer.

        Raises errors.Unavailable while there are transactions that are not on record, and the
        operator has not looked at them.
        """
        # In this order: what is committed meanwhile can only be more.
        pending = await self._connection.client.nonce(self._sender, Tag.PENDING)
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
        """Find out once after a start whether it may sign, and pause payouts if not.

        And again as long as it may not: once the operator has let money out, health is well.
        """
        if self._has_looked and not self._conditions.texts():
            return
        try:
            await self.next()
        except Unavailable:
            # If it has looked, the condition says why. If not, the database or the node has failed.
            if not self._has_looked:
                raise

    async def measure(self) -> None:
        """Compare the node's nonces with those on record, once a minute. Decides on nothing."""
        now = self._steady()
        if self._measured_at is not None and now - self._measured_at < _MEASURED_MS:
            return
        # In the order of ``next``, for the same reason.
        pending = await self._connection.client.nonce(self._sender, Tag.PENDING)
        own = await self._payments.next_nonce(self._network, self._sender)
        self.gap = NonceGap(
            pending - own, await self._unexplained(own, pending), await self._missing(pending, own)
        )
        self._measured_at = now

    async def _unexplained(self, own: int, pending: int) -> int:
        """How many nonces were used by somebody else; those that payouts are paused for, too."""
        if self._conditions.texts():
            return max(0, pending - own)
        acknowledged = await self._unrecorded.acknowledged_nonce(self._network, self._sender)
        if acknowledged is None:
            return 0  # before the first payment: whatever was sent until then is acknowledged
        return await self._count_unrecorded(max(own, acknowledged), pending)

    async def _missing(self, pending: int, own: int) -> int:
        """How many nonces the node waits for, and no payment on record waits with."""
        if pending >= own:
            return 0
        waiting = await self._payments.payments_in(
            self._network, EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED
        )
        held = {item.nonce for item in waiting if item.sender == self._sender}
        return own - pending - sum(pending <= nonce < own for nonce in held)

    async def _problem(self, own: int, pending: int) -> str | None:
        acknowledged = await self._acknowledged(own, pending)
        if pending <= own:
            return None
        if await self._count_unrecorded(max(own, acknowledged), pending):
            if pause_for(self._switch, self._wallet):
                await self._unrecorded.acknowledge_nonce(self._network, self._sender, pending)
        elif self._switch.reason() != reason_of(self._wallet):
            return None
        return (
            f"something else sends from the hot wallet on {self._network}: the network is at nonce"
            f" {pending}, this service at {own}"
        )

    async def _acknowledged(self, own: int, pending: int) -> int:
        """Nonces below this are acknowledged. At first: all from before the service."""
        acknowledged = await self._unrecorded.acknowledged_nonce(self._network, self._sender)
        if acknowledged is None:
            acknowledged = own or pending
            await self._unrecorded.acknowledge_nonce(self._network, self._sender, acknowledged)
        return acknowledged

    async def _count_unrecorded(self, first: int, end: int) -> int:
        """How many nonces from ``first`` on, below ``end``, are of no annotated transaction."""
        if first >= end:
            return 0
        annotated: set[int] = set()
        for txid in await self._unrecorded.annotated(self._network):
            made = await self._connection.client.transaction(txid)
            if made is not None and made.sender.lower() == self._sender.lower():
                annotated.add(made.nonce)
        return end - first - sum(first <= nonce < end for nonce in annotated)


_LONG_MS: Final = 10 * 60 * 1000


class EvmPayments:
    """Prepares, publishes and follows payments. All may raise RpcFailure and ChainUnusable.

    ``is_ours`` tells whether an address (EIP-55) belongs to the service; ``hot_wallet`` is the one
    that pays (EIP-55).
    """

    def __init__(
        self,
        connection: EvmConnection,
        signer: EvmSigner,
        ledger: EvmPaymentLedger,
        clock: Clock,
        is_ours: Callable[[str], Awaitable[bool]],
        nonces: EvmNonces,
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._ledger = ledger
        self._clock = clock
        self.hot_wallet = signer.address
        self._gas = EvmGas(connection, signer.address)
        self._checks = EvmChecks(connection, self._gas, signer.address, is_ours)
        self._writer = asyncio.Lock()
        self._nonces = nonces
        self._payouts_waiting = 0
        self._conditions = Conditions(connection.network.name)
        self._publisher = EvmPublisher(connection, signer, ledger, clock, self._conditions)
        self._upkeep = EvmUpkeep(
            connection, self._publisher, self._gas, ledger, clock, self._conditions
        )

    # --- prepare -------------------------------------------------------------------------------

    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        """The transfer's payment if it is on record. Raises TransferRejected when it failed."""
        known = await self._ledger.payment(transfer.transfer_id)
        if known is None:
            return None
        _require_same(known, transfer)
        if known.state.is_over:
            raise TransferRejected(f"its payment {known.attempts[0].txid} is {known.state}")
        return _prepared(known)

    async def prepare(self, transfer: Transfer, record: Record) -> None:
        """Sign and record.

        Raises TransferRejected for a destination that can't be paid; Unavailable while an earlier
        payout is unpublished, while the wallet has sent what is not on record, for want of USDC or
        ether, or if the gas would cost too much.
        """
        async with self._payout_slot():
            payment = await self._sign(await self._checked(transfer))

            async def commit(rows: Rows) -> None:
                await self._ledger.add_payment(payment, rows=rows)

            await record(_prepared(payment), commit)

    @asynccontextmanager
    async def _payout_slot(self) -> AsyncIterator[None]:
        """The one writer, for a payout: sweeps see that it waits, and let it go first."""
        self._payouts_waiting += 1
        try:
            async with self._writer:
                yield
        finally:
            self._payouts_waiting -= 1

    async def _checked(self, transfer: Transfer) -> EvmPaymentOrder:
        """The call that pays it. Raises as ``prepare`` does."""
        # In this order: what is found mined meanwhile counts twice, rather than not at all.
        owed = await self._owed()
        return await self._checks.order_of(transfer, owed, await self._mined_to())

    async def _owed(self) -> int:
        """USDC units of payouts that wait to be mined: the chain's balance has them still."""
        waiting = await self._publisher.unmined()
        return sum(item.order.units for item in waiting if _is_payout(item))

    async def _mined_to(self) -> int:
        """The newest block with a payment that is mined and not settled; 0: there is none."""
        live = await self._publisher.own(EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED)
        return max((item.inclusion.block.number for item in live if item.inclusion), default=0)

    async def estimate(self, data: bytes, most: int | None = None) -> int:
        """The gas limit for the hot wallet's call of the token, that may take ``most``.

        Raises Reverted.
        """
        return await self._gas.estimate(self._network.token, data, most)

    async def _sign(self, order: EvmPaymentOrder) -> EvmPayment:
        """Sign with the next nonce, which is used up only once that is on record."""
        if waiting := await self._finish_earlier():
            raise Unavailable(
                f"An earlier payment on {self._network.name} is signed and not on the network yet."
                " Nothing new is signed before it is.",
                details={"transferId": waiting},
            )
        price = await self._gas.first_price(order)
        await self._require_ether(order, price)
        nonce = await self._nonces.next()
        attempt = self._publisher.attempt(order, nonce, price)
        return EvmPayment(
            self._network.name, self.hot_wallet, nonce, order, (attempt,), attempt.made_at
        )

    async def _require_ether(self, order: EvmPaymentOrder, price: GasPrice) -> None:
        """Raise Unavailable unless the hot wallet has the ether for a payment.

        Payments that wait to be mined count as spent. Only payouts and refunds may use the reserve.
        """
        needed = await self._gas.needed(order, price, await self._publisher.unmined())
        if order.purpose is not EvmPurpose.TRANSFER or is_withdrawal(order.payment_id):
            needed += self._network.gas_reserve
        if await self._connection.client.ether(self.hot_wallet) < needed:
            raise Unavailable(f"The hot wallet on {self._network.name} lacks ether for gas.")

    # --- what was signed earlier ---------------------------------------------------------------

    async def _finish_earlier(self) -> str | None:
        """Publish what is signed and was not published; a payout that is not on the network yet.

        A payout is published by the order layer alone, which holds it back while payouts are
        paused.
        """
        for earlier in await self._publisher.own(EvmPaymentState.PREPARED):
            if not _is_payout(earlier):
                await self._publisher.advance(earlier.payment_id)
            elif (await self._publisher.verdict(earlier)).outcome is Outcome.ABSENT:
                return earlier.payment_id
        return None

    # --- publish -------------------------------------------------------------------------------

    async def publish(self, transfer: Transfer) -> Verdict:
        """Hand the payment to the network, unless it has it already; then what it says of it."""
        payment = await self._known(transfer)
        async with self._payout_slot():
            return await self._publisher.advance(payment.payment_id)

    async def cost(self, order: EvmPaymentOrder) -> CallCost:
        """The most that a call may cost. Raises Unavailable: gas too dear, or ether lacking."""
        price = await self._gas.first_price(order)
        await self._require_ether(order, price)
        return CallCost(order.gas * price.max_fee, await self._gas.l1_fee(order))

    async def send(self, order: EvmPaymentOrder, sweep: Sweep | None = None) -> Verdict:
        """Sign, commit and publish a call of the service's own. Raises as prepare does."""
        async with self._writer:
            payment = await self._sign(order)
            await self._ledger.add_payment(payment, sweep)
            return await self._publisher.advance(payment.payment_id)

    # --- look up -------------------------------------------------------------------------------

    async def look_up(self, transfer: Transfer) -> Verdict:
        """The outcome of a transfer's payment on the network."""
        return await self._publisher.verdict(await self._known(transfer))

    async def _known(self, transfer: Transfer) -> EvmPayment:
        payment = await self._ledger.payment(transfer.transfer_id)
        first = None if payment is None else payment.attempts[0]
        signed = None if first is None else (first.txid, first.raw)
        if payment is None or signed != (transfer.txid, transfer.raw):
            # Only a database put together from two could bring this about: touch nothing.
            raise LookupError(f"the payment of {transfer.transfer_id} is not the recorded one")
        return payment

    # --- afterwards ----------------------------------------------------------------------------

    async def maintain(self) -> None:
        """Finish, publish again and replace what needs it. To be called every few seconds."""
        top = await self._connection.check()
        async with self._writer:
            await self._finish_earlier()
        published = await self._publisher.own(EvmPaymentState.PUBLISHED)
        self._upkeep.forget_all_but({payment.payment_id for payment in published})
        for payment in published:
            # One at a time: a payout does not wait for all of them.
            async with self._writer:
                await self._upkeep.follow(payment.payment_id)
        async with self._writer:
            await self._upkeep.watch_settled(top)

    # --- conditions -----------------------------------------------------------------------------

    def conditions(self) -> list[str]:
        """Conditions for the operator, in words."""
        return self._conditions.texts() + self._nonces.conditions()

    async def stuck(self) -> str | None:
        """For the operator: the first payment that is signed and has long not been mined."""
        since = self._clock.now_ms() - _LONG_MS
        late = [item for item in await self._publisher.unmined() if item.prepared_at < since]
        if not late:
            return None
        which = f"payment {late[0].payment_id} on {self._network.name}"
        return f"{which} is signed and not mined for long, since {iso8601(late[0].prepared_at)}"

    async def payouts_first(self) -> bool:
        """Whether sweeps have to wait for a payout that is not yet signed, published or mined."""
        return self._payouts_waiting > 0 or any(map(_is_payout, await self._publisher.unmined()))

    async def reconcile(self) -> None:
        """Find out once after a start whether the hot wallet has sent what is not on record."""
        async with self._writer:
            await self._nonces.reconcile()

    async def measure_nonces(self) -> None:
        """Compare the hot wallet's nonces on the network with those on record, for the metrics."""
        await self._nonces.measure()

    def nonce_gap(self) -> NonceGap | None:
        """What that found; None before."""
        return self._nonces.gap

    async def refresh_gas(self) -> None:
        """Refresh fees and the hot wallet's balances. To be called every few seconds."""
        await self._gas.poll()

    def gas_fee(self) -> int:
        """Wei that a payout costs, with margin, as of the last refresh. Raises Unavailable."""
        return self._gas.payout_cost()

    def authorization_gas_fee(self) -> int:
        """Wei that a signed authorization costs, in the same way."""
        return self._gas.authorization_cost()

    def gas_problem(self) -> str | None:
        """Why the cost of a payout is unknown, for the operator; None: known, or no refresh yet."""
        return self._gas.problem

    def sweep_problem(self) -> str | None:
        """Why no sweep can be paid for, as of the last refresh; None: nothing is known against it.

        It saves the questions that end in the same refusal.
        """
        if self._gas.is_too_dear():
            return f"gas on {self._network.name} is too dear for a payment right now"
        hot = self._gas.hot
        if hot is not None and hot.ether < self._network.gas_reserve:
            return f"the hot wallet on {self._network.name} lacks ether for gas"
        return None

    def is_blacklisted(self) -> bool:
        """Whether the token was frozen for the hot wallet at the last refresh."""
        return self._gas.is_blacklisted

    def hot(self) -> HotBalances | None:
        """The hot wallet's balances at the last refresh; None before one."""
        return self._gas.hot

    async def receipt(self, transfer: Transfer) -> EvmReceipt:
        """The proof of a settled payout. Raises Unavailable before that."""
        payment = await self._known(transfer)
        mined = payment.inclusion
        if (
            payment.state is not EvmPaymentState.SETTLED
            or mined is None
            or mined.log_position is None
            or mined.log_index is None
        ):
            raise Unavailable("The payment is not settled yet: there is no receipt for it.")
        return EvmReceipt(
            transfer.transfer_id, self._network.name, self._network.chain_id, self._network.token,
            mined.txid, mined.log_position, mined.log_index, payment.order.recipient,
            payment.order.units, mined.block.number, mined.fee,
        )  # fmt: skip


def _is_payout(payment: EvmPayment) -> bool:
    return payment.order.purpose is EvmPurpose.TRANSFER


def _prepared(payment: EvmPayment) -> PreparedTransfer:
    """As its order knows it: by its first attempt."""
    first = payment.attempts[0]
    return PreparedTransfer(first.txid, first.raw, (payment.payment_id,))


def _require_same(payment: EvmPayment, transfer: Transfer) -> None:
    paid = (payment.order.recipient.lower(), payment.order.units)
    if paid != (transfer.address.lower(), transfer.units):
        raise LookupError(f"the payment of {transfer.transfer_id} has another recipient or amount")
