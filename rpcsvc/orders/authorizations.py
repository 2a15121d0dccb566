"""Funds orders by signed authorizations: on record first, then sent, then credited as any deposit.

A recorded authorization is processed, across restarts, until its deposit is confirmed or it has
failed permanently, and again once that deposit is removed. Until then the order accepts no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog
from msgspec.structs import replace

from rpcsvc.clock import Clock, day_of, ms_to_next_day
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.authorizations import SignedAuthorization
from rpcsvc.domain.clients import Client, is_known
from rpcsvc.domain.order import AWAITS_DEPOSIT, DepositState, Order
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import OrderNotCancellable, RateLimited, Unavailable
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.orders.rounds import Works, repeat
from rpcsvc.orders.waits import Waits
from rpcsvc.store.authorizations import (
    AuthorizationKey,
    AuthorizationRecord,
    AuthorizationState,
    AuthorizationStore,
    ClientDay,
)
from rpcsvc.store.database import StaleWrite
from rpcsvc.store.leases import Lease
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

# How long a payment waits to be in a block. A sidecar gives up on its upstream after 15 s.
OUTCOME_SECONDS: Final = 12


class Carried(NamedTuple):
    """The outcome of an authorization. SETTLED: the network has it, in the transaction ``txid``.

    FAILED only if it can never be carried out; ``reason`` says why.
    """

    outcome: Outcome
    txid: str | None = None
    reason: str | None = None


class AuthorizationWallets(Protocol):
    """Carries out authorizations of others, at the service's expense.

    Any exception but AuthorizationRefused means that the outcome is not known.
    """

    def contract(self, network: str) -> str:
        """The token's contract. Raises errors.Unavailable."""
        ...

    async def token(self, order: Order) -> Domain:
        """The domain that authorizations for an order are signed for.

        Raises errors.Unavailable, and OrderNotFundable where it can't be paid so.
        """
        ...

    def fee(self, network: str) -> int:
        """Return the cost of one's gas in USDC units. Raises errors.Unavailable while not known."""
        ...

    async def require_usable(self, record: AuthorizationRecord) -> None:
        """Raise AuthorizationRefused for what would fail, and errors.Unavailable; sends nothing."""
        ...

    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        """Send the authorization unless it is used, and return its outcome. Safe to repeat."""
        ...


