"""Gasless funding with the on-chain engine: the GaslessWallets port over the USDC adapter."""

from __future__ import annotations

from rpcsvc.domain.order import Order
from rpcsvc.domain.usdc import Domain
from rpcsvc.orders.ports.gasless import Carried, FundingRecord
from rpcsvc.settlement.onchain.engine import OnchainEngine
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter


class OnchainAuthorizations:
    """Takes new authorizations only while the engine takes orders; carries out what is recorded."""

    def __init__(self, engine: OnchainEngine, usdc: EvmAdapter) -> None:
        self._engine = engine
        self._usdc = usdc

    def contract(self, network: str) -> str:
        """A network's token. Raises errors.Unavailable."""
        return self._usdc.domain(network).contract

    async def token(self, order: Order) -> Domain:
        """The domain of its network's token. Raises errors.Unavailable."""
        return self._usdc.domain(order.terms.deposit_network)

    def fee(self, network: str) -> int:
        """What the gas of one costs, in USDC units. Raises errors.Unavailable while not known."""
        return self._usdc.authorization_fee(network)

    async def require_usable(self, record: FundingRecord) -> None:
        """Raise AuthorizationRefused for one that would fail, and errors.Unavailable."""
        self._engine.require_ready()
        await self._usdc.require_usable(record)

    async def carry_out(self, record: FundingRecord) -> Carried:
        """Send an authorization unless it is used, or find what became of it."""
        return await self._usdc.carry_out(record)

    def gas_share(self) -> float | None:
        """What its gas took in 24 hours, as a share of the budget; None before the first look."""
        return self._usdc.gas_budget.share()
