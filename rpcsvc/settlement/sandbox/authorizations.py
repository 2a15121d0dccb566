"""Carries out signed authorizations on the simulated chains: real signatures, simulated money.

A simulated payer holds any amount. What the pool has taken counts as carried out.
"""

from __future__ import annotations

import hashlib

from rpcsvc.clock import Clock
from rpcsvc.domain.authorizations import (
    NOT_SIGNED,
    AuthorizationRefused,
    Reason,
    Refusal,
    is_signed_by_key,
)
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import Order
from rpcsvc.domain.usdc import Domain
from rpcsvc.orders.ports.authorizations import Carried
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.sandbox.chain import Fault, Tx, TxKind, TxState
from rpcsvc.settlement.sandbox.engine import SandboxEngine, SandboxReplyLost
from rpcsvc.settlement.sandbox.ledger import SandboxLedger
from rpcsvc.store.authorizations import AuthorizationRecord

# As Circle's test tokens call themselves.
_NAME = "USDC"
_VERSION = "2"


class SimulatedAuthorizations:
    """Implements AuthorizationWallets on the ledger of the simulated chains."""

    def __init__(self, ledger: SandboxLedger, engine: SandboxEngine, clock: Clock) -> None:
        self._ledger = ledger
        self._engine = engine
        self._clock = clock

    def contract(self, network: str) -> str:
        """The contract of the test network's token."""
        return self._domain(network).contract

    async def token(self, order: Order) -> Domain:
        """The domain of the test network's token."""
        return self._domain(order.terms.deposit_network)

    def _domain(self, network: str) -> Domain:
        names = self._engine.names(USDC, network)
        return Domain(_NAME, _VERSION, names.chain_id, names.token or "")

    def fee(self, network: str) -> int:
        """The simulated fee of a USDC transfer."""
        return self._engine.fees(USDC, XMR, network).refund

    async def require_usable(self, record: AuthorizationRecord) -> None:
        """Refuses what no key signed, and what the service's own wallet could not hold.

        There are no contracts on the simulated chains.
        """
        self._engine.require_ready()
        if not is_signed_by_key(self._domain(record.key.network), record.signed):
            raise AuthorizationRefused(NOT_SIGNED)
        async with self._engine.moving:
            room = await self._engine.room(record.key.network)
        if record.signed.authorization.units > room:
            raise AuthorizationRefused(
                Refusal(Reason.SIMULATION, "The sandbox's wallet can't hold so much.")
            )

    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        """Put the payment into the pool, unless it was there before."""
        self._engine.require_ready()
        async with self._engine.moving:
            txid = _txid(record)
            tx = await self._ledger.transaction(record.key.network, txid)
            if tx is None:
                return await self._send(record, txid)
        if tx.state is TxState.REVERTED:
            return _reverted()
        if tx.state is TxState.DROPPED:
            return self._unused(record) or Carried(Outcome.PENDING)
        return Carried(Outcome.SETTLED, txid)

    async def _send(self, record: AuthorizationRecord, txid: str) -> Carried:
        unused = self._unused(record)
        if unused is not None:
            return unused
        given, now = record.signed.authorization, self._clock.now_ms()
        tx = Tx(
            network=record.key.network,
            txid=txid,
            kind=TxKind.DEPOSIT,
            recipient=given.to,
            sender=record.key.payer,
            units=given.units,
            fee=0,
            broadcast_at=now,
        )
        if await self._strikes(record, Fault.FUNDING_FAILS):
            await self._ledger.broadcast(_never_mined(tx))
            return _reverted()
        await self._ledger.broadcast(tx)
        if await self._strikes(record, Fault.FUNDING_UNKNOWN):
            raise SandboxReplyLost("fault funding_unknown")
        return Carried(Outcome.SETTLED, txid)

    def _unused(self, record: AuthorizationRecord) -> Carried | None:
        """What becomes of an authorization whose window closed unused."""
        if self._clock.now_ms() < record.signed.authorization.valid_before * 1_000:
            return None
        return Carried(Outcome.FAILED, reason="The authorization ran out before it was used.")

    async def _strikes(self, record: AuthorizationRecord, fault: Fault) -> bool:
        if not await self._ledger.has_fault(record.order_id, fault):
            return False
        await self._ledger.clear_fault(record.order_id, fault)
        return True


def _txid(record: AuthorizationRecord) -> str:
    """The same for the same authorization: the pool takes it once."""
    return hashlib.sha256("/".join(record.key).encode()).hexdigest()


def _never_mined(tx: Tx) -> Tx:
    return Tx(
        tx.network, tx.txid, tx.kind, tx.recipient, tx.sender, tx.units, tx.fee, tx.broadcast_at,
        state=TxState.REVERTED, watched=False,
    )  # fmt: skip


def _reverted() -> Carried:
    return Carried(Outcome.FAILED, reason="The network reverted the transaction.")
