"""Carries out signed USDC authorizations (EIP-3009) on one EVM network, at the service's expense.

The hot wallet sends ``transferWithAuthorization`` as a payment of its own, at most once for each
authorization. The outcome of an authorization is read from the token, no matter who sent it: it has
failed only when its nonce went to something else, or its window closed unused, deep in the chain.

``GasBudget`` bounds the gas of authorizations in 24 hours, on all EVM networks together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import structlog

from rpcsvc.clock import DAY_MS, Clock
from rpcsvc.domain import usdc
from rpcsvc.domain.authorizations import (
    LEAST_SECONDS,
    NOT_SIGNED,
    AuthorizationRefused,
    Reason,
    Refusal,
    is_signed_by_key,
)
from rpcsvc.domain.money import USDC, format_units, mul_div_ceil
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition
from rpcsvc.orders.authorizations import Carried
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm.gas import CallCost
from rpcsvc.settlement.onchain.evm.node import Conditions, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmCall, Log, LogFilter, Receipt
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmPayments
from rpcsvc.settlement.onchain.evm.records import (
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    GasUse,
)
from rpcsvc.store.authorizations import AuthorizationKey, AuthorizationRecord

log = structlog.get_logger(__name__)

# How long before its record others may have used an authorization.
_LOOK_BACK_SECONDS: Final = 3_600
# An authorization signed later than this would hardly be mined within its window.
_LEAST_TO_SEND: Final = LEAST_SECONDS // 2
_LONG_MS: Final = 10 * 60_000
# Between the tries to send a refused authorization, whose window may be LEAST_SECONDS.
_FIRST_PAUSE_MS: Final = 4_000
_LONGEST_PAUSE_MS: Final = 30_000
_NAMED_BYTES: Final = 16
# The token has contract wallets judge their signatures, by code that anyone may have written.
_MOST_GAS: Final = 1_000_000
_WEI: Final = 10**18
_FAILED: Final = EvmPaymentState.FAILED
_FINAL: Final = frozenset({EvmPaymentState.SETTLED, EvmPaymentState.FAILED})


# --- the budget for gas --------------------------------------------------------------------------


class _Spent(NamedTuple):
    """The gas of 24 hours: given away, and borne by orders whose payment may yet fail."""

    given: int
    at_risk: int


class GasBudget:
    """The most that gas for signed authorizations may cost in 24 hours, in USDC units.

    It bounds the gas that the service gives away: of authorizations whose order does not bear the
    gas, and of those that failed. Gas that an order bears is bounded by the same amount, but only
    while its payment may yet fail. Both are read from the payments on record, so that a restart
    forgets nothing.

    ``units`` are the budget; ``coin_prices``: USDC units for a whole coin, by network. ``spent`` is
    what was given away as of the last ``refresh``; None before one.
    """

    def __init__(
        self, units: int, coin_prices: Mapping[str, int], ledger: EvmPaymentLedger, clock: Clock
    ) -> None:
        self._units = units
        self._coin_prices = coin_prices
        self._ledger = ledger
        self._clock = clock
        # Stands for the L1 fee of a payment whose own is not known: the most of the last one.
        self._l1_fees: dict[str, int] = {}
        self.spent: int | None = None
        self._deciding = asyncio.Lock()
        self._held = {False: 0, True: 0}  # by whether the order bears it

    async def refresh(self) -> int:
        """The gas given away in 24 hours, pending payments included. Raises errors.Unavailable."""
        return (await self._read()).given

    async def _read(self) -> _Spent:
        since, given, at_risk = self._clock.now_ms() - DAY_MS, 0, 0
        for network, price in self._coin_prices.items():
            uses = await self._ledger.authorization_gas(network, since)
            l1_fee = self._l1_fees.get(network, 0)

            def cost(costs: list[GasUse], price: int = price, l1_fee: int = l1_fee) -> int:
                wei = sum(u.wei + (l1_fee if u.l1_fee is None else u.l1_fee) for u in costs)
                return mul_div_ceil(wei, price, _WEI)

            given += cost([u for u in uses if not u.is_paid or u.state is _FAILED])
            at_risk += cost([u for u in uses if u.is_paid and u.state not in _FINAL])
        self.spent = given
        return _Spent(given, at_risk)

    async def require(self, network: str, cost: CallCost, *, is_paid: bool) -> None:
        """Raise errors.Unavailable when a call would cost more than is left."""
        async with self.spending(network, cost, is_paid=is_paid):
            pass

    @asynccontextmanager
    async def spending(self, network: str, cost: CallCost, *, is_paid: bool) -> AsyncIterator[None]:
        """Hold the most that a call may cost until its payment is on record.

        ``is_paid``: its order bears the gas. Raises errors.Unavailable when that is more than is
        left: concurrent calls, on any network, never pass the bound together.
        """
        self._l1_fees[network] = cost.l1_fee
        needed = mul_div_ceil(cost.gas + cost.l1_fee, self._coin_prices[network], _WEI)
        async with self._deciding:
            # Before the read: a payment recorded meanwhile counts twice, rather than not at all.
            held = self._held[is_paid]
            spent = await self._read()
            counted = spent.at_risk if is_paid else spent.given
            if max(counted + held + needed, spent.given) > self._units:
                raise Unavailable(
                    "The service pays no more gas for signed payments today. Pay the order as its"
                    " fundingInstructions say."
                )
            self._held[is_paid] += needed
        try:
            yield
        finally:
            self._held[is_paid] -= needed

    def share(self) -> float | None:
        """The spent share of the budget; None before ``refresh``."""
        return None if self.spent is None else self.spent / self._units

    def problem(self) -> str | None:
        """A warning for the operator once 90 % of the budget is spent; None before that."""
        if self.spent is None or 10 * self.spent < 9 * self._units:
            return None
        spent, units = format_units(self.spent, USDC), format_units(self._units, USDC)
        return (
            f"gas for signed payments took {spent} of the {units} USD that"
            " onchain.authorization_gas_usd allows in 24 hours"
        )


# --- authorizations of one network ---------------------------------------------------------------


class _Use(NamedTuple):
    """The transaction that used a nonce. ``is_paid``: it made the authorized transfer."""

    txid: str
    block_number: int
    is_paid: bool


class EvmAuthorizations:
    """Authorizations of one network. All may raise RpcFailure, ChainUnusable and Unavailable.

    ``is_paused`` tells whether outgoing money is stopped: then nothing new is sent.
    """

    def __init__(
        self,
        connection: EvmConnection,
        payments: EvmPayments,
        ledger: EvmPaymentLedger,
        budget: GasBudget,
        clock: Clock,
        is_paused: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._payments = payments
        self._ledger = ledger
        self._budget = budget
        self._clock = clock
        self._is_paused = is_paused
        self._backoff = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self._conditions = Conditions(connection.network.name)

    def conditions(self) -> list[Condition]:
        """Return the authorizations that need the operator."""
        return self._conditions.present()

    async def require_usable(self, record: AuthorizationRecord) -> None:
        """Raise AuthorizationRefused for an authorization that the token would refuse; sends
        nothing.

        An authorization that others have carried out is usable: its deposit is credited. Raises
        Unavailable when the gas can't be paid, or its budget is used up.
        """
        top, given = await self._connection.check(), record.signed.authorization
        await self._require_signature(record)
        if await self._is_used(record.key, top):
            # Asked twice: of several nodes behind one address, a lagging one gives no event.
            use = await self._use(record, top) or await self._use(record, top)
            if use is not None and use.is_paid:
                return
            raise _refused(Reason.NONCE_USED, "The payer's nonce is used or cancelled.")
        if await self._connection.is_blacklisted(given.source):
            raise _refused(Reason.SIMULATION, "The payer is on the token's blacklist.")
        if await self._connection.balance(given.source) < given.units:
            raise _refused(Reason.BALANCE, "The payer holds less USDC than value.")
        try:
            order = await self._simulated(record)
        except NodeError as refusal:
            text = f"The token refuses the authorization ({refusal.text[:200]})."
            raise _refused(Reason.SIMULATION, text) from refusal
        cost = await self._cost(order)
        await self._budget.require(self._network.name, cost, is_paid=record.is_gas_paid)

    async def _require_signature(self, record: AuthorizationRecord) -> None:
        """Raise AuthorizationRefused unless its owner signed: a key, or a wallet that is deployed.

        A wallet that is not would have to be deployed first, by a call that the payer has written,
        from the hot wallet: that is not done.
        """
        signed, payer = record.signed, record.key.payer
        if is_signed_by_key(self._connection.domain, signed):
            return
        if not await self._connection.client.code(payer):
            if signed.is_wrapped or signed.vrs is None:
                text = f"{payer} has no code: deploy the wallet first, then sign."
                raise _refused(Reason.UNDEPLOYED, text)
            raise AuthorizationRefused(NOT_SIGNED)
        digest = usdc.transfer_digest(self._connection.domain, signed.authorization)
        asked = EvmCall(payer, usdc.is_valid_signature(digest, signed.bare), gas=_MOST_GAS)
        try:
            answer = await self._connection.client.call(asked)
        except NodeError as refusal:
            raise AuthorizationRefused(NOT_SIGNED) from refusal
        if answer != usdc.VALID_SIGNATURE:
            raise AuthorizationRefused(NOT_SIGNED)

    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        """Send it unless it is used or was sent, and return the outcome. PENDING: not final."""
        top = await self._connection.check()
        if record.txid is not None and (await self._paid_by(record, record.txid)) is not None:
            return Carried(Outcome.SETTLED, record.txid)
        if await self._is_used(record.key, top):
            self._backoff.forget(payment_id(record))
            return self._judged(record, await self._use(record, top), top)
        if await self._ran_out(record, top):
            self._backoff.forget(payment_id(record))
            return Carried(Outcome.FAILED, reason="The authorization ran out before it was used.")
        if await self._ledger.payment(payment_id(record)) is None:
            await self._send(record)
        return Carried(Outcome.PENDING)

    # --- outcome -------------------------------------------------------------------------------

    def _judged(self, record: AuthorizationRecord, use: _Use | None, top: Block) -> Carried:
        """An authorization whose nonce is used. Final only as deep as a failed payment has to be.

        The payer may have signed something else with the nonce, or cancelled it.
        """
        lost = None
        if use is None and self._clock.now_ms() - record.created_at > _LONG_MS:
            lost = (
                f"the authorization {record.key.nonce} of order {record.order_id} on"
                f" {self._network.name} is used, and the node shows no event of it: give another"
                " node"
            )
        self._conditions.set(payment_id(record), lost)
        if use is None:
            return Carried(Outcome.PENDING)
        if use.is_paid:
            return Carried(Outcome.SETTLED, use.txid)
        if top.number - use.block_number + 1 < self._network.failed_after:
            return Carried(Outcome.PENDING)
        why = f"The payer used or cancelled the authorization's nonce in {use.txid}."
        return Carried(Outcome.FAILED, reason=why)

    async def _is_used(self, key: AuthorizationKey, at: Block) -> bool:
        data = usdc.authorization_state(key.payer, bytes.fromhex(key.nonce))
        call = EvmCall(self._network.token, data)
        return usdc.read_bool(await self._connection.client.call(call, at.number))

    async def _ran_out(self, record: AuthorizationRecord, top: Block) -> bool:
        """Whether its window has closed in a block as deep as a failed payment has to be."""
        end = record.signed.authorization.valid_before
        number = top.number - self._network.failed_after + 1
        if top.timestamp < end or number < 0:
            return False
        block = await self._connection.client.block(number)
        return block is not None and block.timestamp >= end

    async def _use(self, record: AuthorizationRecord, top: Block) -> _Use | None:
        """The use of the nonce; None when the node shows none since an hour before the record."""
        key = record.key
        words = (usdc.address_word(key.payer), bytes.fromhex(key.nonce))
        first = await self._block_at(record.created_at // 1_000 - _LOOK_BACK_SECONDS, top)
        wanted, found = LogFilter(self._network.token, (None, *words)), list[Log]()
        async for part in self._connection.client.scan(wanted, first, top.number):
            found += part.logs
        for event in reversed(found):
            if event.topics[0] == usdc.AUTHORIZATION_CANCELED:
                return _Use(event.txid, event.block_number, is_paid=False)
            if event.topics[0] == usdc.AUTHORIZATION_USED:
                receipt = await self._connection.client.receipt(event.txid)
                if receipt is None:
                    return None
                return _Use(event.txid, event.block_number, self._moved(record, receipt))
        return None

    async def _block_at(self, seconds: int, top: Block) -> int:
        """A block that is not younger than a time, found backwards in steps that double."""
        number = top.number
        step = max(1, round((top.timestamp - seconds) / self._network.block_seconds))
        while number > 0:
            number, step = max(number - step, 0), step * 2
            block = await self._connection.client.block(number)
            if block is None or block.timestamp <= seconds:
                break
        return number

    async def _paid_by(self, record: AuthorizationRecord, txid: str) -> Receipt | None:
        """Return the receipt of a transaction that made the authorized transfer."""
        receipt = await self._connection.client.receipt(txid)
        return receipt if receipt is not None and self._moved(record, receipt) else None

    def _moved(self, record: AuthorizationRecord, receipt: Receipt) -> bool:
        given = record.signed.authorization
        wanted = usdc.TransferEvent(record.key.payer, usdc.read_address(
            usdc.address_word(given.to)), given.units)  # fmt: skip
        token = self._network.token.lower()
        return receipt.ok and any(
            event.address.lower() == token and usdc.transfer_in(event.topics, event.data) == wanted
            for event in receipt.logs
        )

    # --- send ----------------------------------------------------------------------------------

    async def _send(self, record: AuthorizationRecord) -> None:
        """Sign, commit and publish, unless it would not be mined in time or fails by now."""
        left = record.signed.authorization.valid_before - self._clock.now_ms() // 1_000
        if left < _LEAST_TO_SEND or self._is_paused():
            return
        name = payment_id(record)
        if not self._backoff.is_due(name):
            return
        # Forgotten once it is sent: after any other end, the next second changes little.
        self._backoff.note(name)
        try:
            order = await self._simulated(record)
        except NodeError as refusal:
            log.warning("authorization_not_sent", order_id=record.order_id, reason=str(refusal))
            return
        cost, is_paid = await self._cost(order), record.is_gas_paid
        async with self._budget.spending(self._network.name, cost, is_paid=is_paid):
            verdict = await self._payments.send(order)
        self._backoff.forget(name)
        log.info("authorization_published", order_id=record.order_id,
                 payment_id=order.payment_id, outcome=verdict.outcome.value)  # fmt: skip

    async def _simulated(self, record: AuthorizationRecord) -> EvmPaymentOrder:
        """Return the call, which the node has just tried out.

        Raises NodeError when it fails: an error of the payer's code is no fault of the node.
        """
        given, vrs, token = record.signed.authorization, record.signed.vrs, self._network.token
        data = (
            usdc.transfer_with_authorization(given, vrs)
            if vrs is not None and is_signed_by_key(self._connection.domain, record.signed)
            else usdc.transfer_with_authorization_bytes(given, record.signed.bare)
        )
        tried = EvmCall(token, data, self._payments.hot_wallet, gas=_MOST_GAS)
        await self._connection.client.call(tried)
        gas = await self._payments.gas.estimate(data, _MOST_GAS)
        name = payment_id(record)
        return EvmPaymentOrder(
            name, EvmPurpose.AUTHORIZATION, given.to, given.units, token, data, gas
        )

    async def _cost(self, order: EvmPaymentOrder) -> CallCost:
        """The most that the call may cost. Raises Unavailable where nothing can be sent now."""
        if self._connection.paused:
            raise Unavailable(f"USDC on {self._network.name} is paused by its issuer.")
        return await self._payments.cost(order)


def payment_id(record: AuthorizationRecord) -> str:
    """Return the id of an authorization's payment, which follows from the authorization."""
    digest = usdc.keccak256("/".join(record.key).encode())
    return f"authorization-{record.order_id}-{digest[:_NAMED_BYTES].hex()}"


def _refused(reason: Reason, message: str) -> AuthorizationRefused:
    return AuthorizationRefused(Refusal(reason, message))
