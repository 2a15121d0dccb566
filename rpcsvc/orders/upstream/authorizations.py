"""Signed authorizations that an upstream carries out: AuthorizationWallets over UpstreamPort.

An authorization is passed on only after it is on record here, and the same one again until the
upstream says what became of it: it takes a payer's nonce once.
"""

from __future__ import annotations

from typing import Final

from rpcsvc.domain.authorizations import (
    NOT_SIGNED,
    SIGNATURE_BYTES,
    AuthorizationRefused,
    is_signed_by_key,
)
from rpcsvc.domain.order import Order
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import OrderNotFundable, Unavailable
from rpcsvc.orders.ports.authorizations import Carried
from rpcsvc.orders.ports.upstream import UpstreamPort
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.store.authorizations import AuthorizationRecord
from rpcsvc.store.orders import OrderStore

# How often the upstream is asked for what is passed on and not resolved.
POLL_MS: Final = 5_000


class RelayedAuthorizations:
    """Has the upstream carry authorizations out, for the orders that it settles."""

    def __init__(self, orders: OrderStore, upstream: UpstreamPort) -> None:
        self._orders = orders
        self._upstream = upstream
        self._domains: dict[str, Domain] = {}  # as they were offered last, by network

    def contract(self, network: str) -> str:
        """The token's contract."""
        return self._upstream.contract(network)

    async def token(self, order: Order) -> Domain:
        """The domain that the upstream offers for the order. Raises OrderNotFundable."""
        if not self._upstream.takes_authorizations:
            raise OrderNotFundable(
                "The service that settles this order takes no signed payments (x402). Pay it as its"
                " fundingInstructions say.",
                details={"status": order.status.value},
            )
        domain = await self._upstream.signing_domain(order.terms, order.due_units)
        self._domains[order.terms.deposit_network] = domain
        return domain

    def fee(self, network: str) -> int:
        """Not known: the upstream prices its orders by itself."""
        raise Unavailable(f"What gas on {network} costs is for the service that settles orders.")

    async def require_usable(self, record: AuthorizationRecord) -> None:
        """Refuse what no key signed that says it did; wallets with code the upstream asks."""
        domain = self._domains.get(record.key.network)
        if domain is None:
            domain = await self.token(await self._order(record))
        is_of_key = len(record.signed.signature) == SIGNATURE_BYTES
        if is_of_key and not is_signed_by_key(domain, record.signed):
            raise AuthorizationRefused(NOT_SIGNED)

    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        """Pass the authorization on, as often as it takes: until the upstream sees the deposit."""
        order = await self._order(record)
        if record.txid is not None and order.due_units == 0:
            return Carried(Outcome.SETTLED, record.txid)
        domain = self._domains.get(record.key.network)
        return await self._upstream.pay_signed(order.terms, record.signed, domain)

    async def _order(self, record: AuthorizationRecord) -> Order:
        order = await self._orders.order(record.order_id)
        if order is None:
            raise Unavailable(f"The order {record.order_id} can't be read.")
        return order
