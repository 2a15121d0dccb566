"""The ports of gasless funding: who keeps authorizations, and who carries them out.

Amounts are USDC units, times are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import Struct

from rpcsvc.domain.gasless import SignedAuthorization
from rpcsvc.domain.order import Order
from rpcsvc.domain.usdc import Domain
from rpcsvc.orders.ports.wallets import Outcome


class AuthorizationKey(NamedTuple):
    """What an authorization is used once under. Addresses are in EIP-55 form, the nonce is hex."""

    network: str
    asset: str
    payer: str
    nonce: str


class FundingState(StrEnum):
    """How far an authorization is.

    RECORDED: it may have been sent. SENT: the network has it. CREDITED: its deposit is final.
    FAILED: it can never be carried out.
    """

    RECORDED = "recorded"
    SENT = "sent"
    CREDITED = "credited"
    FAILED = "failed"


class FundingRecord(Struct, frozen=True):
    """An authorization that is to pay an order. ``reason`` says why it failed.

    ``is_gas_paid``: the order bears the gas; otherwise the service gives it away.
    """

    key: AuthorizationKey
    order_id: str
    signed: SignedAuthorization
    created_at: int
    state: FundingState = FundingState.RECORDED
    txid: str | None = None
    reason: str | None = None
    is_gas_paid: bool = False


class ClientDay(NamedTuple):
    """A client as it is stored, a day of UTC, and how many authorizations it may send on a day."""

    client: str
    day: int
    most: int


class FundingStore(Protocol):
    """Keeps authorizations. Everything may raise errors.Unavailable."""

    async def find(self, key: AuthorizationKey) -> FundingRecord | None:
        """The authorization under a key."""
        ...

    async def unresolved(self) -> Sequence[FundingRecord]:
        """Those that are RECORDED or SENT, oldest first."""
        ...

    async def unresolved_of(self, order_id: str) -> FundingRecord | None:
        """The one of an order that is RECORDED or SENT."""
        ...

    async def sent_on(self, client: str, day: int) -> int:
        """How many authorizations a client sent on a day of UTC."""
        ...

    async def add(
        self, record: FundingRecord, order_version: int, counted: ClientDay | None = None
    ) -> None:
        """Put an authorization on record, durably, and count it for its client.

        Raises StaleWrite when the order is at another version, has an unresolved authorization, the
        key is taken, or the client may send no more.
        """
        ...

    async def resolve(self, record: FundingRecord) -> None:
        """Change state, transaction and reason of an unresolved authorization.

        Raises StaleWrite for one that is resolved.
        """
        ...


class Carried(NamedTuple):
    """The outcome of an authorization. SETTLED: the network has it, in the transaction ``txid``.

    FAILED only if it can never be carried out; ``reason`` says why.
    """

    outcome: Outcome
    txid: str | None = None
    reason: str | None = None


class GaslessWallets(Protocol):
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
        """What the gas of one costs, in USDC units. Raises errors.Unavailable while not known."""
        ...

    async def require_usable(self, record: FundingRecord) -> None:
        """Raise AuthorizationRefused for what would fail, and errors.Unavailable; sends nothing."""
        ...

    async def carry_out(self, record: FundingRecord) -> Carried:
        """Send the authorization unless it is used, and return its outcome. Safe to repeat."""
        ...
