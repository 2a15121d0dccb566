"""The port of the wallets that carry out signed authorizations. Amounts are USDC units."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rpcsvc.domain.order import Order
from rpcsvc.domain.usdc import Domain
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.store.authorizations import AuthorizationRecord


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