class Authorizations:
    """Takes signed authorizations for orders, and carries on with them beside the worker.

    Nodes are asked ``poll_ms`` apart. A slow one holds up neither the worker's passes nor the
    authorizations of other networks. Only a holder of the ``lease`` with time left sends; another
    replica records an authorization, which the holder finds. A network address may send
    ``most_a_day`` (UTC), because each may cost gas; ``secret`` keys the hashes of addresses.
    """

    def __init__(
        self,
        orders: OrderStore,
        store: AuthorizationStore,
        wallets: AuthorizationWallets,
        clock: Clock,
        poll_ms: int,
        lease: Lease,
        most_a_day: Callable[[], int],
        secret: bytes,
    ) -> None:
        self._orders = orders
        self._store = store
        self._wallets = wallets
        self._clock = clock
        self._poll_ms = poll_ms
        self._lease = lease
        self._most_a_day = most_a_day
        self._secret = secret
        self._in_hand: set[AuthorizationKey] = set()
        self._observers: list[Callable[[str], None]] = []

    def on_outcome(self, observer: Callable[[str], None]) -> None:
        """Call ``observer`` with the order id when this process commits its payment's outcome."""
        self._observers.append(observer)

    async def token(self, order: Order) -> Domain:
        """Return the domain that authorizations for an order are signed for.

        Raises errors.Unavailable and OrderNotFundable.
        """
        return await self._wallets.token(order)

    def fee(self, network: str) -> int:
        """Return the cost of one's gas in USDC units. Raises errors.Unavailable while not known."""
        return self._wallets.fee(network)

    async def unresolved(self, order_id: str) -> AuthorizationRecord | None:
        """The authorization that is to pay an order, and has neither done so nor failed."""
        return await self._store.unresolved_of(order_id)

    async def require_none_under_way(self, order: Order) -> None:
        """Raise OrderNotCancellable while a signed payment may yet reach the order."""
        if await self.unresolved(order.order_id):
            raise OrderNotCancellable(
                "A signed payment of the order is under way: ask for its status until the deposit"
                " is there.",
                details={"status": order.status.value},
            )

    async def find(self, order: Order, signed: SignedAuthorization) -> AuthorizationRecord | None:
        """Return the record of an authorization with this payer and nonce, for any order."""
        return await self._store.find(self._key(order, signed))

    async def is_named(self, signed: SignedAuthorization, payment_id: str) -> bool:
        """Return whether the payer has a payment of this name on record, for any order."""
        return await self._store.is_named(evm_checksum(signed.authorization.source), payment_id)

    async def pay(
        self,
        order: Order,
        signed: SignedAuthorization,
        payment_id: str | None,
        client: Client,
        waits: Waits,
    ) -> AuthorizationRecord:
        """Put an authorization of the due amount on record, and send it if this replica settles.

        Returns how far it came within OUTCOME_SECONDS, or at once when the network's answer is not
        known. Raises AuthorizationRefused, errors.RateLimited and errors.Unavailable: then nothing
        is on record.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + OUTCOME_SECONDS
        record, carried = await self._send(order, signed, payment_id, client)
        if carried is None or carried.state is not AuthorizationState.RECORDED:
            return carried or record
        # The settling process carries on with it meanwhile, this one or another.
        look = partial(self._outcome, record.key)
        left = max(0, deadline - now())
        try:
            return await waits.until(order.order_id, look, left, client) or record
        except Unavailable:  # of the wait alone: the payment is on record
            return record

    async def _send(
        self, order: Order, signed: SignedAuthorization, payment_id: str | None, client: Client
    ) -> tuple[AuthorizationRecord, AuthorizationRecord | None]:
        """The authorization as it was recorded, and as ``_carry_on`` gives it."""
        key = self._key(order, signed)
        if key in self._in_hand:
            raise Unavailable("The same payment is being carried out. Ask for the order's status.")
        is_gas_paid = order.terms.funding_gas > 0
        record = AuthorizationRecord(
            key,
            order.order_id,
            signed,
            self._clock.now_ms(),
            is_gas_paid=is_gas_paid,
            payment_id=payment_id,
        )
        self._in_hand.add(key)
        try:
            counted = await self._counted(client)
            await self._wallets.require_usable(record)
            try:
                await self._store.add(record, order.version, counted)
            except StaleWrite:
                raise Unavailable(
                    "The order changed while the payment was being checked. Nothing was sent: send"
                    " the same payment again.",
                    retry_after=1,
                ) from None
            log.info("authorization_recorded", order_id=order.order_id, payer=key.payer)
            return record, await self._carry_on(record)
        finally:
            self._in_hand.discard(key)

    async def _outcome(self, key: AuthorizationKey) -> AuthorizationRecord | None:
        """The authorization once the network has it, or it has failed."""
        record = await self._store.find(key)
        return None if record is None or record.state is AuthorizationState.RECORDED else record

    async def _counted(self, client: Client) -> ClientDay | None:
        """Return the client as it is counted, or None if a token, a key or the socket names it.

        Raises RateLimited for an address that has sent as many as it may today.
        """
        stored, now = client.stored(self._secret), self._clock.now_ms()
        if is_known(stored):
            return None
        counted = ClientDay(stored, day_of(now), self._most_a_day())
        if await self._store.sent_on(stored, counted.day) < counted.most:
            return counted
        seconds = -(-ms_to_next_day(now) // 1000)
        raise RateLimited(
            f"You have sent {counted.most} signed payments today (UTC), the most for a caller"
            " without a token or key. Pay the order as its fundingInstructions say, or come back"
            f" in {seconds} s.",
            retry_after=seconds,
        )

    async def run(self) -> None:
        """Carry on with unresolved authorizations until cancelled; the next start goes on with
        them.
        """
        await repeat(
            self.due,
            self._poll_ms,
            lambda reason: log.warning("authorizations_not_read", reason=reason),
        )

    async def due(self) -> Works:
        """Return a look at each network's unresolved authorizations, one after the other."""
        by_network: dict[str, list[AuthorizationRecord]] = {}
        for record in await self._store.unresolved():
            by_network.setdefault(record.key.network, []).append(record)
        return {
            network: partial(self._resume_in_turn, records)
            for network, records in by_network.items()
        }

    async def _resume_in_turn(self, records: Sequence[AuthorizationRecord]) -> None:
        for record in records:
            if record.key not in self._in_hand and not await self._credit(record):
                await self._carry_on(record)

    async def _carry_on(self, record: AuthorizationRecord) -> AuthorizationRecord | None:
        """The record after another look at, or try with, the network; None for no known answer."""
        if not self._lease.has_time():
            return record
        try:
            carried = await self._wallets.carry_out(record)
        except Exception as error:  # noqa: BLE001 - the outcome is not known, whatever it is
            log.warning("authorization_unknown", order_id=record.order_id, reason=str(error))
            return None
        match carried.outcome:
            case Outcome.SETTLED:
                after = replace(record, state=AuthorizationState.SENT, txid=carried.txid)
            case Outcome.FAILED:
                after = replace(record, state=AuthorizationState.FAILED, reason=carried.reason)
            case _:
                return record
        if after != record:
            await self._store.resolve(after)
            for observe in self._observers:
                observe(after.order_id)
            log.info("authorization_" + after.state, order_id=after.order_id, txid=after.txid)
        return after

    async def _credit(self, record: AuthorizationRecord) -> bool:
        """Resolve the authorization once its deposit is confirmed; return whether it is."""
        if record.state is not AuthorizationState.SENT:
            return False
        order = await self._orders.order(record.order_id)
        is_credited = order is not None and _has_credited(order, record)
        if is_credited:
            await self._store.resolve(replace(record, state=AuthorizationState.CREDITED))
        return is_credited

    def _key(self, order: Order, signed: SignedAuthorization) -> AuthorizationKey:
        given, network = signed.authorization, order.terms.deposit_network
        return AuthorizationKey(
            network,
            evm_checksum(self._wallets.contract(network)),
            evm_checksum(given.source),
            given.nonce.hex(),
        )


def _has_credited(order: Order, record: AuthorizationRecord) -> bool:
    """Return whether the deposit of a sent authorization is confirmed. With an upstream, its status
    tells.
    """
    if order.terms.upstream_id is not None:
        return order.status not in AWAITS_DEPOSIT
    return any(
        deposit.key.txid == record.txid and deposit.state is DepositState.CONFIRMED
        for deposit in order.deposits
    )
