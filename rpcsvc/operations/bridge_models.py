"""Params and results of the bridge (spec 2.4)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rpcsvc.domain.bridge import BridgeKind, BridgeStatus
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.operations import narrowing
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.models import Time, Units, View
from rpcsvc.operations.narrowing import Networks
from rpcsvc.operations.params import OrderId, Params


class BridgeParams(Params):
    """Where bridged money goes."""

    to_address: str


class BridgeDepositParams(BridgeParams):
    """Where on the exchange the XMR goes that is bridged."""

    model_config = ConfigDict(title="BridgeDepositRequest")

    to_address: Annotated[str, Field(description="An address on the exchange, in EVM form.")]

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """One: the exchange's addresses are those of EVM networks."""
        return [{"properties": {"toAddress": narrowing.address(USDC, networks)}}]


class BridgeWithdrawParams(BridgeParams):
    """Where the XMR goes that is bridged from the exchange."""

    model_config = ConfigDict(title="BridgeWithdrawRequest")

    to_address: Annotated[str, Field(description="A Monero address.")]

    @classmethod
    def cases(cls, networks: Networks) -> list[Json]:
        """One: Monero's addresses."""
        return [{"properties": {"toAddress": narrowing.address(XMR, networks)}}]


class BridgeOrderIdParams(Params):
    """Which bridge order."""

    order_id: OrderId


class BridgeRate(View):
    """What an exchange gives: USDC for one XMR, and how long it takes."""

    exchange: str
    rate: float
    eta: str


class ReferenceRate(View):
    """What this service gives: USDC for one XMR, and how long it takes."""

    rate: float
    eta: str


class BridgeRates(View):
    """Rates of the exchanges, and the service's own."""

    rates: list[BridgeRate]
    wagyu_rate: ReferenceRate


class BridgeOpened(View):
    """A bridge order that was made."""

    order_id: str
    deposit_address: str
    destination: str
    expires_at: Time


class BridgeOrderView(BaseModel):
    """A bridge order as it stands."""

    model_config = ConfigDict(extra="forbid")

    id: str
    type: BridgeKind
    status: BridgeStatus
    amount: Annotated[Units, Field(description="What has come so far, in atomic units.")]
    confirmations: int
    required_confirmations: Annotated[int, Field(alias="requiredConfirmations")]
    tx_in: str | None
    tx_out: str | None
    failure_reason: str | None
    created_at: Time
    completed_at: Time | None
